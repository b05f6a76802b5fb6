"""The command line. The only file that prints or exits.

Results go to stdout and to files, everything else to stderr. Exit code 2 for wrong usage, 1 for
what cannot be done, 0 otherwise.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec
from tqdm import tqdm

from sim.config import OutputConfig
from sim.errors import CapacityError, ConfigError, OutputError
from sim.kv_spec import kv_cache_lines
from sim.metrics import Recorder
from sim.report import comparison_report, comparison_rows, provenance, run_report
from sim.results import atomic, make_output_dir, write_json, write_run
from sim.settings import FLAG_RANK, Given, Resolved, Setting, read_config_file, resolve, settings
from sim.simulation import RunResult, Simulation
from sim.summary import summarize
from workloads.errors import TraceError
from workloads.readers import read_trace
from workloads.record import Trace

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
    given = read_config_file(config) if config else {}
    for setting in settings():
        value = values[setting.name]
        if value is not None:
            shown = setting.flag
            if value is False:
                shown = f"--no-{setting.flag[2:]}"
            elif value is not True:
                shown += f" {value}"
            given[setting.name] = Given(value, FLAG_RANK, shown)
    return given


def _say(text: str) -> None:
    click.echo(text, err=True)


def _command(name: str, function: Callable[[dict[str, Given]], int], doc: str) -> click.Command:
    def callback(**values: Any) -> int:
        return function(_given(values))

    config = click.Option(
        ["--config"], metavar="FILE", help="JSON or TOML file with flags by name; flags win."
    )
    return click.Command(
        name, callback=callback, params=[config, *(map(_option, settings()))], help=doc
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


def _simulate(simulation: Simulation) -> RunResult:
    result = simulation.result
    with _progress(result.trace, result.config.label, result.recorder) as update:
        return simulation.run(update)


def _load(resolved: list[Resolved]) -> Trace:
    """Read the trace and say on stderr what the user should know before the runs, each once."""
    load = resolved[0].run.load
    assert load.trace is not None, "resolved"
    trace = read_trace(load.trace, load.trace_format)
    notes = [note for each in resolved for note in each.notes]
    for note in dict.fromkeys([*notes, *(f"{trace.name}: {note}" for note in trace.notes)]):
        _say(f"note: {note}")
    return trace


def _run(given: dict[str, Given]) -> int:
    resolved = resolve(given)
    output = resolved.output
    writes = output.save_steps or output.save_block_tables or "format" in given
    if output.output_dir is None and writes:
        raise ConfigError(
            "--save-steps, --save-block-tables and --format need a folder: add --output-dir DIR"
        )
    trace = _load([resolved])
    folder = make_output_dir(output.output_dir) if output.output_dir else None
    with _block_tables(folder, output) as block_tables:
        simulation = Simulation(
            resolved.run, trace, save_steps=output.save_steps, block_tables=block_tables
        )
        result = _simulate(simulation)
    summary = summarize(result)
    if folder is not None:
        write_run(folder, result, summary, output.format)
    if output.json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2))
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
    with atomic(folder / "block_tables.jsonl") as temporary, temporary.open("w") as file:
        yield file


def _compare(given: dict[str, Given]) -> int:
    names = str(given["allocator"].value).split(",") if "allocator" in given else list(COMPARED)
    each_given = [_only_for(name.strip(), given) for name in names]
    for setting in ("reservation", "placement"):
        if setting in given and not any(setting in mine for mine in each_given):
            raise ConfigError(
                f"{given[setting].where} contradicts the allocators compared, "
                f"{', '.join(names)}: leave it out, or add contiguous to --allocator"
            )
    resolved = [resolve(mine) for mine in each_given]
    output = resolved[0].output
    if output.save_block_tables:
        raise ConfigError("--save-block-tables is for kvsim run, which has one allocator")
    trace = _load(resolved)
    folder = make_output_dir(output.output_dir or "kvsim-results")
    simulations, skipped = [], []
    for each in resolved:
        try:
            simulations.append(Simulation(each.run, trace, save_steps=output.save_steps))
        except CapacityError as error:
            skipped.append(f"skipped {each.run.label}: {error}")
    if not simulations:
        raise CapacityError("; ".join(skipped))
    rows, run_folders = [], []
    for simulation in simulations:
        result = _simulate(simulation)
        rows.append(summarize(result))
        run_folders.append(make_output_dir(folder / result.config.label))
        write_run(run_folders[-1], result, rows[-1], output.format)
    rows = comparison_rows(rows)
    write_json(folder / "compare.json", rows)
    from sim.plots import write_figures  # noqa: PLC0415  # matplotlib: only who draws pays for it

    figures = write_figures(folder, run_folders)
    if output.json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        click.echo(provenance(rows[0]))
        click.echo(
            kv_cache_lines(simulations[0].result.pool, resolved[0].run.model.max_model_len or 0)
        )
        click.echo(comparison_report(rows))
    _say(
        f"wrote {folder}: compare.json, {', '.join(path.name for path in figures)}, "
        f"{', '.join(path.name + '/' for path in run_folders)}"
    )
    for line in skipped:
        _say(line)
    return 1 if skipped else 0


def _only_for(name: str, given: dict[str, Given]) -> dict[str, Given]:
    """Answer *given* for one allocator of a comparison, without the settings of the others."""
    mine = dict(given)
    mine["allocator"] = Given(name, FLAG_RANK, f"--allocator {name}")
    if name != "contiguous" and not name.startswith("reserve-"):
        mine.pop("placement", None)
    if name != "contiguous":
        mine.pop("reservation", None)
    return mine


def _cli() -> click.Group:
    group = click.Group(
        "kvsim",
        help="How many users can a GPU hold, and why: replay request traces through "
        "interchangeable KV-cache allocators.",
        context_settings={
            "token_normalize_func": lambda token: token.replace("_", "-"),
            "max_content_width": 100,
        },
    )
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
    try:
        return int(_cli().main(arguments, prog_name="kvsim", standalone_mode=False) or 0)
    except click.UsageError as error:
        _say(f"kvsim: {error.format_message()}")
        return 2
    except (CapacityError, OutputError, TraceError) as error:
        _say(f"kvsim: {error}")
        return 1
    except ConfigError as error:
        _say(f"kvsim: {error}")
        return 2
    except OSError as error:
        _say(f"kvsim: {error.filename or 'output'}: {error.strerror or error}")
        return 1
    except (click.Abort, KeyboardInterrupt):
        _say("kvsim: interrupted")
        return 130
