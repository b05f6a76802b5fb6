"""Checks of prefix caching: is it on, does it hit what it can, did it get worse, what breaks it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sim.health.facts import LEAST_POINTS, Facts, Finding, Point

WORTH_SHARING = 0.05
"""Share of prompt tokens: with less to share, caching on or off makes no difference that counts."""

HIT_GAP = 0.10
"""Hit rates that far below what a cache without limit hits, in absolute terms, have a cause;
requests that arrive before the first of them is computed explain a few hundredths."""

DROP = 0.20
"""A fall of the hit rate that is no noise: the chapter's careless change is one of 0.8."""

CLEAR = 2.0
"""A fall counts if it is as many standard deviations of the hit rates around their two means."""

LOST = 0.10
"""Share of prompt tokens lost to one difference that is worth another template."""


class Drop(NamedTuple):
    """A hit rate that fell: means before and after, and where."""

    before: float
    after: float
    where: str


def find_drop(series: Sequence[Point]) -> Drop | None:
    """Answer the fall that splits *series* best into two levels; None if there is none.

    The split with the least squares around both means, weighted by tokens (a change point of one
    step); intervals without look-ups are left out.
    """
    points = [p for p in series if p.hit_rate is not None and p.weight > 0]
    rates = [p.hit_rate or 0.0 for p in points]
    weights = [p.weight for p in points]
    best: tuple[float, int] | None = None
    for place in range(LEAST_POINTS, len(points) - LEAST_POINTS + 1):
        spread = sum(
            _spread(rates[part], weights[part]) for part in (slice(place), slice(place, None))
        )
        if best is None or spread < best[0]:
            best = (spread, place)
    if best is None:
        return None
    spread, place = best
    before = _mean(rates[:place], weights[:place])
    after = _mean(rates[place:], weights[place:])
    noise = math.sqrt(spread / sum(weights))
    if before - after < max(DROP, CLEAR * noise):
        return None
    return Drop(before, after, points[place].where)


def _mean(rates: Sequence[float], weights: Sequence[float]) -> float:
    return sum(r * w for r, w in zip(rates, weights, strict=True)) / sum(weights)


def _spread(rates: Sequence[float], weights: Sequence[float]) -> float:
    mean = _mean(rates, weights)
    return sum(w * (r - mean) ** 2 for r, w in zip(rates, weights, strict=True))


def caching_on(facts: Facts) -> Finding | None:
    """Whether prefixes are shared where there is something to share."""
    possible = facts.possible_hit_rate
    if facts.enable_prefix_caching is not False or (
        possible is not None and possible < WORTH_SHARING
    ):
        return None
    known = possible is not None
    return Finding(
        check="caching_on",
        severity="warning" if known else "info",
        figure="prefix caching is off"
        + facts.at("enable_prefix_caching")
        + (
            f"; {100 * (possible or 0):.1f} % of the prompt tokens repeat an earlier prompt"
            if known
            else ""
        ),
        reason="repeated prefixes are computed and stored again for every request",
        change="--enable-prefix-caching (vLLM's default)"
        if facts.is_paged
        else "--allocator prefix: memory in blocks, which prompts can share",
        settings={"enable_prefix_caching": True} if facts.is_paged else {"allocator": "prefix"},
    )


def hit_rate(facts: Facts) -> Finding | None:
    """Whether the cache hits what the load allows."""
    rate, possible = facts.hit_rate, facts.possible_hit_rate
    if rate is None or facts.enable_prefix_caching is False:
        return None
    if possible is None:
        return _never(facts)
    if possible - rate < HIT_GAP:
        return None
    peak = max((point.usage or 0.0 for point in facts.series), default=0.0)
    return Finding(
        check="hit_rate",
        severity="warning",
        figure=f"{100 * rate:.1f} % of the tokens looked up hit, {100 * possible:.1f} % could"
        f"{facts.at('hit_rate')}",
        reason=f"the pool was used up to {100 * peak:.0f} %: running requests push cached prefixes "
        "out, or equal prompts came before the first of them was computed",
        change="a larger pool (--gpu-memory-utilization, --kv-cache-dtype fp8), fewer "
        "--max-num-seqs, or fewer different prefixes per server",
        settings={"kv_cache_dtype": "fp8"},
    )


def _never(facts: Facts) -> Finding | None:
    """Answer a finding where nothing ever hit and what could have is not known."""
    idle = bool(facts.series) and not any(point.running for point in facts.series)
    if facts.hit_rate or any(point.hit_rate for point in facts.series) or idle:
        return None
    return Finding(
        check="hit_rate",
        severity="info",
        figure=f"the prefix cache hit rate is 0.0 % throughout{facts.at('hit_rate')}",
        reason="prompts share nothing from their first token on, or caching is off",
        change="compare two prompts byte by byte (kvsim check --trace), --enable-prefix-caching",
    )


def hit_rate_kept(facts: Facts) -> Finding | None:
    """Whether the hit rate stayed what it was."""
    drop = find_drop(facts.series) or find_drop(facts.possible_series)
    if drop is None:
        return None
    asked = find_drop(facts.possible_series)
    broken = facts.prefix_break
    if asked is not None:
        why = (
            f"the prompts changed: a cache without limit falls from {100 * asked.before:.0f} to "
            f"{100 * asked.after:.0f} % at {asked.where}"
        )
        change = "the template of the prompts: what changes belongs behind what is shared"
    elif facts.possible_series:
        why = "the prompts share as much as before: the pool pushes prefixes out"
        change = "a larger pool, fewer --max-num-seqs, or fewer different prefixes per server"
    else:
        why = "prompts begin otherwise than before, or the pool pushes prefixes out"
        change = "compare a prompt of before and after byte by byte (kvsim check --trace)"
    if asked is not None and broken is not None:
        why += f"; {_where(facts)}"
    return Finding(
        check="hit_rate_kept",
        severity="error",
        figure=f"the hit rate falls from {100 * drop.before:.0f} to {100 * drop.after:.0f} % at "
        f"{drop.where}",
        reason=why,
        change=change,
    )


def _where(facts: Facts) -> str:
    """Answer where two prompts differ, in words."""
    found = facts.prefix_break
    assert found is not None, "asked for one that is there"
    return (
        f"{found.earlier} and {found.later} differ first at {found.unit} {found.position:,} "
        f"({found.earlier_shown} and {found.later_shown}) and agree again from {found.unit} "
        f"{found.resumes[0]:,} and {found.resumes[1]:,} on, for {found.again:,}"
    )


def identical(facts: Facts) -> Finding | None:
    """Whether prompts with the same text begin alike, byte for byte."""
    found = facts.prefix_break
    if found is None or found.lost < LOST:
        return None
    return Finding(
        check="identical",
        severity="warning",
        figure=_where(facts),
        reason=f"a prefix is found only if all before it is equal: {100 * found.lost:.0f} % of the "
        "compared tokens are the same text behind another beginning, and are computed again",
        change="the template of the prompts: times, names and random ids behind what is shared",
    )


def block_and_prefix(facts: Facts) -> Finding | None:
    """Whether blocks are small enough for what prompts share."""
    size, shared = facts.block_size, facts.shared_prefixes
    if size is None or shared is None or not facts.enable_prefix_caching:
        return None
    lost = (facts.possible_by_token or 0.0) - (facts.possible_hit_rate or 0.0)
    short = [each for each in shared if each[1] < size]
    if lost < WORTH_SHARING:
        return None
    requests, tokens = short[0] if short else shared[0]
    smaller = 16 if size > 16 and not facts.is_state_sized else None
    return Finding(
        check="block_and_prefix",
        severity="warning" if smaller else "info",  # nothing takes smaller blocks
        figure=f"block_size {size}, while {requests:,} requests start with the same {tokens:,} "
        f"tokens{facts.at('block_size')}",
        reason="only whole blocks are shared: "
        f"{100 * (facts.possible_hit_rate or 0):.1f} % of the prompt tokens can hit, "
        f"{100 * (facts.possible_by_token or 0):.1f} % with blocks of one token",
        change="--block-size 16" if smaller else "a longer common prefix",
        settings={"block_size": smaller} if smaller else {},
    )
