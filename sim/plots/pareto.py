"""Throughput against latency: which cells no other one beats in both."""

from collections import Counter

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.plots.axis import letter_scale, panel_size
from sim.plots.curves import LOG_SPAN, legend_below, panels_of
from sim.plots.labels import Metric, metric_of, short, text_of
from sim.plots.style import looks
from sim.plots.table import Cells, Series
from sim.plots.titles import context, over_seeds, put_title

THROUGHPUT = "output_throughput"
LATENCIES = ("p99_ttft_ms", "p99_tpot_ms")


def front(latency: Series, throughput: Series) -> list[int]:
    """Answer the points that no other has less latency than at as much throughput; by latency."""
    order = sorted(range(len(latency)), key=lambda i: (latency[i], -throughput[i]))
    best, answer = -np.inf, []
    for i in order:
        if throughput[i] > best:
            answer.append(i)
            best = throughput[i]
    return answer


def draw_pareto(cells: Cells) -> Figure:
    """Draw throughput over each latency there is, means over seeds, and the front."""
    latencies = [metric_of(column) for column in LATENCIES if cells.has(column)]
    names = [name for name in cells.swept if cells.varies(name)]
    columns = [THROUGHPUT, *(metric.column for metric in latencies)]
    frame = cells.frame.assign(**{column: cells.numbers(column) for column in columns})
    points = frame.groupby([*names, "allocator"], sort=False)[columns].mean().reset_index()
    figure, panels = panels_of(len(latencies), height=3.4)
    messages = []
    for axes, metric in zip(panels, latencies, strict=True):
        shown = points.dropna(subset=[metric.column, THROUGHPUT]).reset_index(drop=True)
        best = front(shown[metric.column].to_numpy(float), shown[THROUGHPUT].to_numpy(float))
        _draw(axes, shown, best, metric)
        _name(axes, shown.iloc[best], names, metric)
        owners = Counter(shown["allocator"].iloc[best])
        messages.append(
            f"by {metric.noun}: " + ", ".join(f"{short(n)} {c}" for n, c in owners.most_common(3))
        )
    labels = f"points named by {', '.join(map(short, names))}" if names else ""
    put_title(
        figure,
        f"Points of the Pareto front {'; '.join(messages)}",
        context(cells, over_seeds(cells), labels),
    )
    handles = [
        Line2D([], [], label=short(name), **{**look.of_line(), "linestyle": ""})
        for name, look in looks(points["allocator"]).items()
    ]
    handles.append(Line2D([], [], color="0.5", label="Pareto front"))
    legend_below(figure, handles)
    return figure


def _draw(axes: Axes, points: pd.DataFrame, best: list[int], metric: Metric) -> None:
    x, y = points[metric.column], points[THROUGHPUT]
    for name, look in looks(points["allocator"]).items():
        mine = points["allocator"] == name
        on = mine & points.index.isin(best)
        for chosen, alpha in ((mine & ~on, 0.35), (on, 1.0)):
            keywords = {**look.of_line(), "linestyle": ""}
            axes.plot(x[chosen], y[chosen], alpha=alpha, **keywords)
    axes.plot(x.iloc[best], y.iloc[best], color="0.5", lw=1, drawstyle="steps-post", zorder=1)
    if len(x) and x.min() > 0 and x.max() > LOG_SPAN * x.min():
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", nbins=5)
    axes.margins(0.1, 0.12)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel(metric.label)
    axes.set_ylabel(metric_of(THROUGHPUT).label)


def _name(axes: Axes, points: pd.DataFrame, names: list[str], metric: Metric) -> None:
    """Write the settings beside points of the front, where there is room."""
    if not names:
        return
    axes.autoscale_view()
    places = axes.transAxes.inverted().transform(
        axes.transData.transform(points[[metric.column, THROUGHPUT]].to_numpy(float))
    )
    width, height = (0.08 / panel_size(axes)[0], 0.14 / panel_size(axes)[1])  # of a letter
    taken: list[tuple[float, float, float]] = []
    for (x, y), (_, row) in zip(places, points.iterrows(), strict=True):
        text = ", ".join(short(text_of(row[name]), 16) for name in names)
        left = x if x < 0.5 else x - width * len(text)
        right = left + width * len(text)
        if any(left < end and right > start and abs(y - at) < height for start, end, at in taken):
            continue
        taken.append((left, right, y))
        axes.annotate(
            text,
            (row[metric.column], row[THROUGHPUT]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="left" if x < 0.5 else "right",
            fontsize=8 * letter_scale(),
        )
