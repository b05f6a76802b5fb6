"""Asynchronous scheduling: step k + 1 is decided when step k starts, before its output is there.

Here its timeline and its corners, by hand; that each step is vLLM's is in `tests/lockstep` (cases
``async_*``) and in `test_naive`, the invariants in `test_invariants`.
"""

import pytest

from sim.config import RunConfig
from sim.simulation import Simulation
from tests.checked import Row, replay, requests_of, steps_of
from tests.strategies import PAGED, PREFIX, VARIANTS, Variant, make_config, make_trace
from workloads.record import Trace


def _config(variant: Variant = PAGED, **values: object) -> RunConfig:
    values = {"max_model_len": 64, "num_gpu_blocks_override": 33} | values
    return make_config(variant, async_scheduling=True, **values)


def _requests(config: RunConfig, trace: Trace) -> list[Row]:
    """Answer the requests of a run that is checked in every step; a fast one has the same."""
    rows = requests_of(replay(config, trace))
    assert requests_of(Simulation(config, trace).run()) == rows
    return rows


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
def test_who_finishes_keeps_seat_and_memory_for_a_step(variant: Variant) -> None:
    config = _config(variant, max_num_seqs=1)
    rows = steps_of(replay(config, make_trace((0, 10, 3), (0, 10, 2))))
    assert [row["scheduled"] for row in rows] == ["r0:10", "r0:1", "r0:1", "", "r1:10", "r1:1", ""]
    assert [row["finished"] for row in rows] == ["", "", "", "r0", "", "", "r1"]
    assert [row["running"] for row in rows] == [1] * 7
    assert [row["used_blocks"] > 0 for row in rows] == [True] * 7
    assert [row["used_blocks_after"] > 0 for row in rows] == [*[True] * 3, False, True, True, False]
    # A step without work takes no time.
    assert [row["time"] for row in rows] == [0, 0.001, 0.002, 0.003, 0.003, 0.004, 0.005]


def test_a_seat_that_is_not_the_last_comes_free_a_step_late() -> None:
    """Synchronously r2 would join r0 in step 2."""
    trace = make_trace((0, 10, 6), (0, 10, 2), (0, 10, 2))
    rows = steps_of(replay(_config(max_num_seqs=2), trace))
    scheduled = ["r0:10;r1:10", "r0:1;r1:1", "r0:1", "r0:1;r2:10", "r0:1;r2:1", "r0:1", ""]
    assert [row["scheduled"] for row in rows] == scheduled


def test_times_of_a_token_are_the_end_of_the_step_that_computed_it() -> None:
    """Its step is the one with which it is taken in: the step after."""
    (row,) = _requests(_config(), make_trace((1, 10, 4)))
    assert (row["scheduled_step"], row["first_token_step"], row["finish_step"]) == (0, 1, 4)
    assert (row["scheduled_time"], row["first_token_time"], row["finish_time"]) == (1, 1.001, 1.004)


@pytest.mark.parametrize(
    ("arrival", "step"),
    [
        (0, 0),
        (0.0001, 2),  # step 1 was decided when step 0 started
        (0.001, 2),
        (0.0011, 3),
        (0.002, 3),
        (0.0091, 11),
        (0.01, 11),
        (0.0101, 12),
        (0.0199, 21),
        (0.0201, 21),  # step 20 has no work: 21 starts at once
        (5, 21),
    ],
)
def test_an_arrival_joins_the_step_that_is_decided_next(arrival: float, step: int) -> None:
    _, row = _requests(_config(), make_trace((0, 8, 20), (arrival, 8, 5)))
    assert row["scheduled_step"] == step
    assert row["scheduled_time"] == pytest.approx(max(arrival, min(step, 20) / 1000))


@pytest.mark.parametrize("variant", [PAGED, PREFIX], ids=lambda variant: variant.label)
def test_a_request_preempted_while_its_last_token_is_on_its_way(variant: Variant) -> None:
    """It has finished by the time that anybody could admit it again."""
    config = _config(variant, block_size=4, max_model_len=16, num_gpu_blocks_override=5)
    trace = make_trace((0, 7, 5), (0, 7, 2), (0, 3, 2))
    rows = steps_of(replay(config, trace))
    assert [row["scheduled"] for row in rows[:4]] == ["r0:7;r1:7", "r0:1;r1:1", "r0:1", "r0:1;r2:3"]
    assert [row["preempted"] for row in rows[:4]] == ["", "", "r1", ""]
    assert [row["finished"] for row in rows[:4]] == ["", "", "r1", ""]
    assert [row["waiting"] for row in rows[:4]] == [1, 1, 2, 0]
    _, row, _ = _requests(config, trace)
    assert (row["num_preemptions"], row["num_output_tokens"], row["finish_time"]) == (1, 2, 0.002)


def test_a_block_filled_by_a_token_to_come_is_found_a_step_later() -> None:
    """r0 fills its second block in step 4. Synchronously who comes in that step finds it."""
    found = []
    for is_async in (False, True):
        config = make_config(
            PREFIX,
            max_model_len=64,
            block_size=8,
            num_gpu_blocks_override=33,
            async_scheduling=is_async,
        )
        prompt = [("a", 12), ("out:r0", 4), ("b", 4)]
        hits = []
        for arrival in range(3, 7):
            trace = make_trace((0, [("a", 12)], 20), (arrival / 1000, prompt, 1))
            rows = _requests(config, trace)
            hits.append((rows[1]["scheduled_step"], rows[1]["num_cached_tokens"]))
        found.append(hits)
    assert found[0] == [(3, 8), (4, 16), (5, 16), (6, 16)]
    assert found[1] == [(4, 8), (5, 16), (6, 16), (7, 16)]


def test_a_prompt_that_is_too_long_is_refused_at_arrival() -> None:
    first, second, third = _requests(_config(), make_trace((0, 8, 3), (0.001, 64, 1), (9, 8, 1)))
    assert second["refused"] == "prompt_too_long"
    assert (first["finish_time"], third["finish_time"]) == (0.003, 9.001)
