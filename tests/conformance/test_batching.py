"""Static batching by hand: who is in a batch, when it ends, whose memory goes first. And Orca's.

Every step of random runs is in `test_naive`, the invariants in `test_invariants`.
"""

import msgspec
import pytest

from sim.errors import ConfigError
from sim.simulation import Simulation
from tests.checked import Row, replay, requests_of, steps_of
from tests.strategies import PAGED, STEP_PS, VARIANTS, Variant, make_config, make_trace
from workloads.build import build_trace
from workloads.record import RequestRecord, Trace


def _steps(variant: Variant, trace: Trace, **values: object) -> list[Row]:
    values = {"max_model_len": 64, "num_gpu_blocks_override": 33} | values
    return steps_of(replay(make_config(variant, batching="static", **values), trace))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
def test_a_batch_runs_until_its_last_member_has_finished(variant: Variant) -> None:
    """r2 has no seat, r3 comes while the batch runs: both are the next one."""
    trace = make_trace((0, 10, 4), (0, 10, 2), (0, 10, 2), (0.0015, 10, 1))
    rows = _steps(variant, trace, max_num_seqs=2)
    scheduled = ["r0:10;r1:10", "r0:1;r1:1", "r0:1", "r0:1", "r2:10;r3:10", "r2:1"]
    assert [row["scheduled"] for row in rows] == scheduled
    assert [row["finished"] for row in rows] == ["", "", "", "r1;r0", "", "r3;r2"]
    assert [row["running"] for row in rows] == [2] * 6
    held = [row["used_blocks_after"] for row in rows]
    assert held[1] == held[2] > 0  # r1 had its last token in step 1
    assert (held[3], held[5]) == (0, 0)


def test_prompts_beyond_the_budget_are_computed_over_several_steps() -> None:
    """Of the same batch; who arrives meanwhile is not in it, though there are seats."""
    trace = make_trace((0, 16, 9), (0, 16, 2), (0.0005, 4, 1))
    rows = _steps(PAGED, trace, max_num_seqs=8, max_num_batched_tokens=20)
    scheduled = [row["scheduled"] for row in rows]
    assert scheduled[:3] == ["r0:16;r1:4", "r0:1;r1:12", "r0:1;r1:1"]
    assert scheduled[-2:] == ["r0:1", "r2:4"]
    assert len(rows) == 10


def test_memory_refuses_the_rest_of_a_batch() -> None:
    """Reservations of 64 slots, room for two: the vLLM paper's FasterTransformer."""
    trace = make_trace(*((0, 10, output) for output in (3, 5, 2, 2)))
    rows = _steps(VARIANTS[0], trace, block_size=16, num_gpu_blocks_override=9)
    assert [row["admitted"] for row in rows if row["admitted"]] == ["r0;r1", "r2;r3"]
    assert [row["step"] for row in rows if row["admitted"]] == [0, 5]


def test_who_is_done_loses_memory_before_anybody_is_preempted() -> None:
    """Of five blocks r0 needs a fourth when r1, done, holds two. Then nobody is left but r0."""
    trace = make_trace((0, 7, 8), (0, 7, 2))
    rows = _steps(PAGED, trace, block_size=4, max_model_len=16, num_gpu_blocks_override=6)
    assert not any(row["preempted"] for row in rows)
    assert [row["running"] for row in rows] == [2] * 6 + [1] * 2
    assert rows[-1]["finished"] == "r1;r0"


def test_who_is_preempted_waits_for_another_batch() -> None:
    """Nobody is done when r0 and r1 want a third block each: r1 goes, and comes when r0 is done."""
    trace = make_trace((0, 7, 8), (0, 7, 8), (0, 1, 1))
    rows = _steps(PAGED, trace, block_size=4, max_model_len=16, num_gpu_blocks_override=6)
    (step,) = (row["step"] for row in rows if row["preempted"] == "r1")
    assert rows[step]["scheduled"] == "r0:1"
    (back,) = (row["step"] for row in rows if row["resumed"] == "r1")
    assert rows[back - 1]["finished"].endswith("r0")
    assert rows[back]["scheduled"].startswith("r1:")


def test_the_answer_comes_with_the_end_of_the_batch() -> None:
    """So the next turn of a session waits for it; tokens have the times they are computed at."""
    trace = make_trace((0, 10, 9), (0, 10, 3))
    config = make_config(PAGED, batching="static", max_model_len=64, num_gpu_blocks_override=33)
    result = Simulation(config, trace).run()
    assert [row["finish_time"] for row in requests_of(result)] == [0.009, 0.009]
    assert [row["first_token_time"] for row in requests_of(result)] == [0.001, 0.001]
    gaps = result.recorder.totals.inter_token
    assert gaps.count == 8 + 2
    assert gaps.mean_ps == pytest.approx(STEP_PS)
    records = [
        RequestRecord(1, 0, 10, 9, "other"),
        RequestRecord(2, 0, 10, 3, "turn", None, "chat"),
        RequestRecord(3, 1, 10, 1, "next", None, "chat", STEP_PS),
    ]
    sessions = build_trace(records, name="in memory", trace_format="none")
    load = msgspec.structs.replace(config.load, closed_loop=True)
    closed = Simulation(msgspec.structs.replace(config, load=load), sessions).run()
    assert closed.recorder.arrival_ps.tolist() == [0, 0, 10 * STEP_PS]


def test_a_batch_is_decided_after_the_step_before_it() -> None:
    with pytest.raises(ConfigError, match="--batching static contradicts --async_scheduling"):
        make_config(PAGED, batching="static", async_scheduling=True)


@pytest.mark.parametrize("variant", [VARIANTS[0], PAGED], ids=lambda variant: variant.label)
def test_without_chunks_it_is_orcas_iteration_level_scheduling(variant: Variant) -> None:
    """Whole prompts beside tokens of others, and who has finished leaves (Orca, section 3.1)."""
    lengths = [(0, 40, 3), (0, 40, 9), (0.0005, 60, 2), (0.0005, 30, 4), (0.0025, 50, 2)]
    config = make_config(
        variant,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8 * 64,
        max_model_len=64,
        num_gpu_blocks_override=33,
    )
    rows = steps_of(replay(config, make_trace(*lengths)))
    assert [row["scheduled"] for row in rows[:4]] == [
        "r0:40;r1:40",
        "r0:1;r1:1;r2:60;r3:30",
        "r0:1;r1:1;r2:1;r3:1",
        "r1:1;r3:1;r4:50",
    ]
