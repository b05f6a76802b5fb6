"""What every layer of a configuration keeps for a sequence: its `KVLayout`."""

from collections.abc import Sequence

from sim.errors import ConfigError
from sim.hf_config.fields import Fields
from sim.hf_config.layers import Kind, layer_kinds, window
from sim.hf_config.shape import Shape
from sim.kv_layout import ELEMENT_BYTES, CacheKind, KVLayout, LayerCache

INDEX_KEY_BYTES = 4
"""Of the scale that vLLM keeps beside every 128 elements of an indexer's key in fp8 (vLLM 0.33.0,
``models/deepseek_v2.py``, ``DeepseekV32IndexerCache``)."""

SPARSE_LATENT_FP8_BYTES = {(512, 64): 656}
"""Of a latent in vLLM's ``fp8_ds_mla`` layout, by its widths without and with rotary embedding:
512 in fp8, 4 scales of 4 bytes, 64 in bf16 (``v1/kv_cache_interface.py:729-743``)."""

IMAGE_SIDE, IMAGE_PATCH, IMAGE_TILES = 560, 14, 4
"""Of an image of Llama 3.2 Vision: 4 tiles of 40 * 40 + 1 vectors."""


def layout_of(fields: Fields, shape: Shape, dtype: str, auto_dtype: str) -> KVLayout:
    """Answer what layers keep; *dtype* is the model's, *auto_dtype* that of the cache by default.

    Raises:
        ConfigError: a field is missing that it follows from, or makes no sense.
    """
    if fields.has("compress_ratios"):
        return KVLayout(caches=tuple(_compressed(fields, shape)), auto_dtype="fp8")
    kinds = layer_kinds(fields, shape)
    is_latent = fields.integer("kv_lora_rank") is not None
    caches = _latents(fields, kinds) if is_latent else _attention(fields, shape, kinds)
    caches += _states(fields, kinds, dtype)
    caches += _index_keys(fields, shape)
    return KVLayout(caches=tuple(caches), auto_dtype=auto_dtype)


def _latents(fields: Fields, kinds: Sequence[Kind]) -> list[LayerCache]:
    """Answer the latents of attention layers (DeepSeek, Kimi): one a token on every rank."""
    rank = fields.needed("the latent", "kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim", least=0)
    if rope is None:
        raise ConfigError(f"{fields.where}: qk_rope_head_dim is missing: the latent is unknown")
    odd = [kind for kind in kinds if kind in {"sliding", "chunked", "cross", "both"}]
    if odd:
        raise ConfigError(
            f"{fields.where}: latent attention (kv_lora_rank) in {odd[0]} layers is unknown"
        )
    sparse = fields.has("index_head_dim") and fields.has("index_topk")
    latents = LayerCache(
        kind="latent",
        num_layers=sum(kind == "full" for kind in kinds),
        head_elements=rank + rope,
        fp8_bytes=SPARSE_LATENT_FP8_BYTES.get((rank, rope), 0) if sparse else 0,
    )
    return [latents] if latents.num_layers else []


def _attention(fields: Fields, shape: Shape, kinds: Sequence[Kind]) -> list[LayerCache]:
    """Answer keys and values of attention layers, those that are alike together."""
    found: dict[tuple[CacheKind, int, int, int], int] = {}
    for i, kind in enumerate(kinds):
        heads, elements = shape.kv_heads[i], shape.key_dims[i] + shape.value_dims[i]
        size = 0
        name: CacheKind = "full"
        if kind == "sliding":
            name, size = "sliding", _window_of(fields, i)
            heads = fields.integer("swa_num_key_value_heads") or heads
            key = fields.integer("swa_head_dim")
            if key is not None:
                elements = key + (fields.integer("swa_v_head_dim") or key)
        elif kind == "chunked":
            name, size = "chunked", fields.needed("the chunk", "attention_chunk_size")
        elif kind == "cross":
            name, size = "cross", _image_tokens(fields)
        elif kind not in {"full", "both"}:
            continue
        elif any(other == "sliding" for other in kinds):
            heads = fields.integer("num_global_key_value_heads") or heads
            wide = fields.integer("global_head_dim")
            elements = elements if wide is None else 2 * wide
        if not heads:
            continue
        cache = (name, heads, elements, size)
        found[cache] = found.get(cache, 0) + 1
    return [
        LayerCache(kind=kind, num_layers=n, num_kv_heads=heads, head_elements=elements, window=size)
        for (kind, heads, elements, size), n in found.items()
    ]


def _window_of(fields: Fields, layer: int) -> int:
    """Answer the window of sliding layer number *layer*."""
    name, sizes = fields.raw("sliding_window", "interleaved_sliding_window")
    if isinstance(sizes, list):
        listed = fields.integers(name, least=0, holes=True) or [0]
        return listed[layer % len(listed)] or max(listed)
    if fields.has("block_configs"):
        return max(fields.layers("block_configs", layer + 1, _block_window), default=0)
    return window(fields)


def _block_window(block: Fields) -> int:
    attention = block.sub("attention")
    return (attention.integer("window_length", least=0) or 0) if attention else 0


def _image_tokens(fields: Fields) -> int:
    """Answer the vectors of one image that cross-attention sees."""
    vision = fields.sub("vision_config")
    side, patch, tiles = IMAGE_SIDE, IMAGE_PATCH, IMAGE_TILES
    if vision is None:
        fields.note(f"vision_config is missing: an image of {tiles} tiles of {side} pixels assumed")
    else:
        side = vision.integer("image_size") or side
        patch = vision.integer("patch_size") or patch
        tiles = vision.integer("max_num_tiles") or tiles
    fields.note("layers of cross-attention keep an image's keys and values, none without an image")
    return tiles * ((side // patch) ** 2 + 1)


def _index_keys(fields: Fields, shape: Shape) -> list[LayerCache]:
    """Answer the keys of an indexer that chooses what sparse attention reads."""
    sparse = fields.sub("sparse_attention_config")
    if sparse is not None and sparse.has("sparse_index_dim"):
        which = sparse.integers("sparse_attention_freq", length=shape.num_layers)
        num_layers = shape.num_layers if which is None else sum(map(bool, which))
        fields.note("keys of the indexer are counted in the dtype of the cache")
        return [
            LayerCache(
                kind="index",
                num_layers=num_layers,
                head_elements=sparse.needed("an index key", "sparse_index_dim"),
            )
        ]
    width = fields.integer("index_head_dim")
    if width is None:
        return []
    types = fields.items("indexer_types", length=shape.num_layers)
    num_layers = shape.num_layers if types is None else sum(word == "full" for word in types)
    fields.note(
        f"keys of the indexer take {_stored_key(width)} bytes as in vLLM (fp8 and a scale), "
        f"not {2 * width}"
    )
    return [
        LayerCache(
            kind="index",
            num_layers=num_layers,
            head_elements=width,
            stored_bytes=_stored_key(width),
        )
    ]


def _stored_key(width: int) -> int:
    return width + -(-width // 128) * INDEX_KEY_BYTES


def _compressed(fields: Fields, shape: Shape) -> list[LayerCache]:
    """Answer the caches of DeepSeek-V4: latents of 4 or 128 tokens, of a window, and work space.

    A latent takes 584 bytes in fp8: 448 elements, 8 bytes of scales, 64 with rotary embedding in
    bf16. The work space of a compressor is two sums in fp32 for every element, twice where
    neighbours overlap (ratio 4), of as many tokens as it compresses (vLLM 0.33.0,
    ``deepseek_compressor.py``).
    """
    ratios = fields.integers("compress_ratios", length=shape.num_layers) or []
    width, rope = shape.key_dims[0], fields.needed("a latent", "qk_rope_head_dim")
    index = fields.needed("an index key", "index_head_dim")
    if rope >= width:
        raise fields.error("qk_rope_head_dim", rope, f"less than head_dim {width}")
    fp8 = width - rope + 2 * rope + -(-(width - rope) // 64) + 1
    caches = []
    for ratio in sorted(set(ratios) - {0}):
        layers = ratios.count(ratio)
        overlap = 2 if ratio == 4 else 1
        compressed = LayerCache(
            kind="compressed",
            num_layers=layers,
            head_elements=width,
            tokens_per_entry=ratio,
            fp8_bytes=fp8,
        )
        keys = LayerCache(
            kind="index",
            num_layers=layers,
            head_elements=index,
            tokens_per_entry=ratio,
            stored_bytes=_stored_key(index),
        )
        for cache in (compressed, keys) if ratio == 4 else (compressed,):
            sums = 2 * overlap * cache.head_elements * ELEMENT_BYTES["float32"]
            work = LayerCache(
                kind="compressor", num_layers=layers, window=overlap * ratio, stored_bytes=sums
            )
            caches += [cache, work]
    fields.note(
        "KV of DeepSeek-V4 is kept in fp8 by vLLM (584 bytes a latent, 132 an index key), in "
        "blocks of 256 tokens whatever --block-size is"
    )
    size = fields.needed("the window", "sliding_window")
    window = LayerCache(
        kind="sliding", num_layers=len(ratios), head_elements=width, window=size, fp8_bytes=fp8
    )
    return [*caches, window]


def _states(fields: Fields, kinds: Sequence[Kind], dtype: str) -> list[LayerCache]:
    """Answer the states of layers without attention: of one size, whatever the length."""
    mamba = sum(kind in {"mamba", "both"} for kind in kinds)
    linear = kinds.count("linear")
    short = kinds.count("conv")
    element = ELEMENT_BYTES[dtype]
    states = []
    if mamba:
        states.append(_mamba(fields, mamba, element, _state_bytes(fields, dtype)))
    if linear:
        states.append(_linear(fields, linear, element, dtype))
    if short:
        kept = fields.needed("a layer's state", "conv_L_cache", "L_cache") - 1
        hidden = fields.needed("a layer's state", "conv_dim", "hidden_size")
        states.append(
            LayerCache(kind="state", num_layers=short, state_bytes=kept * hidden * element)
        )
    return states


def _state_bytes(fields: Fields, default: str) -> int:
    """Answer the bytes of an element of a recurrent state: as given, else the model's."""
    word = fields.word("mamba_ssm_cache_dtype", "mamba_ssm_dtype").removeprefix("torch.")
    word = word if word and word != "auto" else default
    if word not in ELEMENT_BYTES:
        raise fields.error("mamba_ssm_dtype", word, f"one of {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[word]


def _mamba(fields: Fields, num_layers: int, element: int, state_element: int) -> LayerCache:
    """Answer the state of Mamba layers: of the recurrence, and of the convolution before it."""
    hidden = fields.needed("a layer's state", "hidden_size", "d_model")
    state = fields.integer("mamba_d_state", "ssm_state_size", "state_size")
    kernel = fields.integer("mamba_d_conv", "conv_kernel", "d_conv", "conv_kernel_size")
    if state is None or kernel is None:
        raise ConfigError(
            f"{fields.where}: mamba_d_state or mamba_d_conv is missing: "
            "the state of Mamba layers cannot be known"
        )
    heads = fields.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    width = fields.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    expand = fields.integer("mamba_expand", "expand") or 2
    inner = fields.integer("mamba_d_ssm", "mamba_intermediate_size") or expand * hidden
    if heads is not None and width is not None:
        inner = heads * width
    elif heads is None:  # the first Mamba: no heads, no groups
        size = inner * state * state_element + inner * (kernel - 1) * element
        return LayerCache(kind="state", num_layers=num_layers, state_bytes=size)
    groups = fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    return LayerCache(
        kind="state",
        num_layers=num_layers,
        num_kv_heads=groups,
        state_bytes=inner * state * state_element + inner * (kernel - 1) * element,
        shared_bytes=2 * groups * state * (kernel - 1) * element,
    )


def _linear(fields: Fields, num_layers: int, element: int, dtype: str) -> LayerCache:
    """Answer the state of linear attention: Kimi's delta attention, gated delta nets, lightning."""
    delta = fields.sub("linear_attn_config")
    if delta is not None and delta.has("num_heads"):
        heads = delta.needed("a layer's state", "num_heads")
        width = delta.needed("a layer's state", "head_dim")
        kernel = delta.needed("a layer's state", "short_conv_kernel_size")
        size = heads * width * width * ELEMENT_BYTES["float32"]  # vLLM keeps it in fp32
        return LayerCache(
            kind="state",
            num_layers=num_layers,
            state_bytes=size + 3 * heads * width * (kernel - 1) * element,
        )
    if fields.has("linear_num_value_heads"):
        what = "the state of linear attention"
        key_heads = fields.needed(what, "linear_num_key_heads")
        value_heads = fields.needed(what, "linear_num_value_heads")
        key, value = (
            fields.needed(what, "linear_key_head_dim"),
            fields.needed(what, "linear_value_head_dim"),
        )
        kernel = fields.needed(what, "linear_conv_kernel_dim")
        conv = 2 * key_heads * key + value_heads * value
        size = value_heads * key * value * _state_bytes(fields, dtype)
        return LayerCache(
            kind="state", num_layers=num_layers, state_bytes=size + conv * (kernel - 1) * element
        )
    if fields.has("attn_type_list"):
        heads = fields.needed("a layer's state", "num_attention_heads")
        width = fields.needed("a layer's state", "head_dim")
        return LayerCache(
            kind="state",
            num_layers=num_layers,
            state_bytes=heads * width * width * _state_bytes(fields, dtype),
        )
    raise ConfigError(
        f"{fields.where}: linear_num_value_heads or linear_attn_config is missing: "
        "the state of linear attention cannot be known"
    )
