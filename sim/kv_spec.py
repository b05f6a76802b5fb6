"""Bytes of a model: of a token in the KV cache, of a block, of the weights.

With `sim.memory` and `sim.kv_pool` the only place that knows bytes; the rest of the simulator
counts tokens and blocks. Sizes are those of one GPU. Under tensor parallelism that is one rank: all
ranks hold equal shares of the weights and of every block.
"""

from sim.errors import ConfigError
from sim.kv_layout import ELEMENT_BYTES
from sim.kv_layout import kv_bytes_per_token as layout_bytes_per_token
from sim.models import ModelSpec, WeightPart, weight_parts

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element, by ``torch_dtype``."""

VOCAB_PADDING = 64
"""Embeddings are padded to a multiple of this many rows, which tensor parallelism has to divide
(vLLM, ``model_executor/layers/vocab_parallel_embedding.py``)."""


def dtype_bytes(model: ModelSpec) -> int:
    """Answer the bytes of one element of the model's weights and of its KV cache.

    Raises:
        ConfigError: the model's dtype is not one of `DTYPE_BYTES`.
    """
    if model.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"--model {model.name}: dtype {model.dtype!r} is not one of {known}")
    return DTYPE_BYTES[model.dtype]


def kv_element_bytes(model: ModelSpec, kv_cache_dtype: str = "auto") -> int:
    """Answer the bytes of one element of *model*'s KV cache under ``--kv-cache-dtype``.

    Raises:
        ConfigError: *kv_cache_dtype*, or the model's own dtype under ``auto``, is unknown.
    """
    if kv_cache_dtype == "auto":
        if model.kv_layout is not None:
            return ELEMENT_BYTES[model.kv_layout.auto_dtype]
        return dtype_bytes(model)
    return ELEMENT_BYTES[model.layout.dtype(kv_cache_dtype)]


def _uneven(
    model: ModelSpec, tensor_parallel_size: int, enable_expert_parallel: bool
) -> str | None:
    """Answer what of *model* cannot be shared equally by that many GPUs; None if all can."""
    tp, kv_heads = tensor_parallel_size, model.num_key_value_heads
    shared = {
        "attention heads": model.num_attention_heads,
        "rows of the padded vocabulary": padded_vocab_size(model),
        "columns of the MLP": model.intermediate_size if model.has_dense_layers else 0,
        **(
            {"experts": model.num_experts}
            if enable_expert_parallel
            else {"columns of an expert": model.moe_intermediate_size}
        ),
        "columns of the shared experts": model.shared_expert_intermediate_size,
    }
    for what, number in shared.items():
        if number % tp:
            return f"{number} {what}"
    if not model.is_mla and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads, neither split nor copied,"
    return None


def check_tensor_parallel(
    model: ModelSpec, tensor_parallel_size: int, *, enable_expert_parallel: bool = False
) -> None:
    """Check that *model* can be shared equally by *tensor_parallel_size* GPUs, as vLLM does.

    vLLM 0.33.0 refuses heads in ``config/model.py`` and ``QKVParallelLinear``, every other matrix
    by ``distributed.divide``.

    Raises:
        ConfigError: it cannot; the message has what cannot be shared, and the sizes that can be.
    """
    if tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size {tensor_parallel_size}: expected at least 1")
    uneven = _uneven(model, tensor_parallel_size, enable_expert_parallel)
    if uneven is not None:
        sizes = range(1, model.num_attention_heads + 1)
        fitting = ", ".join(
            str(size) for size in sizes if _uneven(model, size, enable_expert_parallel) is None
        )
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size}: {model.name} has {uneven} "
            f"that cannot be shared equally by {tensor_parallel_size} GPUs; "
            f"expected one of {fitting}"
        )


def padded_vocab_size(model: ModelSpec) -> int:
    """Answer the rows of an embedding of *model* in memory (`VOCAB_PADDING`)."""
    return -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def kv_heads_per_rank(model: ModelSpec, tensor_parallel_size: int = 1) -> int:
    """Answer the KV heads that one GPU holds: a share, or a copy where there are too few.

    vLLM 0.33.0, ``config/model.py:1663``. Under latent attention every GPU holds the one latent.
    """
    return 1 if model.is_mla else max(1, model.num_key_value_heads // tensor_parallel_size)


def kv_bytes_per_token(
    model: ModelSpec, *, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto"
) -> int:
    """Answer the bytes that one token takes in the KV cache of one GPU, over all layers.

    2 * layers * kv heads * head_dim * bytes (PagedAttention, arXiv 2309.06180 section 3:
    800 KiB for OPT-13B; vLLM 0.33.0, ``v1/kv_cache_interface.py:586-601``). Under latent attention
    layers * (kv_lora_rank + qk_rope_head_dim) * bytes, on every GPU (ibid., 729-743). Layers with a
    window count while the token is in it, states of a fixed size do not (`sim.kv_layout`).
    """
    kv_element_bytes(model, kv_cache_dtype)
    return layout_bytes_per_token(
        model.layout, tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype
    )


def bytes_per_block(
    model: ModelSpec,
    block_size: int,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> int:
    """Answer the bytes of one block of *block_size* tokens on one GPU, over all layers."""
    per_token = kv_bytes_per_token(
        model, tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype
    )
    return per_token * block_size


def _part_bytes(model: ModelSpec, part: WeightPart, tensor_parallel_size: int) -> int:
    """Answer the bytes of *part* on one GPU."""
    elements = part.elements
    if part.held_by == "vocabulary":
        elements = elements // model.vocab_size * padded_vocab_size(model) // tensor_parallel_size
    elif part.held_by == "kv_heads":
        elements //= min(tensor_parallel_size, model.num_key_value_heads)
    elif part.held_by == "ranks":
        elements //= tensor_parallel_size
    return round(elements * (part.bits or 8 * dtype_bytes(model)) / 8)


def weight_bytes(model: ModelSpec, tensor_parallel_size: int = 1) -> int:
    """Answer the bytes of the weights on one GPU.

    A matrix is split by column or row, key and value projections by KV head (copied where there are
    fewer heads than GPUs), embeddings by row of the padded vocabulary; routers and latent
    down-projections are on every GPU, and so is what ``num_parameters`` has beyond the shapes
    (OPT's learned positions). Norms are left out. Within 0.9 % of what vLLM logs for dense
    models here on 1, 2 and 4 GPUs. Quantized parts take their own bits.

    Raises:
        ConfigError: the model's ``config.json`` lacks fields that weights follow from.
    """
    if model.unknown:
        raise ConfigError(
            f"--model {model.name}: {', '.join(model.unknown)} missing: its weights cannot be "
            "counted; give --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    return sum(_part_bytes(model, part, tensor_parallel_size) for part in weight_parts(model))
