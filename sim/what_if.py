"""What would come of other settings: a configuration run in process, and two outcomes compared.

No files are written. `sim.summary` has all figures of a run; here are the few that decide.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sim.arrivals import arriving
from sim.config import CONTIGUOUS_ONLY, RunConfig
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.options import settings
from sim.report import Summary
from sim.settings import FILE_RANK, FLAG_RANK, Given, resolve
from sim.simulation import RunResult, Simulation
from sim.summary import Served, goodput_of, served, summarize
from workloads.editing import sample
from workloads.errors import TraceError, did_you_mean, quote
from workloads.record import PS_PER_S, Trace


class Outcome(NamedTuple):
    """What decides between configurations. None: has no value, or was not asked for.

    Names are those of the summary where it has them, with its definitions and units.

    Attributes:
        mean_num_requests_running, max_num_requests_running: requests in a step, over all replicas.
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


class Ran(NamedTuple):
    """What comes of a configuration, and the summary that says where sizes and times come from.

    Of several replicas it is the first one's.
    """

    outcome: Outcome
    summary: Summary


LOADED = {"trace", "trace_format", "seed"}
"""Settings that a trace which was read does not follow."""

Simulate = Callable[[Simulation], RunResult]
"""How to run: `Simulation.run`, perhaps with a progress bar around it."""


def what_if(
    config: RunConfig, trace: Trace, changes: Mapping[str, Any] | None = None, *, replicas: int = 1
) -> Outcome:
    """Answer what comes of *config* with *changes* on *trace*, as recorded; see `ran`."""
    for name in sorted(LOADED & (changes or {}).keys()):
        raise ConfigError(f"setting {quote(name)}: expected another *trace*, as this one was read")
    config = changed(config, changes) if changes else config
    return ran(config, trace, replicas=replicas).outcome


def ran(
    config: RunConfig, trace: Trace, *, replicas: int = 1, simulate: Simulate = Simulation.run
) -> Ran:
    """Run *config* on *trace*, as recorded.

    *replicas* engines, each on GPUs of its own, take the sessions in turn; each knows the prefixes
    of its own sessions only. What runs at once (``max_concurrency``) is shared out.

    Raises:
        ConfigError: settings that cannot be used, `CapacityError` where they do not fit; fewer
            sessions than replicas.
        TraceError: the request rate cannot be had.
    """
    trace = arriving(trace, config.load)
    if replicas == 1:
        summary = summarize(simulate(Simulation(config, trace)))
        return Ran(outcome_of(summary, config, 1), summary)
    try:
        parts = [sample(trace, every=replicas, nth=nth) for nth in range(replicas)]
    except TraceError:
        raise ConfigError(f"{replicas} replicas: {trace.name} has fewer sessions") from None
    results = [
        simulate(Simulation(_share(config, nth, replicas), part)) for nth, part in enumerate(parts)
    ]
    summaries = [summarize(result) for result in results]
    together = _together(summaries, results, config)
    return Ran(outcome_of(together, config, replicas), summaries[0])


def _share(config: RunConfig, nth: int, replicas: int) -> RunConfig:
    """Answer *config* with the part of ``max_concurrency`` that one replica has; at least one."""
    limit = config.load.max_concurrency
    if limit is None:
        return config
    mine = max(1, limit // replicas + (nth < limit % replicas))
    load = msgspec.structs.replace(config.load, max_concurrency=mine)
    return msgspec.structs.replace(config, load=load)


def _together(
    summaries: Sequence[Summary], results: Sequence[RunResult], config: RunConfig
) -> Summary:
    """Answer what `outcome_of` reads of a summary, of replicas that ran side by side.

    Counts add up, so do means over the whole time; the peak of running requests is the sum of
    theirs, even if not at once; usage is the fullest one's.
    """
    starts = [int(result.trace.arrival_ps[0]) / PS_PER_S for result in results]
    ends = [start + s["duration"] for start, s in zip(starts, summaries, strict=True)]
    duration = max(ends) - min(starts)

    def total(name: str) -> float:
        return sum(summary[name] or 0 for summary in summaries)

    def mean(name: str) -> float | None:
        weighted = sum((s[name] or 0) * s["duration"] for s in summaries)
        return weighted / duration if duration else None

    parts = [served(result) for result in results]
    completed = Served(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    queries = total("prefix_cache_queries")
    overrun = [s["steps_overrun_pct"] for s in summaries]
    found = {
        **completed.section(),
        "mean_num_requests_running": mean("mean_num_requests_running"),
        "max_num_requests_running": total("max_num_requests_running"),
        "users_held": sum(_users_held(summary) or 0 for summary in summaries),
        "output_throughput": total("total_output_tokens") / duration if duration else None,
        "prefix_cache_hit_rate": total("prefix_cache_hits") / queries if queries else None,
        "num_preemptions": total("num_preemptions"),
        "max_kv_cache_usage_perc": max(s["max_kv_cache_usage_perc"] or 0 for s in summaries),
        "steps_overrun_pct": None if None in overrun else max(overrun),
        "timing_provenance": summaries[0]["timing_provenance"],
    }
    if config.load.goodput is not None:
        num_prompts = sum(len(result.trace) for result in results)
        found |= goodput_of(config.load.goodput, completed, duration, num_prompts)
    return found


def _users_held(summary: Summary) -> float | None:
    usage, running = summary["mean_kv_cache_usage_perc"], summary["mean_num_requests_running"]
    return running / usage if usage else None


def outcome_of(summary: Summary, config: RunConfig, replicas: int = 1) -> Outcome:
    """Answer the outcome of the run that has *summary*."""
    gpus = replicas * config.model.tensor_parallel_size
    price = get_gpu(config.model.gpu, config.model.gpu_memory_gib).usd_per_hour
    usd_per_hour = None if price is None else gpus * price
    figures: dict[str, Any] = {name: summary.get(name) for name in Outcome._fields}
    if "users_held" not in summary:
        figures["users_held"] = _users_held(summary)
    figures |= {
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
            new / old if both and old else None,
        )
    return found
