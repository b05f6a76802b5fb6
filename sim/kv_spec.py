"""Memory of the KV cache: bytes a token, bytes a block, and the pool that a GPU has room for.

The only file that turns tokens into bytes; the rest of the simulator counts tokens and blocks.
Sizes are those of one GPU. Under tensor parallelism that is one rank: all ranks hold equal shares
of the weights and of every block, so that the pool of one is the pool of all.
"""

import math
from typing import NamedTuple

import msgspec

from sim.errors import CapacityError, ConfigError
from sim.hardware import GIB, GpuSpec
from sim.kv_layout import ELEMENT_BYTES
from sim.kv_layout import kv_bytes_per_token as layout_bytes_per_token
from sim.models import ModelSpec, WeightPart, count_parameters, parameter_counts

DTYPE_BYTES = {"float16": 2, "bfloat16": 2}
"""Bytes of one element, by ``torch_dtype``."""

KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8": 1}
"""Bytes of one element of the KV cache, by ``--kv-cache-dtype``; ``auto`` is the model's dtype."""

VOCAB_PADDING = 64
"""Embeddings are padded to a multiple of this many rows, which tensor parallelism has to divide
(vLLM, ``model_executor/layers/vocab_parallel_embedding.py``)."""

DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
"""vLLM 0.33.0, ``config/cache.py:215``."""

ACTIVATION_FIXED_BYTES = round(0.164 * GIB)
"""Peak activation that does not grow with the sampler. Fitted together with the next."""

ACTIVATION_BYTES_PER_LOGIT = 14.61
"""Bytes of peak activation for each of max_num_seqs * vocabulary logits in the sampler's warm-up.

Fitted on the start-up logs of vLLM 0.19.0 on H100 of llm-d-planner PR #205: within 4.5 % of the
logged activation for 16 of 17 dense models with a vocabulary of 100,000 or more; 21 % below to 13 %
above it (under 0.2 GiB) for smaller vocabularies. All those logs have max_num_seqs 1024: that it is
the multiplier is inferred.
"""

NON_TORCH_BYTES = round(0.26 * GIB)
"""Memory outside torch's allocator on one GPU: 0.24 to 0.27 GiB in the same logs."""

NON_TORCH_BYTES_TENSOR_PARALLEL = round(2.1 * GIB)
"""The same under tensor parallelism, communication buffers included: 2.06 to 2.21 GiB in the six
logs with 2 and 4 H100. More GPUs and other cards are assumed to be alike."""

NULL_BLOCKS = 1
"""Block 0 is never handed out (vLLM 0.33.0, ``v1/core/block_pool.py:188-192``)."""


class MemoryShare(NamedTuple):
    """One part of the card's memory.

    Attributes:
        name: what uses it.
        num_bytes: how much.
        provenance: ``computed``, ``fitted`` or ``given``: what kind of knowledge the size is.
    """

    name: str
    num_bytes: int
    provenance: str


class KVPool(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the KV cache gets.

    Attributes:
        num_gpu_blocks: blocks, vLLM's null block included: usable are one fewer.
        block_size: tokens a block.
        contiguous_slots: token slots that a contiguous allocator gets from the same memory.
        kv_cache_bytes: bytes the pool was sized from; None when the blocks were given.
        breakdown: parts of the card's visible memory, adding up to it; fewer or none without a GPU.
        provenance: one line for the report: where the size comes from.
    """

    num_gpu_blocks: int
    block_size: int
    contiguous_slots: int
    kv_cache_bytes: int | None
    breakdown: tuple[MemoryShare, ...]
    provenance: str


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
    if kv_cache_dtype not in KV_DTYPE_BYTES:
        known = ", ".join(("auto", *KV_DTYPE_BYTES))
        raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype!r} is not one of {known}")
    return KV_DTYPE_BYTES[kv_cache_dtype]


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
    if model.weights:
        return sum(_part_bytes(model, part, tensor_parallel_size) for part in model.weights)
    counts = parameter_counts(model)
    elements = (
        counts.embeddings // model.vocab_size * padded_vocab_size(model) // tensor_parallel_size
        + counts.kv_projections // min(tensor_parallel_size, model.num_key_value_heads)
        + counts.replicated
        + counts.split // tensor_parallel_size
        + model.num_parameters
        - count_parameters(model)
    )
    return elements * dtype_bytes(model)


def non_torch_bytes(tensor_parallel_size: int = 1) -> int:
    """Answer the memory outside torch's allocator on one GPU (fitted)."""
    return NON_TORCH_BYTES if tensor_parallel_size == 1 else NON_TORCH_BYTES_TENSOR_PARALLEL


def activation_bytes(model: ModelSpec, max_num_seqs: int) -> int:
    """Answer the peak activation of vLLM's profiling run (`ACTIVATION_BYTES_PER_LOGIT`, fitted)."""
    logits = max_num_seqs * model.vocab_size
    return ACTIVATION_FIXED_BYTES + round(ACTIVATION_BYTES_PER_LOGIT * logits)


class _Rank(NamedTuple):
    """One of the equal GPUs that share *model*, and how it holds the KV cache."""

    model: ModelSpec
    tensor_parallel_size: int
    kv_cache_dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in its KV cache."""
        return kv_bytes_per_token(
            self.model,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def takes(self) -> str:
        """The model and how much of it is here, for a message: subject and verb."""
        if self.tensor_parallel_size == 1:
            return f"{self.model.name} takes"
        return f"{self.model.name} on each of {self.tensor_parallel_size} GPUs takes"

    def fixed_shares(self, max_num_seqs: int) -> tuple[MemoryShare, ...]:
        """Answer what is in the card's memory before any KV cache."""
        tp = self.tensor_parallel_size
        return (
            MemoryShare("weights", weight_bytes(self.model, tp), "computed"),
            MemoryShare("peak activation", activation_bytes(self.model, max_num_seqs), "fitted"),
            MemoryShare("non-torch", non_torch_bytes(tp), "fitted"),
        )

    def provenance(self, text: str) -> str:
        """Answer *text* with whose pool it speaks of and what a KV element is, where not usual."""
        if self.kv_cache_dtype != "auto":
            text = f"{text}; KV cache in {self.kv_cache_dtype}"
        return _per_gpu(text, self.tensor_parallel_size)


def _per_gpu(text: str, tensor_parallel_size: int) -> str:
    """Answer *text* about one GPU, saying so if there are several."""
    if tensor_parallel_size == 1:
        return text
    return f"per GPU, tensor parallel {tensor_parallel_size}: {text}"


def size_kv_pool(
    model: ModelSpec | None,
    gpu: GpuSpec | None,
    *,
    block_size: int,
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    max_model_len: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> KVPool:
    """Answer the pool that an engine gets, by vLLM's order of precedence.

    Under tensor parallelism it is the pool of one GPU, and all are equal.

    *num_gpu_blocks_override* wins and needs neither model nor GPU; then *kv_cache_memory_bytes*,
    which needs a model; else ceil(visible * utilization) - weights - peak activation - non-torch
    (vLLM 0.33.0, ``v1/worker/gpu_worker.py:753-757``). Activation and non-torch are fitted on vLLM
    0.19 logs. The memory of CUDA graphs is not modelled: vLLM 0.19 does not subtract it, 0.33
    subtracts an estimate (0.5 to 1.9 GiB in the logs).

    Raises:
        ConfigError: a setting out of its range, *max_model_len* beyond the model's, a model that
            a model or GPU that is needed and
            missing, or memory in which nothing is left for the KV cache.
    """
    for flag, value in (
        ("--block-size", block_size),
        ("--max-model-len", max_model_len),
        ("--max-num-seqs", max_num_seqs),
    ):
        if value < 1:
            raise ConfigError(f"{flag} {value}: expected at least 1")
    if model is not None and max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is beyond {model.name}: "
            f"expected at most its max_position_embeddings {model.max_position_embeddings}"
        )
    if num_gpu_blocks_override is not None:
        return _pool_of_blocks(num_gpu_blocks_override, block_size, tensor_parallel_size)
    if model is None:
        raise ConfigError("--model is missing: name one, or give --num-gpu-blocks-override")
    rank = _Rank(model, tensor_parallel_size, kv_cache_dtype)
    if kv_cache_memory_bytes is not None:
        return _pool_of_bytes(rank, gpu, block_size, kv_cache_memory_bytes, max_num_seqs)
    if gpu is None:
        raise ConfigError(
            "--gpu is missing: name one, "
            "or give --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    least_blocks = -(-max_model_len // block_size) + NULL_BLOCKS
    return _pool_of_gpu(
        rank,
        gpu,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        least_kv_bytes=rank.bytes_per_token * block_size * least_blocks,
    )


def _pool_of_blocks(num_gpu_blocks: int, block_size: int, tensor_parallel_size: int) -> KVPool:
    """Answer the pool of a given number of blocks; ConfigError when none of them is usable."""
    if num_gpu_blocks <= NULL_BLOCKS:
        raise ConfigError(
            f"--num-gpu-blocks-override {num_gpu_blocks}: expected at least {NULL_BLOCKS + 1}, "
            "because block 0 is the null block and holds no tokens"
        )
    return KVPool(
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        contiguous_slots=(num_gpu_blocks - NULL_BLOCKS) * block_size,
        kv_cache_bytes=None,
        breakdown=(),
        provenance=_per_gpu(
            f"{num_gpu_blocks} blocks given by --num-gpu-blocks-override", tensor_parallel_size
        ),
    )


def _pool(
    rank: _Rank,
    block_size: int,
    kv_cache_bytes: int,
    breakdown: tuple[MemoryShare, ...],
    provenance: str,
) -> KVPool:
    """Answer the pool of a given number of bytes, already found to hold a usable block."""
    return KVPool(
        num_gpu_blocks=kv_cache_bytes // (rank.bytes_per_token * block_size),
        block_size=block_size,
        contiguous_slots=kv_cache_bytes // rank.bytes_per_token,
        kv_cache_bytes=kv_cache_bytes,
        breakdown=breakdown,
        provenance=rank.provenance(provenance),
    )


def _pool_of_bytes(
    rank: _Rank,
    gpu: GpuSpec | None,
    block_size: int,
    kv_cache_bytes: int,
    max_num_seqs: int,
) -> KVPool:
    """Answer the pool of given bytes; ConfigError when they, or the card, are too small."""
    flag = f"--kv-cache-memory-bytes {kv_cache_bytes}"
    least = rank.bytes_per_token * block_size * (1 + NULL_BLOCKS)
    if kv_cache_bytes < least:
        raise ConfigError(
            f"{flag}: expected at least {least}, one usable block and the null block of "
            f"{block_size} tokens of {rank.model.name}"
        )
    kv_share = MemoryShare("KV cache", kv_cache_bytes, "given")
    breakdown: tuple[MemoryShare, ...] = (kv_share,)
    if gpu is not None:
        fixed = rank.fixed_shares(max_num_seqs)
        used = sum(share.num_bytes for share in fixed)
        unused = gpu.memory_visible_bytes - used - kv_cache_bytes
        if unused < 0:
            raise CapacityError(
                f"{flag} ({_gib(kv_cache_bytes)}) does not fit: {gpu.name} has "
                f"{_gib(gpu.memory_visible_bytes)} visible, {rank.takes} {_gib(used)} of it "
                f"({_listed(fixed)}): {_gib(-unused)} short"
            )
        breakdown = (*fixed, kv_share, MemoryShare("unused", unused, "computed"))
    return _pool(
        rank,
        block_size,
        kv_cache_bytes,
        breakdown,
        f"{_gib(kv_cache_bytes)} given by --kv-cache-memory-bytes",
    )


def _pool_of_gpu(
    rank: _Rank,
    gpu: GpuSpec,
    *,
    block_size: int,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    least_kv_bytes: int,
) -> KVPool:
    """Answer the pool of a card; *least_kv_bytes*, for the advice, holds one longest request."""
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {gpu_memory_utilization}: expected above 0 and at most 1"
        )
    visible = gpu.memory_visible_bytes
    requested = math.ceil(visible * gpu_memory_utilization)
    fixed = rank.fixed_shares(max_num_seqs)
    used = sum(share.num_bytes for share in fixed)
    kv_cache_bytes = requested - used
    if kv_cache_bytes < rank.bytes_per_token * block_size * (1 + NULL_BLOCKS):
        short = fixed[0].num_bytes - requested
        what = f"weights do not fit, {_gib(short)} short" if short > 0 else "no KV cache is left"
        raise CapacityError(
            f"--gpu-memory-utilization {gpu_memory_utilization} of {gpu.name} is "
            f"{_gib(requested)} of {_gib(visible)} visible, but {rank.takes} {_gib(used)} "
            f"({_listed(fixed)}): {what}; "
            f"{_smallest_utilization(visible, used + least_kv_bytes)}"
        )
    breakdown = (
        *fixed,
        MemoryShare("KV cache", kv_cache_bytes, "computed"),
        MemoryShare("left by --gpu-memory-utilization", visible - requested, "given"),
    )
    return _pool(
        rank,
        block_size,
        kv_cache_bytes,
        breakdown,
        f"{gpu_memory_utilization} of {gpu.name}'s {_gib(visible)} visible, less weights, and less "
        "activation and non-torch memory fitted on vLLM 0.19 logs (CUDA graphs not modelled)",
    )


def _smallest_utilization(visible: int, needed: int) -> str:
    """Answer the advice of a refusal: the utilization, in hundredths, that gives *needed* bytes."""
    hundredths = math.ceil(needed * 100 / visible)
    if hundredths <= 100:
        return f"a request of --max-model-len needs at least {hundredths / 100:.2f}"
    return (
        f"even 1.0 is {_gib(needed - visible)} short for a request of --max-model-len: "
        "take a larger --gpu or --tensor-parallel-size, or a smaller --model, --max-model-len or "
        "--max-num-seqs"
    )


def _gib(num_bytes: int) -> str:
    """Answer *num_bytes* for a message: GiB with two digits."""
    return f"{num_bytes / GIB:.2f} GiB"


def _listed(shares: tuple[MemoryShare, ...]) -> str:
    """Answer *shares* for a message."""
    return " + ".join(f"{share.name} {share.num_bytes / GIB:.2f}" for share in shares)


def kv_cache_lines(pool: KVPool, max_model_len: int) -> str:
    """Answer vLLM's start-up line about the size of the KV cache.

    vLLM 0.33.0, ``v1/core/kv_cache_utils.py:1061-1153``: all blocks count, the null block too, and
    tokens follow from the rounded-up blocks of a longest request, so a *max_model_len* that is no
    multiple of the block size shows fewer tokens than blocks * block size.
    """
    max_concurrency = pool.num_gpu_blocks / -(-max_model_len // pool.block_size)
    num_tokens = int(max_concurrency * max_model_len)
    return (
        f"GPU KV cache size: {num_tokens:,} tokens, "
        f"Maximum concurrency for {max_model_len:,} tokens per request: {max_concurrency:.2f}x"
    )


def check_max_model_len(
    max_model_len: int, *, needed: int, available: int, unit: str, longest: int
) -> None:
    """Check at start that one request of *max_model_len* tokens can ever be served.

    vLLM 0.33.0 refuses to start otherwise (``v1/core/kv_cache_utils.py:151-184``).

    Args:
        max_model_len: tokens of the longest request.
        needed: units of memory that such a request takes from the allocator that asks.
        available: units that the allocator can hand out; for blocks the null block does not count.
        unit: name of the unit in the plural, e.g. ``blocks of 16 tokens`` or ``slots``.
        longest: tokens of the longest request that *available* holds.

    Raises:
        CapacityError: *needed* is more than *available*.
    """
    if needed > available:
        raise CapacityError(
            f"max_model_len {max_model_len} needs {needed} {unit}, the pool has {available}: "
            f"lower --max-model-len to at most {longest} or enlarge the pool "
            "(--gpu-memory-utilization, --num-gpu-blocks-override)"
        )
