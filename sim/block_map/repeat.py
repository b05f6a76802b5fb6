"""A finished run, read back from its folder so that it can be run again, and held to what it left.

A run is decided by its manifest, so that repeating it shows memory at any instant, without files
that grow with steps and blocks (DECISIONS.md, 48).
"""

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sim.allocators.base import HasMemoryMap
from sim.arrivals import arriving, recorded
from sim.config import LoadConfig
from sim.errors import ConfigError, FileError
from sim.plots.results import Results, RunFiles, read_object, read_results
from sim.results import manifest, versions
from sim.settings import FLAG_RANK, Given, given_in, resolve
from sim.simulation import RunResult, Simulation
from sim.summary import summarize
from workloads.errors import TraceError, plain, quote
from workloads.record import Trace

EXPECTED = "expected a folder that kvsim run -o or kvsim compare wrote"
_RUN_AGAIN = "run it again with this version"


class Finished(NamedTuple):
    """A run that is over.

    Attributes:
        files: what it left.
        manifest: of these, the manifest.
        path: where that is.
        simulation: the same run, about to start.
    """

    files: RunFiles
    manifest: dict[str, Any]
    path: Path
    simulation: Simulation


def read_finished(folder: Path, given: Mapping[str, Given]) -> tuple[Results, list[Finished]]:
    """Answer the results in *folder* and its runs; *given* says where trace and table lie now.

    Raises:
        FileError: no results of a run or comparison, not finished, or of another version.
        TraceError: the trace is not there or not as it was.
        ConfigError: this version refuses the configuration.
    """
    results = read_results(folder)
    if not results.runs:
        inside = "; a cell of a sweep is one" if (folder / "cells").is_dir() else ""
        raise FileError(f"{plain(str(folder))}: {EXPECTED}{inside}")
    if results.notes:  # a run of the comparison is not there or cannot be read
        raise FileError(f"{plain(str(folder))} is not as it was left: {results.notes[0]}")
    finished: list[Finished] = []
    traces: dict[LoadConfig, Trace] = {}
    for run in results.runs:
        inside_comparison = results.cells is not None
        place = folder / Path(run.label).name if inside_comparison else folder
        finished.append(_read(place / "manifest.json", run, given, traces))
    return results, finished


def _read(
    path: Path, files: RunFiles, given: Mapping[str, Given], traces: dict[LoadConfig, Trace]
) -> Finished:
    where = plain(str(path))
    content = read_object(path)
    for name in ("kvsim", "config", "trace"):
        if not isinstance(content.get(name), dict):
            raise FileError(f"{where}: no object {name!r}; expected the manifest of a kvsim run")
    for name, kind in (("num_steps", int), ("duration", float)):
        if not isinstance(files.summary.get(name), kind):
            raise FileError(f"{where}: the summary beside it has no number {name!r}; {EXPECTED}")
    written, ours = content["kvsim"].get("version"), versions()["kvsim"]["version"]
    if written != ours:
        raise FileError(
            f"{where}: written by version {quote(written)}, this is {ours!r}: {_RUN_AGAIN}"
        )
    settings = given_in(content["config"], f"{where}: config")
    elsewhere = given.get("trace")
    settings |= {name: value for name, value in given.items() if name != "trace"}
    run = resolve(settings).run
    if run.load not in traces:
        traces[run.load] = _trace(run.load, elsewhere, content["trace"], where)
    simulation = Simulation(run, traces[run.load])
    if not isinstance(simulation.allocator, HasMemoryMap):
        raise FileError(f"{where}: the {run.label} allocator has no memory_map: nothing to draw")
    return Finished(files, content, path, simulation)


def _trace(
    load: LoadConfig, elsewhere: Given | None, written: Mapping[str, Any], where: str
) -> Trace:
    if elsewhere is not None and load.trace is None:
        raise ConfigError(f"{elsewhere.shown} has no effect: {where} is of the shipped workload")
    try:
        recording = recorded(load, None if elsewhere is None else elsewhere.value)
    except TraceError as error:
        if elsewhere is not None or load.trace is None:
            raise  # what is wrong with it has nothing to do with where it was
        raise TraceError(f"{error}; --trace FILE says where the trace of {where} lies") from None
    if recording.sha256 != written.get("sha256"):
        read = recording.name if elsewhere is None else plain(str(elsewhere.value))
        raise TraceError(
            f"{read} is not the trace of {where}, or has changed: sha256 {recording.sha256[:12]}, "
            f"expected {quote(str(written.get('sha256'))[:12])}; --trace FILE names another"
        )
    return arriving(recording, load)


def trace_given(path: str | None, table: str | None) -> dict[str, Given]:
    """Answer where trace and timing table lie now, as far as flags say so."""
    flags = {"trace": (path, "--trace"), "timing_table": (table, "--timing-table")}
    return {
        name: Given(value, FLAG_RANK, flag)
        for name, (value, flag) in flags.items()
        if value is not None
    }


def check_repeats(finished: Finished, result: RunResult) -> None:
    """Refuse a repetition that is another run than the one whose files are there.

    Averages may differ in their last digits, because runs of steps end where a frame is taken.

    Raises:
        FileError: with the first figure that differs.
    """
    again = msgspec.to_builtins(manifest(result))
    for path, old, new in [
        (finished.path, finished.manifest, again),
        (finished.path.with_name("summary.json"), finished.files.summary, summarize(result)),
    ]:
        for key, before, after in _differences(old, msgspec.to_builtins(new)):
            if key.partition(".")[0] in {"versions", "kvsim"} or key == "config.timing_table":
                continue
            commits = [content["kvsim"].get("git_commit") for content in (finished.manifest, again)]
            why = "" if len(set(commits)) == 1 else " (the source has changed since)"
            raise FileError(
                f"{plain(str(path))}: {key} is {quote(before)}, but repeating the run{why} gives "
                f"{quote(after)}: {_RUN_AGAIN}"
            )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Answer where two values of JSON differ: the path of keys, and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**new, **old}:
            inner = f"{key}.{name}" if key else str(name)
            yield from _differences(old.get(name), new.get(name), inner)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for place, pair in enumerate(zip_longest(old, new)):
            yield from _differences(*pair, f"{key}[{place}]")
    elif isinstance(old, float) and isinstance(new, float | int):
        if not math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-9):
            yield key, old, new
    elif old != new:
        yield key, old, new


def step_starts(simulation: Simulation) -> set[int]:
    """Run *simulation*; answer an instant in each step that takes time, in ps from the start."""
    recorder = simulation.run().recorder
    origin = int(recorder.trace.arrival_ps[0])
    instants: set[int] = set()
    for chunk in recorder.step_chunks():
        for start, num_steps, first, increment in zip(
            *(
                chunk[name].tolist()
                for name in ("start_ps", "num_steps", "first_step_ps", "increment_ps")
            ),
            strict=True,
        ):
            for step in range(num_steps) if first else ():
                after = step * first + increment * (step * (step - 1) // 2)
                inside = (first + step * increment) / 1e6  # of a ps that was rounded off
                instants.add(start - origin + round(after + inside))
    return instants
