"""What the prompts of a trace have in common, read off its prefix nodes."""

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from workloads.record import IntArray, Trace

MAX_BRANCHES = 2
"""Most ways on from one place of a conversation: the next turn, and an unfinished block."""


def deepest_shared(trace: Trace, sessions: IntArray) -> tuple[IntArray, IntArray]:
    """Answer of each request the last node that another of *sessions* has too, and its end.

    The end is as far as both have it; node 0 and end 0 where there is none.
    """
    most: dict[int, dict[int, int]] = {}  # of a node, by session, at most two
    for session, row in zip(sessions.tolist(), _rows(trace), strict=True):
        for node, length in row:
            lengths = most.setdefault(node, {})
            lengths[session] = max(length, lengths.get(session, 0))
            if len(lengths) > 2:
                del lengths[min(lengths, key=lengths.__getitem__)]
    last = np.zeros(len(trace), dtype=np.int64)
    last_end = np.zeros(len(trace), dtype=np.int64)
    for place, row in enumerate(_rows(trace)):
        end = 0
        for node, length in row:
            if len(most[node]) < 2:
                break
            both = min(length, *most[node].values())
            end += both
            last[place], last_end[place] = node, end
            if both < length:
                break
    return last, last_end


def common_tokens(trace: Trace, requests: IntArray) -> int:
    """Answer the leading prompt tokens that all *requests* (their rows) have."""
    rows = _rows(trace)
    tokens = 0
    for segments in zip(*(rows[row] for row in requests.tolist()), strict=False):
        if len({node for node, _ in segments}) > 1:
            break
        lengths = {length for _, length in segments}
        tokens += min(lengths)
        if len(lengths) > 1:
            break
    return tokens


def inferred_turns(trace: Trace) -> IntArray:
    """Answer int64 [num_requests]: the request that each one seems to continue, or -1.

    The one that last went as far as this one agrees with any before it, unless many prompts branch
    off there: then it is a common prefix, and no conversation.
    """
    rows = _rows(trace)
    branches: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        for where, (after, _) in pairwise(row):
            branches.setdefault(where, set()).add(after)
    # Of a node, who last went as far as that or farther: farther ones first, later ones last.
    last: dict[int, list[tuple[int, int]]] = {}
    previous = np.full(len(trace), -1, dtype=np.int64)
    outputs = zip(trace.output_nodes.tolist(), trace.num_output_tokens.tolist(), strict=True)
    for place, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        deepest = None
        for node, length in row:
            if node not in last:
                break
            known = last[node][0][0]
            deepest = (node, min(known, length))
            if length > known:
                break
        if deepest is not None and len(branches.get(deepest, ())) <= MAX_BRANCHES:
            node, length = deepest
            far = bisect_right(last[node], -length, key=lambda one: -one[0])
            previous[place] = last[node][far - 1][1]
        for node, length in (*row, output):
            seen = last.setdefault(node, [])
            while seen and seen[-1][0] <= length:
                seen.pop()
            seen.append((length, place))
    return previous


def _rows(trace: Trace) -> list[list[tuple[int, int]]]:
    """Answer nodes and lengths of the segments of each prompt."""
    offsets, nodes = trace.segment_offsets.tolist(), trace.segment_nodes.tolist()
    ends = trace.segment_ends
    starts = np.concatenate([[0], ends[:-1]])
    starts[trace.segment_offsets[:-1]] = 0
    lengths = (ends - starts).tolist()
    return [
        list(zip(nodes[start:stop], lengths[start:stop], strict=True))
        for start, stop in pairwise(offsets)
    ]
