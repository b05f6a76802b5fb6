"""Where the KV slots are, over a setting: stacked bars, a panel an allocator."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sim.columns import SLOT_STATES
from sim.plots.axis import Axis
from sim.plots.curves import hide_inner, legend_below, name_panel, panels_of
from sim.plots.labels import short
from sim.plots.style import SLOT_COLORS, SLOT_HATCHES
from sim.plots.table import MAX_PANELS, Cells, Series, arrange
from sim.plots.titles import context, left_out, over_seeds, put_title

MAX_BARS = 16
"""Most bars of a panel; of more values of x as many, evenly chosen."""


def columns() -> dict[str, str]:
    """Answer the columns of the summary that the figure needs, by state."""
    return {state: f"kv_{state}_pct" for state in SLOT_STATES}


def draw_slots(cells: Cells, x: str) -> Figure:
    """Draw the share of the pool in each state over *x*, means over time and seeds."""
    layout = arrange(cells, x, max_curves=0)
    kept, note = _thinned(cells.frame[x])
    axis = Axis(x, kept, side_by_side=True)
    stacks = {
        state: {
            (curve.panel, curve.label): _heights(axis, curve.points)
            for curve in layout.of(cells.numbers(column))
        }
        for state, column in columns().items()
    }
    stacks = {state: of for state, of in stacks.items() if any(h.any() for h in of.values())}
    every = list(dict.fromkeys(which for of in stacks.values() for which in of))
    figure, panels = panels_of(len(every[:MAX_PANELS]), axis, height=2.3)
    for axes, which in zip(panels, every, strict=False):
        bottom = np.zeros(len(axis.values))
        for state, of in stacks.items():
            heights = of.get(which, np.zeros(len(bottom)))
            axes.bar(range(len(heights)), heights, 0.85, bottom=bottom, **look_of(state))
            bottom += heights
        parts = [short(which[1])] * bool(which[1]) + [layout.panels[which[0]][0]]
        title = ", ".join(part for part in parts if part)
        name_panel(axes, title)
        axes.set_ylim(0, 100)
        axes.set_ylabel("KV slots (%)")
        axis.draw(axes, layout.along)
    cut = left_out(len(panels), len(every) + layout.left_out)
    hide_inner(panels, [None] * len(panels))
    put_title(figure, _message(cells), context(cells, over_seeds(cells), note, cut))
    legend_below(figure, [Patch(**look_of(state)) for state in stacks])
    return figure


def look_of(state: str) -> dict[str, Any]:
    """Answer the keywords of a patch that stands for slots in *state*."""
    return {
        "facecolor": SLOT_COLORS[state],
        "hatch": SLOT_HATCHES.get(state),
        "edgecolor": "white",
        "linewidth": 0,
        "label": state,
    }


def _heights(axis: Axis, points: pd.DataFrame) -> Series:
    points = points[points["x"].isin(axis.values)]
    heights = np.zeros(len(axis.values))
    heights[axis.places(points["x"].tolist()).astype(int)] = points["mean"].fillna(0)
    return heights


def _thinned(values: "pd.Series[float]") -> tuple["pd.Series[float]", str]:
    distinct = Axis(str(values.name), values).values
    if len(distinct) <= MAX_BARS:
        return values, ""
    chosen = np.unique(np.linspace(0, len(distinct) - 1, MAX_BARS).round().astype(int))
    kept = [distinct[i] for i in chosen]
    return values[values.isin(kept)], f"{len(kept)} of {len(distinct)} values"


def _message(cells: Cells) -> str:
    """Answer how much of the pool each allocator fills with KV."""
    live = pd.Series(cells.numbers("kv_live_pct"))
    ranges = live.groupby(cells.frame["allocator"].to_numpy()).agg(["min", "max"]).dropna()
    parts = []
    for name, row in ranges.sort_values("max", ascending=False).iterrows():
        low, high = f"{row['min']:.0f}", f"{row['max']:.0f}"
        parts.append(f"{short(str(name))} {low if low == high else f'{low} to {high}'} %")
    if len(parts) > 3:
        parts = [*parts[:1], "...", parts[-1]]
    return f"Live KV: {', '.join(parts)} of the pool"
