"""What would come of other settings: a configuration run in process, and two outcomes compared.

No files are written. `sim.summary` has all figures of a run; here are the few that decide.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.arrivals import arriving
from sim.config import CONTIGUOUS_ONLY, RunConfig
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.options import settings
from sim.report import Summary
from sim.settings import FILE_RANK, FLAG_RANK, Given, resolve
from sim.simulation import Simulation
from sim.summary import summarize
from workloads.errors import did_you_mean, quote
from workloads.record import Trace


class Outcome(NamedTuple):
    """What decides between configurations. None: has no value, or was not asked for.

    Names are those of the summary where it has them, with its definitions and units.

    Attributes:
        mean_num_requests_running, max_num_requests_running: requests in a step.
        users_held: requests that the whole pool holds at the lengths and sharing of this run: mean
            running over mean usage of the pool. Memory alone; max_num_seqs may allow fewer.
        output_throughput: tokens/s.
        median_ttft_ms, p99_ttft_ms, median_tpot_ms, p99_tpot_ms: milliseconds.
        request_goodput, slo_attainment: requests/s that meet all SLOs, and their share of all; None
            without ``--goodput``.
        prefix_cache_hit_rate: share of 1 of the prompt tokens looked up.
        num_preemptions: events.
        max_kv_cache_usage_perc: share of 1 of the pool, as in vLLM.
        steps_overrun_pct: steps whose activation did not fit beside the pool, % of all.
        num_gpus: cards.
        usd_per_hour: of all cards, rough; None where no price is known.
        usd_per_million_output_tokens: at the load that was offered, idle time paid.
        timing_provenance: how step times are known: measured, fitted, assumed.
    """

    mean_num_requests_running: float | None
    max_num_requests_running: int
    users_held: float | None
    output_throughput: float | None
    median_ttft_ms: float | None
    p99_ttft_ms: float | None
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    request_goodput: float | None
    slo_attainment: float | None
    prefix_cache_hit_rate: float | None
    num_preemptions: int
    max_kv_cache_usage_perc: float | None
    steps_overrun_pct: float | None
    num_gpus: int
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    timing_provenance: str


class Change(NamedTuple):
    """One figure of two outcomes.

    Attributes:
        before, after: its values.
        difference: after - before; None where either is None.
        ratio: after / before; None where either is None, or before is 0.
    """

    before: float | None
    after: float | None
    difference: float | None
    ratio: float | None


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Answer *config* with *changes*, values by names of settings, checked as flags are.

    What was resolved stays: a default that followed from another setting does not follow it again
    (max_num_seqs does not grow with the GPU). A change to None asks for the default.

    Raises:
        ConfigError: no such setting, or a value or combination that cannot be used.
    """
    known = [s.name for s in settings() if s.concern != "output"]
    for name in changes:
        if name not in known:
            raise ConfigError(f"setting {quote(name)} is unknown; {did_you_mean(name, known)}")
    flat = config.flat()
    if {"allocator", "enable_prefix_caching"} & changes.keys():  # the old ones would contradict
        for name in ("allocator", "enable_prefix_caching", *CONTIGUOUS_ONLY):
            flat.pop(name, None)
    given = {
        name: Given(value, FILE_RANK, name) for name, value in flat.items() if value is not None
    }
    for name, value in changes.items():
        given.pop(name, None)
        if value is not None:
            given[name] = Given(value, FLAG_RANK, f"--{name.replace('_', '-')}")
    return resolve(given, shipped_workload=False).run


def what_if(
    config: RunConfig,
    trace: Trace,
    changes: Mapping[str, Any] | None = None,
    *,
    on_step: Callable[[], None] | None = None,
) -> Outcome:
    """Answer what comes of *config* with *changes* on *trace*, as recorded.

    *on_step* is called as by `Simulation.run`.

    Raises:
        ConfigError: settings that cannot be used, `CapacityError` where they do not fit.
        TraceError: the request rate cannot be had.
    """
    config = changed(config, changes) if changes else config
    result = Simulation(config, arriving(trace, config.load)).run(on_step)
    return outcome_of(summarize(result), config)


def outcome_of(summary: Summary, config: RunConfig) -> Outcome:
    """Answer the outcome of the run that has *summary*."""
    usage, running = summary["mean_kv_cache_usage_perc"], summary["mean_num_requests_running"]
    gpus = config.model.tensor_parallel_size
    price = get_gpu(config.model.gpu, config.model.gpu_memory_gib).usd_per_hour
    usd_per_hour = None if price is None else gpus * price
    figures: dict[str, Any] = {name: summary.get(name) for name in Outcome._fields}
    figures |= {
        "users_held": running / usage if usage else None,
        "num_gpus": gpus,
        "usd_per_hour": usd_per_hour,
        "usd_per_million_output_tokens": usd_per_million(
            usd_per_hour, summary["output_throughput"]
        ),
    }
    return Outcome(**figures)


def usd_per_million(usd_per_hour: float | None, output_throughput: float | None) -> float | None:
    """Answer the price of a million output tokens; None where price or throughput is not known."""
    if usd_per_hour is None or not output_throughput:
        return None
    return usd_per_hour / 3600 / output_throughput * 1e6


def compared(before: Outcome, after: Outcome) -> dict[str, Change]:
    """Answer every figure of two outcomes side by side, by name."""
    found = {}
    for name in Outcome._fields:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, str) or isinstance(new, str):
            continue
        both = old is not None and new is not None
        found[name] = Change(
            old,
            new,
            new - old if both else None,
            new / old if both and old and math.isfinite(old) else None,
        )
    return found
