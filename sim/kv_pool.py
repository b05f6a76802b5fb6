"""The pool of KV blocks that a GPU has room for, and what vLLM says of it at start.

Sizes are those of one GPU; under tensor parallelism all ranks are equal, so that the pool of one is
the pool of all.
"""

import math
from typing import NamedTuple

import msgspec

from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import GIB, GpuSpec
from sim.kv_groups import CacheGroup, CacheGroups, cache_groups
from sim.kv_layout import fixed_state_bytes
from sim.kv_spec import kv_bytes_per_token
from sim.memory import Engine, MemoryShare, fixed_shares, memory_rules
from sim.models import ModelSpec

NULL_BLOCKS = 1
"""Block 0 is never handed out (vLLM 0.33.0, ``v1/core/block_pool.py:188-192``)."""


class KVPool(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the KV cache gets.

    Attributes:
        num_gpu_blocks: blocks, vLLM's null block included: usable are one fewer.
        block_size: tokens a block.
        contiguous_slots: token slots that a contiguous allocator gets from the same memory.
        kv_cache_bytes: bytes the pool was sized from; None when the blocks were given.
        breakdown: parts of the card's visible memory, adding up to it; fewer or none without a GPU.
        provenance: one line for the report: where the size comes from.
        groups: block tables of a request; None is one for all layers.
        max_num_batched_tokens: of a step, for which windows have room.
        counts_a_group: the tokens that are printed are those of one group, as before vLLM 0.21.
    """

    num_gpu_blocks: int
    block_size: int
    contiguous_slots: int
    kv_cache_bytes: int | None
    breakdown: tuple[MemoryShare, ...]
    provenance: str
    groups: CacheGroups | None = None
    max_num_batched_tokens: int = 0
    counts_a_group: bool = False

    @property
    def tables(self) -> tuple[CacheGroup, ...]:
        """The block tables of a request."""
        if self.groups is not None:
            return self.groups.groups
        return (CacheGroup("full", 0, self.block_size, 0),)

    def blocks_for(self, num_tokens: int) -> int:
        """Answer the blocks that vLLM counts for a request of *num_tokens* at start."""
        if self.groups is None:
            return -(-num_tokens // self.block_size)
        return self.groups.blocks_for(
            num_tokens, max_num_batched_tokens=self.max_num_batched_tokens
        )

    def longest_request(self, num_blocks: int) -> int:
        """Answer the tokens of the longest request that *num_blocks* hold; 0 if none does."""
        low, high = 0, num_blocks * max(table.block_size for table in self.tables)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


class _Rank(NamedTuple):
    """One of the equal GPUs that share *model*, and how it holds the KV cache."""

    model: ModelSpec
    engine: Engine
    kv_cache_dtype: str
    groups: CacheGroups
    max_model_len: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in its KV cache."""
        return kv_bytes_per_token(
            self.model,
            tensor_parallel_size=self.engine.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest pool: a block of every table, and the null block."""
        return self.groups.bytes_per_block * (len(self.groups.groups) + NULL_BLOCKS)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token slot of a contiguous reservation, with its part of the states."""
        states = fixed_state_bytes(self.model.layout, self.engine.tensor_parallel_size)
        return self.bytes_per_token - (-states // self.max_model_len)

    @property
    def takes(self) -> str:
        """The model and how much of it is here, for a message: subject and verb."""
        if self.engine.tensor_parallel_size == 1:
            return f"{self.model.name} takes"
        return f"{self.model.name} on each of {self.engine.tensor_parallel_size} GPUs takes"

    def provenance(self, text: str) -> str:
        """Answer *text* with whose pool it speaks of and what a KV element is, where not usual."""
        if self.kv_cache_dtype != "auto":
            text = f"{text}; KV cache in {self.kv_cache_dtype}"
        return _per_gpu(text, self.engine.tensor_parallel_size)


def _per_gpu(text: str, tensor_parallel_size: int) -> str:
    """Answer *text* about one GPU, saying so if there are several."""
    if tensor_parallel_size == 1:
        return text
    return f"per GPU, tensor parallel {tensor_parallel_size}: {text}"


def size_kv_pool(
    model: ModelSpec | None,
    gpu: GpuSpec | None,
    engine: Engine,
    *,
    block_size: int,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    max_model_len: int,
    kv_cache_dtype: str = "auto",
    groups: CacheGroups | None = None,
) -> KVPool:
    """Answer the pool that *engine* gets, by vLLM's order of precedence.

    *num_gpu_blocks_override* wins and needs neither model nor GPU; then *kv_cache_memory_bytes*,
    which needs a model; else ceil(visible * utilization) less the shares of `sim.memory`
    (vLLM 0.33.0, ``v1/worker/gpu_worker.py:753-757``). *gpu_memory_utilization* None is the
    version's default; *groups* None is one block table for all layers.

    Raises:
        ConfigError: a setting out of its range, *max_model_len* beyond the model's, a model or GPU
            that is needed and missing.
        CapacityError: memory in which nothing is left for the KV cache.
    """
    for flag, value in (
        ("--block-size", block_size),
        ("--max-model-len", max_model_len),
        ("--max-num-seqs", engine.max_num_seqs),
    ):
        if value < 1:
            raise ConfigError(f"{flag} {value}: expected at least 1")
    if model is not None and max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is beyond {model.name}: "
            f"expected at most its max_position_embeddings {model.max_position_embeddings}"
        )
    if num_gpu_blocks_override is not None:
        return _pool_of_blocks(num_gpu_blocks_override, block_size, engine, groups)
    if model is None:
        raise ConfigError("--model is missing: name one, or give --num-gpu-blocks-override")
    if groups is None:
        per_token = kv_bytes_per_token(
            model,
            tensor_parallel_size=engine.tensor_parallel_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        table = CacheGroup("full", model.num_hidden_layers, block_size, 0)
        groups = CacheGroups((table,), per_token * block_size)
    rank = _Rank(model, engine, kv_cache_dtype, groups, max_model_len)
    if kv_cache_memory_bytes is not None:
        return _pool_of_bytes(rank, gpu, kv_cache_memory_bytes)
    if gpu is None:
        raise ConfigError(
            "--gpu is missing: name one, "
            "or give --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    least_blocks = NULL_BLOCKS + groups.blocks_for(
        max_model_len, max_num_batched_tokens=engine.max_num_batched_tokens
    )
    return _pool_of_gpu(
        rank,
        gpu,
        gpu_memory_utilization=(
            engine.rules.utilization if gpu_memory_utilization is None else gpu_memory_utilization
        ),
        least_kv_bytes=groups.bytes_per_block * least_blocks,
    )


def engine_of(config: RunConfig) -> Engine:
    """Answer what of a resolved configuration memory follows from."""
    model, scheduler = config.model, config.scheduler
    assert scheduler.max_num_seqs is not None, "resolved"
    assert scheduler.max_num_batched_tokens is not None, "resolved"
    return Engine(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        tensor_parallel_size=model.tensor_parallel_size,
        enable_expert_parallel=model.enable_expert_parallel,
        enforce_eager=config.timing.enforce_eager,
        rules=memory_rules(config.cache.vllm_version),
    )


def groups_of(config: RunConfig, model: ModelSpec) -> CacheGroups:
    """Answer the block tables that vLLM gives a request of *model*.

    Raises:
        ConfigError: they are not modelled.
    """
    try:
        groups = cache_groups(
            model.layout,
            config.cache.block_size,
            tensor_parallel_size=config.model.tensor_parallel_size,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            ratio=memory_rules(config.cache.vllm_version).group_ratio,
        )
    except ConfigError as error:
        raise ConfigError(f"--model {model.name}: {error}") from None
    if not groups.block_size:
        raise ConfigError(f"--model {model.name}: no layer keeps keys and values of tokens")
    return groups


def pool_of(
    config: RunConfig, model: ModelSpec, gpu: GpuSpec | None, *, grouped: bool = False
) -> KVPool:
    """Answer the pool of a resolved configuration, whose model and GPU are *model* and *gpu*.

    *grouped*: windows and states have block tables of their own, as in vLLM; else every layer keeps
    every token, which is what the allocators of a run do.

    Raises:
        ConfigError, CapacityError: see `size_kv_pool`.
    """
    cache = config.cache
    assert config.model.max_model_len is not None, "resolved"
    return size_kv_pool(
        model if cache.num_gpu_blocks_override is None else None,
        gpu,
        engine_of(config),
        block_size=cache.block_size,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        num_gpu_blocks_override=cache.num_gpu_blocks_override,
        max_model_len=config.model.max_model_len,
        kv_cache_dtype=cache.kv_cache_dtype,
        groups=groups_of(config, model) if grouped else None,
    )


def _pool_of_blocks(
    num_gpu_blocks: int, block_size: int, engine: Engine, groups: CacheGroups | None
) -> KVPool:
    """Answer the pool of a given number of blocks; ConfigError when none of them is usable."""
    if num_gpu_blocks <= NULL_BLOCKS:
        raise ConfigError(
            f"--num-gpu-blocks-override {num_gpu_blocks}: expected at least {NULL_BLOCKS + 1}, "
            "because block 0 is the null block and holds no tokens"
        )
    return KVPool(
        num_gpu_blocks=num_gpu_blocks,
        block_size=groups.block_size if groups is not None else block_size,
        contiguous_slots=(num_gpu_blocks - NULL_BLOCKS) * block_size,
        kv_cache_bytes=None,
        breakdown=(),
        provenance=_per_gpu(
            f"{num_gpu_blocks} blocks given by --num-gpu-blocks-override",
            engine.tensor_parallel_size,
        ),
        groups=groups,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        counts_a_group=engine.rules.counts_a_group,
    )


def _pool(
    rank: _Rank,
    kv_cache_bytes: int,
    breakdown: tuple[MemoryShare, ...],
    provenance: str,
) -> KVPool:
    """Answer the pool of a given number of bytes, already found to hold a usable block."""
    return KVPool(
        num_gpu_blocks=kv_cache_bytes // rank.groups.bytes_per_block,
        block_size=rank.groups.block_size,
        contiguous_slots=kv_cache_bytes // rank.bytes_per_slot,
        kv_cache_bytes=kv_cache_bytes,
        breakdown=breakdown,
        provenance=rank.provenance(provenance),
        groups=rank.groups,
        max_num_batched_tokens=rank.engine.max_num_batched_tokens,
        counts_a_group=rank.engine.rules.counts_a_group,
    )


def _pool_of_bytes(
    rank: _Rank,
    gpu: GpuSpec | None,
    kv_cache_bytes: int,
) -> KVPool:
    """Answer the pool of given bytes; ConfigError when they, or the card, are too small."""
    flag = f"--kv-cache-memory-bytes {kv_cache_bytes}"
    if kv_cache_bytes < rank.least_bytes:
        raise ConfigError(
            f"{flag}: expected at least {rank.least_bytes}, one usable block and the null block of "
            f"{rank.groups.block_size} tokens of {rank.model.name}"
        )
    kv_share = MemoryShare("KV cache", kv_cache_bytes, "given")
    breakdown: tuple[MemoryShare, ...] = (kv_share,)
    if gpu is not None:
        fixed = fixed_shares(rank.model, gpu, rank.engine)
        used = sum(share.num_bytes for share in fixed)
        unused = gpu.memory_visible_bytes - used - kv_cache_bytes
        if unused < 0:
            raise CapacityError(
                f"{flag} ({gib(kv_cache_bytes)}) does not fit: {gpu.name} has "
                f"{gib(gpu.memory_visible_bytes)} visible, {rank.takes} {gib(used)} of it "
                f"({_listed(fixed)}): {gib(-unused)} short"
            )
        breakdown = (*fixed, kv_share, MemoryShare("unused", unused, "computed"))
    return _pool(
        rank,
        kv_cache_bytes,
        breakdown,
        f"{gib(kv_cache_bytes)} given by --kv-cache-memory-bytes",
    )


def _pool_of_gpu(
    rank: _Rank,
    gpu: GpuSpec,
    *,
    gpu_memory_utilization: float,
    least_kv_bytes: int,
) -> KVPool:
    """Answer the pool of a card; *least_kv_bytes*, for the advice, holds one longest request."""
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {gpu_memory_utilization}: expected above 0 and at most 1"
        )
    visible = gpu.memory_visible_bytes
    requested = math.ceil(visible * gpu_memory_utilization)
    fixed = fixed_shares(rank.model, gpu, rank.engine)
    used = sum(share.num_bytes for share in fixed)
    kv_cache_bytes = requested - used
    if kv_cache_bytes < rank.least_bytes:
        short = fixed[0].num_bytes - requested
        what = f"weights do not fit, {gib(short)} short" if short > 0 else "no KV cache is left"
        raise CapacityError(
            f"--gpu-memory-utilization {gpu_memory_utilization} of {gpu.name} is "
            f"{gib(requested)} of {gib(visible)} visible, but {rank.takes} {gib(used)} "
            f"({_listed(fixed)}): {what}; "
            f"{_smallest_utilization(visible, used + least_kv_bytes)}"
        )
    breakdown = (
        *fixed,
        MemoryShare("KV cache", kv_cache_bytes, "computed"),
        MemoryShare("outside utilization", visible - requested, "given"),
    )
    return _pool(
        rank,
        kv_cache_bytes,
        breakdown,
        f"{gpu_memory_utilization} of {gpu.name}'s {gib(visible)} visible, less weights, "
        f"{', '.join(share.name for share in fixed[1:])} as vLLM {rank.engine.rules.version} "
        "counts them (computed, constants fitted on logs)",
    )


def _smallest_utilization(visible: int, needed: int) -> str:
    """Answer the advice of a refusal: the utilization, in hundredths, that gives *needed* bytes."""
    hundredths = math.ceil(needed * 100 / visible)
    if hundredths <= 100:
        return f"a request of --max-model-len needs at least {hundredths / 100:.2f}"
    return (
        f"even 1.0 is {gib(needed - visible)} short for a request of --max-model-len: "
        "take a larger --gpu or --tensor-parallel-size, or a smaller --model, --max-model-len or "
        "--max-num-seqs"
    )


def gib(num_bytes: int) -> str:
    """Answer *num_bytes* for a message: GiB with two digits."""
    return f"{num_bytes / GIB:.2f} GiB"


def _listed(shares: tuple[MemoryShare, ...]) -> str:
    """Answer *shares* for a message."""
    return " + ".join(f"{share.name} {share.num_bytes / GIB:.2f}" for share in shares)


def kv_cache_figures(pool: KVPool, max_model_len: int) -> tuple[int, float]:
    """Answer tokens and concurrency as `kv_cache_lines` has them."""
    max_concurrency = pool.num_gpu_blocks / pool.blocks_for(max_model_len)
    if pool.counts_a_group:
        least = min(table.block_size for table in pool.tables if table.block_size)
        return pool.num_gpu_blocks // len(pool.tables) * least, max_concurrency
    return int(max_concurrency * max_model_len), max_concurrency


def kv_cache_lines(pool: KVPool, max_model_len: int) -> str:
    """Answer vLLM's start-up line about the size of the KV cache.

    vLLM 0.33.0, ``v1/core/kv_cache_utils.py:1061-1153``: all blocks count, the null block too, and
    tokens follow from the rounded-up blocks of a longest request, so a *max_model_len* that is no
    multiple of the block size shows fewer tokens than blocks * block size. Before 0.21 tokens are
    those of one block table, of all that a request has.
    """
    num_tokens, max_concurrency = kv_cache_figures(pool, max_model_len)
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
