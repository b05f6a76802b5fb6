"""How many requests a pool holds, which limit binds, and what would hold more: closed forms."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import GIB, GpuSpec
from sim.kv_layout import sequence_bytes
from sim.kv_pool import NULL_BLOCKS, KVPool
from sim.kv_spec import check_tensor_parallel, weight_bytes
from sim.memory import graph_bytes
from sim.models import ModelSpec
from sim.pool_sizing import engine_of, pool_of, stages_of

FEWEST_HUNDREDTHS, MOST_HUNDREDTHS = 1, 100
"""Utilizations that `options` tries, in hundredths."""

STATE_BLOCKS = 2
"""Blocks of a state, with prefix caching (`sim.kv_groups.CacheGroups.blocks_for`)."""

MOST_RANKS = 8
"""GPUs that `options` shares a model among: those of one machine."""


class Lengths(NamedTuple):
    """What a request holds while it runs.

    Attributes:
        tokens: mean tokens held, a shared prefix included.
        prefix_len: tokens at the start that all requests share.
        longest: tokens of the longest request.
        where: where the figures come from, for the report.
        spans: of requests that grow, for how many steps each has which tokens on average; none if
            all have *tokens*.
    """

    tokens: float
    prefix_len: int
    longest: int
    where: str
    spans: tuple[tuple[int, float], ...] = ()

    def blocks(self, pool: KVPool) -> float:
        """Answer the mean blocks that a request holds, over all block tables.

        A window holds what is in it and up to a block more; a state two blocks. Of requests that
        grow, half of the last block is empty.
        """
        if self.spans:
            steps = sum(weight for weight, _ in self.spans)
            held = sum(weight * _held(pool, tokens) for weight, tokens in self.spans)
            return held / steps
        if pool.groups is None:
            return pool.blocks_for(int(self.tokens))
        return pool.groups.blocks_for(int(self.tokens), in_flight_tokens=1)

    def shared(self, pool: KVPool) -> int:
        """Answer the blocks of the prefix that are stored once: whole ones outside windows."""
        tables = [table for table in pool.tables if table.block_size and not table.window]
        return sum(self.prefix_len // table.block_size for table in tables)


def _held(pool: KVPool, tokens: float) -> float:
    """Answer the mean blocks of a request that passes *tokens* in the middle of its growth."""
    blocks = 0.0
    for table in pool.tables:
        if not table.block_size:
            blocks += STATE_BLOCKS
        else:
            held = min(tokens, table.window) if table.window else tokens
            blocks += (held + (table.block_size - 1) / 2) / table.block_size
    return blocks


class Concurrency(NamedTuple):
    """Requests that a pool holds at once, by allocator.

    Attributes:
        reserve_max: each with max_model_len slots.
        paged: each with its own blocks.
        prefix: the same, whole blocks of the shared prefix stored once; None without a prefix.
        binding: what keeps more from running: ``memory`` or ``max_num_seqs``.
    """

    reserve_max: int
    paged: float
    prefix: float | None
    binding: str

    @property
    def best(self) -> float:
        """With sharing where there is a prefix."""
        return self.paged if self.prefix is None else self.prefix


class Option(NamedTuple):
    """One way to hold a number of users.

    Attributes:
        tensor_parallel_size: GPUs that share a stage of the model.
        pipeline_parallel_size: stages.
        kv_cache_dtype: as ``--kv-cache-dtype``.
        held: users that it holds at the utilization that was asked for; 0 if it does not start.
        utilization: the smallest, in hundredths, that holds all; None if none does.
        replicas: engines of this kind that hold all at the utilization asked for; None if it does
            not start.
        usd_per_hour: of all their GPUs, a rough price; None if not known.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_cache_dtype: str
    held: int
    utilization: float | None
    replicas: int | None
    usd_per_hour: float | None

    @property
    def gpus(self) -> int | None:
        """GPUs of all replicas."""
        if self.replicas is None:
            return None
        return self.replicas * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def flags(self) -> str:
        """The flags that make it."""
        stages = self.pipeline_parallel_size
        return (
            f"-tp {self.tensor_parallel_size}"
            + (f" -pp {stages}" if stages > 1 else "")
            + f" --kv-cache-dtype {self.kv_cache_dtype}"
        )


def fixed_length(mean_len: int, prefix_len: int) -> Lengths:
    """Answer what requests of *mean_len* tokens hold."""
    return Lengths(mean_len, prefix_len, mean_len, "--mean-len")


def lengths_of(prompts: list[int], outputs: list[int], prefix_len: int, where: str) -> Lengths:
    """Answer what the requests of a trace hold, averaged over time.

    Each holds its prompt and, on average, half of its output, for as long as it generates.
    """
    spans = tuple((o, p + (o + 1) / 2) for p, o in zip(prompts, outputs, strict=True))
    tokens = sum(steps * held for steps, held in spans) / sum(outputs)
    longest = max(p + o for p, o in zip(prompts, outputs, strict=True))
    return Lengths(tokens, prefix_len, longest, where, spans)


def requests_of(pool: KVPool, lengths: Lengths) -> float:
    """Answer how many requests *pool* holds, whole blocks of the prefix once."""
    shared = lengths.shared(pool)
    return (pool.num_gpu_blocks - NULL_BLOCKS - shared) / (lengths.blocks(pool) - shared)


def concurrency(
    pool: KVPool, lengths: Lengths, *, max_model_len: int, max_num_seqs: int
) -> Concurrency:
    """Answer how many requests *pool* holds at once."""
    prefix = requests_of(pool, lengths) if lengths.prefix_len else None
    paged = requests_of(pool, lengths._replace(prefix_len=0))
    best = paged if prefix is None else prefix
    return Concurrency(
        reserve_max=pool.contiguous_slots // max_model_len,
        paged=paged,
        prefix=prefix,
        binding="memory" if best < max_num_seqs else "max_num_seqs",
    )


def check_start(pool: KVPool, config: RunConfig) -> None:
    """Check that vLLM would start: one request of max_model_len fits the pool.

    vLLM 0.33.0, ``v1/core/kv_cache_utils.py:151-184``.

    Raises:
        CapacityError: it does not; the message has both sizes and the longest that does.
    """
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "resolved"
    needed, usable = pool.blocks_for(max_model_len), pool.num_gpu_blocks - NULL_BLOCKS
    if pool.groups is not None and pool.groups.padding_bytes and pool.kv_cache_bytes is not None:
        usable = pool.kv_cache_bytes // pool.groups.checked_bytes
    if needed <= usable:
        return
    if pool.kv_cache_bytes is None or pool.groups is None:
        has = f"{needed:,} blocks are needed, which is more than the {usable:,}"
    else:
        size = pool.groups.checked_bytes / GIB
        has = (
            f"{needed * size:.2f} GiB of KV cache are needed, which is more than the "
            f"{usable * size:.2f} GiB"
        )
    raise CapacityError(
        f"to serve one request of --max-model-len {max_model_len}, {has} there are: lower "
        f"--max-model-len to at most {pool.longest_request(usable)}, or raise "
        "--gpu-memory-utilization"
    )


def hand_estimate(
    model: ModelSpec, gpu: GpuSpec, config: RunConfig, tokens: float
) -> tuple[int, float]:
    """Answer the textbook's pool in bytes, and the requests of *tokens* that it holds.

    Utilization of what weights leave of the visible memory; vLLM takes utilization of all of it,
    and subtracts activation and the rest as well.
    """
    tp, utilization = config.model.tensor_parallel_size, config.cache.gpu_memory_utilization
    assert utilization is not None, "resolved"
    pool = round(utilization * (gpu.memory_visible_bytes - weight_bytes(model, tp)))
    held = sequence_bytes(
        model.layout,
        int(tokens),
        tensor_parallel_size=tp,
        kv_cache_dtype=config.cache.kv_cache_dtype,
    )
    return pool, pool / held


def graphs_beside(model: ModelSpec, gpu: GpuSpec, config: RunConfig) -> tuple[int, int] | None:
    """Answer the bytes of CUDA graphs beside the pool, and what utilization leaves for them.

    None where this version of vLLM subtracts an estimate or captures none, or utilization does not
    decide.
    """
    engine = engine_of(config)
    if not config.cache.by_utilization or engine.rules.subtracts_graphs:
        return None
    utilization = config.cache.gpu_memory_utilization
    assert utilization is not None, "resolved"
    graphs = max(graph_bytes(part, its) for _, part, its in stages_of(model, engine))
    if not graphs:
        return None
    return graphs, math.floor(gpu.memory_visible_bytes * (1 - utilization))


def _with(
    config: RunConfig, tensor_parallel_size: int, kv_cache_dtype: str, utilization: float | None
) -> RunConfig:
    """Answer *config* with another engine on cards whose pool follows from utilization."""
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, tensor_parallel_size=tensor_parallel_size),
        cache=replace(
            config.cache,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=utilization,
            kv_cache_memory_bytes=None,
            num_gpu_blocks_override=None,
        ),
    )


def _held_by(config: RunConfig, model: ModelSpec, gpu: GpuSpec, lengths: Lengths) -> int:
    """Answer the requests that the pool holds; 0 where vLLM would not start."""
    try:
        pool = pool_of(config, model, gpu, grouped=True)
        check_start(pool, config)
    except CapacityError:
        return 0
    return max(0, int(requests_of(pool, lengths)))


def _ranks(model: ModelSpec, config: RunConfig) -> Iterator[int]:
    """Answer the GPUs that can share *model*: what was asked for, then powers of two."""
    for ranks in dict.fromkeys((config.model.tensor_parallel_size, 1, 2, 4, MOST_RANKS)):
        try:
            check_tensor_parallel(
                model, ranks, enable_expert_parallel=config.model.enable_expert_parallel
            )
        except ConfigError:
            continue
        yield ranks


def options(
    config: RunConfig, model: ModelSpec, gpu: GpuSpec, lengths: Lengths, users: int
) -> list[Option]:
    """Answer what holds *users* at once: utilization, KV dtype, tensor parallelism, replicas.

    The first is what was asked for. max_num_seqs is raised to *users*, which costs activation.
    """
    scheduler = config.scheduler
    assert scheduler.max_num_seqs is not None, "resolved"
    assert scheduler.max_num_batched_tokens is not None, "resolved"
    config = msgspec.structs.replace(
        config,
        scheduler=msgspec.structs.replace(
            scheduler,
            max_num_seqs=max(scheduler.max_num_seqs, users),
            max_num_batched_tokens=max(scheduler.max_num_batched_tokens, users),
        ),
    )
    dtypes = dict.fromkeys((config.cache.kv_cache_dtype, "fp8"))
    found = []
    for ranks in _ranks(model, config):
        for dtype in dtypes:
            asked = _with(config, ranks, dtype, config.cache.gpu_memory_utilization)
            held = _held_by(asked, model, gpu, lengths)
            replicas = -(-users // held) if held > 0 else None
            option = Option(
                ranks,
                config.model.pipeline_parallel_size,
                dtype,
                held,
                _smallest(asked, model, gpu, lengths, users),
                replicas,
                None,
            )
            if option.gpus is not None and gpu.usd_per_hour is not None:
                option = option._replace(usd_per_hour=option.gpus * gpu.usd_per_hour)
            found.append(option)
    return found


def _smallest(
    config: RunConfig, model: ModelSpec, gpu: GpuSpec, lengths: Lengths, users: int
) -> float | None:
    """Answer the smallest utilization, in hundredths, whose pool holds *users*."""
    low, high = FEWEST_HUNDREDTHS, MOST_HUNDREDTHS + 1
    while low < high:
        middle = (low + high) // 2
        tried = _with(
            config, config.model.tensor_parallel_size, config.cache.kv_cache_dtype, middle / 100
        )
        if middle > MOST_HUNDREDTHS or _held_by(tried, model, gpu, lengths) >= users:
            high = middle
        else:
            low = middle + 1
    return None if low > MOST_HUNDREDTHS else low / 100
