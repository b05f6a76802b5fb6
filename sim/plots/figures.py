"""Which charts a folder of results has, and their files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sim.errors import ConfigError, FileError
from sim.plots import bars, pareto, series
from sim.plots.curves import draw_curves
from sim.plots.grids import draw_grid, second_setting
from sim.plots.labels import metric_of
from sim.plots.results import Results, RunFiles
from sim.plots.style import drawing, settle, write
from sim.plots.table import Cells, is_text
from workloads.errors import did_you_mean, plain, quote

FORMATS = ("png", "svg")

OVER_TIME: dict[str, Callable[[Sequence[RunFiles]], Figure]] = {
    "running": series.running_requests,
    "slots": series.slot_split,
}
"""Charts of several runs over time, by file name."""

OVER_SETTINGS: dict[str, tuple[str, ...]] = {
    "running": ("mean_num_requests_running",),
    "throughput": ("output_throughput",),
    "goodput": ("request_goodput",),
    "request_rate": ("found_request_rate",),
    "ttft": ("median_ttft_ms", "p99_ttft_ms"),
    "tpot": ("median_tpot_ms", "p99_tpot_ms"),
    "prefix_hits": ("prefix_cache_hit_rate",),
    "preemptions": ("num_preemptions",),
}
"""Charts over a setting, by file name: the columns that each has a panel of."""

OPTIONAL = {"goodput", "request_rate"}
"""Charts that are left out without a note: what they show was not asked for."""

GRIDS = ("running", "throughput")
"""Of `OVER_SETTINGS`, those that two settings have a heat map of."""

Draw = Callable[[], Figure]


def choose(
    results: Results, x: str | None, columns: Sequence[str], where: Sequence[str]
) -> tuple[dict[str, Draw], list[str]]:
    """Answer the charts of *results* by file name, and notes on those that it cannot have.

    *columns* of the summary instead of the usual charts, over setting *x*, of the cells *where*.

    Raises:
        ConfigError: a variable, column or cell that is not there.
        FileError: nothing can be drawn.
    """
    if results.cells is None:
        if x is not None or columns or where:
            flag = "--x" if x is not None else "--y" if columns else "--where"
            raise ConfigError(f"{flag} is for a sweep or comparison; {results.folder} is one run")
        return {"series": lambda: series.time_series(results.runs)}, []
    cells = results.cells.only(where)
    over = cells.variable(x)
    if columns:
        return dict(_chosen(cells, over, columns)), []
    over_time = results.runs if not where and x is None else []
    charts = {name: _bind(draw, over_time) for name, draw in OVER_TIME.items() if over_time}
    notes = list(results.notes)
    for name, draw, missing in _usual(cells, over):
        if not missing:
            charts.setdefault(name, draw)
        elif name not in OPTIONAL:
            notes.append(f"no chart {name}: {cells.path.name} has no {' and no '.join(missing)}")
    if not charts:
        raise FileError(f"{plain(str(results.folder))}: nothing to draw: {'; '.join(notes)}")
    return charts, notes


def _usual(cells: Cells, x: str) -> Iterator[tuple[str, Draw, list[str]]]:
    """Answer name and drawing of every chart over *x*, and what it needs that is not there."""

    def missing(columns: Iterable[str]) -> list[str]:
        return [column for column in columns if not cells.has(column)]

    for name, needed in OVER_SETTINGS.items():
        lacking = missing(needed)
        metrics = [metric_of(column) for column in needed if column not in lacking]
        yield name, _bind(draw_curves, cells, x, metrics), [] if metrics else lacking
    yield "slots", _bind(bars.draw_slots, cells, x), missing(bars.columns().values())
    other = second_setting(cells, x)
    for name in GRIDS if other else ():
        (column,) = OVER_SETTINGS[name]
        draw = _bind(draw_grid, cells, x, other, metric_of(column))
        yield f"map_{name}", draw, missing([column])
    latencies = missing(pareto.LATENCIES)
    lacking = latencies if len(latencies) == len(pareto.LATENCIES) else []
    yield "pareto", _bind(pareto.draw_pareto, cells), missing([pareto.THROUGHPUT]) + lacking


def _bind(draw: Callable[..., Figure], *arguments: Any) -> Draw:
    return lambda: draw(*arguments)


def _chosen(cells: Cells, x: str, columns: Sequence[str]) -> Iterator[tuple[str, Draw]]:
    """Answer a chart of each of *columns* over *x*, and its map if there is a second setting."""
    numeric = [
        str(name)
        for name in cells.frame.columns
        if name not in cells.variables and not is_text(cells.frame[name])
    ]
    other = second_setting(cells, x)
    for column in columns:
        if column not in numeric:
            raise ConfigError(
                f"--y {quote(column)}: no column of numbers in {cells.path.name}; "
                f"{did_you_mean(column, numeric)}"
            )
        if not cells.has(column):
            raise FileError(f"--y {column}: {cells.path.name} has no value in any row")
        name = re.sub(r"[^A-Za-z0-9_]", "_", column)[:80]  # a file of this folder, whatever it is
        yield name, _bind(draw_curves, cells, x, [metric_of(column)])
        if other:
            yield f"map_{name}", _bind(draw_grid, cells, x, other, metric_of(column))


def write_charts(
    folder: Path,
    charts: Mapping[str, Draw],
    formats: Sequence[str] = FORMATS,
    style: Mapping[str, Any] | None = None,
) -> tuple[list[Path], set[str]]:
    """Draw *charts* into *folder*; answer the files, and the characters that the font lacks."""
    files, lacking = [], set[str]()
    names_are_text = {"text.parse_math": False}
    with drawing(names_are_text, style or {}):
        for name, draw in charts.items():
            figure = draw()
            settle(figure)
            for suffix in formats:
                files.append(folder / f"{name}.{suffix}")
                lacking |= write(figure, files[-1])
    return files, lacking


def write_comparison_charts(folder: Path, run_folders: Sequence[Path]) -> list[Path]:
    """Draw the runs in *run_folders* over time into *folder*; answer the files."""
    runs = [RunFiles(run_folder) for run_folder in run_folders]
    charts = {name: _bind(draw, runs) for name, draw in OVER_TIME.items()}
    return write_charts(folder, charts)[0]
