"""Invariants I1 to I8 of every registered allocator, on random workloads and configurations.

I1 slots conserved; I2 a refusal takes nothing; I3 arrived = finished + refused; I4 one owner a
slot, or as many as share it; I5 arrival, scheduled, first token, finish in order; I6 equal input,
equal bytes; I7 no decision looks at an output that is still to come; I8 work-conserving.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sim.allocators.base import Allocator, IntegrityError
from sim.allocators.contiguous import ContiguousAllocator
from sim.allocators.paged import PagedAllocator
from sim.allocators.prefix import PrefixCachingAllocator
from sim.columns import SLOT_STATES
from sim.request import make_requests
from sim.result_tables import request_table, step_table
from tests.checked import Driver, Row, plain_run, replay, requests_of, steps_of
from tests.strategies import (
    PAGED,
    PREFIX,
    VARIANTS,
    Variant,
    configs,
    make_allocator,
    make_config,
    make_trace,
    random_trace,
    traces,
)
from workloads.record import PS_PER_S, Trace

REPOSITORY = Path(__file__).parents[2]

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
random_runs = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@every_variant
@random_runs
@given(data=st.data())
def test_every_step_and_every_request(variant: Variant, data: st.DataObject) -> None:
    config, trace = data.draw(configs(variant)), data.draw(traces())
    result = replay(config, trace)
    assert config.model.max_model_len is not None
    _check_requests(trace, requests_of(result), config.model.max_model_len)
    _check_steps(steps_of(result), requests_of(result), result.recorder.capacity)


def _check_requests(trace: Trace, rows: list[Row], max_model_len: int) -> None:
    """I3 and I5."""
    assert [row["request_id"] for row in rows] == trace.request_ids
    for row, output in zip(rows, trace.num_output_tokens.tolist(), strict=True):
        prompt = row["num_prompt_tokens"]
        if prompt >= max_model_len:
            assert row["refused"] == "prompt_too_long"
            assert row["scheduled_time"] is None
            assert row["finish_time"] is None
            continue
        assert row["refused"] is None
        assert row["num_output_tokens"] == min(output, max_model_len - prompt)
        times = ["arrival_time", "scheduled_time", "first_token_time", "finish_time"]
        assert sorted(times, key=lambda name: (row[name], times.index(name))) == times
        assert row["scheduled_time"] < row["first_token_time"]
        assert row["scheduled_step"] <= row["first_token_step"] <= row["finish_step"]
        # One token a step at most, the last one in the step of the finish.
        assert row["finish_step"] - row["first_token_step"] >= row["num_output_tokens"] - 1


def _check_steps(steps: list[Row], requests: list[Row], capacity: int) -> None:
    """I1 in every row, and that rows and requests tell the same story."""
    assert [row["step"] for row in steps] == list(range(len(steps)))
    end = 0.0
    for row in steps:
        assert sum(row[f"kv_{state}_slots"] for state in SLOT_STATES) == capacity
        assert min(row[f"kv_{state}_slots"] for state in SLOT_STATES) >= 0
        assert row["num_scheduled_reqs"] == len(_names(row["scheduled"]))
        assert row["num_prefill_tokens"] + row["num_decode_tokens"] == row["num_scheduled_tokens"]
        assert row["time"] >= end - 1e-9
        end = row["time"] + row["duration"]
    for column in ("admitted", "finished"):
        served = [row["request_id"] for row in requests if row["refused"] is None]
        assert sorted(_all(steps, column)) == sorted(served)
    # Whose last token was on its way when it was preempted does not run again.
    again = [n for r in steps for n in _names(r["preempted"]) if n not in _names(r["finished"])]
    assert sorted(again) == sorted(_all(steps, "resumed"))
    for row in requests:
        assert (row["num_preemptions"] or 0) == _all(steps, "preempted").count(row["request_id"])


def _names(joined: str) -> list[str]:
    return [name.partition(":")[0] for name in joined.split(";")] if joined else []


def _all(steps: list[Row], column: str) -> list[str]:
    return [name for row in steps for name in _names(row[column])]


@pytest.mark.parametrize("variant", [PAGED, PREFIX], ids=lambda variant: variant.label)
def test_the_random_runs_reach_what_they_are_for(variant: Variant) -> None:
    """Preemption, recomputation, refusals and (with sharing) hits do occur under these checks."""
    config = make_config(
        variant,
        block_size=8,
        max_model_len=320,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=100,
    )
    totals = replay(config, random_trace(seed=7, num_requests=40)).recorder.totals
    assert totals.num_preempted > 3
    assert totals.recomputed_tokens > 100
    assert totals.num_refusals > totals.num_preempted
    assert (totals.prefix_cache_hits > 500) == (variant is PREFIX)
    assert (totals.preempted_cache_hits > 0) == (variant is PREFIX)


@every_variant
@settings(random_runs, max_examples=8)
@given(data=st.data())
def test_i6_two_runs_are_equal(variant: Variant, data: st.DataObject) -> None:
    config, trace = data.draw(configs(variant)), data.draw(traces())
    first, second = plain_run(config, trace), plain_run(config, trace)
    assert step_table(first.recorder).equals(step_table(second.recorder))
    assert request_table(first.recorder).equals(request_table(second.recorder))
    np.testing.assert_equal(
        dataclasses.asdict(first.recorder.totals), dataclasses.asdict(second.recorder.totals)
    )


_CLI = "import sys; from sim.cli import main; sys.exit(main(sys.argv[1:]))"


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["run", "--save-steps", "--save-block-tables", "--format", "csv"],
            {
                "block_tables.jsonl",
                "manifest.json",
                "requests.csv",
                "steps.csv",
                "summary.json",
            },
        ),
        (["run"], {"manifest.json", "requests.parquet", "steps.parquet", "summary.json"}),
        (["compare"], {"compare.json", "prefix/steps.parquet", "reserve-max/summary.json"}),
    ],
    ids=["run-csv", "run-parquet", "compare"],
)
def test_i6_same_bytes_whatever_the_hash_seed(
    arguments: list[str], expected: set[str], tmp_path: Path, samples: Path
) -> None:
    trace = ["--trace", str(samples / "mooncake.jsonl"), "--max-model-len", "8192"]
    common = [*trace, "--kv-cache-memory-bytes", "4G", "--step-time", "constant:0.02"]
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-c", _CLI, *arguments, *common, "--output-dir", str(folder)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append((done.stdout, _files(folder)))
    first, second = found
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert expected <= first[1].keys()
    for name, content in first[1].items():
        assert content, name
        assert content == second[1][name], name


DECISIONS = (
    "step",
    "time",
    "duration",
    "running",
    "waiting",
    "scheduled",
    "preempted",
    "admitted",
    "resumed",
    "num_refusals",
    "used_blocks",
    "kv_live_slots",
    "prefix_cache_hits",
    "recomputed_tokens",
)


@pytest.mark.parametrize(
    "variant",
    [v for v in VARIANTS if v.reservation not in {"oracle", "pow2"}],
    ids=lambda variant: variant.label,
)
@settings(random_runs, max_examples=20)
@given(data=st.data())
def test_i7_nobody_looks_at_an_output_to_come(variant: Variant, data: st.DataObject) -> None:
    """One request wants more: nothing differs until the step in which it would have finished."""
    config, trace = data.draw(configs(variant)), data.draw(traces())
    assume(config.scheduler.batching == "continuous")  # else who is done stays: no finish shows it
    assert config.model.max_model_len is not None
    prompts, outputs = trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist()
    can_grow = [
        row
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        if prompt + output < config.model.max_model_len
    ]
    assume(can_grow)
    row = data.draw(st.sampled_from(can_grow))
    longer = trace.num_output_tokens.copy()
    longer[row] += data.draw(st.integers(1, 50))
    first = plain_run(config, trace)
    second = plain_run(config, _with_outputs(trace, longer))
    finish_step = requests_of(first)[row]["finish_step"]
    assert requests_of(second)[row]["finish_step"] > finish_step
    # Asynchronously it is known a step ahead that a request has all that it wants.
    end = finish_step + (not config.scheduler.async_scheduling)
    for before, after in zip(steps_of(first)[:end], steps_of(second)[:end], strict=True):
        assert [before[name] for name in DECISIONS] == [after[name] for name in DECISIONS]


def _with_outputs(trace: Trace, num_output_tokens: Any) -> Trace:
    columns = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    return Trace(**(columns | {"num_output_tokens": num_output_tokens}))


def test_i7_the_oracle_does_look() -> None:
    """The comparison above can fail: a longer output changes what the oracle admits at once."""
    config = make_config(
        Variant("contiguous", "oracle", "first_fit"),
        block_size=1,
        max_model_len=64,
        num_gpu_blocks_override=65,
    )
    runs = [
        steps_of(plain_run(config, make_trace((0, 10, output), (0, 10, 20)))) for output in (20, 50)
    ]
    assert [run[0]["admitted"] for run in runs] == ["r0;r1", "r0"]


@every_variant
def test_free_of_an_unknown_request(variant: Variant) -> None:
    config = make_config(variant, max_model_len=64, num_gpu_blocks_override=9)
    allocator = make_allocator(config)
    first, second = make_requests(make_trace((0, 8, 4), (0, 8, 4)), 64)
    with pytest.raises(KeyError):
        allocator.free(first)
    assert allocator.allocate_slots(first, 8) is not None
    first.num_computed_tokens = 8
    slots = allocator.stats().as_tuple()
    with pytest.raises(KeyError):
        allocator.free(second)
    assert allocator.stats().as_tuple() == slots
    allocator.free(first)
    with pytest.raises(KeyError):
        allocator.free(first)
    allocator.check_integrity()
    assert allocator.stats().held == 0


@every_variant
def test_a_refused_request_can_still_come(variant: Variant) -> None:
    """I2 seen from outside: a refusal leaves exactly the room that there was."""
    config = make_config(variant, block_size=4, max_model_len=32, num_gpu_blocks_override=13)
    allocator = make_allocator(config)
    requests = list(make_requests(make_trace(*((0, 32 - 8, 8) for _ in range(3))), 32))
    granted = [r for r in requests if allocator.allocate_slots(r, 24) is not None]
    assert 1 <= len(granted) < 3
    for request in granted:
        request.num_computed_tokens = 24
    refused = requests[len(granted)]
    for _ in range(5):
        assert allocator.allocate_slots(refused, 24) is None
        allocator.check_integrity()
        with pytest.raises(KeyError):
            allocator.free(refused)
    allocator.free(granted[0])
    assert allocator.allocate_slots(refused, 24) is not None


@pytest.mark.parametrize("variant", [PAGED, PREFIX], ids=lambda variant: variant.label)
def test_a_refusal_leaves_the_order_of_the_free_list(variant: Variant) -> None:
    """The next grant is the same, block by block, whether somebody was refused before or not."""
    config = make_config(variant, block_size=4, max_model_len=32, num_gpu_blocks_override=41)
    grants = []
    for num_refusals in (0, 1, 4):
        allocator = make_allocator(config)
        requests = list(make_requests(make_trace(*((0, 22 + row % 3, 8) for row in range(30))), 32))
        held = []
        while allocator.allocate_slots(requests[0], requests[0].num_tokens) is not None:
            requests[0].num_computed_tokens = requests[0].num_tokens
            held.append(requests.pop(0))
        for request in held[1::2]:
            allocator.free(request)
        for _ in range(num_refusals):
            assert allocator.allocate_slots(requests[-1], 40 * 4) is None
        granted = [allocator.allocate_slots(r, r.num_tokens) for r in requests[:2]]
        grants.append([(list(g.new_blocks), g.start, g.size) for g in granted if g is not None])
    assert grants[0] == grants[1] == grants[2]
    assert len(grants[0]) == 2


def _driver(variant: Variant) -> Driver:
    """Answer a run in its middle: several requests hold memory, one with shared blocks."""
    config = make_config(variant, block_size=4, max_model_len=64, num_gpu_blocks_override=97)
    prompts = [[("system", 12), (f"u{row}", 5 + row)] for row in range(5)]
    trace = make_trace(*((0, prompt, 2 if row == 1 else 20) for row, prompt in enumerate(prompts)))
    driver = Driver(config, make_allocator(config), list(make_requests(trace, 64)))
    driver.step(5)
    assert len(driver.scheduler.running) >= 3
    driver.allocator.check_integrity()
    return driver


@every_variant
def test_check_integrity_sees_a_counter_that_moved_behind_its_back(variant: Variant) -> None:
    """Of whatever allocator: the live slots follow from the requests that hold memory."""
    driver = _driver(variant)
    request = next(iter(driver.scheduler.running))
    driver.scheduler._leave([request])  # while it decodes, nobody reads its counters
    driver.allocator.check_integrity()
    request.num_computed_tokens -= 1
    with pytest.raises((IntegrityError, KeyError)):
        driver.allocator.check_integrity()


def _set(name: str, change: int) -> Callable[[Any], None]:
    def corrupt(allocator: Any) -> None:
        setattr(allocator, name, getattr(allocator, name) + change)

    return corrupt


def _paged_leak(allocator: Any) -> None:
    next(iter(allocator._tables.values())).pop()


def _paged_two_owners(allocator: Any) -> None:
    tables = list(allocator._tables.values())
    tables[0][-1] = tables[1][-1]


def _paged_free_and_held(allocator: Any) -> None:
    held = next(iter(allocator._tables.values()))[-1]
    if allocator._returned:
        allocator._returned[-1] = held
    else:
        allocator._returned.append(held)


def _paged_free_twice(allocator: Any) -> None:
    allocator._returned.append(allocator._next_unused)


def _forgotten_holder(allocator: Any) -> None:
    books = getattr(allocator, "_tables", None) or allocator._extents
    books.pop(next(iter(books)))


def _extents_overlap(allocator: Any) -> None:
    first, second, *_ = allocator._extents
    allocator._extents[second] = allocator._extents[first]


def _extent_shrinks(allocator: Any) -> None:
    last = list(allocator._extents)[-1]
    start, size = allocator._extents[last]
    allocator._extents[last] = (start, size // 4)


def _hole_lost(allocator: Any) -> None:
    holes = allocator._placement.holes()
    assert allocator._placement.take(1) is not None
    assert allocator._placement.holes() != holes


def _ref_cnt(change: int) -> Callable[[Any], None]:
    def corrupt(allocator: Any) -> None:
        counts = allocator._cache._ref_cnt
        counts[counts.argmax()] += change

    return corrupt


def _ref_cnt_of_nobody(allocator: Any) -> None:
    allocator._cache._ref_cnt[allocator._next_unused] = 1


def _key_swapped(allocator: Any) -> None:
    keys = allocator._cache._key_of
    first, second = np.flatnonzero(keys != -1)[:2]
    keys[[first, second]] = keys[[second, first]]


def _entry_lost(allocator: Any) -> None:
    entries = allocator._cache._block_of
    entries[np.flatnonzero(entries)[0]] = 0


def _entry_twice(allocator: Any) -> None:
    entries = allocator._cache._block_of
    key = int(np.flatnonzero(entries)[0])
    allocator._cache._copies.setdefault(key, []).append(int(entries[key]))


def _evictable_held(allocator: Any) -> None:
    allocator._cache.enter_private([int(allocator._cache._ref_cnt.argmax())])


def _hashed_count(allocator: Any) -> None:
    allocator._num_keyed[next(iter(allocator._num_keyed))] += 1


BLOCKS: dict[str, Callable[[Any], None]] = {
    "live": _set("_live", 1),
    "internal": _set("_internal", -1),
    "num_free": _set("_num_free", 1),
    "next_unused": _set("_next_unused", 1),
    "leak": _paged_leak,
    "two owners": _paged_two_owners,
    "free and held": _paged_free_and_held,
    "free twice": _paged_free_twice,
    "holder forgotten": _forgotten_holder,
}
CORRUPTIONS: dict[type, dict[str, Callable[[Any], None]]] = {
    ContiguousAllocator: {
        "live": _set("_live", -1),
        "internal": _set("_internal", 1),
        "external": _set("_external", 1),
        "reserved": _set("_reserved_slots", -1),
        "capacity": _set("_capacity", 1),
        "holder forgotten": _forgotten_holder,
        "overlap": _extents_overlap,
        "shrunk": _extent_shrinks,
        "hole lost": _hole_lost,
    },
    PagedAllocator: BLOCKS,
    PrefixCachingAllocator: BLOCKS
    | {
        "owner too many": _ref_cnt(1),
        "owner too few": _ref_cnt(-1),
        "owner of nothing": _ref_cnt_of_nobody,
        "keys swapped": _key_swapped,
        "entry lost": _entry_lost,
        "entry twice": _entry_twice,
        "evictable while held": _evictable_held,
        "hashed blocks": _hashed_count,
    },
}


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        pytest.param(variant, what, id=f"{variant.label}: {what}")
        for variant in VARIANTS
        for what in CORRUPTIONS.get(
            type(
                make_allocator(make_config(variant, num_gpu_blocks_override=999, max_model_len=8))
            ),
            {},
        )
    ],
)
def test_check_integrity_sees_corrupted_books(variant: Variant, what: str) -> None:
    driver = _driver(variant)
    allocator: Allocator = driver.allocator
    CORRUPTIONS[type(allocator)][what](allocator)
    with pytest.raises(IntegrityError, match=r"booked -?\d+, counted -?\d+"):
        allocator.check_integrity()


def test_requests_that_arrive_while_nobody_is_there() -> None:
    """Idle time is no step, and takes no memory."""
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=9)
    trace = make_trace((1.0, 8, 3), (9.0, 8, 3))
    result = replay(config, trace)
    assert [row["time"] for row in steps_of(result)] == [1, 1.001, 1.002, 9, 9.001, 9.002]
    assert result.recorder.totals.duration_ps == 8 * PS_PER_S + 3 * PS_PER_S // 1000
