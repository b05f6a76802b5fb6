"""Closed loops: who waits for whom, in every allocator, in runs of steps and in single steps."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.config import RunConfig
from sim.errors import ConfigError
from sim.request import UNSET
from sim.simulation import RunResult, Simulation
from tests.checked import requests_of, steps_of
from tests.conformance.test_relations import assert_same_run, random_runs
from tests.strategies import (
    PAGED,
    STEP_PS,
    VARIANTS,
    Variant,
    configs,
    make_config,
    make_trace,
    traces,
)
from workloads.build import build_trace
from workloads.errors import TraceError
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, RequestRecord, Trace


def _closed(config: RunConfig, *, closed_loop: bool, max_concurrency: int | None) -> RunConfig:
    load = msgspec.structs.replace(
        config.load, closed_loop=closed_loop, max_concurrency=max_concurrency
    )
    return msgspec.structs.replace(config, load=load)


@st.composite
def closed_runs(draw: st.DrawFn, variant: Variant) -> tuple[RunConfig, Trace]:
    """Answer a configuration and a trace of sessions, a limit, or both."""
    trace = draw(traces(sessions=True))
    closed_loop = draw(st.booleans())
    assume(not closed_loop or (trace.previous_turn >= 0).any())
    limit = draw(st.sampled_from([1, 2, 4, 100] + [None] * closed_loop))
    config = draw(configs(variant))
    return _closed(config, closed_loop=closed_loop, max_concurrency=limit), trace


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
@settings(random_runs, max_examples=25)
@given(data=st.data())
def test_runs_of_steps_are_single_steps(variant: Variant, data: st.DataObject) -> None:
    config, trace = data.draw(closed_runs(variant))
    runs, steps = (Simulation(config, trace, single_step=single).run() for single in (False, True))
    assert_same_run(runs, steps)


def _ends(result: RunResult) -> list[int]:
    """Answer when each request ended, or was refused, in ps."""
    finished = result.recorder.request_columns()["finish_ps"]
    ends: list[int] = np.where(finished == UNSET, result.recorder.arrival_ps, finished).tolist()
    return ends


@random_runs
@given(run=closed_runs(PAGED))
def test_who_waits_for_whom(run: tuple[RunConfig, Trace]) -> None:
    """A turn comes its think time after the last, or when there is room, and never earlier."""
    config, trace = run
    result = Simulation(config, trace).run()
    arrivals, ends = result.recorder.arrival_ps.tolist(), _ends(result)
    limit, closed = config.load.max_concurrency, config.load.closed_loop
    ready = [
        ends[previous] + think if closed and previous >= 0 else recorded
        for previous, think, recorded in zip(
            trace.previous_turn.tolist(), trace.think_ps.tolist(), trace.arrival_ps, strict=True
        )
    ]
    for row, arrival in enumerate(arrivals):
        assert arrival >= ready[row]
        if arrival > ready[row]:  # somebody's end made room
            assert limit is not None
            assert arrival in ends
    if limit is not None:
        changes = sorted([(end, -1) for end in ends] + [(arrival, 1) for arrival in arrivals])
        under_way = np.cumsum([change for _, change in changes])
        assert under_way.max(initial=0) <= limit


@random_runs
@given(data=st.data())
def test_a_limit_that_nobody_reaches_is_none(data: st.DataObject) -> None:
    config, trace = data.draw(configs(PAGED)), data.draw(traces())
    limited = _closed(config, closed_loop=False, max_concurrency=len(trace))
    one, other = Simulation(config, trace).run(), Simulation(limited, trace).run()
    assert requests_of(one) == requests_of(other)
    assert steps_of(one) == steps_of(other)


def test_one_at_a_time_takes_the_sum_of_all() -> None:
    """A prompt of one step and an output token a step: 5 + 7 + 3 steps of a millisecond."""
    trace = make_trace((0, 10, 5), (0, 10, 7), (0, 10, 3))
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=40, max_concurrency=1)
    recorder = Simulation(config, trace).run().recorder
    assert recorder.arrival_ps.tolist() == [0, 5 * STEP_PS, 12 * STEP_PS]
    assert recorder.totals.duration_ps == 15 * STEP_PS


def test_who_is_refused_takes_nobodys_room() -> None:
    """It is sent when there is room, and the next one with it, also in the middle of a run."""
    trace = make_trace((0, 10, 5), (0.002, 64, 9), (0.002, 10, 7))
    config = make_config(
        PAGED, max_model_len=64, num_gpu_blocks_override=40, max_num_seqs=1, max_concurrency=2
    )
    for single_step in (False, True):
        recorder = Simulation(config, trace, single_step=single_step).run().recorder
        assert recorder.arrival_ps.tolist() == [0, 2 * STEP_PS, 2 * STEP_PS]
        assert recorder.request_columns()["finish_ps"][1] == UNSET


def test_turns_come_a_think_time_after_the_last() -> None:
    records = [
        RequestRecord(i + 1, i * STEP_PS, 10, 4, f"r{i}", None, "chat", 6 * STEP_PS)
        for i in range(3)
    ]
    trace = build_trace(records, name="in memory", trace_format="none")
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=40, closed_loop=True)
    recorder = Simulation(config, trace).run().recorder
    arrivals = recorder.arrival_ps.tolist()
    assert [later - earlier for earlier, later in pairwise(arrivals)] == [10 * STEP_PS] * 2


def test_a_closed_loop_needs_sessions() -> None:
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=40, closed_loop=True)
    with pytest.raises(ConfigError, match="in memory has no sessions of several turns; expected"):
        Simulation(config, make_trace((0, 10, 5)))


def test_a_turn_after_the_end_of_time_is_refused() -> None:
    think_ps = MAX_ARRIVAL_S * PS_PER_S
    records = [RequestRecord(i + 1, i, 5, 2, f"r{i}", None, "s", think_ps) for i in range(2)]
    trace = build_trace(records, name="t", trace_format="native")
    config = _closed(make_config(PAGED), closed_loop=True, max_concurrency=None)
    with pytest.raises(TraceError, match=r"t: request 'r1' would arrive after 9e\+06 s: expected"):
        Simulation(config, trace).run()
