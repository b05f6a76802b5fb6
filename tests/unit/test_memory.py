"""What is in a card's memory before the KV cache, by hand."""

import re

import msgspec
import pytest

from sim.errors import ConfigError
from sim.hardware import GIB, get_gpu
from sim.memory import (
    FIXED_ACTIVATION_BYTES,
    VLLM_0_11,
    VLLM_0_19,
    VLLM_0_33,
    Engine,
    activation_bytes,
    expert_workspace_bytes,
    fixed_shares,
    forward_bytes,
    graph_count,
    graph_estimate_bytes,
    memory_rules,
    non_torch_bytes,
    sampler_bytes,
)
from sim.models import get_model

LLAMA, H100 = get_model("Llama-3.1-8B"), get_gpu("H100")


def test_the_sampler_by_hand() -> None:
    """14 bytes a logit, 132 rows of fp32 logits, the last hidden states."""
    by_hand = 1024 * 128_256 * 14 + 132 * 128_256 * 4 + 1024 * 4096 * 2
    assert sampler_bytes(LLAMA, H100, Engine(1024, 8192)) == by_hand
    old = Engine(1024, 8192, rules=VLLM_0_11)
    assert sampler_bytes(LLAMA, H100, old) == 1024 * 128_256 * 38 + 1024 * 4096 * 2


@pytest.mark.parametrize(("seqs", "rows"), [(1, 1), (3, 4), (100, 128), (131, 132), (4096, 132)])
def test_rows_of_the_sampler_are_a_power_of_two_or_all_multiprocessors(
    seqs: int, rows: int
) -> None:
    engine = Engine(seqs, 8192)
    with_rows = sampler_bytes(LLAMA, H100, engine)
    assert with_rows - sampler_bytes(LLAMA, None, engine) == rows * 128_256 * 4


def test_a_layer_by_hand() -> None:
    assert forward_bytes(LLAMA, Engine(1024, 8192)) == 8192 * 2 * (3 * 14_336 + 3.5 * 4096)
    shared = Engine(1024, 8192, tensor_parallel_size=4)
    assert forward_bytes(LLAMA, shared) == 8192 * 2 * (3 * 14_336 // 4 + 3.5 * 4096)


def test_the_larger_moment_counts() -> None:
    """Few requests and many tokens: a layer; many requests: the sampler."""
    few, many = Engine(8, 16_384), Engine(1024, 1024)
    assert activation_bytes(LLAMA, H100, few) == FIXED_ACTIVATION_BYTES + forward_bytes(LLAMA, few)
    hidden = 1024 * 4096 * 2
    assert activation_bytes(LLAMA, H100, many) == (
        FIXED_ACTIVATION_BYTES + hidden + sampler_bytes(LLAMA, H100, many)
    )


def test_experts_by_hand() -> None:
    """Qwen3-30B-A3B: 8 experts a token; 2048 columns twice, since experts are narrower."""
    model = get_model("Qwen3-30B-A3B")
    assert expert_workspace_bytes(model, Engine(1024, 8192)) == 8192 * 8 * 2 * 2048 * 2
    assert expert_workspace_bytes(LLAMA, Engine(1024, 8192)) == 0
    mixtral = get_model("Mixtral-8x7B-v0.1")
    two = Engine(1024, 8192, tensor_parallel_size=2)
    assert expert_workspace_bytes(mixtral, two) == 8192 * 2 * (7168 + 14_336) * 2
    whole = two._replace(enable_expert_parallel=True)
    assert expert_workspace_bytes(mixtral, whole) == 8192 * 2 * (14_336 + 28_672) * 2


@pytest.mark.parametrize(
    ("seqs", "tokens", "graphs"),
    [(256, 2048, 51 + 35), (1024, 8192, 51 + 51), (8, 2048, 5 + 4), (128, 2048, 35 + 19)],
)
def test_graphs_are_as_many_as_vllm_s_logs_say(seqs: int, tokens: int, graphs: int) -> None:
    engine = Engine(seqs, tokens)
    assert graph_count(engine) == graphs
    assert graph_count(engine._replace(enforce_eager=True)) == 0


def test_who_subtracts_graphs() -> None:
    """0.26 GiB of a model of 7B with max_num_seqs 256 (a log of 0.21)."""
    estimate = graph_estimate_bytes(get_model("Llama-2-7b-hf"), Engine(256, 8192))
    assert estimate / GIB == pytest.approx(0.26, abs=0.005)
    for rules, names in ((VLLM_0_33, 4), (VLLM_0_19, 3), (VLLM_0_11, 3)):
        assert len(fixed_shares(LLAMA, H100, Engine(256, 2048, rules=rules))) == names
    eager = Engine(256, 2048, enforce_eager=True)
    assert len(fixed_shares(LLAMA, H100, eager)) == 3


def test_buffers_of_collectives_are_smaller_without_nvlink() -> None:
    two = Engine(256, 2048, tensor_parallel_size=2)
    assert non_torch_bytes(H100, two) == round(2.1 * GIB)
    assert non_torch_bytes(get_gpu("L40S"), two) == round(0.55 * GIB)
    assert non_torch_bytes(get_gpu("L40S"), Engine(256, 2048)) == round(0.25 * GIB)


def test_more_of_anything_needs_no_less() -> None:
    least = activation_bytes(LLAMA, H100, Engine(64, 2048))
    for engine in (Engine(128, 2048), Engine(64, 4096)):
        assert activation_bytes(LLAMA, H100, engine) >= least
    wide = msgspec.structs.replace(LLAMA, vocab_size=2 * LLAMA.vocab_size)
    assert activation_bytes(wide, H100, Engine(64, 2048)) >= least


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("'0.20': expected one of 0.33, 0.19, 0.11")):
        memory_rules("0.20")
