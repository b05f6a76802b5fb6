"""A column of the summary over two settings: a heat map, a panel an allocator."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.plots.axis import Axis, letter_scale
from sim.plots.curves import hide_inner, name_panel, panels_of
from sim.plots.labels import Metric, named, number, short
from sim.plots.table import MAX_PANELS, Cells, Series, arrange, in_curves
from sim.plots.titles import context, left_out, over_seeds, put_title

_MAX_NUMBERS = 12
"""Most values of a setting for which cells have their number written in them."""


def second_setting(cells: Cells, x: str) -> str | None:
    """Answer the setting that a heat map has beside *x*: the next that varies by itself."""
    if x in {"allocator", "seed"}:
        return None
    for name in cells.swept:
        if name != x and cells.varies(name) and cells.varies(x):
            pairs = len(cells.frame.drop_duplicates([x, name]))
            if pairs > max(cells.frame[x].nunique(), cells.frame[name].nunique()):
                return name
    return None


def draw_grid(cells: Cells, x: str, y: str, metric: Metric) -> Figure:
    """Draw *metric* by colour over settings *x* and *y*, means over seeds."""
    layout = arrange(cells, x, beside=(y,), max_curves=0)
    frame = cells.frame.assign(value=cells.numbers(metric.column) * metric.scale)
    across, up = (Axis(name, frame[name], side_by_side=True) for name in (x, y))
    maps: list[tuple[str, Series]] = []
    for title, panel in layout.panels:
        for label, rows in in_curves(frame.loc[panel.index], "allocator"):
            if rows["value"].notna().any():
                means = rows.groupby([y, x])["value"].mean().unstack()
                full = means.reindex(index=up.values, columns=across.values)
                name = ", ".join(part for part in (short(label), title) if part)
                maps.append((name, full.to_numpy(float)))
    shown = maps[:MAX_PANELS]
    figure, panels = panels_of(len(shown), across)
    norm = mpl.colors.Normalize(
        min(float(np.nanmin(m)) for _, m in shown), max(float(np.nanmax(m)) for _, m in shown)
    )
    for axes, (title, grid) in zip(panels, shown, strict=True):
        image = axes.imshow(
            np.ma.masked_invalid(grid), norm=norm, cmap="cividis", origin="lower", aspect="auto"
        )
        axes.set_facecolor("0.85")
        _numbers(axes, grid, norm)
        across.draw(axes)
        up.draw(axes, which="y")
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        name_panel(axes, title)
        axes.set_xlim(-0.5, grid.shape[1] - 0.5)
        axes.set_ylim(-0.5, grid.shape[0] - 0.5)
    hide_inner(panels, [None] * len(panels))
    bar = figure.colorbar(image, ax=panels, format="{x:,.10g}", pad=0.02)
    bar.set_label(metric.label)
    bar.outline.set_visible(False)
    missing = "grey: no result" if any(np.isnan(grid).any() for _, grid in shown) else ""
    cut = left_out(len(shown), len(maps) + layout.left_out)
    put_title(
        figure, _message(metric, shown, across, up), context(cells, over_seeds(cells), missing, cut)
    )
    return figure


def _numbers(axes: Axes, grid: Series, norm: mpl.colors.Normalize) -> None:
    if max(grid.shape) > _MAX_NUMBERS:
        return
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = "black" if norm(value) > 0.5 else "white"
            axes.text(
                column,
                row,
                number(value),
                ha="center",
                va="center",
                color=color,
                fontsize=7 * letter_scale(),
            )


def _message(metric: Metric, maps: list[tuple[str, Series]], across: Axis, up: Axis) -> str:
    """Answer where the best value is, or the highest."""
    least = metric.more_is_better is False
    pick, of = (np.nanargmin, np.nanmin) if least else (np.nanargmax, np.nanmax)
    title, grid = (min if least else max)(maps, key=lambda each: float(of(each[1])))
    row, column = np.unravel_index(int(pick(grid)), grid.shape)
    at = f"{named(across.name, across.values[column])}, {named(up.name, up.values[row])}"
    word = "Lowest" if least else "Highest"
    value = f"{number(grid[row, column])}{metric.unit}"
    return f"{word} {metric.noun}: {value}, {title} at {at}"
