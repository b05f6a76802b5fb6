"""Parts of a trace, and our own format as the target of a conversion."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.strategies import traces
from workloads.arrivals import mean_rate
from workloads.editing import first_turns, native_lines, sample
from workloads.errors import TraceError
from workloads.readers import read_trace
from workloads.record import PS_PER_S, Trace
from workloads.reuse import num_repeated_tokens

COLUMNS = ("arrival_ps", "num_prompt_tokens", "num_output_tokens", "previous_turn")


def _again(trace: Trace, folder: Path) -> Trace:
    path = folder / "again.jsonl"
    path.write_bytes(b"".join(native_lines(trace)))
    return read_trace(path)


def _same(one: Trace, other: Trace) -> bool:
    thinks = [t.think_ps[t.previous_turn >= 0].tolist() for t in (one, other)]
    return (
        all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in COLUMNS)
        and num_repeated_tokens(one, outputs=True).tolist()
        == num_repeated_tokens(other, outputs=True).tolist()
        and thinks[0] == thinks[1]
    )


@pytest.mark.parametrize(
    "name",
    [
        "aiperf.jsonl",
        "azure2023.csv",
        "bailian.jsonl",
        "burstgpt.csv",
        "claude_code_session.json",
        "conversation.jsonl",
        "mooncake.jsonl",
        "tokens.jsonl",
    ],
)
def test_samples_survive_a_conversion(samples: Path, tmp_path: Path, name: str) -> None:
    trace = read_trace(samples / name)
    again = _again(trace, tmp_path)
    assert _same(trace, again)
    assert again.request_ids == trace.request_ids
    assert again.session_ids == trace.session_ids
    assert again.num_shareable_tokens.tolist() == trace.num_shareable_tokens.tolist()


@given(traces(sessions=True))
@hypothesis_settings(max_examples=50, deadline=None)
def test_any_trace_survives_a_conversion(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace
) -> None:
    assert _same(trace, _again(trace, tmp_path_factory.getbasetemp()))


@given(traces(sessions=True), st.integers(0, 20), st.integers(1, 50), st.integers(1, 4))
@hypothesis_settings(max_examples=60, deadline=None)
def test_sessions_stay_whole(trace: Trace, first_ms: int, span_ms: int, every: int) -> None:
    whole = dict(zip(trace.request_ids, first_turns(trace.previous_turn).tolist(), strict=True))
    firsts = trace.arrival_ps / PS_PER_S
    start, end = first_ms / 1000, (first_ms + span_ms) / 1000
    roots = [row for row in sorted(set(whole.values())) if start <= firsts[row] < end][::every]
    expected = [name for name, root in whole.items() if root in roots]
    if not expected:
        with pytest.raises(TraceError, match="no session starts"):
            sample(trace, start=start, end=end, every=every)
        return
    part = sample(trace, start=start, end=end, every=every)
    assert part.request_ids == expected
    rows = [trace.request_ids.index(name) for name in expected]
    assert part.arrival_ps.tolist() == (trace.arrival_ps[rows] - round(start * PS_PER_S)).tolist()
    assert part.num_prompt_tokens.tolist() == trace.num_prompt_tokens[rows].tolist()
    before = {trace.request_ids[i]: trace.previous_turn[i] for i in rows}
    for name, previous in zip(part.request_ids, part.previous_turn.tolist(), strict=True):
        assert (previous < 0) == (before[name] < 0)
        if previous >= 0:
            assert part.request_ids[previous] == trace.request_ids[before[name]]


def test_a_part_has_the_rate_asked_for(samples: Path) -> None:
    trace = read_trace(samples / "conversation.jsonl")
    part = sample(trace, start=10, every=3, request_rate=2.5)
    assert mean_rate(part) == pytest.approx(2.5, rel=1e-9)
    plain = sample(trace, start=10, every=3)
    factor = mean_rate(plain) / 2.5
    assert np.diff(part.arrival_ps) == pytest.approx(np.diff(plain.arrival_ps) * factor, abs=2)
