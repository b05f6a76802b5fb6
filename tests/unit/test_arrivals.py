"""A trace at another rate: one factor on every gap, and nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.arrivals import at_request_rate, mean_rate
from workloads.build import build_trace
from workloads.errors import TraceError
from workloads.record import PS_PER_S, RequestRecord, Trace


def _trace(arrivals: list[int]) -> Trace:
    records = [RequestRecord(row, ps, 10, 5) for row, ps in enumerate(sorted(arrivals), 1)]
    return build_trace(records, name="made.jsonl", trace_format="native")


ARRIVALS = st.lists(st.integers(0, 10**15), min_size=2, max_size=30).filter(
    lambda arrivals: max(arrivals) - min(arrivals) > 10**6
)


@settings(max_examples=30)
@given(ARRIVALS, st.floats(0.01, 100))
def test_gaps_get_one_factor(arrivals: list[int], rate: float) -> None:
    trace = _trace(arrivals)
    got = at_request_rate(trace, rate)
    gaps, new = np.diff(trace.arrival_ps), np.diff(got.arrival_ps)
    # (n - 1) gaps whose mean is 1 / rate, each in proportion to what it was
    expected = gaps / gaps.sum() * len(gaps) / rate * PS_PER_S
    assert np.allclose(new, expected, rtol=1e-9, atol=2)
    assert got.arrival_ps[0] == trace.arrival_ps[0]
    assert got.request_ids == trace.request_ids
    assert got.sha256 == trace.sha256


@settings(max_examples=30)
@given(ARRIVALS)
def test_own_rate_changes_nothing(arrivals: list[int]) -> None:
    trace = _trace(arrivals)
    got = at_request_rate(trace, mean_rate(trace))
    assert np.array_equal(got.arrival_ps, trace.arrival_ps)


def test_all_at_once() -> None:
    got = at_request_rate(_trace([5, 7, 900]), math.inf)
    assert got.arrival_ps.tolist() == [5, 5, 5]
    assert mean_rate(got) == math.inf


def test_a_lone_request_has_no_rate() -> None:
    assert at_request_rate(_trace([77]), 3.0).arrival_ps.tolist() == [77]


def test_no_gaps_cannot_be_stretched() -> None:
    with pytest.raises(TraceError, match=r"^made.jsonl: all requests arrive at one instant"):
        at_request_rate(_trace([5, 5]), 2.0)


def test_later_than_a_trace_may_say() -> None:
    with pytest.raises(TraceError, match=r"expected a higher rate$"):
        at_request_rate(_trace([0, PS_PER_S]), 1e-8)
