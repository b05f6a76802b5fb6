"""Charts of the measurements, drawn from summary.csv only."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sim.plots.style import COLORS
from tests.benchmarks.workloads import AT_ONCE, AZURE_LIKE, OUTPUT_LENGTHS, roomy

MARKERS = {"paged": "o", "prefix": "s", "reserve-max": "^"}


def read_loop(summary: Path) -> pd.DataFrame:
    """Answer one row a measurement of the loop."""
    rows = pd.read_csv(summary)
    measured = rows[(rows["benchmark"] == "loop") & rows["seconds"].notna()]
    return measured.drop_duplicates(["workload", "allocator", "requests"])


def _curves(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    """Draw seconds over column *x*, one curve an allocator."""
    for allocator, curve in rows.groupby("allocator"):
        name = str(allocator)
        axes.plot(
            curve[x],
            curve["seconds"],
            marker=MARKERS.get(name, "o"),
            color=COLORS[name],
            label=name,
        )
    axes.set_ylabel("time of the loop (s)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.3)


def _linear(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw what proportional growth from the fastest first point would be."""
    x = np.sort(rows["requests"].unique())
    start = rows.loc[rows["requests"] == x[0], "seconds"].min()
    axes.plot(x, start * x / x[0], color="0.5", linestyle=":", label="proportional")


def _grows(rows: pd.DataFrame) -> str:
    """Answer how time grew over the last step of requests, as the range over the allocators."""
    last, before = rows["requests"].nlargest(2 * rows["allocator"].nunique()).unique()[:2]
    seconds = rows.pivot_table(index="allocator", columns="requests", values="seconds")
    growth = seconds[last] / seconds[before]
    low, high = f"{growth.min():.1f}", f"{growth.max():.1f}"
    span = low if low == high else f"{low} to {high}"
    return f"{last / before:g}x the requests take {span}x the time"


def by_requests(rows: pd.DataFrame) -> Figure:
    """Draw time against the number of requests, all at once and near saturation."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {
        AT_ONCE: "512 in, 128 out, all at once",
        AZURE_LIKE: "like Azure's chats, Poisson arrivals",
    }
    for axes, (workload, title) in zip(panels, titles.items(), strict=True):
        chosen = rows[rows["workload"] == workload].sort_values("requests")
        _curves(axes, chosen, "requests")
        _linear(axes, chosen)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("requests")
        axes.set_title(f"{_grows(chosen)}\n{title}", loc="left", fontsize=10)
        axes.legend(frameon=False)
    return figure


def by_output(rows: pd.DataFrame) -> Figure:
    """Draw time against the output tokens of each request, at a fixed number of requests."""
    chosen = rows[rows["workload"].isin([roomy(length) for length in OUTPUT_LENGTHS])].copy()
    count = int(chosen["requests"].iloc[0])
    chosen["length"] = chosen["output_tokens"] / chosen["requests"]
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    _curves(axes, chosen.sort_values("length"), "length")
    axes.set_xscale("log", base=2)
    axes.set_xticks(OUTPUT_LENGTHS, [f"{length:,}" for length in OUTPUT_LENGTHS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("output tokens a request")
    first, last = OUTPUT_LENGTHS[0], OUTPUT_LENGTHS[-1]
    seconds = chosen.pivot_table(index="allocator", columns="length", values="seconds")
    growth = (seconds[last] / seconds[first]).max()
    axes.set_title(
        f"{last // first}x the output tokens take at most {growth:.1f}x the time\n"
        f"{count:,} requests of 512 prompt tokens, all at once, no pressure",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False)
    return figure


def draw(summary: Path, folder: Path) -> None:
    """Leave both charts in *folder*."""
    rows = read_loop(summary)
    by_requests(rows).savefig(folder / "time_by_requests.png", dpi=150)
    by_output(rows).savefig(folder / "time_by_output.png", dpi=150)
