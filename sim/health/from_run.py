"""Facts of a run that ended, from its files or from memory."""

from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from sim.errors import ConfigError, FileError
from sim.files import reason
from sim.hardware import GIB
from sim.health.facts import Facts, Point
from sim.health.from_config import NUM_WINDOWS
from sim.options import settings
from sim.plots.results import RunFiles, RunSeries, read_object
from sim.result_tables import step_table
from sim.settings import FILE_RANK, Given, Resolved, resolve
from sim.simulation import RunResult
from workloads.errors import plain, quote

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Summary(msgspec.Struct):
    """What of a summary is read, here and where a change is compared with it."""

    num_prompts: Count
    num_clipped_requests: Count
    refused: dict[str, Count]
    total_input_tokens: Count
    total_output_tokens: Count
    prefix_cache_queries: Count
    prefix_cache_hits: Count
    prefix_cache_hit_rate: float | None
    recomputed_tokens: Count
    num_preemptions: Count
    max_num_requests_running: Count
    mean_num_requests_running: float | None
    mean_kv_cache_usage_perc: float | None
    max_kv_cache_usage_perc: float | None
    output_throughput: float | None
    median_ttft_ms: float | None
    p99_ttft_ms: float | None
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    max_activation_bytes: int | None
    activation_room_bytes: int | None
    steps_overrun_pct: float | None
    timing_provenance: str


def facts_of_run(run: RunSeries, name: str) -> Facts:
    """Answer what happened in *run*.

    Raises:
        FileError: the summary is not as this version writes it.
    """
    try:
        summary = msgspec.convert(run.summary, _Summary)
    except msgspec.ValidationError as error:
        raise FileError(
            f"{name}: summary.json: {error}; expected a run of this version of kvsim: run it again"
        ) from None
    tokens = summary.total_input_tokens + summary.total_output_tokens
    facts = Facts(
        source="run",
        name=name,
        allocator=run.label,
        num_requests=summary.num_prompts,
        num_clipped=summary.num_clipped_requests,
        num_refused=sum(summary.refused.values()),
        num_preemptions=summary.num_preemptions,
        recomputed=summary.recomputed_tokens / tokens if tokens else 0.0,
        series=_series(run),
    )
    if summary.prefix_cache_queries:
        facts.queries, facts.hits = summary.prefix_cache_queries, summary.prefix_cache_hits
        facts.hit_rate = facts.hits / facts.queries
    needed, room = summary.max_activation_bytes, summary.activation_room_bytes
    if needed is not None and room is not None:
        facts.step_gib, facts.room_gib = needed / GIB, room / GIB
        facts.steps_overrun = (summary.steps_overrun_pct or 0.0) / 100
    return facts


def _series(run: RunSeries) -> list[Point]:
    edges = np.linspace(0, run.end, NUM_WINDOWS + 1)
    capacity = run.summary["kv_cache_slots"]
    live, reserved, internal = (
        run.mean_over_time(f"kv_{state}_slots", edges) for state in ("live", "reserved", "internal")
    )
    held = live + reserved + internal
    running, waiting = (run.mean_over_time(name, edges) for name in ("running", "waiting"))
    queries, hits, preempted = (
        run.sum_over_time(name, edges)
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preempted")
    )
    return [
        Point(
            f"{edges[row]:,.1f} s",
            float(running[row]),
            float(waiting[row]),
            float(held[row] / capacity),
            float(hits[row] / queries[row]) if queries[row] > 0.5 else None,
            float(queries[row]),
            float(preempted[row]),
        )
        for row in range(NUM_WINDOWS)
    ]


def in_memory(result: RunResult, summary: dict[str, Any]) -> RunSeries:
    """Answer *result* as its files would have it."""
    return RunSeries(summary, step_table(result.recorder).to_pandas())


def read_runs(folder: Path) -> list[tuple[RunFiles, dict[str, Any]]]:
    """Answer the run in *folder*, or those of a comparison, each with its manifest.

    Raises:
        FileError: it is neither, not whole, or of another version.
    """
    shown = plain(str(folder))
    try:
        names = {path.name for path in folder.iterdir()}
    except (OSError, ValueError) as error:
        raise FileError(f"{shown}: {reason(error)}; {_EXPECTED}") from None
    if names & {"sweep.json", "cells", "summary.parquet", "summary.csv"}:
        raise FileError(f"{shown} is a sweep; expected one run of it: name a folder below cells")
    if "compare.json" in names:
        rows = sorted(path.parent for path in folder.glob("*/summary.json"))
    else:
        rows = [folder]
    if not rows or not names:
        raise FileError(f"{shown} has no results; {_EXPECTED}")
    return [(RunFiles(row), _manifest(row)) for row in rows]


_EXPECTED = "expected a folder that kvsim run -o or kvsim compare wrote"


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        raise FileError(f"{plain(str(path))} is missing: the folder is half-written; {_EXPECTED}")
    manifest = read_object(path)
    for key in ("config", "kvsim", "trace"):
        if not isinstance(manifest.get(key), dict):
            raise FileError(f"{plain(str(path))}: key {key}: expected an object; {_EXPECTED}")
    return manifest


def config_of(manifest: dict[str, Any], where: str, flags: dict[str, Given]) -> Resolved:
    """Answer the configuration that the run of *manifest* had, with *flags* instead of its own.

    Raises:
        FileError: it has settings that this version has not, or values that it does not take.
    """
    version = str(manifest["kvsim"].get("version"))
    config = {name: value for name, value in manifest["config"].items() if value is not None}
    known = {setting.name for setting in settings()}
    unknown = sorted(config.keys() - known)
    if unknown:
        raise FileError(
            f"{where}: manifest.json: {quote(unknown[0])} is no setting here: the run is of kvsim "
            f"{quote(version)}; expected one of this version, {metadata.version('kvsim')}"
        )
    given = {name: Given(value, FILE_RANK, name) for name, value in config.items()}
    try:
        return resolve(given | flags, shipped_workload=False)
    except ConfigError as error:
        raise FileError(
            f"{where}: manifest.json: {error}; expected a run of kvsim {metadata.version('kvsim')}"
        ) from None
