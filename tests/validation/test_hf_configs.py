"""Quirky configurations of real models against worked figures."""

import csv
from pathlib import Path

import msgspec
import pytest

from sim.hf_config import read_config, spec_of
from sim.kv_groups import cache_groups
from sim.kv_layout import (
    KVLayout,
    fixed_bytes_per_request,
    kv_bytes_per_token_longctx,
    sequence_bytes,
)
from sim.kv_spec import weight_bytes
from sim.models import get_model

SUMMED = {"B38_openelm-270m.json", "B39_decilm-variable-gqa.json"}
"""Whose worked figure counts one layer for all, because their heads were summed."""


def _sixteen_bit(layout: KVLayout) -> str:
    return "bfloat16" if layout.auto_dtype == "fp8" else layout.auto_dtype


def test_bytes_are_those_of_every_worked_figure(shared: Path) -> None:
    """All 31 rows, indexers in 16 bits as the rows count them."""
    folder = shared / "published" / "configs"
    with (folder / "expected.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 31
    for row in rows:
        layout = read_config(folder / row["file"]).layout
        dtype = _sixteen_bit(layout)
        per_token = kv_bytes_per_token_longctx(layout, kv_cache_dtype=dtype, stored_index=False)
        fixed = fixed_bytes_per_request(layout, kv_cache_dtype=dtype)
        assert per_token == int(row["kv_bytes_per_token_longctx"]), row["file"]
        assert fixed == int(row["fixed_bytes_per_request"]), row["file"]
        growing = sum(cache.num_layers for cache in layout.caches if cache.grows)
        if row["file"] not in SUMMED:
            assert growing == int(row["growing_layers"]), row["file"]


@pytest.mark.parametrize(
    ("file", "per_token"),
    [  # the other reading that the rows name: what the engine does by default
        ("A03_gemma4-31b-nvfp4.json", 40_960),
        ("A09_deepseek-v3.2.json", 78_324),
        ("A21_qwen3-32b-fp8-static.json", 131_072),
    ],
)
def test_default_dtypes_are_the_engines(shared: Path, file: str, per_token: int) -> None:
    layout = read_config(shared / "published" / "configs" / file).layout
    assert kv_bytes_per_token_longctx(layout) == per_token


@pytest.mark.parametrize(
    ("file", "billions"),
    [
        ("A01_nemotron-super-49b.json", 49.9),
        ("A05_kimi-k3.json", 2800),
        ("A09_deepseek-v3.2.json", 671.9),
        ("A11_qwen3.5-27b.json", 27),
        ("A13_nemotron3-ultra-550b.json", 550),
        ("A15_gpt-oss-20b.json", 20.9),
        ("A19_mixtral-8x7b.json", 46.7),
        ("A23_step-3.7-flash.json", 196),
        ("B04_falcon-40b.json", 41.3),
        ("B09_dbrx.json", 131.6),
        ("B29_bloom-7b1.json", 7.07),
    ],
)
def test_parameters_are_those_of_the_names(shared: Path, file: str, billions: float) -> None:
    model = read_config(shared / "published" / "configs" / file)
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_deepseek_v4_pro_at_a_million_tokens() -> None:
    """9.62 GiB in bfloat16 (vLLM's blog of 24 April 2026); windows and work space apart."""
    layout = get_model("DeepSeek-V4-Pro").layout
    growing = KVLayout(
        caches=tuple(cache for cache in layout.caches if cache.grows), auto_dtype="bfloat16"
    )
    tokens = 2**20
    num_bytes = sequence_bytes(growing, tokens, stored_index=False)
    assert round(num_bytes / 2**30, 2) == 9.62
    # in fp8 about 5,511 bytes a token
    assert kv_bytes_per_token_longctx(layout, kv_cache_dtype="fp8") == 5511


@pytest.mark.parametrize(
    ("name", "kv_gib", "num_blocks", "tokens", "concurrency"),
    [  # llm-d-planner PR #205, vLLM 0.19.0: blocks from the logged GiB, which is rounded
        ("google/gemma-2-27b-it", 20.59, 7335, 58_672, 7.16),
    ],
)
def test_blocks_of_a_hybrid_are_those_of_a_log(
    name: str, kv_gib: float, num_blocks: int, tokens: int, concurrency: float
) -> None:
    groups = cache_groups(get_model(name).layout, 16)
    assert int(kv_gib * 2**30 / groups.bytes_per_block) == pytest.approx(num_blocks, abs=2)
    assert num_blocks // len(groups.groups) * 16 == tokens
    each = groups.blocks_for(8192, in_flight_tokens=8192)
    assert round(num_blocks / each, 2) == concurrency


def test_a_refusal_of_gpt_oss_needs_what_the_log_says() -> None:
    """4.54 GiB for one request of 131,072 tokens, in a log with 1,024 batched tokens a step."""
    groups = cache_groups(get_model("gpt-oss-120b").layout, 16)
    each = groups.blocks_for(131_072, in_flight_tokens=1024)
    assert round(each * groups.bytes_per_block / 2**30, 2) == 4.54


def test_blocks_of_deepseek_v4_are_those_of_a_log() -> None:
    """vLLM 0.22.1 with DeepSeek-V4-Flash in fp8 on 8 GPUs of 72 GB, as reported with its figures.

    Pages of 37,440, 8,640 and 1,728 bytes; 22 rows of them a block; 40,471 blocks in 42,566,892,135
    bytes. At 256,000 tokens and 8,192 batched a request took 3,969 blocks of its formula, which
    divided the sum over all pages by the first group's: 37.93 GiB held 9.76.
    """
    groups = cache_groups(get_model("DeepSeek-V4-Flash").layout, 256)
    padded = groups.bytes_per_block + groups.padding_bytes
    assert padded == 22 * (37_440 + 8_640 + 1_728)
    assert 42_566_892_135 // padded == 40_471
    assert [group[1:] for group in groups.groups] == [
        (21, 256, 0), (21, 4, 8), (20, 8, 128), (22, 64, 128), (21, 64, 128)
    ]  # fmt: skip
    growing = 21 * 37_440 + 21 * 8_640 + 20 * 1_728
    assert groups.bytes_per_block == growing  # as vLLM 0.27.1 packs them
    pages = (growing, 21 * 37_440 + 21 * 8_640, 20 * 37_440, 22 * 37_440, 21 * 37_440)
    needed = 0
    for group, page in zip(groups.groups, pages, strict=True):
        alone = groups._replace(groups=(group,))
        needed += page * alone.blocks_for(256_000, in_flight_tokens=8192)
    each = -(-needed // growing)
    assert each == 3969
    assert round(38_724 / each * 256_000) == 2_497_693
    assert pytest.approx(37.93 * 2**30 / padded, abs=6) == 38_724  # half a digit of the GiB


def test_a_refusal_of_deepseek_v4_needs_what_the_log_says() -> None:
    """6.66 GiB for 30,000 tokens, and 13,528 fit 5.44 GiB (vllm-project/vllm#44376, 0.22).

    Two GPUs of 96 GB, without a server: 16,384 tokens a step.
    """
    groups = cache_groups(get_model("DeepSeek-V4-Flash").layout, 256, tensor_parallel_size=2)
    padded = (groups.bytes_per_block + groups.padding_bytes) / 2**30
    assert round(groups.blocks_for(30_000, in_flight_tokens=16_384) * padded, 2) == 6.66
    assert round(groups.blocks_for(13_528, in_flight_tokens=16_384) * padded, 2) == 5.44


FP8 = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("name", "quantization", "tensor_parallel_size", "weights_gib", "error"),
    [  # start-up logs of llm-d-planner PR #205
        ("Llama-3.1-70B", FP8, 2, 33.88, 0.01),
        ("Llama-3.1-70B", FP8, 4, 16.96, 0.01),
        ("Qwen2.5-7B-Instruct", FP8, 1, 8.14, 0.01),
        ("Llama-3.1-8B", {"quant_method": "fp8"}, 1, 8.49, 0.01),
        ("Llama-3.1-8B", INT4, 1, 5.38, 0.01),
    ],
)
def test_weights_of_quantized_models_are_those_of_logs(
    name: str, quantization: object, tensor_parallel_size: int, weights_gib: float, error: float
) -> None:
    preset = get_model(name)
    values = {key: value for key, value in msgspec.to_builtins(preset).items() if value != 0}
    values |= {"quantization_config": quantization, "tie_word_embeddings": False}
    model = spec_of(values, name=name, where=name)
    weights = weight_bytes(model, tensor_parallel_size) / 2**30
    assert weights == pytest.approx(weights_gib, rel=error)
