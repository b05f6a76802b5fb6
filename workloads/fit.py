"""Describe a trace by a specification that imitates it, and say how well.

What is imitated: arrivals (rate, burstiness, and the rate over time where it varies), lengths (over
time where they vary; outputs go with their prompts), common prefixes, turns and think
times. What is not: which request follows which, beyond that.
"""

from pathlib import Path
from typing import Any

import numpy as np

from workloads.arrivals import mean_rate
from workloads.distributions import (
    AnyDistribution,
    ByInput,
    Exponential,
    Floats,
    Geometric,
    Lognormal,
    Quantiles,
    correlated,
    draw,
)
from workloads.editing import first_turns
from workloads.errors import TraceError
from workloads.processes import AllAtOnce, AnyProcess, Gamma, Profile
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, IntArray, Trace
from workloads.reuse import num_repeated_tokens
from workloads.sharing import common_tokens, deepest_shared, inferred_turns
from workloads.spec import Prefix, RequestClass, Workload

MAX_WINDOWS, PER_WINDOW = 48, 300
"""Most pieces of time with lengths of their own, and sessions in one of them at least."""

MAX_STEPS, PER_STEP = 120, 300
"""Most steps of a rate that varies, and sessions in one of them on average at least."""

MAX_PIECES, PER_PIECE = 32, 300
"""Most ranges of prompts with outputs of their own, and requests in one of them at least."""

TELLING = 0.05
"""Share of the variance of outputs that prompts must say beyond what else does."""

GOOD_KS = 0.02
"""A named distribution is taken if its distance is at most this beyond what chance makes."""

CHANCE = 4
"""Standard deviations beyond which a difference is none of chance."""

_LEVELS = (
    *(0, 0.005, 0.01, 0.025),
    *(place / 20 for place in range(1, 20)),
    *(0.975, 0.99, 0.995, 0.999, 1),
)


def ks_distance(one: Floats, other: Floats) -> float:
    """Answer the Kolmogorov-Smirnov distance: the most by which two distributions differ."""
    one, other = np.sort(one), np.sort(other)
    values = np.concatenate([one, other])
    shares = [np.searchsorted(each, values, side="right") / len(each) for each in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def fit(trace: Trace) -> Workload:
    """Answer a workload that imitates *trace*.

    Raises:
        TraceError: a trace of fewer than 10 requests, which say nothing of a distribution.
    """
    if len(trace) < 10:
        raise TraceError(f"{trace.name}: {len(trace)} requests: expected at least 10 to imitate")
    previous = trace.previous_turn
    if not (previous >= 0).any():
        previous = inferred_turns(trace)
    first = first_turns(previous)
    is_first = previous < 0
    starts = trace.arrival_ps[is_first] / PS_PER_S
    prefix, num_common = _prefix(trace, first)
    new = _new_tokens(trace, previous, num_common)
    turns = np.bincount(first, minlength=len(trace))[is_first]
    gaps = trace.arrival_ps - trace.arrival_ps[np.maximum(previous, 0)]
    thinks = (trace.think_ps if trace.think_ps.any() else gaps)[~is_first] / PS_PER_S
    outputs = trace.num_output_tokens.astype(np.float64)
    session_ps = trace.arrival_ps[first]
    windows = [
        (
            start,
            end,
            (session_ps >= start * PS_PER_S) & (session_ps < (end or MAX_ARRIVAL_S) * PS_PER_S),
        )
        for start, end in _windows(trace, starts, is_first, new)
    ]
    groups = [inside & turn for _, _, inside in windows for turn in (is_first, ~is_first)]
    window = np.argmax([inside for _, _, inside in windows], axis=0)
    by_input = _by_input(new, outputs, window)
    correlation = 0.0
    if by_input is None:
        correlation = _correlation([(new[group], outputs[group]) for group in groups])
    classes = []
    for place, (start, end, inside) in enumerate(windows):
        later = inside & ~is_first
        has_turns = bool(later.any())
        output_len: AnyDistribution | ByInput | str
        if by_input is None:
            output_len = _lengths(outputs[inside])
        else:  # said once
            output_len = by_input if not place else _class_name(*windows[0][:2])
        classes.append(
            RequestClass(
                name=_class_name(start, end),
                prefix=prefix,
                input_len=_lengths(new[inside & is_first]),
                turn_len=_lengths(new[later]) if has_turns else None,
                output_len=output_len,
                correlation=correlation,
                turns=_counts(turns) if len(thinks) else 1,
                think_time=_times(thinks) if len(thinks) else 0,
                stratified=True,
                start=start,
                end=end,
            )
        )
    return Workload(arrivals=_arrivals(starts), classes=classes, num_requests=len(trace))


def _class_name(start: float, end: float | None) -> str:
    return "fit" if end is None and not start else f"from {start:g} s"


def compare(trace: Trace, imitation: Trace, seed: int) -> str:
    """Answer how far *imitation*, drawn by *seed*, is from *trace*, as lines of text."""
    both = (trace, imitation)
    rows: list[tuple[str, ...]] = [("", "trace", "imitation", "KS distance")]

    def add(name: str, one: Floats, other: Floats) -> None:
        shown = [f"{np.median(each):.6g} / {np.percentile(each, 99):.6g}" for each in (one, other)]
        rows.append((name, *shown, f"{ks_distance(one, other):.4f}"))

    prompts = [np.asarray(t.num_prompt_tokens, float) for t in both]
    outputs = [np.asarray(t.num_output_tokens, float) for t in both]
    gaps = [np.diff(t.arrival_ps) / PS_PER_S for t in both]
    add("prompt tokens, p50 / p99", *prompts)
    add("output tokens, p50 / p99", *outputs)
    add("gaps of arrivals, s, p50 / p99", *gaps)
    rows.append(("requests / s", *(f"{mean_rate(t):.4g}" for t in both), ""))
    hits = [num_repeated_tokens(t, outputs=True).sum() / t.num_prompt_tokens.sum() for t in both]
    rows.append(("prompt tokens seen before, %", *(f"{100 * hit:.2f}" for hit in hits), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, f"imitation: {len(imitation):,} requests, seed {seed}"])


def _prefix(trace: Trace, first: IntArray) -> tuple[list[Prefix], IntArray]:
    """Answer the common prefixes, and how many tokens of each request's prompt are in one.

    A text that every session has, and variants of what comes behind it.
    """
    nodes, ends = deepest_shared(trace, first)
    ends = ends[first]  # a later turn starts as its session does
    roots = np.unique(first)
    nodes, lengths = nodes[roots], ends[roots]
    if lengths.sum() < 0.01 * trace.num_prompt_tokens[roots].sum():
        return [], np.zeros(len(trace), dtype=np.int64)
    common = common_tokens(trace, roots)
    found = [Prefix(name="common", tokens=common)] if common else []
    if (lengths > common).any():
        _, place, counts = np.unique(nodes, return_index=True, return_counts=True)
        found.append(
            Prefix(
                name="variants",
                # As often as they are used, so that their mean is that of the prompts.
                tokens=_lengths((lengths - common).astype(np.float64)),
                variants=len(place),
                zipf=_zipf(np.sort(counts)[::-1].astype(np.float64)),
            )
        )
    return found, ends


def _zipf(counts: Floats) -> float:
    """Answer the exponent that makes *counts*, falling, most likely."""
    log_ranks = np.log(np.arange(1, len(counts) + 1))
    mean = float((counts * log_ranks).sum() / counts.sum())
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = np.exp(-middle * log_ranks)
        # The mean of log(rank) falls as the exponent grows.
        if (weights * log_ranks).sum() / weights.sum() > mean:
            low = middle
        else:
            high = middle
    return round(low, 3)


def _new_tokens(trace: Trace, previous: IntArray, num_common: IntArray) -> Floats:
    """Answer the tokens of each prompt that its session had not said before, at least 1."""
    before = np.maximum(previous, 0)
    said = trace.num_prompt_tokens[before] + trace.num_output_tokens[before]
    known = np.where(previous < 0, num_common, said)
    return np.maximum(trace.num_prompt_tokens - known, 1).astype(np.float64)


def _arrivals(starts: Floats) -> AnyProcess:
    """Answer the process that imitates the times *starts*."""
    span = float(starts[-1])
    if span <= 0:
        return AllAtOnce()
    rate = len(starts) / span
    steps = min(MAX_STEPS, len(starts) // PER_STEP)
    process: Gamma | Profile = Gamma(rate=_short(rate), burstiness=_burstiness(starts * rate))
    if steps > 1:
        counts, _ = np.histogram(starts, steps, (0, span))
        # Of a steady process the variance is what burstiness makes of the mean.
        if _beyond_chance(counts.var(ddof=1) / counts.mean() * process.burstiness, steps):
            rates = [_short(float(count) * steps / span) for count in counts]
            step = span / steps
            profile = Profile(rates=rates, step=step)
            expected = np.array([profile.expected(start) for start in starts.tolist()])
            return Profile(rates=rates, step=step, burstiness=_burstiness(expected), exact=True)
    return process


def _burstiness(expected: Floats) -> float:
    """Answer the shape of the gaps of a process of rate 1."""
    gaps = np.diff(expected)
    squared = float(gaps.var() / gaps.mean() ** 2)
    return _short(min(max(1 / max(squared, 1e-6), 1e-3), 1e6))


def _windows(
    trace: Trace, starts: Floats, is_first: Any, new: Floats
) -> list[tuple[float, float | None]]:
    """Answer the times within each of which sessions are of one kind."""
    num = min(MAX_WINDOWS, len(starts) // PER_WINDOW)
    if num < 2 or starts[-1] <= 0:
        return [(0.0, None)]
    edges = np.linspace(0, starts[-1], num + 1)
    window = np.searchsorted(edges, starts, side="right") - 1
    outputs = trace.num_output_tokens[is_first].astype(np.float64)
    if not any(_varies(values, np.minimum(window, num - 1)) for values in (new[is_first], outputs)):
        return [(0.0, None)]
    bounds = [_short(float(edge)) for edge in edges]
    return list(zip(bounds[:-1], [*bounds[1:-1], None], strict=True))


def _varies(values: Floats, groups: IntArray) -> bool:
    """Answer whether the means of *groups* differ by more than chance."""
    if values.min() == values.max():
        return False
    sizes = np.bincount(groups)
    means = np.bincount(groups, values)[sizes > 0] / sizes[sizes > 0]
    ratio = means.var(ddof=1) / (values.var() / sizes[sizes > 0]).mean()
    return _beyond_chance(ratio, len(means))


def _beyond_chance(ratio: float, num: int) -> bool:
    """Answer whether a variance of *num* values is more than chance makes of what is expected."""
    return bool(ratio > 1 + CHANCE * (2 / (num - 1)) ** 0.5)


def _by_input(new: Floats, outputs: Floats, window: IntArray) -> ByInput | None:
    """Answer outputs by the new tokens of the prompt, if these say more of them than all else.

    All else is the time, and their linear correlation.
    """
    num = min(MAX_PIECES, len(new) // PER_PIECE)
    if num < 2 or new.std() == 0 or outputs.std() == 0:
        return None
    bounds = np.unique(np.quantile(new, np.arange(1, num) / num, method="lower"))
    piece = np.searchsorted(bounds, new)
    if len(np.unique(piece)) <= len(bounds):  # the last is empty
        bounds = bounds[:-1]
        piece = np.minimum(piece, len(bounds))
    linear = float(np.corrcoef(new, outputs)[0, 1]) ** 2
    told = _told(outputs, piece) - max(_told(outputs, window), linear)
    if not len(bounds) or told < TELLING + CHANCE * num / len(new):
        return None
    of = [_lengths(outputs[piece == place]) for place in range(len(bounds) + 1)]
    return ByInput(bounds=bounds.tolist(), of=of)


def _told(values: Floats, groups: IntArray) -> float:
    """Answer the share of the variance of *values* that lies between *groups*."""
    sizes = np.bincount(groups)
    means = np.bincount(groups, values) / np.maximum(sizes, 1)
    return float((sizes * (means - values.mean()) ** 2).sum() / len(values) / values.var())


def _correlation(groups: list[tuple[Floats, Floats]]) -> float:
    """Answer the rank correlation of prompt and output that imitates the linear one of *groups*.

    The linear one decides how much memory is held for how long: their mean product. It is that
    inside groups, together; 0 if it may be chance.
    """
    groups = [(new, outputs) for new, outputs in groups if len(new) and new.std() and outputs.std()]
    num = sum(len(new) for new, _ in groups)
    wanted = _linear(groups)
    if abs(wanted) * num**0.5 <= CHANCE:
        return 0.0
    random = np.random.default_rng(0)
    shares = [random.random((2, len(new))) for new, _ in groups]
    low, high = -0.95, 0.95
    for _ in range(12):
        middle = (low + high) / 2
        drawn = [
            (np.quantile(new, one), np.quantile(outputs, correlated(one, other, middle)))
            for (new, outputs), (one, other) in zip(groups, shares, strict=True)
        ]
        low, high = (middle, high) if _linear(drawn) < wanted else (low, middle)
    return round((low + high) / 2, 3)


def _linear(groups: list[tuple[Floats, Floats]]) -> float:
    """Answer the mean correlation inside *groups*, by their sizes."""
    products = [
        float((((one - one.mean()) / one.std()) * ((other - other.mean()) / other.std())).sum())
        for one, other in groups
        if one.std() > 0 and other.std() > 0
    ]
    return sum(products) / max(sum(len(one) for one, _ in groups), 1)


def _lengths(values: Floats) -> AnyDistribution:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low
    return _close_enough(values, _lognormal(values), whole=True) or _quantiles(values, digits=0)


def _times(values: Floats) -> AnyDistribution:
    if values.min() == values.max():
        return _short(float(values[0]))
    exponential = Exponential(mean=_short(float(values.mean())), max=_short(float(values.max())))
    return (
        _close_enough(values, exponential, whole=False)
        or _close_enough(values, _lognormal(values), whole=False)
        or _quantiles(values, digits=3)
    )


def _counts(values: IntArray) -> AnyDistribution:
    if values.min() == values.max():
        return float(values[0])
    geometric = Geometric(mean=_short(float(values.mean())), max=float(values.max()))
    numbers = values.astype(np.float64)
    return _close_enough(numbers, geometric, whole=True) or _quantiles(numbers, digits=0)


def _lognormal(values: Floats) -> Lognormal | None:
    median, p99 = (float(np.percentile(values, q)) for q in (50, 99))
    if not 0 < median < p99:
        return None
    return Lognormal(
        median=_short(median),
        p99=_short(p99),
        min=_short(float(values.min())),
        max=_short(float(values.max())),
    )


def _close_enough(
    values: Floats, found: Lognormal | Geometric | Exponential | None, *, whole: bool
) -> AnyDistribution | None:
    """Answer *found* if it is near to *values*."""
    if found is None:
        return None
    shares = (np.arange(10_000) + 0.5) / 10_000
    drawn, _ = draw(found, shares, least=0, whole=whole, folder=Path())
    chance = 1.22 / len(values) ** 0.5  # exceeded by one in ten samples of *found* itself
    return found if ks_distance(values, drawn) <= GOOD_KS + chance else None


def _quantiles(values: Floats, digits: int) -> Quantiles:
    found = np.maximum.accumulate(np.round(np.quantile(values, _LEVELS), digits))
    return Quantiles(values=found.tolist(), levels=list(_LEVELS))


def _short(value: float) -> float:
    """Answer *value* with six digits."""
    return float(f"{value:.6g}")
