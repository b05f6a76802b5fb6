"""The paged allocators and the scheduler against a naive model of vLLM's rules, at random.

Every step: who runs, who waits, who is scheduled for how much, which blocks each holds, when.
"""

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.config import RunConfig
from sim.result_tables import request_table, step_table
from sim.simulation import Simulation
from tests.naive import Naive, NaiveConfig, NaiveRequest, NaiveStep
from tests.strategies import PAGED, PREFIX, Variant, make_config, scheduler_settings, smallest_pool
from workloads.build import build_trace
from workloads.record import PS_PER_S, RequestRecord, Segment, Trace

BASE, PER_TOKEN, PER_CONTEXT = 1_000_000_000, 10_000_000, 1_000_000
"""Step time in picoseconds."""


@st.composite
def scenarios(draw: st.DrawFn, variant: Variant) -> tuple[RunConfig, list[RequestRecord]]:
    """Answer a configuration and a workload with much repetition: small alphabets collide."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    max_model_len = draw(st.integers(8, 96))
    num_gpu_blocks = smallest_pool(variant, block_size, max_model_len)
    num_gpu_blocks += draw(st.sampled_from([0, 0, 1, 2, 5, 10, 40]))
    config = make_config(
        variant,
        block_size=block_size,
        max_model_len=max_model_len,
        num_gpu_blocks_override=num_gpu_blocks,
        step_time=f"linear:{BASE / PS_PER_S},{PER_TOKEN / PS_PER_S},{PER_CONTEXT / PS_PER_S}",
        **draw(scheduler_settings(max_model_len)),
    )
    records: list[RequestRecord] = []
    prompts: list[list[Segment]] = []
    arrival = 0
    for row in range(draw(st.integers(1, 14))):
        arrival += draw(st.sampled_from([0, 0, 1, 3, 10, 50])) * BASE
        kind = draw(st.sampled_from(["new", "shared", "shared", "repeated", "turn"]))
        prompt: list[Segment] = [(f"u{row}", draw(st.integers(1, 60)))]
        if kind == "shared":
            prompt = [(draw(st.sampled_from("ab")), draw(st.integers(1, 40))), *prompt]
            prompt[1] = (prompt[1][0], draw(st.integers(1, 10)))
        elif kind == "repeated" and prompts:
            prompt = draw(st.sampled_from(prompts))
        elif kind == "turn" and prompts:
            turn = draw(st.integers(0, row - 1))
            prompt = [*prompts[turn], (f"out:r{turn}", draw(st.integers(1, 20)))]
        prompts.append(prompt)
        length = sum(n for _, n in prompt)
        output = draw(st.integers(1, 40))
        records.append(RequestRecord(row + 1, arrival, length, output, f"r{row}", prompt))
    return config, records


def _naive(config: RunConfig, records: list[RequestRecord]) -> Naive:
    cache, scheduler, longest = config.cache, config.scheduler, config.model.max_model_len
    assert cache.num_gpu_blocks_override is not None
    assert scheduler.max_num_seqs is not None
    assert scheduler.max_num_batched_tokens is not None
    assert longest is not None
    naive = Naive(
        NaiveConfig(
            block_size=cache.block_size,
            num_blocks=cache.num_gpu_blocks_override,
            max_model_len=longest,
            max_num_seqs=scheduler.max_num_seqs,
            budget=scheduler.max_num_batched_tokens,
            caching=cache.allocator == "prefix",
            chunked=scheduler.enable_chunked_prefill,
            gate=scheduler.scheduler_reserve_full_isl,
            watermark=scheduler.watermark,
            threshold=scheduler.long_prefill_token_threshold,
            base=BASE,
            per_token=PER_TOKEN,
            per_context=PER_CONTEXT,
            asynchronous=scheduler.async_scheduling,
            static=scheduler.batching == "static",
        ),
        [
            NaiveRequest(
                name=str(record.request_id),
                arrival=record.arrival_ps,
                prompt=[(c, i) for c, n in record.segments or () for i in range(n)],
                num_outputs=record.num_output_tokens,
            )
            for record in records
        ],
    )
    naive.run()
    return naive


def _row(step: NaiveStep) -> dict[str, Any]:
    names = ("preempted", "admitted", "resumed", "finished")
    return {
        "time": step.time / PS_PER_S,
        "running": step.running,
        "waiting": step.waiting,
        "used_blocks": step.used,
        "scheduled": ";".join(f"{name}:{n}" for name, n in step.scheduled),
        **{name: ";".join(getattr(step, name)) for name in names},
        "prefix_cache_queries": step.cache[0],
        "prefix_cache_hits": step.cache[1],
        "preempted_cache_queries": step.cache[2],
        "preempted_cache_hits": step.cache[3],
    }


def _check_requests(got: list[dict[str, Any]], naive: Naive) -> None:
    expected = {request.name: request for request in naive.requests}
    for row in got:
        request = expected.get(row["request_id"])
        if request is None:
            assert row["refused"] == "prompt_too_long"
            continue
        steps = [row["scheduled_step"], row["first_token_step"], row["finish_step"]]
        assert steps == request.steps, request.name
        times = [row["first_token_time"], row["finish_time"]]
        assert times == [time / PS_PER_S for time in request.times], request.name
        assert row["num_cached_tokens"] == request.cached, request.name
        assert row["num_preemptions"] == request.preemptions, request.name


def _trace(records: list[RequestRecord]) -> Trace:
    return build_trace(records, name="in memory", trace_format="none")


@pytest.mark.parametrize("variant", [PAGED, PREFIX], ids=str)
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_every_step_is_the_naive_one(variant: Variant, data: st.DataObject) -> None:
    config, records = data.draw(scenarios(variant))
    simulation = Simulation(config, _trace(records), save_steps=True, save_block_tables=True)
    tables = io.StringIO()
    result = simulation.run(simulation.allocator.check_integrity, tables)
    naive = _naive(config, records)
    expected = naive.steps
    got = step_table(result.recorder).to_pylist()
    blocks = [json.loads(line)["blocks"] for line in tables.getvalue().splitlines()]
    for number, step in enumerate(expected):
        row = _row(step)
        assert {name: got[number][name] for name in row} == row, f"step {number}"
        assert blocks[number] == step.tables, f"step {number}"
    assert len(got) == len(expected)
    _check_requests(request_table(result.recorder).to_pylist(), naive)


@pytest.mark.parametrize("variant", [PAGED, PREFIX], ids=str)
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_runs_of_steps_are_the_naive_steps(variant: Variant, data: st.DataObject) -> None:
    """Fast-forward: the same steps, decided several at a time."""
    config, records = data.draw(scenarios(variant))
    simulation = Simulation(config, _trace(records))
    result = simulation.run(simulation.allocator.check_integrity)
    naive = _naive(config, records)
    expected = naive.steps
    assert result.recorder.num_steps == len(expected)
    for run in step_table(result.recorder).to_pylist():
        steps = expected[run["step"] : run["step"] + run["num_steps"]]
        if not steps:
            continue
        assert run["time"] == pytest.approx(steps[0].time / PS_PER_S, abs=1e-9)
        assert {step.running for step in steps} == {run["running"]}
        assert steps[-1].used == run["used_blocks"]
        tokens = sum(n for step in steps for _, n in step.scheduled)
        assert tokens == run["num_scheduled_tokens"]
        assert sum(len(step.finished) for step in steps) == run["num_finished"]
        assert not any(step.finished for step in steps[:-1])
        assert sum(len(step.preempted) for step in steps) == run["num_preempted"]
        assert sum(step.cache[1] for step in steps) == run["prefix_cache_hits"]
    _check_requests(request_table(result.recorder).to_pylist(), naive)


@pytest.mark.parametrize("gate", [True, False])
def test_a_decode_lets_the_head_in_by_filling_a_block(gate: bool) -> None:
    """The head is one block short until a running request has filled what both of them have."""
    answer: list[Segment] = [("a", 4), ("out:r0", 16)]
    records = [
        RequestRecord(1, 0, 4, 40, "r0", answer[:1]),
        RequestRecord(2, 0, 8, 36, "r1", [("b", 8)]),
        RequestRecord(3, 122 * BASE // 10, 21, 4, "head", [*answer, ("c", 1)]),
    ]
    config = make_config(
        PREFIX,
        block_size=4,
        max_model_len=48,
        num_gpu_blocks_override=13,
        scheduler_reserve_full_isl=gate,
    )
    came = []
    for single_step in (True, False):
        simulation = Simulation(config, _trace(records), single_step=single_step)
        result = simulation.run(simulation.allocator.check_integrity)
        came.append(request_table(result.recorder).to_pylist())
        assert result.recorder.totals.num_refusals
    assert came[0] == came[1]
    assert came[1][2]["scheduled_step"] == 16  # it came in step 13; blocks are filled in 12 and 16
    assert came[1][2]["num_cached_tokens"] == 20


def test_blocks_that_nobody_awaits_end_no_run() -> None:
    """An answer that a later prompt repeats costs no more rows than one that it does not."""
    rows = []
    for said in ("out:r0", "something else"):
        turn: list[Segment] = [("a", 64), (said, 900), ("b", 10)]
        records = [
            RequestRecord(1, 0, 64, 1000, "r0", turn[:1]),
            RequestRecord(2, 5000 * BASE, 974, 10, "r1", turn),
        ]
        config = make_config(PREFIX, block_size=16, max_model_len=2048, num_gpu_blocks_override=300)
        result = Simulation(config, _trace(records)).run()
        rows.append(len(step_table(result.recorder)))
    assert rows[0] == rows[1] < 10
