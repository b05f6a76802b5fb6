"""A column of the summary over a setting: one curve an allocator, bars for seeds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.plots.axis import MAX_WIDTH, Axis, fit, letter_scale, new_figure, panel_size
from sim.plots.labels import Metric, named, number, short
from sim.plots.style import Look, looks, shades
from sim.plots.table import MAX_PANELS, Cells, Curve, Layout, arrange
from sim.plots.titles import context, left_out, message, put_title, seeds

LOG_SPAN = 30
"""Times that spread further than by this factor are drawn by their logarithm."""

MAX_MARKERS = 40
"""About so many markers a curve has at most."""


def panels_of(
    count: int, axis: Axis | None = None, columns: int | None = None, *, height: float = 2.7
) -> tuple[Figure, list[Axes]]:
    """Answer a figure of *count* panels over *axis*, at most three beside each other; and them."""
    columns = columns or (count if count <= 3 else (2 if count == 4 else 3))
    columns = min(columns, axis.most_columns) if axis else columns
    rows = -(-count // columns)
    width = 8.0 if columns < 3 else MAX_WIDTH
    size = (width, max(height * rows + 1.0, 3.8) + (axis.extra if axis else 0))
    figure = new_figure(*size)
    panels = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def name_panel(axes: Axes, title: str) -> None:
    """Write *title* above *axes*, broken where it does not fit."""
    axes.set_title(fit(title, panel_size(axes)[0]), loc="left")


def hide_inner(panels: Sequence[Axes], rows: Sequence[object]) -> None:
    """Hide labels that a panel below has too, or the one on the left, if *rows* are equal there."""
    spec = panels[0].get_subplotspec()
    columns = spec.get_gridspec().ncols if spec else 1
    for place, axes in enumerate(panels):
        if place + columns < len(panels):
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
        if place % columns and rows[place - 1] == rows[place]:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")


def draw_curves(cells: Cells, x: str, metrics: Sequence[Metric]) -> Figure:
    """Draw *metrics* over *x*; a panel each, times the panels of the settings that are left."""
    layout = arrange(cells, x)
    axis = Axis(x, cells.frame[x])
    shown = layout.panels[: MAX_PANELS // len(metrics)]
    count = len(layout.panels) + layout.left_out
    layout = layout._replace(panels=shown)
    columns = len(metrics) if len(metrics) > 1 else None  # a column each
    figure, panels = panels_of(len(metrics) * len(shown), axis, columns)
    look = looks(layout.curves) if layout.by == "allocator" else shades(layout.curves)
    of_metrics = [layout.of(cells.numbers(metric.column)) for metric in metrics]
    drawn = [curve for curves in of_metrics for curve in curves]
    for place, (metric, curves) in enumerate(zip(metrics, of_metrics, strict=True)):
        mine = [panels[len(metrics) * i + place] for i in range(len(shown))]
        for curve in curves:
            _curve(mine[curve.panel], axis, curve, look, metric)
        for axes, (title, _) in zip(mine, shown, strict=True):
            _finish(axes, metric, curves)
            axis.draw(axes, layout.along)
            name_panel(axes, title)
    hide_inner(panels, list(metrics) * len(shown))
    put_title(
        figure,
        message(layout, metrics[0], of_metrics[0]),
        context(cells, seeds(drawn), left_out(len(shown), count)),
    )
    used = [name for name in layout.curves if any(curve.label == name for curve in drawn)]
    if layout.by is not None and used:
        put_legend(figure, layout, {name: look[name] for name in used}, not axis.is_text)
    return figure


def put_legend(figure: Figure, layout: Layout, look: dict[str, Look], line: bool) -> None:
    """Name the curves below *figure*, which have a *line* or markers only."""
    handles = [
        Line2D(
            [],
            [],
            label=short(name) if layout.by == "allocator" else named(str(layout.by), name),
            **(of.of_line() if line else {**of.of_line(), "linestyle": ""}),
        )
        for name, of in look.items()
    ]
    legend_below(figure, handles)


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """Name *handles* below *figure*, in as many columns as there is room for."""
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = int(figure.get_figwidth() / letter_scale() / (0.67 + 0.066 * widest))
    rows = -(-len(handles) // max(columns, 1))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=-(-len(handles) // rows),
        frameon=False,
    )


def _curve(axes: Axes, axis: Axis, curve: Curve, look: dict[str, Look], metric: Metric) -> None:
    points = curve.points
    places = axis.places(points["x"].tolist())
    mean, low, high = (
        points[name].to_numpy(float) * metric.scale for name in ("mean", "low", "high")
    )
    spread = np.vstack([mean - low, high - mean])
    bars = (points["count"] > 1).any()
    if curve.label == "":
        each = looks(str(x) for x in points["x"])
        colors = [each[str(x)].color for x in points["x"]]
        drawn = axes.bar(places, mean, 0.6, color=colors, yerr=spread if bars else None, capsize=3)
        texts = ["" if np.isnan(value) else number(value) for value in mean]
        axes.bar_label(drawn, texts, padding=2)
        return
    mine = look[curve.label]
    keywords = mine.of_line()
    if axis.is_text:  # between names there is nothing, so no line; side by side to be seen
        order = list(look)
        step = min(0.12, 0.6 / len(order))
        places = places + (order.index(curve.label) - (len(order) - 1) / 2) * step
        keywords["linestyle"] = ""
    every = max(1, len(places) // MAX_MARKERS)
    axes.errorbar(
        places,
        mean,
        spread if bars else None,
        capsize=2.5,
        markevery=every,
        **keywords,
    )


def _finish(axes: Axes, metric: Metric, curves: Sequence[Curve]) -> None:
    """Give *axes* the label and the range of *metric*, which all panels share."""
    low = [v for curve in curves for v in curve.points["low"].dropna() * metric.scale]
    high = [v for curve in curves for v in curve.points["high"].dropna() * metric.scale]
    axes.set_ylabel(fit(metric.label, panel_size(axes)[1]))
    least, most = min(low, default=0.0), max(high, default=0.0)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    if metric.more_is_better is False and least > 0 and most > LOG_SPAN * least:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.set_ylim(least / 1.5, most * 1.5)
    elif least >= 0:
        axes.set_ylim(0, most * 1.1 or 1.0)
    else:
        axes.set_ylim(least - 0.1 * (most - least), most + 0.1 * (most - least) or 1.0)
