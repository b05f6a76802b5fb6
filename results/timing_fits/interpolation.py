"""Leave-one-out errors of interpolating measured kernel tables.

    python results/timing_fits/interpolation.py DATA_DIR PROFILE_DIR OUT_CSV

DATA_DIR is ``aiconfigurator_core/systems/data`` of an installed aiconfigurator-core 0.12.0,
PROFILE_DIR an LLMServingSim profile (``attention.csv``). Every row that a protocol leaves out is
estimated from its neighbours; the CSV has one row per (study, GPU, protocol, rule): number of rows,
p50, p90 and p99 of the absolute percentage error, and the median signed error (bias).
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

GPUS = {
    "A100": ("a100_sxm", "vllm/0.14.0", 40e6),
    "H100": ("h100_sxm", "vllm/0.24.0", 50e6),
    "H200": ("h200_sxm", "vllm/0.24.0", 50e6),
    "B200": ("b200_sxm", "vllm/0.24.0", 126e6),
}
"""Table and L2 size, bytes."""

HEAD_DIM = 128
SHORT_CONTEXT = 128
"""Mean context, tokens, up to which rule (ii) is tried in the hybrid rule."""
PROFILE_QUERY_HEADS = 32
PROFILE_SMS = 128
FA2_QUERY_TILE = 64
"""Llama-3.1-8B on an RTX 4090; query rows of a FlashAttention-2 tile as the profile shows it."""
Grid = dict[tuple[int, int], float]
Errors = dict[tuple[str, str], list[float]]


def linear(x: float, lo: float, t_lo: float, hi: float, t_hi: float) -> float:
    """Answer the line through two points at *x*."""
    return t_lo + (t_hi - t_lo) * (x - lo) / (hi - lo)


def log_log(x: float, lo: float, t_lo: float, hi: float, t_hi: float) -> float:
    """Answer the power law through two points at *x*."""
    return math.exp(linear(math.log(x), math.log(lo), math.log(t_lo), math.log(hi), math.log(t_hi)))


def linear_per_unit(x: float, lo: float, t_lo: float, hi: float, t_hi: float) -> float:
    """Answer *x* times the line through the times per unit: exact for b * x + c * x * x."""
    return x * linear(x, lo, t_lo / lo, hi, t_hi / hi)


Rule = Callable[[float, float, float, float, float], float]


def decode_estimates(  # noqa: PLR0912  # every protocol in one place
    grid: Grid, batch: int, context: int, l2_tokens: float
) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield (protocol, rule) and estimate of one left-out decode point, both powers of 2.

    Context is that of each request. "x4" protocols estimate from a grid of every second knot on
    both axes around the point. *l2_tokens*: tokens whose keys and values fill L2.
    """

    def at(b: int, c: float) -> float | None:
        return grid.get((b, int(c)))

    def coarse(b: int, c: float, rule: Rule) -> float | None:
        """Answer t(b, c) from contexts c / 2 and 2 c."""
        below, above = at(b, c / 2), at(b, c * 2)
        if below is None or above is None:
            return None
        return rule(c, c / 2, below, c * 2, above)

    lo, hi = batch // 2, batch * 2
    for name, rule in (("linear", linear), ("log", log_log)):
        by_context = coarse(batch, context, rule)
        if by_context is not None:
            yield ("context knot", f"{name} in context"), by_context
        total = (at(lo, context * 2), at(hi, context / 2)) if lo else (None, None)
        mean = (at(lo, context), at(hi, context)) if lo else (None, None)
        by_total = by_mean = None
        if total[0] is not None and total[1] is not None:
            by_total = rule(batch, lo, total[0], hi, total[1])
            yield ("batch knot", f"(i) total context, {name}"), by_total
        if mean[0] is not None and mean[1] is not None:
            by_mean = rule(batch, lo, mean[0], hi, mean[1])
            yield ("batch knot", f"(ii) mean context, {name}"), by_mean
        if by_total is not None and by_mean is not None:
            yield ("batch knot, rows with both", f"(i) total context, {name}"), by_total
            yield ("batch knot, rows with both", f"(ii) mean context, {name}"), by_mean
            both = (by_total + by_mean) / 2
            yield ("batch knot, rows with both", f"mean of (i) and (ii), {name}"), both
        hybrid = by_mean if context <= SHORT_CONTEXT and by_mean is not None else by_total
        if hybrid is not None:
            rule_name = f"(ii) up to {SHORT_CONTEXT} tokens, else (i), {name}"
            yield ("batch knot", rule_name), hybrid
        resident = lo * context > l2_tokens and by_mean is not None
        best = by_mean if resident else by_total
        if best is not None:
            yield ("batch knot", f"(ii) where its rows exceed L2, else (i), {name}"), best
        if lo:
            pair = coarse(lo, context * 2, rule), coarse(hi, context / 2, rule)
            if pair[0] is not None and pair[1] is not None:
                yield (
                    ("both axes, intervals of x4", f"(i) total context, {name}"),
                    rule(batch, lo, pair[0], hi, pair[1]),
                )
            pair = coarse(lo, context, rule), coarse(hi, context, rule)
            if pair[0] is not None and pair[1] is not None:
                yield (
                    ("both axes, intervals of x4", f"(ii) mean context, {name}"),
                    rule(batch, lo, pair[0], hi, pair[1]),
                )
        best = by_context if by_context is not None else by_total
        if best is not None:
            yield ("single point", f"{name} in context, else (i)"), best
        best = by_total if by_total is not None else by_context
        if best is not None:
            yield ("single point", f"(i), else {name} in context"), best
        if by_total is not None and by_context is not None:
            yield ("single point", f"mean of (i) and context, {name}"), (by_total + by_context) / 2


def read(data: Path, system: str, family: str, version: str, name: str) -> pd.DataFrame:
    """Answer one table, with windows of 0 where it has no such column."""
    frame = pd.read_parquet(data / system / family / version / f"{name}_perf.parquet")
    if "attention" in name and "window_size" not in frame:
        frame["window_size"] = 0
    return frame


def attention_groups(frame: pd.DataFrame) -> Iterator[tuple[int, int, pd.DataFrame]]:
    """Yield query heads, kv heads and rows of bf16, head_dim 128, no window."""
    rows = frame[
        (frame["head_dim"] == HEAD_DIM)
        & (frame["window_size"] == 0)
        & (frame["kv_cache_dtype"] == "bfloat16")
    ]
    for (heads, kv_heads), group in rows.groupby(["num_heads", "num_key_value_heads"]):
        yield int(heads), int(kv_heads), group


def decode_study(data: Path, gpu: str, tail: list[dict[str, float | str]]) -> Errors:
    """Answer signed errors, %, of decode rows whose KV exceeds L2; collect those above 10 %."""
    system, version, l2 = GPUS[gpu]
    errors: Errors = {}
    frame = read(data, system, "attention", version, "generation_attention")
    for heads, kv_heads, group in attention_groups(frame):
        contexts, batches = group["step"] + 1, group["batch_size"]
        times = group["latency"] * 1e3
        grid = {
            (int(b), int(c)): float(t) for b, c, t in zip(batches, contexts, times, strict=True)
        }
        for (batch, context), truth in grid.items():
            num_bytes = batch * context * kv_heads * HEAD_DIM * 4
            if num_bytes <= l2:
                continue
            for key, estimate in decode_estimates(
                grid, batch, context, l2 / (kv_heads * HEAD_DIM * 4)
            ):
                error = 100 * (estimate / truth - 1)
                errors.setdefault(key, []).append(error)
                if key[0] == "batch knot" and num_bytes > 2 * l2 and heads <= 16 * kv_heads:
                    scope = ("batch knot, KV > 2 x L2, q/kv <= 16", key[1])
                    errors.setdefault(scope, []).append(error)
                tail.append(
                    {
                        "gpu": gpu, "protocol": key[0], "rule": key[1], "heads": heads,
                        "kv_heads": kv_heads, "batch": batch, "context": context,
                        "kv_over_l2": num_bytes / l2, "us": truth, "error": error,
                    }
                )  # fmt: skip
    return errors


def axis_errors(
    points: Iterable[tuple[float, float]], rules: dict[str, Rule], keep: Callable[[float], bool]
) -> Iterator[tuple[str, float]]:
    """Yield rule and signed error, %, of each inner point of one axis left out."""
    series = sorted(points)
    for (lo, t_lo), (x, truth), (hi, t_hi) in zip(series, series[1:], series[2:], strict=False):
        if keep(x):
            for name, rule in rules.items():
                yield name, 100 * (rule(x, lo, t_lo, hi, t_hi) / truth - 1)


def prefill_study(data: Path, gpu: str) -> Errors:
    """Answer signed errors, %, of prefill rows: a length left out, or a batch."""
    system, version, _ = GPUS[gpu]
    errors: Errors = {}
    rules: dict[str, Rule] = {
        "linear": linear, "log": log_log, "linear in time per token": linear_per_unit,
    }  # fmt: skip
    frame = read(data, system, "attention", version, "context_attention")
    for _, _, group in attention_groups(frame):
        unique = group.groupby(["batch_size", "isl"])["latency"].median().reset_index()
        for axis, other, low in (("isl", "batch_size", 16), ("batch_size", "isl", 1)):
            for fixed, line in unique.groupby(other):
                if axis == "batch_size" and fixed < 16:
                    continue
                points = zip(line[axis].astype(float), line["latency"], strict=True)
                for name, error in axis_errors(points, rules, lambda x, low=low: x >= low):  # type: ignore[misc]
                    errors.setdefault((f"{axis} knot", name), []).append(error)
                if axis == "isl":
                    points = zip(line[axis].astype(float), line["latency"], strict=True)
                    for name, error in axis_errors(points, rules, lambda x: x >= 512):
                        errors.setdefault(("isl knot, 512 and more", name), []).append(error)
                    points = zip(line[axis].astype(float), line["latency"], strict=True)
                    for name, error in axis_errors(points, rules, lambda x: 16 <= x < 512):
                        errors.setdefault(("isl knot, 16 to 256", name), []).append(error)
    return errors


def gemm_study(data: Path, gpu: str) -> Errors:
    """Answer signed errors, %, of bf16 products: m, n or k left out; weights above L2 apart."""
    system, version, l2 = GPUS[gpu]
    errors: Errors = {}
    rules: dict[str, Rule] = {"linear": linear, "log": log_log}
    frame = read(data, system, "gemm", version, "gemm")
    rows = frame[(frame["gemm_dtype"] == "bfloat16") & (frame["m"] <= 8192)]
    for axis, fixed in (("m", ["n", "k"]), ("n", ["m", "k"]), ("k", ["m", "n"])):
        for key, line in rows.groupby(fixed):
            big = min(key) >= 2048 and key[0] * key[1] * 2 > l2 if axis == "m" else key[1] >= 2048
            points = list(zip(line[axis].astype(float), line["latency"], strict=True))
            low = 1.0 if axis == "m" else 2048.0
            for name, error in axis_errors(points, rules, lambda x, low=low: x >= low):  # type: ignore[misc]
                if axis == "m":
                    errors.setdefault(("m knot, all (n, k)", name), []).append(error)
                if big:
                    what = "weights above L2" if axis == "m" else "n, k of 2048 and more"
                    errors.setdefault((f"{axis} knot, {what}", name), []).append(error)
            if axis == "m" and big:  # of pairs t, t + 1 keep t + 1 (and every knot without pair)
                ms = {x for x, _ in points}
                thin = [(x, t) for x, t in points if x < 17 or x + 1 not in ms]
                for name, error in axis_errors(thin, rules, lambda x: x >= 17):
                    key2 = ("m knot above 16, pairs thinned, weights above L2", name)
                    errors.setdefault(key2, []).append(error)
    return errors


def history_study(profile: Path) -> Errors:
    """Answer signed errors, %, of pricing a chunk behind a history from tables without history."""
    frame = pd.read_csv(profile / "attention.csv")
    rows = frame[(frame["n_decode"] == 0) & (frame["prefill_chunk"] > 0)]
    base = rows[rows["kv_prefill"] == 0].groupby("prefill_chunk")["time_us"].median()
    sizes, times = base.index.to_numpy(float), base.to_numpy()
    weights = 1 / times
    t0, per_token, per_square = np.linalg.lstsq(
        np.stack([np.ones_like(sizes), sizes, sizes**2], axis=1) * weights[:, None],
        times * weights,
        rcond=None,
    )[0]
    last = sizes[-1]
    pair_us = (times[-1] - times[-2]) / ((last**2 - sizes[-2] ** 2) / 2)

    def measured(n: float) -> float:
        """Answer T0(n): linear in time per token, beyond the last knot by its pair cost."""
        if n <= last:
            return float(n * np.interp(n, sizes, times / sizes))
        return float(times[-1] + pair_us * (n * n - last * last) / 2)

    fill = FA2_QUERY_TILE * PROFILE_SMS / PROFILE_QUERY_HEADS

    def whole(n: float, h: float) -> float:
        """Answer the share of T0(h + n) that the last n rows are."""
        return measured(h + n) * (1 - (h / (h + n)) ** 2)

    rules: dict[str, Callable[[float, float], float]] = {
        "T0(n) + pair cost * max(n, n_fill) * h": lambda n, h: (
            measured(n) + pair_us * max(n, fill) * h
        ),
        "T0(n) + pair cost of fit * max(n, n_fill) * h": lambda n, h: (
            measured(n) + 2 * per_square * max(n, fill) * h
        ),
        "T0(h+n') * (1 - (h/(h+n'))^2), n' = max(n, n_fill)": lambda n, h: whole(max(n, fill), h),
        "T0(h+n) * (1 - (h/(h+n))^2)": lambda n, h: measured(h + n) * (1 - (h / (h + n)) ** 2),
        "T0(h+n) - T0(h)": lambda n, h: measured(h + n) - measured(h) if h else measured(n),
        "T0(n) + pair cost * n * h": lambda n, h: measured(n) + pair_us * n * h,
        "T0(sqrt(n^2 + 2nh)), as many pairs": lambda n, h: measured(math.sqrt(n * n + 2 * n * h)),
        "fit of T0 by pairs": lambda n, h: (
            t0 + per_token * n + 2 * per_square * n * (h + n / 2)
        ),
        "max(T0(n), fit by pairs)": lambda n, h: max(
            measured(n), t0 + per_token * n + 2 * per_square * n * (h + n / 2)
        ),
    }  # fmt: skip
    errors: Errors = {}
    for chunk, history, truth in rows[["prefill_chunk", "kv_prefill", "time_us"]].itertuples(
        index=False
    ):
        if history == 0:
            continue
        kinds = ["all histories"]
        kinds.append("h + n within table" if chunk + history <= last else "h + n beyond table")
        kinds.append("chunk of 256 and more" if chunk >= 256 else "chunk below 256")
        for name, rule in rules.items():
            error = 100 * (rule(chunk, history) / truth - 1)
            for kind in kinds:
                errors.setdefault((kind, name), []).append(error)
    return errors


SKEW_SHARES = {"sr<=5%": 0.05, "sr<=15%": 0.125, "sr<=40%": 0.25, "sr<=70%": 0.5, "sr>70%": 0.8}
"""Share of long requests taken for each bucket of the published skew fit."""
SKEW = 4
"""Long context over short, as in the rows that were measured."""


def skew_study(profile: Path) -> Errors:
    """Answer signed errors, %, of pricing a decode batch of two lengths by its total context.

    The published fit says t = t_mean + alpha * (t_max - t_mean), where t_mean and t_max are uniform
    batches at the mean and at the long context, here interpolated from the profile.
    """
    frame = pd.read_csv(profile / "attention.csv")
    table = frame[(frame["prefill_chunk"] == 0)].pivot_table(
        index="n_decode", columns="kv_decode", values="time_us"
    )
    contexts = table.columns.to_numpy(float)
    buckets = pd.read_csv(profile / "skew_fit.csv")
    errors: Errors = {}
    for row in buckets[buckets["pc"] == 0].itertuples(index=False):
        batch = int(str(row.n_label).removeprefix("n<="))
        long = 1024 * int(str(row.kv_big_label).removeprefix("kvB<=").removesuffix("k"))
        share = max(SKEW_SHARES[str(row.skew_rate_label)], 1 / batch)
        mean = long * (share + (1 - share) / SKEW)
        line = table.loc[batch].to_numpy()
        t_mean, t_max = np.interp([mean, long], contexts, line)
        truth = t_mean + row.alpha * (t_max - t_mean)
        error = 100 * (t_mean / truth - 1)
        for kind in ("decodes only", "8 requests or fewer" if batch <= 8 else "above 8 requests"):
            errors.setdefault((kind, "total context"), []).append(float(error))
    return errors


def mixed_study(profile: Path) -> Errors:
    """Answer signed errors, %, of pricing a chunk with decodes from its two parts."""
    frame = pd.read_csv(profile / "attention.csv")
    alone = frame[frame["n_decode"] == 0].set_index(["prefill_chunk", "kv_prefill"])["time_us"]
    decodes = frame[frame["prefill_chunk"] == 0].set_index(["n_decode", "kv_decode"])["time_us"]
    mixed = frame[(frame["prefill_chunk"] > 0) & (frame["n_decode"] > 0)]
    errors: Errors = {}
    for row in mixed.itertuples(index=False):
        prefill = alone.get((row.prefill_chunk, row.kv_prefill))
        decode = decodes.get((row.n_decode, row.kv_decode))
        if prefill is None or decode is None:
            continue
        kinds = ["all", "8 decodes or fewer" if row.n_decode <= 8 else "16 decodes and more"]
        kinds.append(kinds[1] + (", chunk of 512 and more" if row.prefill_chunk >= 512 else ""))
        for kind in dict.fromkeys(kinds):
            for name, estimate in (("sum", prefill + decode), ("maximum", max(prefill, decode))):
                error = 100 * (estimate / row.time_us - 1)
                errors.setdefault((kind, name), []).append(float(error))
    return errors


def summarise(study: str, gpu: str, errors: Errors) -> Iterator[dict[str, str | int | float]]:
    """Yield one row of the CSV per protocol and rule."""
    for (protocol, rule), values in sorted(errors.items()):
        signed = np.asarray(values)
        p50, p90, p99 = np.percentile(np.abs(signed), [50, 90, 99])
        yield {
            "study": study, "gpu": gpu, "protocol": protocol, "rule": rule, "rows": len(values),
            "p50": round(p50, 2), "p90": round(p90, 2), "p99": round(p99, 2),
            "bias": round(float(np.median(signed)), 2),
        }  # fmt: skip


def main() -> None:
    """Run every study and write the CSV; ``--tail`` also writes every decode error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tail", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, str | int | float]] = []
    tail: list[dict[str, float | str]] = []
    for study, run in (
        ("decode", lambda gpu: decode_study(args.data, gpu, tail)),
        ("prefill", lambda gpu: prefill_study(args.data, gpu)),
        ("gemm", lambda gpu: gemm_study(args.data, gpu)),
    ):
        overall: Errors = {}
        for gpu in GPUS:
            errors = run(gpu)
            rows += summarise(study, gpu, errors)
            for key, values in errors.items():
                overall.setdefault(key, []).extend(values)
        rows += summarise(study, "all", overall)
    rows += summarise("history", "RTX-4090", history_study(args.profile))
    rows += summarise("skew", "RTX-4090", skew_study(args.profile))
    rows += summarise("mixed", "RTX-4090", mixed_study(args.profile))
    pd.DataFrame(rows).to_csv(args.out, index=False)
    if args.tail:
        pd.DataFrame(tail).to_csv(args.tail, index=False)


if __name__ == "__main__":
    main()
