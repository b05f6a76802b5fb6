"""``kvsim run``: one configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from sim.commands.common import given_by, load_trace, print_json, without_effect
from sim.commands.watch import Watch, check_needs, check_series, watched
from sim.config import OutputConfig
from sim.errors import ConfigError
from sim.files import atomic
from sim.kv_pool import kv_cache_lines
from sim.report import provenance, run_report
from sim.results import make_output_dir, write_run
from sim.settings import Resolved, resolve
from sim.simulation import Simulation
from sim.summary import summarize
from workloads.errors import plain

BLOCK_TABLES = "block_tables.jsonl"


def run(values: dict[str, Any]) -> int:
    """Replay a trace through one allocator as the *values* of all flags say; answer the exit code.

    Raises:
        ConfigError, TraceError: what cannot be used or done.
    """
    given = given_by(values)
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
                without_effect(given[setting], why, resolved.notes)
    check_needs(given, resolved)
    read = {each.shown: each.value for name, each in given.items() if name != "openmetrics"}
    check_series(output, {**read, f"--config {plain(str(values['config']))}": values["config"]})
    with watched(output) as watch:
        _run(resolved, watch)
        watch.linger()
    return 0


def _run(resolved: Resolved, watch: Watch) -> None:
    output = resolved.output
    trace = load_trace(resolved.run.load, resolved.notes)
    simulation = Simulation(
        resolved.run,
        trace,
        save_steps=output.save_steps,
        save_block_tables=output.save_block_tables,
        single_step=output.single_step,
    )
    folder = make_output_dir(output.output_dir) if output.output_dir is not None else None
    with _block_tables(folder, output) as block_tables:
        result = watch.simulate(simulation, block_tables)
    if folder is not None and not output.save_block_tables:
        (folder / BLOCK_TABLES).unlink(missing_ok=True)  # an earlier run's
    summary = summarize(result)
    if folder is not None:
        write_run(folder, result, summary, output.format)
    if output.json:
        print_json(summary)
    else:
        click.echo(provenance([summary]))
        click.echo(kv_cache_lines(result.pool, resolved.run.model.max_model_len or 0))
        click.echo(run_report(summary))
    watch.write(simulation)


@contextmanager
def _block_tables(folder: Path | None, output: OutputConfig) -> Iterator[TextIO | None]:
    if folder is None or not output.save_block_tables:
        yield None
        return
    with atomic(folder / BLOCK_TABLES) as temporary, temporary.open("w") as file:
        yield file
