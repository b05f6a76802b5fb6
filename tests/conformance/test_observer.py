"""A look at a run is right at any time: held to the run decided step by step, and to its tables."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.columns import SLOT_STATES
from sim.config import RunConfig
from sim.metrics import Recorder
from sim.simulation import RunResult, Simulation
from sim.totals import COUNTS
from sim.watch.histograms import Histogram
from sim.watch.names import bounds
from sim.watch.observer import Observer, Sample
from tests.checked import requests_of
from tests.strategies import PREFIX, STEP_PS, VARIANTS, Variant, configs, make_config, random_trace
from tests.strategies import traces as random_traces
from workloads.record import PS_PER_S, Trace

BOUNDS = bounds(320)
AT_THE_START = {"num_admitted", "num_resumed", "num_preempted", "num_refusals"} | {
    name for name in COUNTS if "cache" in name
}
"""Counts of what is decided; the rest comes with the end of a step."""

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)


def _run(config: RunConfig, trace: Trace, *, single_step: bool = False) -> RunResult:
    return Simulation(config, trace, single_step=single_step).run()


def _looked_at(recorder: Recorder, times: list[int]) -> list[Sample]:
    observer = Observer(recorder, BOUNDS)
    return [observer.sample(time) for time in times]


def _times(recorder: Recorder, number: int) -> list[int]:
    """Answer times from before the start to behind the end, step boundaries among them."""
    start, end = recorder.start_ps, recorder.now_ps
    anywhere = np.linspace(start - STEP_PS, end + STEP_PS, number).astype(np.int64)
    boundaries = start + STEP_PS * np.arange(0, (end - start) // STEP_PS + 1, 7)
    return sorted({*anywhere.tolist(), *boundaries.tolist(), end})


@every_variant
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_look_counts_what_single_steps_had_done(variant: Variant, async_scheduling: bool) -> None:
    config = make_config(
        variant,
        block_size=8,
        max_model_len=320,
        num_gpu_blocks_override=130,
        async_scheduling=async_scheduling,
    )
    trace = random_trace(seed=3, num_requests=40)
    recorder = _run(config, trace).recorder
    assert any(rows["num_steps"].max() > 5 for rows in recorder.step_chunks())
    (steps,) = _run(config, trace, single_step=True).recorder.step_chunks()
    starts, ends = steps["start_ps"], steps["start_ps"] + steps["duration_ps"]
    tokens = steps["num_decodes"] + steps["num_sampled_prefills"]
    times = _times(recorder, 50)
    for time, sample in zip(times, _looked_at(recorder, times), strict=True):
        at = min(max(time, recorder.start_ps), recorder.now_ps)
        begun, over = starts <= at, ends <= at
        for name in COUNTS:
            expected = steps[name][begun if name in AT_THE_START else over].sum(dtype=np.int64)
            assert sample.counts[name] == expected, name
        assert sample.counts["generation_tokens"] == tokens[over].sum()
        gaps = sample.histograms["vllm:inter_token_latency_seconds"].counts.sum()
        firsts = sample.histograms["vllm:time_to_first_token_seconds"].counts.sum()
        assert gaps + firsts == tokens[over].sum()
        now = np.flatnonzero(begun)[-1]
        assert sample.running == steps["running"][now]
        assert sample.waiting <= steps["waiting"][now]
        assert sum(sample.slots.values()) == pytest.approx(recorder.capacity)
        assert sample.slots["live"] == pytest.approx(steps["live"][now], abs=sample.running + 1e-6)
        held = sum(sample.slots[state] for state in ("live", "reserved", "internal"))
        assert held == pytest.approx(steps["held_slots"][now], abs=8 * sample.running)


def _expected(values: list[float], name: str) -> Histogram:
    """Answer what a real client library's histogram would hold, inf left to the end."""
    edges = [-np.inf, *BOUNDS[name], np.inf]
    counts = [sum(low < value <= high for value in values) for low, high in pairwise(edges)]
    return Histogram(np.array(counts), sum(values))


def _brings_tokens(result: RunResult) -> list[int]:
    """Answer for each row how many of its steps brought a token."""
    return [
        int(steps)
        for rows in result.recorder.step_chunks()
        for steps, decodes, sampled in zip(
            rows["num_steps"], rows["num_decodes"], rows["num_sampled_prefills"], strict=True
        )
        if decodes or sampled
    ]


@every_variant
def test_the_last_look_agrees_with_the_tables(variant: Variant) -> None:
    config = make_config(
        variant, block_size=8, max_model_len=320, num_gpu_blocks_override=100, max_num_seqs=12
    )
    trace = random_trace(seed=11, num_requests=60)
    result = _run(config, trace)
    sample = Observer(result.recorder, BOUNDS).sample()
    rows = requests_of(result)
    assert sample.counts["num_finished"] == len(rows) == 60
    assert sample.counts["generation_tokens"] == sum(row["num_output_tokens"] for row in rows)
    assert sample.counts["prompt_tokens"] == sum(row["num_prompt_tokens"] for row in rows)
    assert sample.counts["cached_tokens"] == sum(row["num_cached_tokens"] for row in rows)
    values = {
        "vllm:time_to_first_token_seconds": [
            row["first_token_time"] - row["arrival_time"] for row in rows
        ],
        "vllm:e2e_request_latency_seconds": [
            row["finish_time"] - row["arrival_time"] for row in rows
        ],
        "vllm:request_queue_time_seconds": [
            row["scheduled_time"] - row["arrival_time"] for row in rows
        ],
        "vllm:request_prefill_time_seconds": [
            row["first_token_time"] - row["scheduled_time"] for row in rows
        ],
        "vllm:request_decode_time_seconds": [
            row["finish_time"] - row["first_token_time"] for row in rows
        ],
        "vllm:request_inference_time_seconds": [
            row["finish_time"] - row["scheduled_time"] for row in rows
        ],
        "vllm:request_prompt_tokens": [row["num_prompt_tokens"] for row in rows],
        "vllm:request_generation_tokens": [row["num_output_tokens"] for row in rows],
        "vllm:request_num_preemptions": [row["num_preemptions"] for row in rows],
        "vllm:request_prefill_kv_computed_tokens": [
            row["num_prompt_tokens"] - row["num_cached_tokens"] for row in rows
        ],
    }
    for name, numbers in values.items():
        # A bound is met exactly or not at all.
        expected = _expected([round(number, 9) for number in numbers], name)
        assert sample.histograms[name].counts.tolist() == expected.counts.tolist(), name
        assert sample.histograms[name].total == pytest.approx(expected.total), name
    totals = result.recorder.totals
    gaps = sample.histograms["vllm:inter_token_latency_seconds"]
    assert gaps.counts.sum() == totals.inter_token.count
    mean_s = totals.inter_token.mean_ps / PS_PER_S
    assert gaps.total == pytest.approx(mean_s * totals.inter_token.count)
    computed = sample.counts["prompt_tokens"] - sample.counts["cached_tokens"]
    steps = sample.histograms["vllm:iteration_tokens_total"]
    assert steps.total == computed + sample.counts["generation_tokens"]
    assert steps.counts.sum() == sum(_brings_tokens(result))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(data=st.data())
def test_looks_add_up_however_often_they_are_taken(data: st.DataObject) -> None:
    config = data.draw(configs(data.draw(st.sampled_from(VARIANTS))))
    recorder = _run(config, data.draw(random_traces())).recorder
    samples = _looked_at(recorder, _times(recorder, data.draw(st.integers(2, 40))))
    for before, after in pairwise(samples):
        assert all(after.counts[name] >= count for name, count in before.counts.items())
        for name, histogram in before.histograms.items():
            assert (after.histograms[name].counts >= histogram.counts).all()
        assert set(after.slots) == set(SLOT_STATES)
        assert min(after.slots.values()) >= 0
    last, once = samples[-1], Observer(recorder, BOUNDS).sample()
    assert last.counts == once.counts
    for name, histogram in once.histograms.items():
        assert last.histograms[name].counts.tolist() == histogram.counts.tolist()
        assert last.histograms[name].total == pytest.approx(histogram.total)


def test_looks_while_it_runs_are_those_taken_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across packed chunks of rows, too."""
    monkeypatch.setattr("sim.metrics.CHUNK_ROWS", 16)
    config = make_config(PREFIX, block_size=8, max_model_len=320, num_gpu_blocks_override=100)
    simulation = Simulation(config, random_trace(seed=5, num_requests=40))
    recorder = simulation.result.recorder
    observer, during = Observer(recorder, BOUNDS), []
    simulation.run(lambda: during.append(observer.sample()))
    assert len(list(recorder.step_chunks())) > 5
    afterwards = Observer(recorder, BOUNDS)
    for sample in during:
        again = afterwards.sample(sample.time_ps)
        # What begins at this very instant had not been decided yet.
        for name in set(sample.counts) - AT_THE_START:
            assert again.counts[name] == sample.counts[name]
        for name, histogram in sample.histograms.items():
            assert again.histograms[name].counts.tolist() == histogram.counts.tolist()


def test_after_the_end_nobody_runs() -> None:
    config = make_config(PREFIX, block_size=8, max_model_len=320, num_gpu_blocks_override=100)
    simulation = Simulation(config, random_trace(seed=5, num_requests=10))
    observer = Observer(simulation.run().recorder)
    observer.finish(simulation.allocator.stats())
    before = observer.sample(simulation.result.recorder.now_ps - 1)
    after = observer.sample()
    assert before.running > after.running == after.waiting == 0
    assert after.usage == 0
    assert after.slots["cached"] > 0
    assert after.histograms == {}
