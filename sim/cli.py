"""The command line. The only file that prints or exits.

Results go to stdout and to files, everything else to stderr. Exit code 2 for wrong usage, 1 for
what cannot be done, 0 otherwise.
"""

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec
from tqdm import tqdm

from sim.config import LoadConfig, OutputConfig
from sim.errors import CapacityError, ConfigError, FileError
from sim.kv_spec import kv_cache_lines
from sim.metrics import Recorder
from sim.report import comparison_report, comparison_rows, provenance, run_report
from sim.results import atomic, make_output_dir, reason, write_comparison, write_run
from sim.settings import (
    FILE_RANK,
    FLAG_RANK,
    Given,
    Resolved,
    Setting,
    read_config_file,
    resolve,
    settings,
)
from sim.simulation import RunResult, Simulation
from sim.summary import summarize
from workloads.errors import TraceError, did_you_mean, plain, quote
from workloads.readers import read_trace
from workloads.record import Trace
from workloads.samples import CONVERSATION

BLOCK_TABLES = "block_tables.jsonl"

COMPARED = ("reserve-max", "reserve-pow2", "reserve-oracle", "paged", "prefix")
"""What ``kvsim compare`` runs when no allocator is named."""


def _option(setting: Setting) -> click.Option:
    """Answer the flag of *setting*; values stay text, `sim.settings` converts and checks them."""
    names = [setting.flag]
    if setting.name == "output_dir":
        names.insert(0, "-o")
    if setting.type is bool:
        names[-1] += f"/--no-{setting.flag[2:]}"
        shown = "on" if setting.default else "off"
        return click.Option(names, default=None, help=f"{setting.help} [default: {shown}]")
    default = "" if setting.default is None else f" [default: {setting.default}]"
    metavar = "|".join(setting.choices) or getattr(setting.type, "__name__", "str").upper()
    return click.Option(names, default=None, metavar=metavar, help=setting.help + default)


def _given(values: dict[str, Any]) -> dict[str, Given]:
    """Answer what the user gave; a flag wins over ``--config``."""
    config = values.pop("config")
    given = read_config_file(config) if config is not None else {}
    for setting in settings():
        value = values[setting.name]
        if value is not None:
            flag = f"--no-{setting.flag[2:]}" if value is False else setting.flag
            given[setting.name] = Given(value, FLAG_RANK, flag)
    return given


def _say(text: str) -> None:
    click.echo(text, err=True)


def _command(name: str, function: Callable[[dict[str, Given]], int], doc: str) -> click.Command:
    def callback(**values: Any) -> int:
        if extra := click.get_current_context().args:
            raise click.UsageError(
                f"unexpected argument {quote(extra[0])}; a trace is given as --trace FILE, "
                "every other setting by its flag"
            )
        return function(_given(values))

    config = click.Option(
        ["--config"], metavar="FILE", help="JSON or TOML file with flags by name; flags win."
    )
    return click.Command(
        name,
        callback=callback,
        params=[config, *(map(_option, settings()))],
        help=doc,
        context_settings={"allow_extra_args": True},
    )


@contextmanager
def _progress(trace: Trace, label: str, recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Lend a callback that shows on stderr how many requests are done, once a run takes long."""
    wait = 1.0 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=len(trace), desc=label, unit=" req", file=sys.stderr, delay=wait, mininterval=wait / 2
    ) as bar:

        def update() -> None:
            if recorder.num_done > bar.n:
                bar.update(recorder.num_done - bar.n)

        yield update


def _simulate(simulation: Simulation, block_tables: TextIO | None = None) -> RunResult:
    result = simulation.result
    with _progress(result.trace, result.config.label, result.recorder) as update:
        return simulation.run(update, block_tables)


def _load(load: LoadConfig, notes: list[str]) -> Trace:
    """Read the trace and say on stderr what the user should know before the run."""
    if load.trace is None:
        # Its name without the place of installation: results do not depend on that.
        trace = dataclasses.replace(read_trace(CONVERSATION), name=CONVERSATION.name)
    else:
        trace = read_trace(load.trace, load.trace_format)
    for note in dict.fromkeys([*notes, *(f"{trace.name}: {note}" for note in trace.notes)]):
        _say(f"note: {note}")
    return trace


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def _run(given: dict[str, Given]) -> int:
    if "allocator" in given and "," in str(given["allocator"].value):
        raise ConfigError(
            f"{given['allocator'].shown}: kvsim run takes one allocator, kvsim compare a list"
        )
    resolved = resolve(given)
    output = resolved.output
    if output.output_dir is None:
        for setting in ("save_steps", "save_block_tables", "format"):
            if setting in given and given[setting].value is not False:
                why = f"{given[setting].shown} needs a folder: add --output-dir DIR"
                if given[setting].rank == FLAG_RANK:
                    raise ConfigError(why)
                resolved.notes.append(why)
    trace = _load(resolved.run.load, resolved.notes)
    simulation = Simulation(
        resolved.run,
        trace,
        save_steps=output.save_steps,
        save_block_tables=output.save_block_tables,
        single_step=output.single_step,
    )
    folder = make_output_dir(output.output_dir) if output.output_dir is not None else None
    with _block_tables(folder, output) as block_tables:
        result = _simulate(simulation, block_tables)
    if folder is not None and not output.save_block_tables:
        (folder / BLOCK_TABLES).unlink(missing_ok=True)  # an earlier run's
    summary = summarize(result)
    if folder is not None:
        write_run(folder, result, summary, output.format)
    if output.json:
        _print_json(summary)
    else:
        click.echo(provenance(summary))
        click.echo(kv_cache_lines(result.pool, resolved.run.model.max_model_len or 0))
        click.echo(run_report(summary))
    return 0


@contextmanager
def _block_tables(folder: Path | None, output: OutputConfig) -> Iterator[TextIO | None]:
    if folder is None or not output.save_block_tables:
        yield None
        return
    with atomic(folder / BLOCK_TABLES) as temporary, temporary.open("w") as file:
        yield file


def _compare(given: dict[str, Given]) -> int:
    notes: list[str] = []
    resolved = _compared(given, notes)
    output = resolved[0].output
    if output.save_block_tables:
        raise ConfigError("--save-block-tables is for kvsim run, which has one allocator")
    trace = _load(resolved[0].run.load, notes + [n for each in resolved for n in each.notes])
    simulations, skipped = [], []
    for each in resolved:
        try:
            simulation = Simulation(
                each.run, trace, save_steps=output.save_steps, single_step=output.single_step
            )
            simulations.append(simulation)
        except CapacityError as error:
            skipped.append(f"skipped {each.run.label}: {error}")
    if not simulations:
        raise CapacityError("; ".join(skipped))
    folder = make_output_dir("kvsim-results" if output.output_dir is None else output.output_dir)
    summaries, run_folders = [], []
    for simulation in simulations:
        result = _simulate(simulation)
        summaries.append(summarize(result))
        run_folders.append(make_output_dir(folder / result.config.label))
        write_run(run_folders[-1], result, summaries[-1], output.format)
    rows = comparison_rows(summaries)
    files = write_comparison(folder, rows)
    if all(row["num_steps"] and row["duration"] for row in rows):
        from sim.plots import write_figures  # noqa: PLC0415  # only who draws pays for matplotlib

        files += write_figures(folder, run_folders)
    else:
        why = "the runs took no time" if rows[0]["num_steps"] else "no request was served"
        _say(f"note: no figures, because {why}")
    if output.json:
        _print_json(rows)
    else:
        click.echo(provenance(rows[0]))
        click.echo(
            kv_cache_lines(simulations[0].result.pool, resolved[0].run.model.max_model_len or 0)
        )
        click.echo(comparison_report(rows))
    written = [*(path.name for path in files), *(f"{path.name}/" for path in run_folders)]
    _say(f"wrote {folder}: {', '.join(written)}")
    for line in skipped:
        _say(line)
    return 1 if skipped else 0


def _compared(given: dict[str, Given], notes: list[str]) -> list[Resolved]:
    """Answer one configuration an allocator; add to *notes* what has no effect on any."""
    names, where = list(COMPARED), "--allocator"
    if "allocator" in given:
        where = given["allocator"].where
        listed = given["allocator"].value
        names = [name.strip() for name in listed.split(",")] if isinstance(listed, str) else [""]
        if not all(names):
            raise ConfigError(
                f"{where}: expected names separated by commas, like {','.join(COMPARED)}, "
                f"got {quote(listed)}"
            )
    useless = ["enable_prefix_caching"]
    if "contiguous" not in names:
        useless.append("reservation")
        if not any(name.startswith("reserve-") for name in names):
            useless.append("placement")
    for setting in useless:
        if setting in given:
            why = f"has no effect on kvsim compare of {', '.join(names)}"
            if given[setting].rank > FILE_RANK:
                raise ConfigError(f"{given[setting].shown} {why}: leave it out")
            notes.append(f"{given[setting].shown} {why}")
    resolved = [resolve(_only_for(name, where, given)) for name in names]
    labels = [each.run.label for each in resolved]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"{where} {plain(','.join(names))}: {label} is there twice; "
                "expected each allocator once"
            )
    return resolved


def _only_for(name: str, where: str, given: dict[str, Given]) -> dict[str, Given]:
    """Answer *given* for one allocator of a comparison, without the settings of the others."""
    mine = dict(given)
    mine["allocator"] = Given(name, FLAG_RANK, where)
    mine.pop("enable_prefix_caching", None)
    if name != "contiguous":
        mine.pop("reservation", None)
        if not name.startswith("reserve-"):
            mine.pop("placement", None)
    return mine


class _Commands(click.Group):
    """The commands by name; an unknown one is refused with the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Answer the command that *args* start with."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(
                f"unknown command {quote(args[0])}; {did_you_mean(args[0], self.commands)}"
            )
        return super().resolve_command(ctx, args)


def _cli() -> click.Group:
    group = _Commands(
        "kvsim",
        help="How many users can a GPU hold, and why: replay request traces through "
        "interchangeable KV-cache allocators.",
        context_settings={
            "token_normalize_func": lambda token: token.replace("_", "-"),
            "max_content_width": 100,
        },
    )
    click.version_option(package_name="kvsim")(group)
    group.add_command(
        _command("run", _run, "Replay a trace through one KV allocator and report what happened.")
    )
    group.add_command(
        _command(
            "compare",
            _compare,
            "Replay one trace through several KV allocators, side by side. Without arguments: a "
            "shipped workload, every allocator.",
        )
    )
    return group


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; answer the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if threading.current_thread() is threading.main_thread():
        # As an interruption: temporary files go, and what is whole stays.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not arguments:
            raise click.UsageError("a command is missing; choices: compare, run; or --help")  # noqa: TRY301
        return int(_cli().main(arguments, prog_name="kvsim", standalone_mode=False) or 0)
    except BrokenPipeError:  # whoever read the output, like head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (click.UsageError, ConfigError, TraceError, OSError) as error:
        code, message = _refusal(error)
        _say(f"kvsim: {' '.join(message.splitlines())}")
        return code
    except MemoryError as error:
        _say(f"kvsim: out of memory: {error}: shorten the trace or its outputs")
        return 1
    except (click.Abort, KeyboardInterrupt):
        _say("kvsim: interrupted")
        return 130


def _refusal(error: Exception) -> tuple[int, str]:
    """Answer exit code and message: 2 for wrong usage, 1 for what cannot be done."""
    if isinstance(error, click.UsageError):
        return 2, error.format_message()
    if isinstance(error, OSError):
        return 1, f"{error.filename or 'standard output'}: {reason(error)}"
    if isinstance(error, ConfigError) and not isinstance(error, CapacityError | FileError):
        return 2, str(error)
    return 1, str(error)
