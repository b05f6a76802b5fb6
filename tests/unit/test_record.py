from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.build import build_trace
from workloads.errors import TraceError
from workloads.record import MAX_ARRIVAL_S, MAX_TOKENS, PS_PER_S, RequestRecord, Trace

Segments = list[tuple[str | int, int]]
# 1 and "1" are different contents; short lengths make prompts agree often.
SEGMENTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", 1, "1", "out:r0", "out:r1"]), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)


def _record(segments: Segments | None = None, **changes: Any) -> RequestRecord:
    length = sum(n for _, n in segments) if segments else 5
    record = RequestRecord(1, 0, length, 2, segments=segments)
    return record._replace(**changes)


def _build(*records: RequestRecord) -> Trace:
    return build_trace(records, name="t", trace_format="native")


def _expanded(segments: Segments) -> list[tuple[str | int, int]]:
    return [(content, offset) for content, length in segments for offset in range(length)]


def _named(trace: Trace, row: int) -> list[tuple[int, int]]:
    """The (node, offset) of every prompt token of *row*, then of every output token."""
    first, last = trace.segment_offsets[row], trace.segment_offsets[row + 1]
    names, start = [], 0
    for node, end in zip(
        trace.segment_nodes[first:last].tolist(),
        trace.segment_ends[first:last].tolist(),
        strict=True,
    ):
        names += [(node, offset) for offset in range(end - start)]
        start = end
    return names + [(int(trace.output_nodes[row]), i) for i in range(trace.num_output_tokens[row])]


@given(st.lists(SEGMENTS, min_size=2, max_size=5))
def test_names_agree_exactly_where_token_sequences_do(prompts: list[Segments]) -> None:
    trace = _build(*(_record(segments) for segments in prompts))
    tokens = [_expanded([*segments, (f"out:r{row}", 2)]) for row, segments in enumerate(prompts)]
    for one in range(len(prompts)):
        names = _named(trace, one)
        assert len(names) == len(tokens[one])
        for other in range(len(prompts)):
            for i, name in enumerate(names):
                for j, other_name in enumerate(_named(trace, other)):
                    same = i == j and tokens[one][: i + 1] == tokens[other][: j + 1]
                    assert (name == other_name) == same


def test_a_prompt_repeats_an_output() -> None:
    trace = _build(_record([("q", 3)]), _record([("q", 3), ("out:r0", 2), ("more", 1)]))
    assert trace.segment_nodes[2] == trace.output_nodes[0]
    assert trace.segment_nodes[1] == trace.segment_nodes[0]


def test_an_output_is_the_same_only_behind_its_own_prompt() -> None:
    trace = _build(_record([("q", 3)]), _record([("q", 2), ("out:r0", 2)]))
    assert trace.segment_nodes[2] != trace.output_nodes[0]


def test_unknown_content_is_one_segment_that_nobody_shares() -> None:
    trace = _build(_record(), _record([("r0", 3)]), _record())
    assert trace.segment_offsets.tolist() == [0, 1, 2, 3]
    nodes = trace.segment_nodes.tolist() + trace.output_nodes.tolist()
    assert len(set(nodes)) == 6


def test_sorting_is_stable_and_noted() -> None:
    trace = _build(*(_record(arrival_ps=ps) for ps in (5, 3, 5, 3)))
    assert trace.request_ids == ["r1", "r3", "r0", "r2"]
    assert trace.arrival_ps.tolist() == [3, 3, 5, 5]
    assert trace.notes == ("sorted by arrival time: 2 requests came before their predecessor",)


def test_columns_are_int64() -> None:
    trace = _build(_record([("q", 3)]))
    for column in (trace.arrival_ps, trace.segment_nodes, trace.segment_ends, trace.output_nodes):
        assert column.dtype == np.int64


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_record(arrival_ps=-1), "arrival time"),
        (_record(arrival_ps=MAX_ARRIVAL_S * PS_PER_S + 1), "arrival time 9e+06 s: expected 0 to"),
        (_record(num_prompt_tokens=0), "prompt length 0"),
        (_record(num_prompt_tokens=MAX_TOKENS + 1), "prompt length 2147483648"),
        (_record(num_output_tokens=0), "output length 0"),
        (_record([]), "prompt length 5: expected it to be the sum"),
        (_record([("a", 0)], num_prompt_tokens=5), "each 1 or more: [0]"),
        (_record([("a", 4)], num_prompt_tokens=5), "prompt length 5: expected it to be the sum"),
    ],
)
def test_records_that_cannot_run_are_refused(record: RequestRecord, message: str) -> None:
    with pytest.raises(TraceError) as refusal:
        _build(record)
    assert str(refusal.value).startswith("t, line 1: ")
    assert message in str(refusal.value)


def test_duplicate_ids_are_refused() -> None:
    with pytest.raises(TraceError, match=r"^t, line 2: request id 'x' is already used on line 1$"):
        _build(_record(request_id="x"), _record(request_id="x", line=2))


def test_no_request_is_refused() -> None:
    with pytest.raises(TraceError, match=r"^t: no requests in it"):
        _build()


def test_a_session_without_a_name_is_none() -> None:
    trace = _build(*(_record(session_id=name) for name in ("", "s", "")))
    assert trace.session_ids == [None, "s", None]
    assert trace.previous_turn.tolist() == [-1, -1, -1]
