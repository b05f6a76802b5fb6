"""Run the experiments and draw them again: ``python results/regenerate.py [NAME ...]``.

Each NAME is a folder here with a ``spec.toml``: ``kvsim sweep`` runs it into
``kvsim-results/NAME``, where a run that was interrupted goes on. Then ``summary.csv``,
``manifest.json`` and the figures of the folder are written: the summary with nine digits and
without the names of cells, which change with every version; what its times and pools rest on is in
the manifest. ``--figures`` draws what is there, without a run. ``claims`` are the folders of
`claims`, ``c05`` one of them; ``paper`` has a program of its own.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import claims
from experiment import RESULTS as HERE
from experiment import run_sweep, save
from paper import paper
from sim.plots.curves import draw_curves
from sim.plots.grids import draw_grid
from sim.plots.labels import Metric, metric_of
from sim.plots.results import read_results
from sim.plots.style import drawing
from sim.plots.table import Cells
from sim.plots.titles import BASELINE, context, put_title

RELATIVE = Metric("relative", "throughput (% of that with blocks of 16)", "throughput")
SHORT: dict[str, Callable[[str], str]] = {
    "trace": lambda value: Path(value).stem,
    "step_time": lambda value: value.partition(":")[0],
}
"""What is left of values of these settings in a figure: enough to tell them apart."""


class Chart(NamedTuple):
    """A figure of an experiment.

    Attributes:
        title: what it shows.
        columns: of the summary, a column of panels each.
        where: which cells, as ``kvsim plot --where``.
        up: the second setting of a heat map; of curves None.
        limits: of all y axes; by the values if None.
    """

    name: str
    title: str
    x: str
    columns: Sequence[str]
    where: Sequence[str] = ()
    up: str | None = None
    limits: tuple[float, float] | None = None


CHARTS = {
    "block_size": (
        Chart(
            "throughput",
            "Any block size beats reserving the maximum; 16 to 64 are the best or near it",
            "block_size",
            ("output_throughput",),
            ("step_time=roofline",),
        ),
        Chart(
            "u_curve",
            "Kernels make small blocks slow (top); unused slots and lost sharing, large ones. "
            "With kernel times that ignore block_size (below) only the right arm is left",
            "block_size",
            (RELATIVE.column,),
            limits=(78, 106),
        ),
        Chart(
            "causes",
            "Large blocks preempt less, but leave slots unused and cut what is shared",
            "block_size",
            ("num_preemptions", "kv_internal_pct", "prefix_cache_hit_rate"),
            ("step_time=roofline", "allocator=prefix"),
        ),
    ),
    "utilization": (
        Chart(
            "concurrency",
            "More memory means more users for every allocator; the allocator matters far more",
            "gpu_memory_utilization",
            ("mean_num_requests_running", "output_throughput"),
        ),
        Chart(
            "latency",
            "Past saturation more memory shortens the queue and lengthens every step",
            "gpu_memory_utilization",
            ("mean_ttft_ms", "mean_tpot_ms"),
        ),
    ),
    "block_size_x_utilization": (
        Chart(
            "throughput_map",
            "A block of 16 to 64 is right at every utilization; memory moves more than block size",
            "block_size",
            ("output_throughput",),
            up="gpu_memory_utilization",
        ),
    ),
    "request_rate": (
        Chart(
            "latency",
            "Paging takes three times the load of reserving, or more, before requests have to wait",
            "request_rate",
            ("median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms"),
        ),
        Chart(
            "goodput",
            "Goodput (TTFT 1 s, TPOT 100 ms) rises to a knee, then collapses; throughput does not "
            "show it",
            "request_rate",
            ("request_goodput", "output_throughput"),
        ),
    ),
}
"""The figures of each experiment."""

OTHERS: dict[str, Callable[..., None]] = {"claims": claims.regenerate, "paper": paper.main}
"""What is made otherwise, from the keyword *figures*: whether it is only drawn."""


def draw(name: str) -> None:
    """Draw the figures of experiment *name* from its summary."""
    folder = HERE / name
    found = read_results(folder).cells
    assert found is not None, "a folder with summary.csv has cells"
    frame = found.frame
    for setting, shorten in SHORT.items():
        if setting in found.swept:
            frame[setting] = frame[setting].map(shorten)
    if found.varies("block_size"):
        rest = [setting for setting in (*found.swept, "allocator") if setting != "block_size"]
        blocks = frame[frame["allocator"] != BASELINE]
        at_16 = blocks[blocks["block_size"] == 16].set_index(rest)["output_throughput"]
        at_16 = frame.join(at_16.rename("at_16"), on=rest)["at_16"]
        frame[RELATIVE.column] = 100 * frame["output_throughput"] / at_16
    cells = Cells(frame, found.swept, found.path)
    with drawing():
        for chart in CHARTS[name]:
            _draw(cells.only(chart.where), chart, folder / f"{chart.name}.png")


def _draw(cells: Cells, chart: Chart, path: Path) -> None:
    metrics = [RELATIVE if c == RELATIVE.column else metric_of(c) for c in chart.columns]
    if chart.up is None:
        figure = draw_curves(cells, chart.x, metrics)
    else:
        figure = draw_grid(cells, chart.x, chart.up, metrics[0])
    put_title(figure, chart.title, context(cells))
    for axes in figure.axes if chart.limits else ():
        axes.set_ylim(chart.limits)
        axes.set_title(axes.get_title("left").replace("\n", " "), loc="left")
    save(figure, path)


def main() -> None:
    """Regenerate the experiments named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [*CHARTS, *OTHERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--figures", action="store_true", help="only draw")
    given = parser.parse_args()
    parts = claims.found()
    for name in given.names:
        if name not in {*known, *parts}:
            parser.error(f"no experiment {name}; expected {', '.join([*known, *parts])}")
    for name in given.names or known:
        if name in parts:
            claims.regenerate([name], figures=given.figures)
        elif name in OTHERS:
            OTHERS[name](figures=given.figures)
        else:
            if not given.figures:
                run_sweep(HERE / name)
            draw(name)


if __name__ == "__main__":
    main()
