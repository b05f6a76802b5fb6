"""Activation of steps beside the KV cache."""

from typing import Any

import numpy as np
import pytest

from sim.hardware import get_gpu
from sim.kv_spec import kv_bytes_per_token, weight_bytes
from sim.memory import activation_bytes, graph_bytes, non_torch_bytes
from sim.models import get_model
from sim.overrun import Overrun, StepSizes
from sim.pool_sizing import engine_of, pool_of
from tests.strategies import PAGED, make_config

LLAMA, H100 = get_model("Llama-3.1-8B"), get_gpu("H100")


def _rows(*steps: tuple[int, int, int]) -> dict[str, Any]:
    """Answer rows of (steps, decodes, tokens of one chunk)."""
    num_steps, decodes, chunk = (np.array(column) for column in zip(*steps, strict=True))
    return {
        "num_steps": num_steps,
        "num_decodes": decodes,
        "num_late_decodes": np.zeros(len(steps), dtype=np.int64),
        "num_prefills": (chunk > 0).astype(np.int64),
        "num_prefill_tokens": chunk,
    }


def _overrun(rows: dict[str, Any], **values: Any) -> Overrun:
    config = make_config(PAGED, gpu="H100", max_model_len=8192, max_num_seqs=256, **values)
    sizes = StepSizes()
    sizes.add(rows)
    overrun = sizes.overrun(config, pool_of(config, LLAMA, H100))
    assert overrun is not None
    return overrun


def test_a_sized_pool_leaves_room_for_the_largest_step() -> None:
    config = make_config(PAGED, gpu="H100", max_model_len=8192, max_num_seqs=256)
    engine = engine_of(config)
    largest = (1, 255, engine.max_num_batched_tokens - 255)
    got = _overrun(_rows(largest, (10, 256, 0), (0, 0, 0)))
    assert got.max_activation_bytes == activation_bytes(LLAMA, H100, engine)
    assert got.room_bytes > got.max_activation_bytes
    assert (got.num_steps, got.share) == (0, 0)


def test_a_pool_given_by_hand_may_leave_none() -> None:
    """Room for a step of 64 decodes, not for one of 2,048 tokens."""
    config = make_config(PAGED, gpu="H100", max_model_len=8192, max_num_seqs=256)
    engine = engine_of(config)
    small, large = (
        activation_bytes(LLAMA, H100, engine._replace(max_num_batched_tokens=t, max_num_seqs=s))
        for t, s in ((64, 64), (2048, 1))
    )
    assert small < large
    taken = weight_bytes(LLAMA) + non_torch_bytes(H100, engine) + graph_bytes(LLAMA, engine)
    room = H100.memory_visible_bytes - taken - (small + large) // 2
    blocks = room // (16 * kv_bytes_per_token(LLAMA))
    got = _overrun(_rows((30, 64, 0), (1, 0, 2048), (9, 64, 0)), num_gpu_blocks_override=blocks)
    assert small < got.room_bytes < large
    assert got.num_steps == 1
    assert got.share == pytest.approx(1 / 40)


def test_what_does_not_fit_at_all_overruns_always() -> None:
    got = _overrun(_rows((5, 1, 0)), num_gpu_blocks_override=10**6)
    assert got.room_bytes < 0
    assert got.share == 1


def test_before_0_21_graphs_take_what_utilization_leaves_out() -> None:
    rooms = [
        _overrun(_rows((1, 1, 0)), vllm_version="0.19", gpu_memory_utilization=share).room_bytes
        for share in (0.9, 0.999)
    ]
    assert rooms[0] - rooms[1] == pytest.approx(0.099 * H100.memory_visible_bytes, rel=0.01)
