"""Figures that follow from arithmetic, from the papers, or from runs of vLLM 0.33.0.

Reports of users (their numbers C24 to C35) and figures of PagedAttention (arXiv 2309.06180).
"""

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.allocators.base import HasBlockTables
from sim.cli import main
from sim.memory import Engine
from sim.models import get_model
from sim.pool_sizing import size_kv_pool
from sim.request import make_requests
from tests.checked import Driver, plain_run, replay, requests_of, steps_of
from tests.strategies import PAGED, PREFIX, Variant, make_allocator, make_config, make_trace
from workloads.record import Segment, Trace

GIB = 2**30
ORCA_MAX = Variant("contiguous", "max", "first_fit")


def _sharegpt_like(num_requests: int, seed: int = 0) -> Trace:
    """Answer lengths with the means of ShareGPT (161 and 338 tokens), all there at the start."""
    rng = random.Random(seed)
    return make_trace(
        *(
            (
                0,
                1 + min(1023, int(rng.expovariate(1 / 161))),
                1 + min(1023, int(rng.expovariate(1 / 338))),
            )
            for _ in range(num_requests)
        )
    )


@pytest.mark.parametrize("placement", ["first_fit", "buddy"])
def test_orca_max_holds_seven_requests(placement: str) -> None:
    """PagedAttention, table 1, figures 2 and 13: 12 GiB of KV, OPT-13B, at most 2048 tokens."""
    model = get_model("facebook/opt-13b")
    pool = size_kv_pool(
        model,
        None,
        Engine(max_num_seqs=256, max_num_batched_tokens=2048),
        block_size=16,
        kv_cache_memory_bytes=12 * GIB,
        max_model_len=2048,
    )
    assert pool.contiguous_slots == 12 * GIB // 819_200 == 15_728
    config = make_config(
        Variant("contiguous", "max", placement),
        model="facebook/opt-13b",
        gpu="A100-40",
        kv_cache_memory_bytes=12 * GIB,
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        step_time="constant:0.02",
    )
    result = plain_run(config, _sharegpt_like(200))
    rows = steps_of(result)
    assert result.recorder.capacity == 15_728
    assert result.recorder.totals.max_running == 7
    saturated = [row for row in rows if row["waiting"]]
    assert len(saturated) > 0.8 * len(rows)
    # A hole is refilled in the step after it opens: never fewer than seven while some wait.
    assert {row["running"] for row in saturated} == {7}
    assert {row["kv_external_slots"] for row in saturated} == {15_728 - 7 * 2048}
    external = 100 * saturated[0]["kv_external_slots"] / 15_728
    assert external == pytest.approx(8.85, abs=0.005)
    assert external == pytest.approx(8.9, abs=0.06), "the paper's figure"
    # Whatever is reserved is live, or will be, or never: 91.15 % of the pool.
    for row in saturated:
        held = row["kv_live_slots"] + row["kv_reserved_slots"] + row["kv_internal_slots"]
        assert held == 7 * 2048


def test_block_table_of_35_tokens() -> None:
    """Three blocks of 16 hold 48 tokens; the fourth comes with the 49th, not with the 36th."""
    config = make_config(PAGED, block_size=16, max_model_len=64, num_gpu_blocks_override=9)
    (request,) = requests = list(make_requests(make_trace((0, 35, 20)), 64))
    driver = Driver(config, make_allocator(config), requests)
    allocator = driver.allocator
    assert isinstance(allocator, HasBlockTables)
    blocks: dict[int, list[int]] = {}
    for num_computed_tokens in range(35, 51):
        driver.step()
        blocks[num_computed_tokens] = allocator.block_table(request)
    assert blocks[35] == blocks[36] == blocks[48]
    assert len(blocks[48]) == 3
    assert len(blocks[49]) == 4
    assert blocks[49][:3] == blocks[48], "nothing moves"


@pytest.mark.parametrize("variant", [PAGED, PREFIX], ids=lambda variant: variant.label)
def test_c24_two_preemptions_and_an_end(variant: Variant) -> None:
    """4 requests of 64 + 64 tokens in 16 usable blocks of 16 (vLLM 0.33.0)."""
    config = make_config(variant, max_model_len=256, num_gpu_blocks_override=17)
    trace = make_trace(*((0, [(f"u{row}", 64)], 64) for row in range(4)))
    result = replay(config, trace)
    requests = requests_of(result)
    assert result.recorder.totals.num_steps == 127
    assert [row["num_preemptions"] for row in requests] == [0, 0, 1, 1]
    assert [row["finish_step"] for row in requests] == [63, 63, 110, 126]


@pytest.mark.parametrize(("length", "hit"), [(64, 48), (65, 64)])
def test_c26_a_cached_prompt_computes_one_token_at_least(length: int, hit: int) -> None:
    config = make_config(PREFIX, max_model_len=128, num_gpu_blocks_override=33)
    prompt: list[Segment] = [("same", length)]
    result = replay(config, make_trace((0, prompt, 4), (1, prompt, 4)))
    assert [row["num_cached_tokens"] for row in requests_of(result)] == [0, hit]
    admission = next(row for row in steps_of(result) if row["admitted"] == "r1")
    assert admission["num_scheduled_tokens"] == length - hit
    totals = result.recorder.totals
    assert (totals.prefix_cache_hits, totals.prefix_cache_queries) == (hit, 2 * length)


def test_c29_the_hit_rate_counts_tokens() -> None:
    """16 of 17 tokens and 0 of 1,600 make 1.0 %; by requests it would be a half."""
    config = make_config(PREFIX, max_model_len=2048, num_gpu_blocks_override=300)
    trace = make_trace(
        (0, [("stem", 16), ("u0", 1)], 1),
        (1, [("stem", 16), ("u1", 1)], 1),
        (2, [("u2", 1600)], 1),
    )
    result = replay(config, trace)
    assert [row["num_cached_tokens"] for row in requests_of(result)] == [0, 16, 0]
    rows = steps_of(result)[1:]  # without the request that filled the cache
    hits = sum(row["prefix_cache_hits"] for row in rows)
    assert (hits, sum(row["prefix_cache_queries"] for row in rows)) == (16, 1617)
    totals = result.recorder.totals
    assert (totals.prefix_cache_hits, totals.prefix_cache_queries) == (16, 1634)


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = msgspec.json.decode((folder / "summary.json").read_bytes())
    return summary


def _run(tmp_path: Path, lines: list[dict[str, Any]], *arguments: str) -> int:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return main(
        [
            "run",
            *("--trace", str(trace), "--step-time", "constant:0.001"),
            *("--output-dir", str(tmp_path / "out"), "--save-steps"),
            *arguments,
        ]
    )


def test_c30_usage_counts_blocks_and_live_counts_tokens(tmp_path: Path) -> None:
    """8 requests of 17 tokens hold 16 of 32 blocks: half of the pool for 136 of 512 slots."""
    config = make_config(PREFIX, max_model_len=128, num_gpu_blocks_override=33)
    trace = make_trace(*((0, [(f"u{row}", 17)], 1) for row in range(8)))
    first = steps_of(replay(config, trace))[0]
    assert first["used_blocks"] == 16
    assert first["used_blocks_after"] == 0, "cached blocks that nobody holds are free"
    assert first["kv_live_slots"] == 136
    lines = [{"arrival_time": 0, "prompt": [[f"u{n}", 17]], "output_len": 1} for n in range(8)]
    flags = ["--num-gpu-blocks-override", "33", "--max-model-len", "128"]
    assert _run(tmp_path, lines, *flags) == 0
    summary = _summary(tmp_path / "out")
    assert summary["max_kv_cache_usage_perc"] == 0.5, "a share of 1, as in vLLM, despite its name"
    assert summary["mean_kv_cache_usage_perc"] == 0.5
    assert summary["kv_live_pct"] == pytest.approx(26.5625)


def test_c31_a_later_turn_finds_generated_tokens() -> None:
    """40 + 25 tokens, then those 65 and 15 more: 64 of 80 hit."""
    config = make_config(PREFIX, max_model_len=256, num_gpu_blocks_override=33)
    turn: list[Segment] = [("u0", 40), ("out:r0", 25), ("u1", 15)]
    result = replay(config, make_trace((0, turn[:1], 25), (1, turn, 10)))
    assert [row["num_cached_tokens"] for row in requests_of(result)] == [0, 64]


@pytest.mark.parametrize(("output", "cached"), [(24, 48), (25, 64), (26, 64)])
def test_c31_the_last_sampled_token_is_never_cached(output: int, cached: int) -> None:
    """The prompt's 40 tokens and output - 1 generated ones were computed."""
    config = make_config(PREFIX, max_model_len=256, num_gpu_blocks_override=33)
    turn: list[Segment] = [("u0", 40), ("out:r0", output), ("u1", 15)]
    result = replay(config, make_trace((0, turn[:1], output), (1, turn, 10)))
    assert requests_of(result)[1]["num_cached_tokens"] == cached


@pytest.mark.parametrize("variant", [PAGED, PREFIX, ORCA_MAX], ids=lambda variant: variant.label)
def test_c34_outputs_are_cut_and_long_prompts_refused(variant: Variant) -> None:
    config = make_config(variant, max_model_len=128, num_gpu_blocks_override=33)
    trace = make_trace((0, 120, 50), (0, 127, 50), (0, 128, 5), (0, 500, 5), (0, 10, 118))
    rows = requests_of(replay(config, trace))
    assert [row["num_output_tokens"] for row in rows] == [8, 1, None, None, 118]
    assert [row["refused"] for row in rows] == [
        None,
        None,
        "prompt_too_long",
        "prompt_too_long",
        None,
    ]


def test_c34_clipped_requests_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [(120, 50), (128, 5), (10, 118)]
    lines = [{"arrival_time": 0, "input_length": p, "output_len": o} for p, o in lengths]
    flags = ["--num-gpu-blocks-override", "33", "--max-model-len", "128"]
    assert _run(tmp_path, lines, *flags) == 0
    summary = _summary(tmp_path / "out")
    assert summary["num_clipped_requests"] == 1
    assert summary["refused"] == {"prompt_too_long": 1}
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["total_output_tokens"] == 8 + 118
    printed = capsys.readouterr().out
    assert "Outputs cut at max_model_len:            1 " in printed
    assert "Refused (prompt_too_long):               1 " in printed


@pytest.mark.parametrize(
    ("lengths", "flags", "code", "said"),
    [
        ((0, 5), [], 1, "input_length"),
        ((9, 0), [], 1, "output_len"),
        ((9, 5), ["--block-size", "0"], 2, "--block-size: expected"),
        ((9, 5), ["--max-model-len", "-239"], 2, "--max-model-len: expected"),
    ],
)
def test_c34_what_cannot_be_is_refused_before_the_run(
    lengths: tuple[int, int], flags: list[str], code: int, said: str, tmp_path: Path
) -> None:
    line = {"arrival_time": 0, "input_length": lengths[0], "output_len": lengths[1]}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert _run(tmp_path, [line], *flags) == code
    assert said in err.getvalue()
    assert out.getvalue() == ""
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize(
    ("length", "block_size", "num_blocks"),
    [(17, 16, 64), (17, 32, 32), (33, 16, 96), (33, 32, 64), (17, 1, 544), (17, 8, 96)],
)
def test_c35_blocks_of_32_requests(length: int, block_size: int, num_blocks: int) -> None:
    config = make_config(
        PAGED,
        max_model_len=64,
        block_size=block_size,
        num_gpu_blocks_override=1 + 4096 // block_size,
        max_num_seqs=32,
    )
    trace = make_trace(*((0, length, 1) for _ in range(32)))
    first = steps_of(replay(config, trace))[0]
    assert first["used_blocks"] == num_blocks
    assert first["kv_live_slots"] == 32 * length
    # The last token is sampled, never written: what the block has left is wasted for good.
    assert first["kv_internal_slots"] == num_blocks * block_size - 32 * length


@pytest.mark.parametrize(
    ("block_size", "warned"), [(1, True), (8, True), (16, False), (24, True), (32, False)]
)
def test_c35_a_block_size_that_no_gpu_kernel_takes_is_noted(
    block_size: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"arrival_time": 0, "input_length": 17, "output_len": 5}]
    flags = ["--num-gpu-blocks-override", "999", "--max-model-len", "64"]
    assert _run(tmp_path, lines, *flags, "--block-size", str(block_size)) == 0
    said = capsys.readouterr().err
    assert ("multiples of 16" in said) == warned
    assert _run(tmp_path, lines, *flags, "--block-size", "8", "--allocator", "reserve-max") == 0
    assert "multiples of 16" not in capsys.readouterr().err


@pytest.mark.parametrize("reserve", [True, False])
def test_a_chunked_prompt_holds_blocks_for_what_is_computed(reserve: bool) -> None:
    """8,000 tokens under a budget of 2,048: the gate checks room for all, it takes none ahead."""
    config = make_config(
        PAGED,
        max_model_len=8192,
        num_gpu_blocks_override=601,
        max_num_batched_tokens=2048,
        scheduler_reserve_full_isl=reserve,
    )
    rows = steps_of(replay(config, make_trace((0, 8000, 3))))
    assert [row["num_scheduled_tokens"] for row in rows] == [2048, 2048, 2048, 1856, 1, 1]
    assert [row["used_blocks"] for row in rows] == [128, 256, 384, 500, 501, 501]
    assert [row["kv_reserved_slots"] for row in rows] == [0, 0, 0, 0, 1, 0]


def test_the_gate_keeps_a_prompt_out_that_would_not_fit_whole() -> None:
    """200 blocks left, 8,000 tokens want 500: in with its first chunk only without the gate."""
    steps = []
    for reserve in (True, False):
        config = make_config(
            PAGED,
            max_model_len=8192,
            num_gpu_blocks_override=601,
            max_num_batched_tokens=8192,
            scheduler_reserve_full_isl=reserve,
        )
        steps.append(steps_of(replay(config, make_trace((0, 6400, 2), (0, 8000, 2)))))
    gated, free = steps
    assert (gated[0]["admitted"], gated[0]["num_refusals"]) == ("r0", 1)
    assert (free[0]["admitted"], free[0]["num_refusals"]) == ("r0;r1", 0)


@pytest.mark.parametrize(("second", "admitted"), [(24, "r0;r1"), (25, "r0")])
def test_a_whole_prompt_may_fill_the_budget_to_the_last_token(second: int, admitted: str) -> None:
    config = make_config(
        PAGED,
        max_model_len=64,
        num_gpu_blocks_override=33,
        enable_chunked_prefill=False,
        max_num_batched_tokens=64,
    )
    first, *_ = steps_of(replay(config, make_trace((0, 40, 2), (0, second, 2))))
    assert first["admitted"] == admitted


@pytest.mark.parametrize(
    ("prompt", "output", "size"), [(7, 25, 7 + 32), (7, 32, 7 + 32), (7, 33, 64), (60, 4, 64)]
)
def test_orca_pow2_reserves_up_to_the_next_power_of_two(
    prompt: int, output: int, size: int
) -> None:
    """PagedAttention, section 6.1: an output of 25 is given 32; never beyond max_model_len."""
    config = make_config(
        Variant("contiguous", "pow2", "first_fit"), max_model_len=64, num_gpu_blocks_override=9
    )
    (first, *_) = steps_of(replay(config, make_trace((0, prompt, output))))
    held = first["kv_live_slots"] + first["kv_reserved_slots"] + first["kv_internal_slots"]
    assert held == size
    assert first["kv_internal_slots"] == size - (prompt + output - 1)


def test_external_slots_of_the_buddy_allocator() -> None:
    """128 slots, reservations of 40 in extents of 64: one held leaves 88 free and 40 usable."""
    config = make_config(
        Variant("contiguous", "max", "buddy"), max_model_len=40, num_gpu_blocks_override=9
    )
    rows = steps_of(replay(config, make_trace((0, 10, 3), (0.001, 10, 3))))
    assert [row["kv_external_slots"] for row in rows] == [88 - 40, 48, 48, 48]
    assert [row["running"] for row in rows] == [1, 2, 2, 1]


def test_an_arrival_at_the_very_end_of_a_step_joins_the_next() -> None:
    """Also where it was put on the clock after the end of that step was."""
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=33)
    trace = make_trace((0, 8, 5), (0.0015, 8, 5), (0.002, 8, 5))
    admitted = [row["admitted"] for row in steps_of(replay(config, trace))]
    assert admitted[:4] == ["r0", "", "r1;r2", ""]


def test_equal_content_behind_another_prefix_is_not_shared() -> None:
    """The same user text after a system prompt of another length, or after a cut of it."""
    config = make_config(PREFIX, max_model_len=256, num_gpu_blocks_override=99)
    prompts = [[("system", 32), ("user", 32)], [("system", 48), ("user", 32)]]
    prompts.append([("system", 16), ("user", 64)])
    trace = make_trace(*((row, prompt, 2) for row, prompt in enumerate(prompts)))
    assert [row["num_cached_tokens"] for row in requests_of(replay(config, trace))] == [0, 32, 16]
