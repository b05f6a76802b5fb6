"""Figures, drawn from result files only; one function a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from sim.files import atomic
from sim.metrics import SLOT_STATES

NUM_BINS = 300
"""Points a curve: each is the time-weighted mean of its bin, so no step is lost."""

COLORS = {
    "reserve-max": "#D55E00",
    "reserve-pow2": "#E69F00",
    "reserve-oracle": "#CC79A7",
    "paged": "#0072B2",
    "prefix": "#009E73",
}
"""Okabe and Ito's palette, told apart by colour-blind readers; the same in every figure."""

_LINES = {
    "reserve-max": "-",
    "reserve-pow2": "--",
    "reserve-oracle": ":",
    "paged": "-",
    "prefix": "--",
}
_SLOT_COLORS = {
    "live": "#0072B2",
    "reserved": "#9AD1F5",
    "internal": "#D55E00",
    "external": "#F0C05A",
    "cached": "#009E73",
    "free": "#EEEEEE",
}
_STYLE: Any = {
    "svg.hashsalt": "kvsim",  # ids in the file follow from its content: equal runs, equal bytes
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Series = npt.NDArray[np.float64]


class RunFiles:
    """The result files of one run, as `sim.results.write_run` left them."""

    def __init__(self, folder: Path) -> None:
        self.summary: dict[str, Any] = msgspec.json.decode((folder / "summary.json").read_bytes())
        parquet = folder / "steps.parquet"
        self.steps = (
            pd.read_parquet(parquet) if parquet.exists() else pd.read_csv(folder / "steps.csv")
        )
        self.label: str = self.summary["allocator"]

    @property
    def end(self) -> float:
        """Seconds from the first step to the last one's end."""
        last = self.steps.iloc[-1]
        return float(last["time"] + last["duration"] - self.steps["time"].iloc[0])

    def mean_over_time(self, column: str, edges: Series) -> Series:
        """Answer the time-weighted mean of *column* between neighbouring *edges* (seconds)."""
        start = self.steps["time"].to_numpy(float) - float(self.steps["time"].iloc[0])
        duration = self.steps["duration"].to_numpy(float)
        area = np.cumsum(self.steps[column].to_numpy(float) * duration)
        times = np.column_stack([start, start + duration]).ravel()
        areas = np.column_stack([np.concatenate([[0.0], area[:-1]]), area]).ravel()
        return np.asarray(np.diff(np.interp(edges, times, areas)) / np.diff(edges))


def _edges(end: float) -> Series:
    return np.linspace(0, max(end, 1e-9), NUM_BINS + 1)


def running_requests(runs: Sequence[RunFiles]) -> Figure:
    """Draw how many requests run at once, over time, one curve an allocator."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    edges = _edges(max(run.end for run in runs))
    middle = (edges[:-1] + edges[1:]) / 2
    for run in runs:
        shown = middle <= run.end
        values = run.mean_over_time("running", edges)
        axes.plot(
            middle[shown],
            values[shown],
            color=COLORS.get(run.label),
            linestyle=_LINES.get(run.label, "-"),
            label=f"{run.label} (mean {run.summary['mean_num_requests_running']:.0f})",
        )
    axes.set_xlabel("simulated time (s)")
    axes.set_ylabel("running requests")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(_running_message(runs), loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=min(len(runs), 3), frameon=False)
    return figure


def _running_message(runs: Sequence[RunFiles]) -> str:
    """Answer what the curves say: who serves most at once, and how many times the baseline."""
    first = runs[0].summary
    where = f"{first['model_id']} on {first['gpu']}"
    means = {run.label: run.summary["mean_num_requests_running"] or 0.0 for run in runs}
    base = "reserve-max" if "reserve-max" in means else runs[0].label
    best = max(means, key=lambda label: means[label])
    if not means[base] or f"{means[best] / means[base]:.1f}" == "1.0":
        return f"All serve about as many requests at once: {where}"
    return f"{best} serves {means[best] / means[base]:.1f}x as many at once as {base}: {where}"


def slot_split(runs: Sequence[RunFiles]) -> Figure:
    """Draw where the KV slots are, over time, one panel an allocator."""
    rows = -(-len(runs) // 2) if len(runs) > 1 else 1
    columns = 2 if len(runs) > 1 else 1
    figure = Figure(figsize=(4.4 * columns, 2.2 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    shown_states = [s for s in SLOT_STATES if any(r.steps[f"kv_{s}_slots"].any() for r in runs)]
    edges = _edges(max(run.end for run in runs))
    middle = (edges[:-1] + edges[1:]) / 2
    for run, axes in zip(runs, panels, strict=False):
        shown = middle <= run.end
        capacity = run.summary["kv_cache_slots"]
        shares = [
            100 * run.mean_over_time(f"kv_{state}_slots", edges)[shown] / capacity
            for state in shown_states
        ]
        colors = [_SLOT_COLORS[state] for state in shown_states]
        axes.stackplot(middle[shown], shares, colors=colors, labels=shown_states)
        live = run.summary["kv_live_pct"]
        axes.set_title(f"{run.label}: {live:.0f} % live on average", loc="left", fontsize=10)
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 100)
        axes.set_ylabel("KV slots (%)")
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(runs) - columns) : len(runs)]:
        axes.set_xlabel("simulated time (s)")
        axes.tick_params(labelbottom=True)
    first = runs[0].summary
    figure.suptitle(f"Where the KV slots are: {first['model_id']} on {first['gpu']}", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


FIGURES = {"running": running_requests, "slots": slot_split}
"""File name to the function that draws it."""


def write_figures(folder: Path, run_folders: Sequence[Path]) -> list[Path]:
    """Draw every figure of the runs in *run_folders* into *folder*; answer the files."""
    runs = [RunFiles(run_folder) for run_folder in run_folders]
    files = []
    with mpl.rc_context(_STYLE):
        for name, draw in FIGURES.items():
            figure = draw(runs)
            for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{suffix}"
                with atomic(path) as temporary:
                    figure.savefig(temporary, format=suffix, dpi=150, metadata=metadata)
                files.append(path)
    return files
