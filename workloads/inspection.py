"""What is in a trace: arrivals, lengths, sessions, how often prompts repeat, what is odd."""

from typing import Any

import numpy as np
import numpy.typing as npt

from workloads.arrivals import mean_rate
from workloads.record import PS_PER_S, IntArray, Trace
from workloads.reuse import (
    block_accesses,
    lru_hit_ratios,
    num_accesses,
    num_repeated_tokens,
    reuse_distances,
)

PERCENTILES = (50, 90, 95, 99)

CACHE_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Sizes of a cache that are asked about, as shares of all different blocks."""

MAX_ACCESSES = 1 << 22
"""Accesses to blocks that are looked at; where there are more, to one block in so many."""

MOST_SHARED = 5
"""Prefixes that are listed."""

CURVE_POINTS = 60
"""Sizes of a cache at which the curve of hits is drawn."""

Floats = npt.NDArray[np.float64]


def inspect(trace: Trace, block_size: int) -> dict[str, Any]:
    """Answer what is in *trace*; reuse is counted in blocks of *block_size* tokens.

    Times in seconds, lengths in tokens, rates in requests a second, ratios from 0 to 1. The rules
    of reuse are those of `workloads.reuse`: prompts only, in the order of arrival.
    """
    gaps = np.diff(trace.arrival_ps) / PS_PER_S
    prompts, outputs = trace.num_prompt_tokens, trace.num_output_tokens
    spread = gaps.std() if len(gaps) else 0.0
    return {
        "name": trace.name,
        "format": trace.trace_format,
        "num_requests": len(trace),
        "duration": float(gaps.sum()),
        "request_rate": mean_rate(trace) if gaps.any() else None,
        "burstiness": float((gaps.mean() / spread) ** 2) if spread else None,
        "num_instants": len(np.unique(trace.arrival_ps)),
        "input_len": _percentiles(prompts),
        "output_len": _percentiles(outputs),
        "total_input_tokens": int(prompts.sum()),
        "total_output_tokens": int(outputs.sum()),
        "sessions": _sessions(trace),
        "reuse": _reuse(trace, block_size),
        "most_shared": most_shared(trace),
        "oddities": [*trace.notes, *_oddities(trace)],
    }


def _percentiles(values: IntArray | Floats) -> dict[str, float]:
    levels = {f"p{level}": float(np.percentile(values, level)) for level in PERCENTILES}
    return {
        "min": float(values.min()),
        **levels,
        "max": float(values.max()),
        "mean": float(values.mean()),
    }


def _sessions(trace: Trace) -> dict[str, Any] | None:
    """Answer turns and think times; None for a trace without sessions of several turns."""
    later = trace.previous_turn >= 0
    if not later.any():
        return None
    turns = np.ones(len(trace), dtype=np.int64)
    for row in np.flatnonzero(later).tolist():
        turns[row] = turns[trace.previous_turn[row]] + 1
    is_last = np.ones(len(trace), dtype=bool)
    is_last[trace.previous_turn[later]] = False
    return {
        "num_sessions": int((~later).sum()),
        "turns": _percentiles(turns[is_last]),
        "think_time": _percentiles(trace.think_ps[later] / PS_PER_S),
    }


def _reuse(trace: Trace, block_size: int) -> dict[str, Any]:
    total, one_in, accesses = _accesses(trace, block_size)
    distances = reuse_distances(accesses)
    again = distances[distances >= 0] * one_in
    num_blocks = min((int(accesses.max()) + 1) * one_in, total)
    sizes = [max(1, round(share * num_blocks)) for share in CACHE_SHARES]
    ratios = lru_hit_ratios(distances, [size / one_in for size in sizes], total / one_in)
    return {
        "block_size": block_size,
        "repeated_tokens": float(num_repeated_tokens(trace).sum() / trace.num_prompt_tokens.sum()),
        "one_in": one_in,
        "num_accesses": total,
        "num_blocks": num_blocks,
        "hit_ratio": (total - num_blocks) / total,
        "accessed_once": float((np.bincount(accesses) == 1).mean()),
        "reuse_distance": _percentiles(again) if len(again) else None,
        "lru": [
            {"share": share, "blocks": size, "hit_ratio": float(ratio)}
            for share, size, ratio in zip(CACHE_SHARES, sizes, ratios, strict=True)
        ],
    }


def _accesses(trace: Trace, block_size: int) -> tuple[int, int, IntArray]:
    """Answer how many accesses there are, in how many blocks one is looked at, and its accesses."""
    total = num_accesses(trace, block_size)
    one_in = -(-total // MAX_ACCESSES)
    return total, one_in, block_accesses(trace, block_size, one_in)


def lru_curve(trace: Trace, block_size: int) -> tuple[IntArray, Floats]:
    """Answer cache sizes in blocks, evenly on a logarithmic axis, and the hits of LRU at each."""
    total, one_in, accesses = _accesses(trace, block_size)
    most = min((int(accesses.max()) + 1) * one_in, total)
    sizes = np.unique(np.geomspace(1, most, CURVE_POINTS).round().astype(int))
    distances = reuse_distances(accesses)
    return sizes, lru_hit_ratios(distances, (sizes / one_in).tolist(), total / one_in)


def most_shared(trace: Trace) -> list[dict[str, int]]:
    """Answer the prefixes that save most: tokens that all who go through a node have in common.

    Of prefixes of as many requests, the longest.
    """
    counts = np.bincount(trace.segment_nodes)
    ends = np.full(len(counts), np.iinfo(np.int64).max)
    np.minimum.at(ends, trace.segment_nodes, trace.segment_ends)
    saved = np.where(counts > 1, (counts - 1) * ends, 0)
    found: list[dict[str, int]] = []
    for place in np.argsort(-saved, kind="stable")[: 20 * MOST_SHARED].tolist():
        count = int(counts[place])
        if count < 2 or len(found) == MOST_SHARED:
            break
        if all(count != other["num_requests"] for other in found):
            found.append({"num_requests": count, "num_tokens": int(ends[place])})
    return found


def _oddities(trace: Trace) -> list[str]:
    """Answer what a reader of the trace may stumble over."""
    prompts, outputs = trace.num_prompt_tokens, trace.num_output_tokens
    odd = []
    for what, number in (
        ("outputs of 1 token", int((outputs == 1).sum())),
        ("prompts of 1 token", int((prompts == 1).sum())),
        ("requests that arrive with another", len(trace) - len(np.unique(trace.arrival_ps))),
    ):
        if number:
            odd.append(f"{number:,} {what}")
    longest, typical = float(prompts.max()), float(np.percentile(prompts, 99))
    if longest > 4 * typical:
        odd.append(f"the longest prompt, {longest:,.0f} tokens, is {longest / typical:.0f} x p99")
    return odd
