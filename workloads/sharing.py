"""What the prompts of a trace have in common, read off its prefix nodes."""

from itertools import pairwise

import numpy as np

from workloads.record import IntArray, Trace

MAX_BRANCHES = 2
"""Most ways on from one place of a conversation: the next turn, and an unfinished block."""


def prefix_hits(trace: Trace) -> IntArray:
    """Answer int64 [num_requests]: the leading prompt tokens that some earlier request had.

    In its prompt or its output: what a cache without limit would hit, block size 1.
    """
    seen: set[int] = set()
    hits = np.zeros(len(trace), dtype=np.int64)
    for row, (nodes, ends) in enumerate(_rows(trace)):
        for node, end in zip(nodes, ends, strict=True):
            if node not in seen:
                break
            hits[row] = end
        seen.update(nodes)
        seen.add(int(trace.output_nodes[row]))
    return hits


def deepest_shared(trace: Trace, sessions: IntArray) -> tuple[IntArray, IntArray]:
    """Answer of each request the last node that another of *sessions* has too, and its end.

    Node 0 and end 0 where there is none.
    """
    owner: dict[int, int] = {}
    for session, (nodes, _) in zip(sessions.tolist(), _rows(trace), strict=True):
        for node in nodes:
            owner[node] = session if owner.get(node, session) == session else -1
    last = np.zeros(len(trace), dtype=np.int64)
    last_end = np.zeros(len(trace), dtype=np.int64)
    for row, (nodes, ends) in enumerate(_rows(trace)):
        for node, end in zip(nodes, ends, strict=True):
            if owner[node] >= 0:
                break
            last[row], last_end[row] = node, end
    return last, last_end


def common_tokens(trace: Trace, requests: IntArray) -> int:
    """Answer the leading prompt tokens that all *requests* (their rows) have."""
    rows = _rows(trace)
    nodes, ends = rows[int(requests[0])]
    level = len(nodes)
    for row in requests.tolist():
        other = rows[row][0]
        level = next((i for i in range(level) if other[i : i + 1] != nodes[i : i + 1]), level)
    return ends[level - 1] if level else 0


def inferred_turns(trace: Trace) -> IntArray:
    """Answer int64 [num_requests]: the request that each one seems to continue, or -1.

    The one that last had the deepest node already seen, unless many prompts branch off there: then
    it is a common prefix, and no conversation.
    """
    branches: dict[int, set[int]] = {}
    for nodes, _ in _rows(trace):
        for node, after in pairwise(nodes):
            branches.setdefault(node, set()).add(after)
    last: dict[int, int] = {}
    previous = np.full(len(trace), -1, dtype=np.int64)
    for row, (nodes, _) in enumerate(_rows(trace)):
        deepest = 0
        for node in nodes:
            if node not in last:
                break
            deepest = node
        if deepest and len(branches.get(deepest, ())) <= MAX_BRANCHES:
            previous[row] = last[deepest]
        last.update(dict.fromkeys(nodes, row))
        last[int(trace.output_nodes[row])] = row
    return previous


def _rows(trace: Trace) -> "list[tuple[list[int], list[int]]]":
    """Answer nodes and ends of the segments of each prompt."""
    offsets = trace.segment_offsets.tolist()
    nodes, ends = trace.segment_nodes.tolist(), trace.segment_ends.tolist()
    return [(nodes[start:stop], ends[start:stop]) for start, stop in pairwise(offsets)]
