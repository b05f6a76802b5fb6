"""How large the pool of KV blocks is that an engine gets.

Sizes are those of one GPU. Under tensor parallelism all ranks are equal, so that the pool of one is
the pool of all; of pipeline stages the one with the fewest blocks decides.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import GIB, GpuSpec
from sim.kv_groups import CacheGroup, CacheGroups, cache_groups
from sim.kv_layout import fixed_state_bytes, sequence_bytes
from sim.kv_pool import NULL_BLOCKS, KVPool, gib
from sim.kv_spec import kv_bytes_per_token
from sim.memory import Engine, MemoryShare, fixed_shares, memory_rules
from sim.models import ModelSpec
from sim.stages import Span, groups_of_stage, model_of_stage, spans_of_stages


class _Rank(NamedTuple):
    """One of the equal GPUs of a stage, *model* being its part, and how it holds the KV cache."""

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
        """Bytes of a token slot of a contiguous reservation, with its part of what is fixed."""
        if len(self.groups.groups) > 1:
            whole = sequence_bytes(
                self.model.layout,
                self.max_model_len,
                tensor_parallel_size=self.engine.tensor_parallel_size,
                kv_cache_dtype=self.kv_cache_dtype,
            )
            return -(-whole // self.max_model_len)
        states = fixed_state_bytes(self.model.layout, self.engine.tensor_parallel_size)
        return self.bytes_per_token - (-states // self.max_model_len)

    @property
    def takes(self) -> str:
        """The model and how much of it is here, for a message: subject and verb."""
        ranks, stages = self.engine.tensor_parallel_size, self.engine.pipeline_parallel_size
        name = self.model.name
        if stages > 1:
            name = f"stage {self.engine.stage + 1} of {stages} of {name}"
        return f"{name} takes" if ranks == 1 else f"{name} on each of {ranks} GPUs takes"

    def provenance(self, text: str) -> str:
        """Answer *text* with whose pool it speaks of and what a KV element is, where not usual."""
        if self.kv_cache_dtype != "auto":
            text = f"{text}; KV cache in {self.kv_cache_dtype}"
        return _per_gpu(text, self.engine)


def _per_gpu(text: str, engine: Engine) -> str:
    """Answer *text* about one GPU, saying which if there are several."""
    which = []
    if engine.tensor_parallel_size > 1:
        which.append(f"tensor parallel {engine.tensor_parallel_size}")
    if engine.pipeline_parallel_size > 1:
        which.append(f"stage {engine.stage + 1} of {engine.pipeline_parallel_size} has least room")
    return f"per GPU, {', '.join(which)}: {text}" if which else text


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
    if kv_cache_memory_bytes is None and gpu is None:
        raise ConfigError(
            "--gpu is missing: name one, "
            "or give --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    if groups is None:
        groups = _one_table(model, engine, block_size, kv_cache_dtype)
    pools = []
    for rank in _ranks(model, engine, kv_cache_dtype, groups, max_model_len):
        if kv_cache_memory_bytes is not None:
            pools.append(_pool_of_bytes(rank, gpu, kv_cache_memory_bytes))
        elif gpu is not None:
            utilization = gpu_memory_utilization
            if utilization is None:
                utilization = engine.rules.utilization
            pools.append(_pool_of_gpu(rank, gpu, gpu_memory_utilization=utilization))
    return min(pools, key=lambda pool: pool.num_gpu_blocks)


def _one_table(
    model: ModelSpec, engine: Engine, block_size: int, kv_cache_dtype: str
) -> CacheGroups:
    """Answer the block table that all layers share, each keeping every token."""
    per_token = kv_bytes_per_token(
        model,
        tensor_parallel_size=engine.tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    table = CacheGroup("full", model.num_hidden_layers, block_size, 0)
    return CacheGroups((table,), per_token * block_size)


def _ranks(
    model: ModelSpec,
    engine: Engine,
    kv_cache_dtype: str,
    groups: CacheGroups,
    max_model_len: int,
) -> Iterator[_Rank]:
    """Answer a GPU of every stage.

    Raises:
        ConfigError: stages that the model cannot be divided into.
    """
    for span, part, part_engine in stages_of(model, engine):
        part_groups = groups_of_stage(groups, span)
        yield _Rank(part, part_engine, kv_cache_dtype, part_groups, max_model_len)


def stages_of(model: ModelSpec, engine: Engine) -> Iterator[tuple[Span, ModelSpec, Engine]]:
    """Answer each stage of *engine*: its layers, what it holds of *model*, and its GPU's engine.

    Raises:
        ConfigError: stages that the model cannot be divided into.
    """
    spans = spans_of_stages(model.num_hidden_layers, engine.pipeline_parallel_size)
    for stage, span in enumerate(spans):
        yield span, model_of_stage(model, span), engine._replace(stage=stage)


def engine_of(config: RunConfig) -> Engine:
    """Answer what of a resolved configuration memory follows from."""
    model, scheduler = config.model, config.scheduler
    assert scheduler.max_num_seqs is not None, "resolved"
    assert scheduler.max_num_batched_tokens is not None, "resolved"
    return Engine(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        tensor_parallel_size=model.tensor_parallel_size,
        pipeline_parallel_size=model.pipeline_parallel_size,
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
            engine._replace(pipeline_parallel_size=1),  # of every stage
        ),
        groups=groups,
        in_flight_tokens=engine.in_flight_tokens,
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
        in_flight_tokens=rank.engine.in_flight_tokens,
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
) -> KVPool:
    """Answer the pool of a card."""
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
        least_blocks = NULL_BLOCKS + rank.groups.blocks_for(
            rank.max_model_len, in_flight_tokens=rank.engine.in_flight_tokens
        )
        needed = used + rank.groups.bytes_per_block * least_blocks
        short = fixed[0].num_bytes - requested
        what = f"weights do not fit, {gib(short)} short" if short > 0 else "no KV cache is left"
        raise CapacityError(
            f"--gpu-memory-utilization {gpu_memory_utilization} of {gpu.name} is "
            f"{gib(requested)} of {gib(visible)} visible, but {rank.takes} {gib(used)} "
            f"({_listed(fixed)}): {what}; "
            f"{_smallest_utilization(visible, needed)}"
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


def _listed(shares: tuple[MemoryShare, ...]) -> str:
    """Answer *shares* for a message."""
    return " + ".join(f"{share.name} {share.num_bytes / GIB:.2f}" for share in shares)
