"""The experiments: each answers what it measured, by plain names, of one system."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paper.runs import (
    GIB,
    HOST_S,
    LLAMA_13B,
    SERVERS,
    SYSTEMS,
    Load,
    Server,
    duration_s,
    means,
    normalized_latency,
    run,
    steps,
)
from sim.kv_spec import kv_bytes_per_token
from sim.models import get_model
from sim.simulation import RunResult
from sim.sweep.find import highest_rate
from workloads.build import build_trace
from workloads.record import RequestRecord, Trace

SHAREGPT = Load("sharegpt", 2, 3600)
ALPACA = Load("alpaca", 30, 900)
"""Of Figures 2 and 13: the rates are the paper's."""

LEVELS = (0.1, 0.5)
"""Mean normalized latencies (s a token) up to which a rate counts as sustained."""

MAIN_LEVEL = 0.5
TOLERANCE = 0.02
BLOCK_BYTES = {"64 KB": 64 * 1024, "2 MB": 2 * 1024 * 1024}

# ---- Table 1


def slots(server: Server) -> int:
    """Answer the token slots of *server*: KV memory over the bytes of a token."""
    return server.kv_gib * GIB // kv_bytes_per_token(get_model(server.model))


# ---- Figures 2 and 13


def occupancy(
    system: str, load: Load, changes: Mapping[str, Any] | None = None, host: float = 1.0
) -> dict[str, float]:
    """Answer what `means` does, of *system* on OPT-13B under *load*, with *changes* of settings."""
    settings = SERVERS["OPT-13B"].settings() | SYSTEMS[system] | dict(changes or {})
    return means(run(load.trace(), settings, load.rate, host))


# ---- Figures 12 and 16


class Curve(NamedTuple):
    """Normalized latency by rate, and the highest rate (requests a second) within each level."""

    tried: dict[float, float]
    sustained: dict[float, float]


def curve(system: str, server: Server, load: Load, start: float) -> Curve:
    """Answer the curve of *system*, by bisection from *start*.

    *load* says lengths, seconds and seed; its rate is not used.
    """
    settings = server.settings() | SYSTEMS[system]
    if load.prefix and system == "vLLM":
        settings |= {"allocator": "prefix", "enable_prefix_caching": True}
    tried: dict[float, float] = {}

    def latency(rate: float) -> float:
        if rate not in tried:
            tried[rate] = normalized_latency(run(load._replace(rate=rate).trace(), settings, rate))
        return tried[rate]

    def sustained(level: float) -> float:
        return highest_rate(lambda rate: latency(rate) <= level, start, TOLERANCE).rate

    rates = {level: sustained(level) for level in LEVELS}
    return Curve(dict(sorted(tried.items())), rates)


def shared_prefix(system: str, prefix: int) -> Curve:
    """Answer the curve of LLaMA-13B on sentences behind one *prefix* of tokens."""
    return curve(system, LLAMA_13B, Load("translation", 1, 200, prefix=prefix), start=8)


# ---- Figure 15, parallel sampling


def sampling_saving(lengths: str, samples: int, seed: int = 0) -> float:
    """Answer the share (%) of block time that *samples* outputs of a prompt save by sharing it.

    They are as many requests with one prompt, with and without a prefix cache, in a pool that is
    never full. What is not there: the last block of a prompt, which is shared until it is written.
    """
    rate = {"sharegpt": 0.2, "alpaca": 2.0}[lengths] * 6 / samples
    records = [
        record._replace(request_id=f"{record.request_id}.{sample}")
        for record in Load(lengths, 1, 400, seed).records()
        for sample in range(samples)
    ]
    trace = build_trace(records, name=lengths, trace_format="workload", sha256="")
    held = []
    for allocator in ("paged", "prefix"):
        settings = SERVERS["OPT-13B"].settings() | {
            "allocator": allocator,
            "step_time": "constant:0.02",
            "num_gpu_blocks_override": 200_000,
            "max_num_seqs": 2560,
            "request_rate": rate * samples,
        }
        rows = steps(run(trace, settings))
        slots_held = sum(rows[f"kv_{state}_slots"] for state in ("live", "reserved", "internal"))
        held.append(float((slots_held * rows["duration_ps"]).sum()))
    return 100 * (1 - held[1] / held[0])


# ---- vAttention


class Mapped(NamedTuple):
    """A model under vAttention on A100 of 80 GB: groups of pages, each of one buffer of one worker.

    *batches* are the published largest ones, by size of group.
    """

    model: str
    gpus: int
    batches: dict[str, int]


MAPPED = (
    Mapped("01-ai/Yi-6B", 1, {"64 KB": 240, "2 MB": 187}),
    Mapped("meta-llama/Llama-3.1-8B", 2, {"64 KB": 258, "2 MB": 203}),
    Mapped("01-ai/Yi-34B", 2, {"64 KB": 68, "2 MB": 56}),
)


def tokens_per_group(mapped: Mapped, group: str) -> int:
    """Answer the tokens whose K (or V) of one layer fills a *group* of a worker."""
    model = get_model(mapped.model)
    per_token = kv_bytes_per_token(model, tensor_parallel_size=mapped.gpus)
    return BLOCK_BYTES[group] * 2 * model.num_hidden_layers // per_token


def worst_waste(mapped: Mapped, group: str) -> int:
    """Answer the bytes, over all workers, that a request wastes whose last group has one token.

    From the `paged` allocator with blocks of a group.
    """
    size = tokens_per_group(mapped, group)
    rows = steps(_in_blocks([size + 1], size, 8192 // size))
    return int(rows["kv_internal_slots"][0]) * kv_bytes_per_token(get_model(mapped.model))


def largest_batch(mapped: Mapped, group: str) -> int:
    """Answer how many requests the pool of *mapped* takes.

    Their mean length follows from the published batch with groups of 64 KB, which is therefore no
    prediction; that with groups of 2 MB is. ASSUMED: lengths between half and one and a half means.
    """
    size, small = tokens_per_group(mapped, group), tokens_per_group(mapped, "64 KB")
    pool = _pool_tokens(mapped)
    mean = pool / mapped.batches["64 KB"] - small / 2
    shares = (np.random.default_rng(0).permutation(400) + 0.5) / 400
    lengths = mean * (0.5 + shares)
    result = _in_blocks(np.rint(lengths).astype(int).tolist(), size, pool // size)
    return int(steps(result)["running"][0])


def _pool_tokens(mapped: Mapped) -> int:
    """Answer the tokens of the pool that is left at a utilization of 0.9."""
    settings = {
        "model": mapped.model,
        "gpu": "A100-80",
        "tensor_parallel_size": mapped.gpus,
        "allocator": "paged",
        "gpu_memory_utilization": 0.9,
    }
    return run(_at_once([1]), settings).recorder.capacity


def _in_blocks(lengths: list[int], block_size: int, num_blocks: int) -> RunResult:
    """Answer the run of prompts of *lengths* at once; only blocks count, whatever the model."""
    settings = {
        "model": "meta-llama/Llama-3.1-8B",
        "allocator": "paged",
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks + 1,  # and the null block
        "max_model_len": 8192,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 10**8,
        "step_time": "constant:0.02",
    }
    return run(_at_once(lengths), settings)


def _at_once(lengths: list[int]) -> Trace:
    """Answer prompts of *lengths* that all come at once and sample one token."""
    records = [RequestRecord(n, 0, length, 1) for n, length in enumerate(lengths, 1)]
    return build_trace(records, name="at once", trace_format="workload", sha256="")


# ---- the host time, held to measurements that are not the paper's

HOST_CHECK = {32: (6121, 5752, 8700), 128: (3592, 3180, 7500), 512: (2029, 1734, 8100),
              1536: (1898, 1653, 8100)}  # fmt: skip
"""vLLM 0.1 with OPT-13B on an A100 of 40 GB by the longest output: tokens a second of Anyscale's
benchmark (github anyscale/llm-continuous-batching-benchmarks), of a user who repeated it (its issue
4), and ``max_num_batched_tokens``."""


def host_check(longest: int, host: float = 1.0) -> float:
    """Answer the tokens, prompts included, a second of that benchmark.

    1,000 prompts of 512 tokens at once; outputs exponential with mean 128, longer ones drawn again;
    the benchmark's loop sleeps 10 ms a step, which are added.
    """
    shares = (np.random.default_rng(0).permutation(1000) + 0.5) / 1000
    outputs = -128 * np.log1p(-shares * (1 - math.exp(-longest / 128)))
    outputs = np.maximum(np.rint(outputs), 1).astype(int)
    records = [RequestRecord(n, 0, 512, int(output)) for n, output in enumerate(outputs, 1)]
    settings = {
        "model": "facebook/opt-13b",
        "gpu": "A100-40",
        "gpu_memory_utilization": 0.9,
        "vllm_version": "0.11",
        **SYSTEMS["vLLM"],
        "max_num_batched_tokens": HOST_CHECK[longest][2],
        "host_overhead": host * HOST_S + 0.010,
    }
    trace = build_trace(records, name="anyscale", trace_format="workload", sha256="")
    return float(512_000 + outputs.sum()) / duration_s(run(trace, settings, host=host))
