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


def block_accesses(trace: Trace, block_size: int) -> IntArray:
    """Answer a number for every block of every prompt, in order: equal numbers, equal prefixes.

    int64 [num_blocks]. A last block that is not full counts as the block it may become.
    """
    prompts = trace.num_prompt_tokens
    base = np.cumsum(prompts) - prompts  # of each prompt, in the row of all prompts
    segments = np.diff(trace.segment_offsets)
    ends = np.repeat(base, segments) + trace.segment_ends
    starts = np.concatenate([[0], ends[:-1]])
    blocks = -(-prompts // block_size)
    number = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    full = np.repeat(base, blocks) + (number + 1) * block_size
    last = np.minimum(full, np.repeat(base + prompts, blocks))
    segment = np.searchsorted(ends, last)
    offset = full - starts[segment]
    _, accesses = np.unique(trace.segment_nodes[segment] << 32 | offset, return_inverse=True)
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


def lru_hit_ratios(distances: IntArray, sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Answer the share of accesses that LRU of each of *sizes* blocks hits."""
    hits = np.sort(distances[distances >= 0])
    return np.searchsorted(hits, np.asarray(sizes)) / max(len(distances), 1)
