"""``kvsim compare``: one trace, an allocator a run, side by side."""

from typing import Any

import click

from sim.commands.common import given_by, is_on, load_trace, print_json, say
from sim.commands.watch import check_needs, watched
from sim.comparison import comparison_report, comparison_rows
from sim.errors import CapacityError, ConfigError
from sim.kv_pool import kv_cache_lines
from sim.report import provenance
from sim.results import make_output_dir, write_comparison, write_run
from sim.settings import FILE_RANK, FLAG_RANK, Given, Resolved, resolve
from sim.simulation import Simulation
from sim.summary import summarize
from workloads.errors import plain, quote

COMPARED = ("reserve-max", "reserve-pow2", "reserve-oracle", "paged", "prefix")
"""What ``kvsim compare`` runs when no allocator is named."""


def compare(values: dict[str, Any]) -> int:
    """Replay a trace through several allocators as *values* say; answer the exit code.

    Raises:
        ConfigError, TraceError: what cannot be used or done.
    """
    given = given_by(values)
    notes: list[str] = []
    resolved = _compared(given, notes)
    output = resolved[0].output
    for name in ("save_block_tables", "metrics_port", "openmetrics"):
        if is_on(getattr(output, name)):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is for kvsim run, which has one allocator")
    check_needs(given, resolved[0])
    trace = load_trace(resolved[0].run.load, notes + [n for each in resolved for n in each.notes])
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
    with watched(output) as watch:
        for simulation in simulations:
            result = watch.simulate(simulation)
            summaries.append(summarize(result))
            run_folders.append(make_output_dir(folder / result.config.label))
            write_run(run_folders[-1], result, summaries[-1], output.format)
    rows = comparison_rows(summaries)
    files = write_comparison(folder, rows)
    if all(row["num_steps"] and row["duration"] for row in rows):
        from sim.plots.figures import (  # noqa: PLC0415  # only who draws pays for matplotlib
            write_comparison_charts,
        )

        files += write_comparison_charts(folder, run_folders)
    else:
        why = "the runs took no time" if rows[0]["num_steps"] else "no request was served"
        say(f"note: no figures, because {why}")
    if output.json:
        print_json(rows)
    else:
        click.echo(provenance(rows))
        click.echo(
            kv_cache_lines(simulations[0].result.pool, resolved[0].run.model.max_model_len or 0)
        )
        click.echo(comparison_report(rows))
    written = [*(path.name for path in files), *(f"{path.name}/" for path in run_folders)]
    say(f"wrote {folder}: {', '.join(written)}")
    for line in skipped:
        say(line)
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
