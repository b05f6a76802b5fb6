"""How often prompts repeat earlier ones: hits of a cache without limit, and of LRU of any size.

A cache holds blocks of prompt tokens, named by all tokens up to their end. The rules are those of
the published figures of the Mooncake traces (FAST'25, ``conversation_trace.jsonl``): every block of
a prompt is one access, in order, the last though it is not full; outputs are not cached.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workloads.record import IntArray, Trace

FIRST = -1
"""Reuse distance of what was never accessed before."""


def num_repeated_tokens(trace: Trace, *, outputs: bool = False) -> IntArray:
    """Answer how many leading prompt tokens of each request were in an earlier prompt.

    int64 [num_requests]: the hits of a cache without limit and with blocks of 1 token. *outputs*:
    or in an earlier request's prompt and output.
    """
    most: dict[int, int] = {}
    repeated = np.zeros(len(trace), dtype=np.int64)
    nodes, ends = trace.segment_nodes.tolist(), trace.segment_ends.tolist()
    offsets = trace.segment_offsets.tolist()
    answers = list(zip(trace.output_nodes.tolist(), trace.num_output_tokens.tolist(), strict=True))
    for row in range(len(trace)):
        before = hits = 0
        goes_on = True
        for segment in range(offsets[row], offsets[row + 1]):
            node, length = nodes[segment], ends[segment] - before
            before = ends[segment]
            known = most.get(node, 0)
            if goes_on:
                hits += min(known, length)
                goes_on = known >= length
            if length > known:
                most[node] = length
        repeated[row] = hits
        if outputs:
            node, length = answers[row]
            most[node] = max(length, most.get(node, 0))
    return repeated


def num_accesses(trace: Trace, block_size: int) -> int:
    """Answer how many blocks all prompts have."""
    return int((-(-trace.num_prompt_tokens // block_size)).sum())


def block_accesses(trace: Trace, block_size: int, one_in: int = 1) -> IntArray:
    """Answer a number for every block of every prompt, in order: equal numbers, equal prefixes.

    int64 [num_blocks]. A last block that is not full counts as the block it may become. Of *one_in*
    blocks only one, with all its accesses: distances between them, times *one_in*, are those of all
    (Waldspurger et al., Efficient MRC construction with SHARDS, FAST'15).
    """
    offsets, nodes, ends = trace.segment_offsets, trace.segment_nodes, trace.segment_ends
    starts = np.concatenate([[0], ends[:-1]])
    starts[offsets[:-1]] = 0
    # A block is of the segment that has its last token.
    first, stop = starts // block_size, ends // block_size
    stop[offsets[1:] - 1] = -(-trace.num_prompt_tokens // block_size)
    # Which block of a segment is looked at first depends on its node only, as if by chance.
    scattered = nodes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)
    first += (scattered.astype(np.int64) - first) % one_in
    counts = np.maximum(-(-(stop - first) // one_in), 0)
    segment = np.repeat(np.arange(len(nodes)), counts)
    place = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    block = first[segment] + place * one_in
    _, accesses = np.unique(nodes[segment] << 32 | block, return_inverse=True)
    return accesses.astype(np.int64)


def reuse_distances(accesses: IntArray) -> IntArray:
    """Answer how many others were accessed since the last access to the same block; else `FIRST`.

    int64, one for each of *accesses*. LRU of more blocks than that has it still: one pass, all
    sizes (Mattson et al., Evaluation techniques for storage hierarchies, 1970).
    """
    num = len(accesses)
    order = np.argsort(accesses, kind="stable")
    again = accesses[order[1:]] == accesses[order[:-1]]
    previous = np.full(num, -1, dtype=np.int64)
    previous[order[1:][again]] = order[:-1][again]
    # Of the accesses in between, those whose own last access was before it are the distinct ones;
    # up to it, that is true of all.
    distances = _num_earlier_not_larger(previous) - previous - 1
    return np.where(previous >= 0, distances, FIRST)


def _num_earlier_not_larger(values: IntArray) -> IntArray:
    """Answer, for each of *values*, how many before it are as large or smaller."""
    counts = np.zeros(len(values), dtype=np.int64)
    order = np.argsort(values, kind="stable")
    for bit in reversed(range(len(values).bit_length())):
        # Positions by value, in groups that agree in all higher bits: of two of them that part at
        # this bit, the smaller position comes first.
        group = order >> (bit + 1)
        is_early = (order >> bit & 1) == 0
        num_early = np.cumsum(is_early)
        first = np.searchsorted(group, group)
        before = num_early - (num_early[first] - is_early[first])
        counts[order[~is_early]] += before[~is_early]
        order = order[np.argsort(order >> bit, kind="stable")]
    return counts


def lru_hit_ratios(
    distances: IntArray, sizes: Sequence[float], num_accesses: float | None = None
) -> npt.NDArray[np.float64]:
    """Answer the share of accesses that LRU of each of *sizes* blocks hits.

    *num_accesses*: how many there should be, where *distances* are a sample: its misses are
    counted, because whether it has a block that everybody hits is chance.
    """
    misses = len(distances) - np.searchsorted(
        np.sort(distances[distances >= 0]), np.asarray(sizes, dtype=np.float64)
    )
    total = num_accesses or len(distances)
    found: npt.NDArray[np.float64] = np.maximum(total - misses, 0) / max(total, 1)
    return found
