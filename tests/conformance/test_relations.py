"""Relations between allocators that must be equal, whole step tables compared."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.config import RunConfig
from sim.result_tables import expand, step_table
from sim.simulation import RunResult, Simulation
from sim.totals import COUNTS
from tests.checked import Row, plain_run, replay, requests_of, steps_of
from tests.strategies import (
    PAGED,
    PREFIX,
    STEP_PS,
    VARIANTS,
    Variant,
    configs,
    make_config,
    make_trace,
    scheduler_settings,
    smallest_pool,
    traces,
)
from workloads.build import build_trace
from workloads.record import PS_PER_S, RequestRecord, Segment, Trace

random_runs = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
RESERVE_MAX = Variant("contiguous", "max", "first_fit")


def _steps_without(config: RunConfig, trace: Trace, *columns: str) -> list[Row]:
    rows = steps_of(plain_run(config, trace))
    return [{name: row[name] for name in row if name not in columns} for row in rows]


def _times(config: RunConfig, trace: Trace) -> list[Row]:
    rows = requests_of(plain_run(config, trace))
    return [{name: row[name] for name in row if name != "num_cached_tokens"} for row in rows]


@random_runs
@given(data=st.data())
def test_prefix_sharing_without_anything_to_share_is_paging(data: st.DataObject) -> None:
    """As long as nobody is preempted: a resumed request finds what it computed itself."""
    trace = data.draw(traces(unique=True))
    config = data.draw(configs(PAGED))
    assume(plain_run(config, trace).recorder.totals.num_preempted == 0)
    names = {name: value for name, value in config.flat().items() if value is not None}
    for name in ("allocator", "reservation", "placement", "enable_prefix_caching"):
        names.pop(name, None)
    sharing = make_config(PREFIX, **names)
    differ = ("kv_cached_slots", "kv_free_slots", "prefix_cache_queries")
    assert _steps_without(sharing, trace, *differ) == _steps_without(config, trace, *differ)
    assert _times(sharing, trace) == _times(config, trace)
    for paged, shared in zip(
        steps_of(plain_run(config, trace)), steps_of(plain_run(sharing, trace)), strict=True
    ):
        assert paged["kv_cached_slots"] == 0
        assert paged["kv_free_slots"] == shared["kv_cached_slots"] + shared["kv_free_slots"]


def assert_same_run(runs: RunResult, steps: RunResult) -> None:
    """Hold a run decided in runs of steps to the same one, decided step by step."""
    assert requests_of(runs) == requests_of(steps)
    expected = expand(step_table(steps.recorder)).to_pydict()
    for name, column in expand(step_table(runs.recorder)).to_pydict().items():
        assert column == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    got, want = runs.recorder.totals, steps.recorder.totals
    for name in (*COUNTS, "num_steps", "duration_ps", "waiting_time", "max_held_slots"):
        assert getattr(got, name) == getattr(want, name), name
    assert got.running_time == pytest.approx(want.running_time, rel=1e-9)
    for state, slot_time in want.slot_time.items():
        assert got.slot_time[state] == pytest.approx(slot_time, rel=1e-9, abs=1), state
    if runs.config.scheduler.batching == "static":
        return  # a request finishes with its batch
    # Every token but the first comes a gap after the one before.
    served = [row for row in requests_of(steps) if row["refused"] is None]
    assert got.inter_token.count == sum(row["num_output_tokens"] - 1 for row in served)
    decoding = sum(row["finish_time"] - row["first_token_time"] for row in served) * PS_PER_S
    assert got.inter_token.mean_ps * got.inter_token.count == pytest.approx(decoding, rel=1e-9)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
@settings(random_runs, max_examples=25)
@given(data=st.data())
def test_runs_of_steps_are_single_steps(variant: Variant, data: st.DataObject) -> None:
    """Decided several at a time or one by one: the same steps, requests, counts and averages."""
    config, trace = data.draw(configs(variant)), data.draw(traces())
    runs, steps = (Simulation(config, trace, single_step=single).run() for single in (False, True))
    assert_same_run(runs, steps)


@random_runs
@given(data=st.data())
def test_one_block_a_request_is_reserving_the_maximum(data: st.DataObject) -> None:
    """Paging with blocks of max_model_len tokens, in as many slots."""
    max_model_len = data.draw(st.integers(4, 96))
    trace = data.draw(traces())
    values = data.draw(scheduler_settings(max_model_len)) | {
        "watermark": 0.0,
        "max_model_len": max_model_len,
        "block_size": max_model_len,
        "num_gpu_blocks_override": data.draw(st.integers(2, 10)),
    }
    paged = make_config(PAGED, **values)
    reserved = make_config(RESERVE_MAX, **values)
    rows = _steps_without(paged, trace)
    assert rows == _steps_without(reserved, trace)
    assert _times(paged, trace) == _times(reserved, trace)
    assert all(row["num_preempted"] == 0 and row["kv_external_slots"] == 0 for row in rows)


@random_runs
@given(data=st.data())
def test_blocks_of_one_slot_waste_nothing(data: st.DataObject) -> None:
    variant = data.draw(st.sampled_from([PAGED, PREFIX]))
    config = data.draw(configs(variant))
    names = {name: value for name, value in config.flat().items() if value is not None}
    assert config.model.max_model_len is not None
    names |= {
        "block_size": 1,
        "num_gpu_blocks_override": config.model.max_model_len
        + 1
        + data.draw(st.integers(0, 3 * config.model.max_model_len)),
    }
    for name in ("allocator", "reservation", "placement", "enable_prefix_caching"):
        names.pop(name, None)
    for row in steps_of(plain_run(make_config(variant, **names), data.draw(traces()))):
        assert row["kv_internal_slots"] == 0
        assert row["kv_reserved_slots"] == 0
        assert row["used_blocks"] == row["kv_live_slots"]


@pytest.mark.parametrize("placement", ["first_fit", "buddy"])
@random_runs
@given(data=st.data())
def test_the_oracle_reserves_nothing_that_is_never_written(
    placement: str, data: st.DataObject
) -> None:
    config = data.draw(configs(Variant("contiguous", "oracle", placement)))
    rows = steps_of(plain_run(config, data.draw(traces())))
    assert all(row["kv_internal_slots"] == 0 for row in rows)


@settings(random_runs, max_examples=15)
@given(data=st.data())
def test_with_memory_to_spare_all_allocators_schedule_alike(data: st.DataObject) -> None:
    """Only sharing changes the schedule then, and only where there is something to share."""
    max_model_len, block_size = data.draw(st.integers(4, 96)), data.draw(st.integers(1, 32))
    trace = data.draw(traces(unique=True))
    values = data.draw(scheduler_settings(max_model_len)) | {
        "watermark": 0.0,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_gpu_blocks_override": 1 + len(trace) * (128 // block_size + 1) * 2,
    }
    schedules = []
    for variant in VARIANTS:
        rows = steps_of(plain_run(make_config(variant, **values), trace))
        assert all(row["num_refusals"] == 0 for row in rows)
        schedules.append(
            [(r["time"], r["scheduled"], r["admitted"], r["kv_live_slots"]) for r in rows]
        )
    assert schedules == [schedules[0]] * len(schedules)


Tokens = list[tuple[object, int]]


def _tokens(segments: list[Segment]) -> Tokens:
    """Answer the identity of every token, spelled out."""
    return [(content, place) for content, length in segments for place in range(length)]


def _common(first: Tokens, second: Tokens) -> int:
    for place, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        if mine != theirs:
            return place
    return min(len(first), len(second))


@st.composite
def _chats(draw: st.DrawFn) -> list[tuple[list[Segment], int]]:
    """Answer (prompt, output) of chats that branch off each other anywhere."""
    chats: list[tuple[list[Segment], int]] = []
    for row in range(draw(st.integers(2, 10))):
        prompt: list[Segment] = []
        if draw(st.booleans()) and chats:
            parent = draw(st.integers(0, row - 1))
            prompt = list(chats[parent][0])
            goes_on: bool = draw(st.booleans())
            if goes_on:
                prompt.append((f"out:r{parent}", draw(st.integers(1, 40))))
            else:
                content, length = prompt.pop()
                prompt.append((content, draw(st.integers(1, length))))
        if not prompt or draw(st.booleans()):
            prompt.append((draw(st.sampled_from(["s", "t", f"u{row}"])), draw(st.integers(1, 40))))
        chats.append((prompt, draw(st.integers(1, 40))))
    return chats


@random_runs
@given(
    chats=_chats(),
    block_size=st.integers(1, 20),
    gaps=st.lists(st.integers(0, 60), min_size=10, max_size=10),
    more=st.integers(0, 500),
)
def test_hits_are_the_longest_prefix_that_was_ever_computed(
    chats: list[tuple[list[Segment], int]], block_size: int, gaps: list[int], more: int
) -> None:
    """Nothing is evicted here. Expected: a comparison of token sequences, one by one."""
    max_model_len = 1000
    records = []
    at = 0
    for number, (prompt, output) in enumerate(chats):
        at += gaps[number] * STEP_PS
        length = sum(n for _, n in prompt)
        records.append(RequestRecord(number + 1, at, length, output, f"r{number}", prompt))
    trace = build_trace(records, name="in memory", trace_format="none")
    needed = sum(-(-(r.num_prompt_tokens + r.num_output_tokens) // block_size) for r in records)
    least = smallest_pool(PREFIX, block_size, max_model_len)
    config = make_config(
        PREFIX,
        block_size=block_size,
        max_model_len=max_model_len,
        num_gpu_blocks_override=least + needed + more,
        max_num_seqs=16,
        max_num_batched_tokens=4000,
    )
    result = replay(config, trace)
    assert result.recorder.totals.num_refusals == 0

    rows = requests_of(result)
    sequences = [_tokens([*prompt, (f"out:r{i}", out)]) for i, (prompt, out) in enumerate(chats)]
    for index, row in enumerate(rows):
        prompt_tokens = _tokens(chats[index][0])
        best = 0
        for other, theirs in enumerate(rows):
            first, step = theirs["scheduled_step"], row["scheduled_step"]
            if (first, other) >= (step, index):
                continue
            # By then it has computed its prompt, and a token more in every step since.
            since = min(step, theirs["finish_step"]) - first
            computed = len(sequences[other]) - chats[other][1] + since
            best = max(best, _common(prompt_tokens, sequences[other][:computed]))
        best = min(best, len(prompt_tokens) - 1)
        assert row["num_cached_tokens"] == best // block_size * block_size, row["request_id"]


@settings(random_runs, max_examples=25)
@given(data=st.data())
def test_a_larger_pool_changes_nothing_once_nobody_is_refused(data: st.DataObject) -> None:
    """And nothing is evicted: hits, steps and times stay."""
    trace, block_size = data.draw(traces()), data.draw(st.integers(1, 32))
    values = data.draw(scheduler_settings(96)) | {"watermark": 0.0, "block_size": block_size}
    enough = 1 + len(trace) * -(-128 // block_size)
    pools = [enough, enough + data.draw(st.integers(1, 1000))]
    tables = [
        _steps_without(
            make_config(PREFIX, max_model_len=96, num_gpu_blocks_override=pool, **values),
            trace,
            "kv_free_slots",
        )
        for pool in pools
    ]
    assert tables[0] == tables[1]


def test_a_smaller_pool_loses_hits_to_eviction() -> None:
    """The relation above can fail: with too few blocks the first prompt is gone."""
    trace = make_trace(*((row, [(f"u{row % 3}", 64)], 1) for row in range(6)))
    hits = [
        plain_run(
            make_config(PREFIX, max_model_len=96, num_gpu_blocks_override=pool), trace
        ).recorder.totals.prefix_cache_hits
        for pool in (8, 13, 100)
    ]
    assert hits == [0, 3 * 48, 3 * 48]
