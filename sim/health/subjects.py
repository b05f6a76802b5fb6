"""What is to be checked, from each source: its facts, and what is needed to run it again.

Each source is imported when it is read: a configuration alone needs neither tables nor parsers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.arrivals import arriving, recorded
from sim.config import RunConfig
from sim.errors import ConfigError
from sim.health.facts import Facts, merged
from sim.health.from_config import add_load, facts_of_config
from sim.report import Summary
from sim.settings import FILE_RANK, KERNEL_BLOCK_SIZE, Given, resolve
from workloads.errors import TraceError, plain, quote
from workloads.record import Trace

if TYPE_CHECKING:
    from sim.simulation import RunResult, Simulation

_OF_CARD = (
    "total_gib", "outside_gib", "activation_gib", "room_gib", "graph_gib", "graphs_outside",
    "kv_gib", "kv_tokens", "concurrency",
)  # fmt: skip
"""Facts that are of a card, and are left out where nobody named one."""

_SETTINGS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "enable_prefix_caching", "block_size",
)  # fmt: skip
"""Facts that a server or flags have to tell: defaults say nothing of a server."""

_WHERE = ("trace", "trace_format")
"""Settings that say where the trace of a run lies now."""

_OF_LOAD = ("block_size", "enable_prefix_caching")
"""Settings that what a load shares depends on."""

Run = Callable[["Simulation"], "RunResult"]
"""Runs a simulation; the command line shows how far it is."""


@dataclass
class Subject:
    """One server, start or run.

    Attributes:
        config: the configuration that a change starts from; None where it is not known whole.
        trace: its load as recorded, before the request rate; None where it is not known.
        summary: of the run that the facts are of; None where there was none.
        unknown_gain: why what a change brings cannot be simulated, without *config* or *trace*.
        notes: what the user should know.
    """

    facts: Facts
    config: RunConfig | None = None
    trace: Trace | None = None
    summary: Summary | None = None
    unknown_gain: str = "add --trace to simulate it"
    notes: list[str] = field(default_factory=list)


def of_flags(given: dict[str, Given], run: Run) -> list[Subject]:
    """Answer the configuration that flags make; with a trace, what a run of it shows.

    Raises:
        ConfigError, TraceError: what cannot be used.
    """
    resolved = resolve(given, shipped_workload=False, runs=False)
    subject = Subject(facts_of_config(resolved.run, "configuration"), notes=resolved.notes)
    if resolved.run.load.trace is None:
        return [subject]
    subject.trace = recorded(resolved.run.load)
    arrived = arriving(subject.trace, resolved.run.load)
    add_load(subject.facts, arrived, resolved.run)
    if subject.facts.refusals:
        return [subject]
    from sim.health.from_run import facts_of_run, in_memory  # noqa: PLC0415  # see the module
    from sim.simulation import Simulation  # noqa: PLC0415
    from sim.summary import summarize  # noqa: PLC0415

    try:
        subject.config = resolve(given, shipped_workload=False).run
        result = run(Simulation(subject.config, arrived))
    except ConfigError as error:
        subject.config = None
        subject.unknown_gain = f"not simulated: {error}"
        subject.notes.append(subject.unknown_gain)
        return [subject]
    subject.summary = summarize(result)
    if subject.summary["num_steps"]:
        seen = facts_of_run(in_memory(result, subject.summary), "configuration")
        subject.facts = merged(subject.facts, seen)
        subject.facts.source = "configuration"
    return [subject]


def of_folder(folder: str, given: dict[str, Given]) -> list[Subject]:
    """Answer the run in *folder*, or those of a comparison; *given* may name the trace anew.

    Raises:
        ConfigError, TraceError: what cannot be read or used.
    """
    from sim.health.from_run import config_of, facts_of_run, read_runs  # noqa: PLC0415  # ibid.

    subjects = []
    for setting, value in given.items():
        if setting not in _WHERE:
            raise ConfigError(f"{value.shown} and DIR: a run has settings of its own")
    for run, manifest in read_runs(Path(folder)):
        name = plain(str(run.folder))
        resolved = config_of(manifest, name, given)
        seen = facts_of_run(run, name)
        subject = Subject(merged(facts_of_config(resolved.run, name), seen))
        subject.config, subject.summary = resolved.run, run.summary
        subject.facts.refusals = []  # it ran
        try:
            subject.trace = _same_trace(resolved.run, manifest["trace"])
        except TraceError:  # what it says is of a file that the manifest names, not the user
            if "trace" in given:
                raise
            named = quote(resolved.run.load.trace or "of the shipped workload")
            subject.notes.append(f"{name}: its trace {named} is not at hand: add --trace")
        if subject.trace is not None:
            add_load(subject.facts, arriving(subject.trace, resolved.run.load), resolved.run)
        subjects.append(subject)
    return subjects


def _same_trace(config: RunConfig, manifest: dict[str, Any]) -> Trace:
    """Answer the trace of a run.

    Raises:
        TraceError: it cannot be read, or is another one.
    """
    trace = recorded(config.load)
    if trace.sha256 != manifest.get("sha256"):
        raise TraceError(f"{trace.name} is not the trace of the run: its contents differ")
    return trace


def of_log(path: str, given: dict[str, Given]) -> list[Subject]:
    """Answer the starts of a server in the log at *path*; *given* wins over what it says.

    Raises:
        ConfigError, TraceError: what cannot be read or used.
    """
    from sim.health.from_log import facts_of_log  # noqa: PLC0415  # ibid.
    from sim.reconcile import settings_of  # noqa: PLC0415
    from sim.server_log import read_server_log  # noqa: PLC0415

    shown = plain(path)
    log = read_server_log(path, "--log")
    every = facts_of_log(log, shown)
    if not any(facts.series or facts.places or facts.refusals for facts in every):
        raise ConfigError(
            f"--log {shown}: nothing about memory or load in {log.num_lines:,} lines; expected the "
            "log of a server (what it exposes at /metrics is for --metrics)"
        )
    return [
        _of_server(facts, _told(facts) | settings_of(startup, shown, given)[0] | given, given)
        for startup, facts in zip(log.startups, every, strict=True)
    ]


def of_metrics(path: str, given: dict[str, Given]) -> list[Subject]:
    """Answer the engines in the metrics text at *path*; model, card and trace are of *given*.

    Raises:
        ConfigError, TraceError: what cannot be read or used.
    """
    from sim.health.from_metrics import facts_of_metrics  # noqa: PLC0415  # ibid.

    return [
        _of_server(facts, _told(facts) | given, given) for facts in facts_of_metrics(Path(path))
    ]


def _told(facts: Facts) -> dict[str, Given]:
    """Answer the settings of a run that a server tells by itself."""
    names = ["block_size", "enable_prefix_caching"]
    if facts.source == "metrics":
        names += ["gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"]
    return {
        name: Given(value, FILE_RANK, facts.name)
        for name in names
        if (value := getattr(facts, name)) is not None
    }


def _of_server(facts: Facts, both: dict[str, Given], flags: dict[str, Given]) -> Subject:
    """Answer *facts* of a server beside those of the configuration that it and *flags* tell.

    What the server says itself goes before what is computed. Without a model and a GPU nothing is
    computed of them.

    Raises:
        ConfigError: flags that cannot be used, whatever the server says.
    """
    subject = Subject(facts)
    try:
        if "model" not in both:  # of the default nothing is computed; a load may be told apart
            both = {name: both[name] for name in both if name in (*_OF_LOAD, *flags)}
        config = resolve(both, shipped_workload=False, runs=False).run
        computed = facts_of_config(config, facts.name)
    except ConfigError as error:
        resolve(flags, shipped_workload=False, runs=False)  # whoever gave them is told
        subject.unknown_gain = f"not simulated: {error}"
        subject.notes.append(f"{facts.name}: nothing is computed beside it: {error}")
        return subject
    if "model" not in both:
        told = {name: getattr(computed, name) for name in _SETTINGS}
        computed = Facts(source="configuration", name=facts.name, **told)
    elif "gpu" not in both:
        for name in _OF_CARD:
            setattr(computed, name, None)
    for name in _SETTINGS:
        if name not in both:  # a default of this version, on a card that may be another
            setattr(computed, name, None)
    computed.kernel_block_size = KERNEL_BLOCK_SIZE if "block_size" in both else None
    computed.refusals = None
    subject.facts = merged(computed, facts)
    missing = [f"--{name}" for name in ("trace", "model", "gpu") if name not in both]
    subject.unknown_gain = f"add {', '.join(missing)} to simulate it"
    if config.load.trace is not None:
        subject.trace = recorded(config.load)
        add_load(subject.facts, arriving(subject.trace, config.load), config)
        if {"model", "gpu"} <= both.keys():
            subject.config = config
    return subject
