"""How many requests a pool holds, which limit binds, and what would hold more: closed forms."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import GpuSpec
from sim.kv_pool import NULL_BLOCKS, KVPool, engine_of, pool_of
from sim.kv_spec import bytes_per_block, check_tensor_parallel, kv_bytes_per_token, weight_bytes
from sim.memory import graph_bytes
from sim.models import ModelSpec

FEWEST_HUNDREDTHS, MOST_HUNDREDTHS = 1, 100
"""Utilizations that `options` tries, in hundredths."""

MOST_RANKS = 8
"""GPUs that `options` shares a model among: those of one machine."""


class Lengths(NamedTuple):
    """What a request holds while it runs.

    Attributes:
        tokens: mean tokens held, a shared prefix included.
        blocks: mean blocks held, for paging.
        prefix_len: tokens at the start that all requests share.
        longest: tokens of the longest request.
        where: where the figures come from, for the report.
    """

    tokens: float
    blocks: float
    prefix_len: int
    longest: int
    where: str


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
        tensor_parallel_size: GPUs that share the model.
        kv_cache_dtype: as ``--kv-cache-dtype``.
        held: users that it holds at the utilization that was asked for; 0 if it does not start.
        utilization: the smallest, in hundredths, that holds all; None if none does.
        replicas: engines of this kind that hold all at the utilization asked for; None if it does
            not start.
        usd_per_hour: of all their GPUs, a rough price; None if not known.
    """

    tensor_parallel_size: int
    kv_cache_dtype: str
    held: int
    utilization: float | None
    replicas: int | None
    usd_per_hour: float | None


def fixed_length(mean_len: int, prefix_len: int, block_size: int) -> Lengths:
    """Answer what requests of *mean_len* tokens hold."""
    return Lengths(mean_len, -(-mean_len // block_size), prefix_len, mean_len, "--mean-len")


def lengths_of(
    prompts: list[int], outputs: list[int], prefix_len: int, block_size: int, where: str
) -> Lengths:
    """Answer what the requests of a trace hold, averaged over time.

    Each holds its prompt and, on average, half of its output, for as long as it generates; half a
    block is empty.
    """
    steps = sum(outputs)
    tokens = sum(o * (p + (o + 1) / 2) for p, o in zip(prompts, outputs, strict=True)) / steps
    longest = max(p + o for p, o in zip(prompts, outputs, strict=True))
    blocks = (tokens + (block_size - 1) / 2) / block_size
    return Lengths(tokens, blocks, prefix_len, longest, where)


def blocks_for(lengths: Lengths, users: float, block_size: int) -> float:
    """Answer the blocks that *users* hold, whole blocks of the prefix once, the null block too."""
    shared = lengths.prefix_len // block_size
    return NULL_BLOCKS + shared + users * (lengths.blocks - shared)


def concurrency(
    pool: KVPool, lengths: Lengths, *, max_model_len: int, max_num_seqs: int
) -> Concurrency:
    """Answer how many requests *pool* holds at once."""
    usable = pool.num_gpu_blocks - NULL_BLOCKS
    shared = lengths.prefix_len // pool.block_size
    prefix = (usable - shared) / (lengths.blocks - shared) if lengths.prefix_len else None
    paged = usable / lengths.blocks
    best = paged if prefix is None else prefix
    return Concurrency(
        reserve_max=pool.contiguous_slots // max_model_len,
        paged=paged,
        prefix=prefix,
        binding="memory" if best < max_num_seqs else "max_num_seqs",
    )


def check_start(pool: KVPool, model: ModelSpec, config: RunConfig) -> None:
    """Check that vLLM would start: one request of max_model_len fits the pool.

    vLLM 0.33.0, ``v1/core/kv_cache_utils.py:151-184``.

    Raises:
        CapacityError: it does not; the message has both sizes and the longest that does.
    """
    max_model_len = config.model.max_model_len
    assert max_model_len is not None, "resolved"
    needed = -(-max_model_len // pool.block_size)
    usable = pool.num_gpu_blocks - NULL_BLOCKS
    if needed > usable:
        size = bytes_per_block(
            model,
            pool.block_size,
            tensor_parallel_size=config.model.tensor_parallel_size,
            kv_cache_dtype=config.cache.kv_cache_dtype,
        )
        raise CapacityError(
            f"to serve one request of --max-model-len {max_model_len}, {needed * size / 2**30:.2f} "
            f"GiB of KV cache are needed, which is more than the {usable * size / 2**30:.2f} GiB "
            f"there are: lower --max-model-len to at most {usable * pool.block_size}, or raise "
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
    per_token = kv_bytes_per_token(
        model, tensor_parallel_size=tp, kv_cache_dtype=config.cache.kv_cache_dtype
    )
    return pool, pool / (per_token * tokens)


def graphs_beside(model: ModelSpec, gpu: GpuSpec, config: RunConfig) -> tuple[int, int] | None:
    """Answer the bytes of CUDA graphs beside the pool, and what utilization leaves for them.

    None where this version of vLLM subtracts an estimate, or captures none.
    """
    engine = engine_of(config)
    utilization = config.cache.gpu_memory_utilization
    assert utilization is not None, "resolved"
    graphs = graph_bytes(model, engine)
    if engine.rules.subtracts_graphs or not graphs:
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


def _blocks(config: RunConfig, model: ModelSpec, gpu: GpuSpec) -> int:
    """Answer the blocks of the pool; 0 where vLLM would not start."""
    try:
        pool = pool_of(config, model, gpu)
        check_start(pool, model, config)
    except CapacityError:
        return 0
    return pool.num_gpu_blocks


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
    needed = math.ceil(blocks_for(lengths, users, config.cache.block_size))
    dtypes = dict.fromkeys((config.cache.kv_cache_dtype, "fp8"))
    found = []
    for ranks in _ranks(model, config):
        for dtype in dtypes:
            asked = _with(config, ranks, dtype, config.cache.gpu_memory_utilization)
            blocks = _blocks(asked, model, gpu)
            shared = lengths.prefix_len // config.cache.block_size
            held = int((blocks - NULL_BLOCKS - shared) / (lengths.blocks - shared)) if blocks else 0
            replicas = -(-users // held) if held > 0 else None
            price = None
            if replicas is not None and gpu.usd_per_hour is not None:
                price = replicas * ranks * gpu.usd_per_hour
            found.append(
                Option(
                    ranks,
                    dtype,
                    max(held, 0),
                    _smallest(asked, model, gpu, needed),
                    replicas,
                    price,
                )
            )
    return found


def _smallest(config: RunConfig, model: ModelSpec, gpu: GpuSpec, needed: int) -> float | None:
    """Answer the smallest utilization, in hundredths, whose pool has *needed* blocks."""
    low, high = FEWEST_HUNDREDTHS, MOST_HUNDREDTHS + 1
    while low < high:
        middle = (low + high) // 2
        tried = _with(
            config, config.model.tensor_parallel_size, config.cache.kv_cache_dtype, middle / 100
        )
        if middle > MOST_HUNDREDTHS or _blocks(tried, model, gpu) >= needed:
            high = middle
        else:
            low = middle + 1
    return None if low > MOST_HUNDREDTHS else low / 100
