"""``kvsim sweep``: many configurations, in parallel, each result kept as it comes."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import click
import tabulate

from sim.commands.common import progress_of_cells, say
from sim.errors import ConfigError
from sim.settings import parse_whole
from sim.sweep.cells import Cell, Inputs, Plan, make_plan
from sim.sweep.folder import SweepFolder
from sim.sweep.local import run_local
from sim.sweep.ray_cluster import run_ray
from sim.sweep.spec import read_spec
from sim.sweep.work import ERROR_FILE, Results
from workloads.errors import did_you_mean, quote

EXECUTORS = ("local", "ray")
_SHOWN_FAILURES = 20

_Run = Callable[[Sequence[Cell], Inputs], Results]


def sweep(values: dict[str, Any]) -> int:
    """Run the cells of a spec that have not finished; answer the exit code.

    Raises:
        ConfigError, TraceError: what cannot be used or done.
    """
    if values["spec"] is None:
        raise ConfigError("a spec is missing: kvsim sweep SPEC.toml -o DIR")
    run = _executor(values)
    if values["output_dir"] is None and not values["dry_run"]:
        raise ConfigError("--output-dir is missing: expected the folder for the results, -o DIR")
    spec = read_spec(values["spec"])
    plan = make_plan(spec)
    for note in plan.notes:
        say(f"note: {note}")
    if values["output_dir"] is None:
        _list_cells(plan.cells, set(), set())
        return 0
    folder = SweepFolder(values["output_dir"], spec, plan)
    if values["dry_run"]:
        folder.check()
        _list_cells(plan.cells, folder.finished().keys(), folder.failed().keys())
        return 0
    with folder.opened():
        return _run_cells(folder, plan, run)


def _run_cells(folder: SweepFolder, plan: Plan, run: _Run) -> int:
    """Run what *folder* has not got, then write its tables; answer the exit code."""
    finished = folder.finished()
    todo = [cell for cell in plan.cells if cell.name not in finished]
    try:
        with (
            closing(run(todo, plan.inputs)) as results,
            progress_of_cells(len(plan.cells), len(finished)) as update,
        ):
            for cell, files in results:
                folder.save(cell, files)
                update(ERROR_FILE in files)
    except KeyboardInterrupt:
        folder.write_summary()
        say(
            f"{len(folder.finished()):,} of {len(plan.cells):,} cells have finished; the same "
            "command goes on with the others"
        )
        raise
    written = folder.write_summary()
    failed = folder.failed()
    say(
        f"wrote {folder.path}: {', '.join(path.name for path in written)}, cells/ "
        f"({len(plan.cells) - len(failed):,} of {len(plan.cells):,} cells)"
    )
    failures = [cell for cell in plan.cells if cell.name in failed]
    for cell in failures[:_SHOWN_FAILURES]:
        say(f"failed {cell.shown}: {failed[cell.name]}")
    if len(failures) > _SHOWN_FAILURES:
        say(f"failed: {len(failures) - _SHOWN_FAILURES:,} more, see sweep.json")
    return 1 if failures else 0


def _executor(values: dict[str, Any]) -> _Run:
    """Answer what runs cells as the flags say."""
    name, address, jobs = values["executor"] or "local", values["address"], values["jobs"]
    if name not in EXECUTORS:
        raise ConfigError(
            f"--executor: unknown value {quote(name)}; {did_you_mean(name, EXECUTORS)}"
        )
    if name == "ray":
        if jobs is not None:
            raise ConfigError("--jobs has no effect on --executor ray, which uses every CPU")
        return lambda cells, inputs: run_ray(cells, inputs, address)
    if address is not None:
        raise ConfigError("--address is for --executor ray: add it, or leave --address out")
    count = os.cpu_count() or 1
    if jobs is not None:
        number = parse_whole(jobs)
        if number is None or not 1 <= number <= 1024:
            raise ConfigError(f"--jobs: expected a whole number, 1 to 1024, got {quote(jobs)}")
        count = number
    return lambda cells, inputs: run_local(cells, inputs, count)


def _list_cells(cells: Sequence[Cell], finished: Any, failed: Any) -> None:
    """Print the cells as a table, a line each, and say how many are left to do."""
    names = list(cells[0].settings)
    rows = [
        [
            cell.name,
            *(str(value) for value in cell.settings.values()),
            "finished" if cell.name in finished else "failed" if cell.name in failed else "to do",
        ]
        for cell in cells
    ]
    headers = ["cell", *names, "state"]
    click.echo(tabulate.tabulate(rows, headers, tablefmt="simple", disable_numparse=True))
    say(f"{len(cells):,} cells, {len(cells) - len(finished):,} to do")
