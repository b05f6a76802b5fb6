"""Prefix identity of tokens and text, and how often prompts repeat, against the obvious way."""

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.build import build_trace
from workloads.prefix import ContentTree
from workloads.record import RequestRecord, Segment, Trace
from workloads.reuse import (
    block_accesses,
    lru_hit_ratios,
    num_repeated_tokens,
    reuse_distances,
)

PROMPTS = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=7)


def _build(prompts: list[list[Segment]], outputs: list[int]) -> Trace:
    records = [
        RequestRecord(row + 1, 0, sum(n for _, n in segments), output, None, segments)
        for row, (segments, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return build_trace(records, name="t", trace_format="none")


def _names(trace: Trace, row: int) -> list[tuple[int, int]]:
    first, last = trace.segment_offsets[row : row + 2]
    ends = trace.segment_ends[first:last].tolist()
    nodes = trace.segment_nodes[first:last].tolist()
    starts = [0, *ends[:-1]]
    return [
        (node, i)
        for node, start, end in zip(nodes, starts, ends, strict=True)
        for i in range(end - start)
    ]


@settings(deadline=None)
@given(PROMPTS)
def test_tokens_have_one_name_where_all_before_them_agree(prompts: list[str]) -> None:
    tree = ContentTree(1)
    trace = _build([[*tree.segments(prompt.encode())] for prompt in prompts], [1] * len(prompts))
    names = [_names(trace, row) for row in range(len(prompts))]
    for one, own in zip(prompts, names, strict=True):
        assert len(own) == len(one)
        for other, others in zip(prompts, names, strict=True):
            for i in range(min(len(one), len(other))):
                assert (own[i] == others[i]) == (one[: i + 1] == other[: i + 1])


@settings(deadline=None)
@given(PROMPTS, PROMPTS)
def test_what_is_shared_is_equal_and_next_turns_repeat_outputs(
    prompts: list[str], answers: list[str]
) -> None:
    """Later turns go on with what an earlier one was answered: they have all of it."""
    tree = ContentTree(1)
    said: list[str] = []
    rows: list[list[Segment]] = []
    lengths: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=False):
        for text in (prompt, prompt + answer + "c"):
            said.append(text + answer)
            rows.append([*tree.segments(text.encode())])
            tree.add_output(answer.encode(), f"r{len(rows) - 1}")
            lengths.append(len(answer))
    trace = _build(rows, lengths)
    tokens = [
        _names(trace, row) + [(node, i) for i in range(lengths[row])]
        for row, node in enumerate(trace.output_nodes.tolist())
    ]
    for one, own in zip(said, tokens, strict=True):
        for other, others in zip(said, tokens, strict=True):
            for i in range(min(len(one), len(other))):
                if own[i] == others[i]:
                    assert one[: i + 1] == other[: i + 1]
    if len(said) == 2:  # nobody else's text is in the way
        assert tokens[1][: len(said[0])] == tokens[0]


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 4))
def test_repeated_tokens_and_blocks(prompts: list[str], size: int) -> None:
    tree = ContentTree(1)
    trace = _build([[*tree.segments(prompt.encode())] for prompt in prompts], [1] * len(prompts))
    known: set[str] = set()
    expected = []
    for prompt in prompts:
        starts = [prompt[: i + 1] for i in range(len(prompt))]
        expected.append(sum(start in known for start in starts))
        known.update(starts)
    assert num_repeated_tokens(trace).tolist() == expected
    accesses = block_accesses(trace, size).tolist()
    blocks = [prompt[: i + size] for prompt in prompts for i in range(0, len(prompt), size)]
    assert len(accesses) == len(blocks)
    for one, key in zip(blocks, accesses, strict=True):
        for other, other_key in zip(blocks, accesses, strict=True):
            if len(one) % size == 0 and len(other) % size == 0:
                assert (key == other_key) == (one == other)


@settings(deadline=None)
@given(st.lists(st.integers(0, 8), max_size=60))
def test_reuse_distances_are_those_of_lru(accesses: list[int]) -> None:
    distances = reuse_distances(np.array(accesses, dtype=np.int64))
    ratios = lru_hit_ratios(distances, range(11))
    for size in range(11):
        cache: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for key in accesses:
            hits += key in cache
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > size:
                cache.popitem(last=False)
        assert ratios[size] == hits / max(len(accesses), 1)
