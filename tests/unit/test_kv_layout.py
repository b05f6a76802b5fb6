"""What layers keep, in bytes and in vLLM's blocks."""

import pytest

from sim.errors import ConfigError
from sim.kv_groups import cache_groups
from sim.kv_layout import (
    KVLayout,
    LayerCache,
    fixed_bytes_per_request,
    kv_bytes_per_token,
    kv_bytes_per_token_longctx,
    sequence_bytes,
)
from sim.models import get_model


def _layout(*caches: LayerCache, dtype: str = "bfloat16") -> KVLayout:
    return KVLayout(caches=caches, auto_dtype=dtype)


def _full(num_layers: int, heads: int = 4, elements: int = 256) -> LayerCache:
    return LayerCache(
        kind="full", num_layers=num_layers, num_kv_heads=heads, head_elements=elements
    )


def _sliding(num_layers: int, window: int = 1024, elements: int = 256) -> LayerCache:
    return LayerCache(
        kind="sliding",
        num_layers=num_layers,
        num_kv_heads=4,
        head_elements=elements,
        window=window,
    )


def test_heads_are_shared_by_ranks_and_copied_where_too_few() -> None:
    layout = _layout(_full(1))
    got = [kv_bytes_per_token_longctx(layout, tensor_parallel_size=tp) for tp in (1, 2, 4, 8)]
    assert got == [2048, 1024, 512, 512]


def test_latents_are_on_every_rank() -> None:
    layout = get_model("DeepSeek-V3").layout
    assert [kv_bytes_per_token_longctx(layout, tensor_parallel_size=tp) for tp in (1, 8, 16)] == [
        70_272
    ] * 3


def test_a_sequence_grows_until_its_windows_are_full() -> None:
    layout = _layout(_full(1), _sliding(3))
    token = 2048
    assert sequence_bytes(layout, 0) == 0
    assert sequence_bytes(layout, 1024) == 4 * 1024 * token
    assert sequence_bytes(layout, 1025) == (4 * 1024 + 1) * token
    assert kv_bytes_per_token(layout) == 4 * token
    assert kv_bytes_per_token_longctx(layout) == token
    assert fixed_bytes_per_request(layout) == 3 * 1024 * token
    long = 100_000
    assert sequence_bytes(layout, long) == fixed_bytes_per_request(layout) + long * token


def test_states_are_of_one_size_and_shared() -> None:
    state = LayerCache(
        kind="state", num_layers=2, num_kv_heads=2, state_bytes=4096, shared_bytes=512
    )
    layout = _layout(_full(1), state)
    assert [fixed_bytes_per_request(layout, tensor_parallel_size=tp) for tp in (1, 2, 4)] == [
        9216,
        4608,
        2560,
    ]
    assert sequence_bytes(layout, 1) - sequence_bytes(layout, 0) == 2048
    assert sequence_bytes(layout, 0) == 9216


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [("auto", 2048), ("bfloat16", 2048), ("float16", 2048), ("float32", 4096), ("fp8", 1024),
     ("fp8_e5m2", 1024)],
)  # fmt: skip
def test_elements_by_dtype(dtype: str, per_token: int) -> None:
    assert kv_bytes_per_token_longctx(_layout(_full(1)), kv_cache_dtype=dtype) == per_token


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype 'int4' is not one of auto, "):
        kv_bytes_per_token_longctx(_layout(_full(1)), kv_cache_dtype="int4")


def test_sparse_latents_have_a_layout_of_their_own_in_fp8() -> None:
    layout = get_model("DeepSeek-V3.2").layout
    assert kv_bytes_per_token_longctx(layout) == 61 * (1152 + 132)
    assert kv_bytes_per_token_longctx(layout, stored_index=False) == 61 * (1152 + 256)
    assert kv_bytes_per_token_longctx(layout, kv_cache_dtype="fp8") == 61 * (656 + 132)
    plain = get_model("DeepSeek-V3").layout
    assert kv_bytes_per_token_longctx(plain, kv_cache_dtype="fp8") == 61 * 576


@pytest.mark.parametrize(
    ("full", "sliding", "groups"),
    [
        (12, 12, [12, 12]),
        (5, 21, [5, 5, 4, 4, 4, 4]),
        (10, 52, [10, 9, 9, 9, 9, 8, 8]),  # Gemma 3: 7 groups of 10
        (13, 12, [13, 12]),  # nearly as many: the larger is the size
        (10, 14, [10, 14]),
        (10, 15, [10, 8, 7]),
    ],
)
def test_layers_are_dealt_out_to_groups(full: int, sliding: int, groups: list[int]) -> None:
    made = cache_groups(_layout(_full(full), _sliding(sliding)), 16)
    assert sorted(group.num_layers for group in made.groups) == sorted(groups)
    size = max(groups)
    assert made.bytes_per_block == size * 16 * 2048


def test_all_that_grows_is_one_group() -> None:
    made = cache_groups(_layout(_full(3), _full(2, heads=2)), 16)
    assert len(made.groups) == 1
    assert made.bytes_per_block == 16 * (3 * 2048 + 2 * 1024)
    assert made.blocks_for(100, in_flight_tokens=8192) == 7


def test_chunks_are_full_attention_to_the_block_tables() -> None:
    made = cache_groups(get_model("Llama-4-Scout-17B-16E-Instruct").layout, 16)
    assert [(group.kind, group.num_layers) for group in made.groups] == [("full", 48)]
    assert made.bytes_per_block == 196_608 * 16


def test_smaller_pages_get_larger_blocks() -> None:
    """Gemma 4: global layers have half the bytes a token, so twice the tokens a block."""
    made = cache_groups(_layout(_full(2, elements=128), _sliding(2)), 16)
    assert {(group.kind, group.block_size) for group in made.groups} == {
        ("full", 32),
        ("sliding", 16),
    }
    with pytest.raises(ConfigError, match="expected a multiple"):
        cache_groups(_layout(_full(2, elements=96), _sliding(2)), 16)


def test_blocks_of_attention_beside_states_are_as_large_as_a_state() -> None:
    """Qwen3.5: 784 tokens; a hybrid of 12 + 36 layers with 4 MiB states: 2,096, as in a log."""
    made = cache_groups(get_model("Qwen3.5-27B").layout, 16)
    assert made.block_size == 784
    assert len(made.groups) == 4
    state = LayerCache(kind="state", num_layers=36, state_bytes=4_194_304 + 73_728)
    hybrid = cache_groups(_layout(_full(12, heads=2, elements=512), state), 16)
    assert hybrid.block_size == 2096
    assert int(17.36 * 2**30) // hybrid.bytes_per_block == 361
    blocks = hybrid.blocks_for(131_072, in_flight_tokens=8192)
    assert blocks == 63 + 3 * 2
    assert round(361 / blocks, 2) == 5.23
    alone = hybrid.blocks_for(131_072, in_flight_tokens=8192, enable_prefix_caching=False)
    assert alone == 63 + 3


def test_a_window_takes_a_block_more_and_what_is_in_flight() -> None:
    made = cache_groups(_layout(_sliding(4, window=4096)), 16)
    assert made.blocks_for(100_000, in_flight_tokens=2048) == (4095 + 2048 + 15) // 16 + 1
    assert made.blocks_for(32, in_flight_tokens=2048) == 3


def test_compressed_layers_in_16_bits_have_no_blocks() -> None:
    with pytest.raises(ConfigError, match="in bfloat16: vLLM has no blocks for them; expected"):
        cache_groups(get_model("DeepSeek-V4-Pro").layout, 64, kv_cache_dtype="bfloat16")


def test_cross_attention_takes_nothing_without_an_image() -> None:
    cross = LayerCache(kind="cross", num_layers=8, num_kv_heads=8, head_elements=256, window=6404)
    layout = _layout(_full(32), cross)
    assert sequence_bytes(layout, 10) == 10 * 32 * 2048
    with_image = sequence_bytes(layout, 10, images=True)
    assert with_image - sequence_bytes(layout, 10) == fixed_bytes_per_request(layout)
