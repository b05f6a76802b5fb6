"""Facts of a configuration: its pool, the card around it, and the load that it is meant for."""

from typing import Any

import numpy as np

from sim.capacity import check_start
from sim.config import RunConfig
from sim.errors import CapacityError
from sim.hardware import GIB, GpuSpec, get_gpu
from sim.health.facts import Facts, Point
from sim.kv_groups import CacheGroups
from sim.kv_layout import sequence_bytes
from sim.kv_pool import KVPool, kv_cache_figures
from sim.kv_spec import weight_bytes
from sim.memory import activation_bytes, graph_bytes, non_torch_bytes
from sim.models import ModelSpec, model_of
from sim.pool_sizing import engine_of, pool_of, stages_of
from sim.refusal import can_be_served
from sim.settings import KERNEL_BLOCK_SIZE
from workloads.breaks import find_break, sampled_prompts
from workloads.inspection import most_shared
from workloads.record import PS_PER_S, IntArray, Trace
from workloads.reuse import num_repeated_tokens
from workloads.samples import CONVERSATION

NUM_WINDOWS = 40
"""Intervals of a series: enough to place a change within a few per cent of the time, and few enough
that each has many requests."""


def facts_of_config(config: RunConfig, name: str) -> Facts:
    """Answer what follows from *config* alone, as vLLM accounts for memory.

    A pool that does not start is a refusal among the facts.

    Raises:
        ConfigError: settings that cannot be used at all.
    """
    model = model_of(config.model)
    gpu = get_gpu(config.model.gpu, config.model.gpu_memory_gib)
    cache, scheduler = config.cache, config.scheduler
    facts = Facts(
        source="configuration",
        name=name,
        allocator=config.label,
        block_size=cache.block_size,
        kernel_block_size=KERNEL_BLOCK_SIZE if cache.allocator != "contiguous" else None,
        max_model_len=config.model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        gpu_memory_utilization=cache.gpu_memory_utilization if cache.by_utilization else None,
        enable_prefix_caching=cache.enable_prefix_caching,
        is_sized=cache.by_utilization,
        total_gib=gpu.memory_visible_bytes / GIB,
        refusals=[],
    )
    try:
        pool = pool_of(config, model, gpu, grouped=True)
        check_start(pool, config)
    except CapacityError as error:
        pool_flags = "--gpu-memory-utilization"
        if not cache.by_utilization:
            pool_flags = "--kv-cache-memory-bytes or --num-gpu-blocks-override"
        flags = f"--max-model-len, {pool_flags}, --kv-cache-dtype fp8 or -tp"
        facts.refusals = [(str(error), flags)]
        return facts
    _card(facts, config, model, gpu, pool)
    _pool(facts, config, model, pool)
    return facts


def _card(facts: Facts, config: RunConfig, model: ModelSpec, gpu: GpuSpec, pool: KVPool) -> None:
    """Fill in what is in the memory of the GPU that has least room."""
    assert facts.total_gib is not None, "there is a GPU"
    kv = pool.num_gpu_blocks * (pool.groups.bytes_per_block if pool.groups is not None else 0)
    rooms, activations, graphs = [], [], []
    for _, part, engine in stages_of(model, engine_of(config)):
        taken = weight_bytes(part, engine.tensor_parallel_size) + non_torch_bytes(gpu, engine)
        graphs.append(graph_bytes(part, engine))
        activations.append(activation_bytes(part, gpu, engine))
        rooms.append(gpu.memory_visible_bytes - taken - graphs[-1] - kv)
    facts.activation_gib = max(activations) / GIB
    facts.room_gib = min(rooms) / GIB
    facts.graph_gib = max(graphs) / GIB
    facts.graphs_outside = not engine_of(config).rules.subtracts_graphs
    facts.kv_gib = kv / GIB
    if facts.gpu_memory_utilization is not None:
        facts.outside_gib = (1 - facts.gpu_memory_utilization) * facts.total_gib


def _pool(facts: Facts, config: RunConfig, model: ModelSpec, pool: KVPool) -> None:
    """Fill in what the pool holds."""
    length = config.model.max_model_len or 1
    facts.kv_tokens, facts.concurrency = kv_cache_figures(pool, length)
    facts.num_tables = len(pool.tables)
    if pool.groups is not None:
        facts.padding = _padding(pool.groups)
        if facts.kernel_block_size is not None and len(pool.tables) > 1:
            facts.block_size = pool.groups.block_size
    facts.own_rates = own_rates(config, model)
    facts.bytes_per_token = facts.own_rates[1]


def own_rates(config: RunConfig, model: ModelSpec) -> tuple[float, float]:
    """Answer the bytes of cache a token on one GPU, all layers whole, and as the layers are.

    The second is that of a request of max_model_len.
    """
    length = config.model.max_model_len or 1
    how: dict[str, Any] = {
        "tensor_parallel_size": config.model.tensor_parallel_size,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
    }
    dtype = model.layout.dtype(config.cache.kv_cache_dtype)
    whole = sum(
        cache.num_layers
        * cache.entry_bytes(dtype, config.model.tensor_parallel_size)
        / cache.tokens_per_entry
        for cache in model.layout.caches
        if cache.kind not in {"state", "cross"}
    )
    return float(whole), sequence_bytes(model.layout, length, **how) / length


def _padding(groups: CacheGroups) -> float:
    """Answer the share of the pool that padded layers take."""
    layers = [group.num_layers for group in groups.groups]
    return 1 - sum(layers) / (max(layers) * len(layers)) if max(layers) else 0.0


def add_load(facts: Facts, trace: Trace, config: RunConfig) -> None:
    """Fill in what *trace* asks for and what of it a cache could share."""
    longest = config.model.max_model_len or 0
    prompts, outputs = trace.num_prompt_tokens, trace.num_output_tokens
    total = prompts + outputs
    served = can_be_served(prompts, longest)
    facts.num_requests = len(trace)
    facts.longest = int(total.max())
    facts.mean_len = float(total.mean())
    facts.num_clipped = int((served & (total > longest)).sum())
    facts.num_refused = int((~served).sum())
    facts.shared_prefixes = [
        (each["num_requests"], each["num_tokens"]) for each in most_shared(trace)
    ]
    repeated = np.minimum(num_repeated_tokens(trace, outputs=True), prompts - 1)
    size = facts.block_size or config.cache.block_size  # with states, as large as one of them
    whole = repeated // size * size
    if served.any():  # who is refused is not looked up
        asked = int(prompts[served].sum())
        facts.possible_hit_rate = int(whole[served].sum()) / asked
        facts.possible_by_token = int(repeated[served].sum()) / asked
        facts.possible_series = _windows(trace, prompts * served, whole * served)
    load = config.load
    if load.trace != "-":  # which cannot be read again
        path = load.trace or CONVERSATION
        found = sampled_prompts(path, load.trace_format, load.seed, len(trace))
        facts.num_compared = len(found) or None
        facts.prefix_break = find_break(found)


def _windows(trace: Trace, asked: IntArray, hits: IntArray) -> list[Point]:
    """Answer what a cache without limit hits of what is looked up, by the time of arrival."""
    start = int(trace.arrival_ps[0])
    width = max(1, -(-(int(trace.arrival_ps[-1]) - start + 1) // NUM_WINDOWS))
    place = (trace.arrival_ps - start) // width
    queries = np.bincount(place, asked, NUM_WINDOWS)
    found = np.bincount(place, hits, NUM_WINDOWS)
    return [
        Point(f"{row * width / PS_PER_S:,.1f} s", hit_rate=hit / total, weight=total)
        for row, (total, hit) in enumerate(zip(queries.tolist(), found.tolist(), strict=True))
        if total
    ]
