"""Axes over a setting: numbers in proportion or by their logarithm, names side by side."""

import textwrap
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import NullFormatter, NullLocator

from sim.plots.labels import setting_label, short, text_of
from sim.plots.table import Series, in_order, is_text

_CHARACTER = 0.085
"""Inches that a character of a tick is wide, with some room."""

_NAME = 0.2
"""Inches that a name needs at least beside the next one, if both are turned."""

MAX_WIDTH = 10.0
"""Of a figure, in inches: a wider one would be too small to read where it is shown."""


class Axis:
    """An axis over the *values* of setting *name*.

    Attributes:
        is_text: the values are names, and have a place each, 0, 1, 2, ...
        is_log: they grow by factors rather than by steps.
    """

    def __init__(self, name: str, values: "pd.Series[Any]", *, side_by_side: bool = False) -> None:
        self.name = name
        self.values = in_order(values)
        self.is_text = is_text(values) or side_by_side
        numbers = np.array([] if is_text(values) else self.values, dtype=float)
        self.is_log = not self.is_text and is_geometric(numbers)

    def places(self, values: Sequence[Hashable]) -> Series:
        """Answer where *values* are."""
        if not self.is_text:
            return np.asarray(values, dtype=float)
        place = {value: float(number) for number, value in enumerate(self.values)}
        return np.array([place[value] for value in values])

    def draw(
        self, axes: Axes, along: Sequence[str] = (), *, which: Literal["x", "y"] = "x"
    ) -> None:
        """Give *axes* the scale, the ticks and the label."""
        axis = axes.xaxis if which == "x" else axes.yaxis
        if self.is_log and which == "x":
            whole = np.log2(self.places(self.values)) % 1 == 0
            axes.set_xscale("log", base=2 if whole.all() else 10)
        length = panel_size(axes)[0 if which == "x" else 1]
        labels = [short(text_of(value), 24) for value in self.values]
        shown = self._thinned(labels, length, which)
        if self.is_text and which == "x":
            self._names(axes, labels, length)
        elif self.is_text or len(shown) == len(labels):
            places = self.places([self.values[i] for i in shown])
            axis.set_ticks(places, [labels[i] for i in shown])
            axis.set_minor_locator(NullLocator())
        else:
            axis.set_major_formatter("{x:,.10g}")
        axis.set_minor_formatter(NullFormatter())
        label = setting_label(self.name) + "".join(f", and {short(name)} with it" for name in along)
        axis.set_label_text(fit(label, length))

    @property
    def most_columns(self) -> int:
        """How many panels may stand beside each other, for names to have room."""
        return max(1, int(MAX_WIDTH * 0.8 / _NAME / len(self.values))) if self.is_text else 3

    @property
    def extra(self) -> float:
        """Inches of height that turned names may take."""
        if not self.is_text:
            return 0.0
        return 0.06 * max(min(len(text_of(value)), 24) for value in self.values)

    def _names(self, axes: Axes, labels: list[str], length: float) -> None:
        space = length / len(labels)
        every = -int(-_NAME * 0.8 // space)  # of too many names some, evenly
        turned: dict[str, Any] = {}
        if max(map(len, labels)) * _CHARACTER > space:
            turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
            if space < 2 * _NAME:
                turned = {"rotation": 90, "fontsize": 8 * letter_scale()}
        axes.set_xticks(range(0, len(labels), every), labels[::every], **turned)
        pad = 0.6 if len(labels) > 2 else 1.0
        axes.set_xlim(-pad, len(labels) - 1 + pad)

    def _thinned(self, labels: list[str], length: float, which: Literal["x", "y"]) -> list[int]:
        """Answer which values get a tick: as many as there is room for, from the first."""
        places = self.places(self.values)
        along = np.log(places) if self.is_log else places
        span = float(along[-1] - along[0]) or 1.0
        shown: list[int] = []
        before = -np.inf
        for i, at in enumerate((along - along[0]) / span * length):
            if which == "x":
                room = _CHARACTER * (len(labels[i]) + 1)
                room = (room + _CHARACTER * len(labels[shown[-1]]) if shown else room) / 2 + 0.05
            else:
                room = 0.18
            if at - before >= room:
                shown.append(i)
                before = float(at)
        return shown


def new_figure(width: float, height: float) -> Figure:
    """Answer a figure of that size in inches, larger where the style's letters are."""
    scale = letter_scale()
    return Figure(figsize=(width * scale, height * scale), layout="constrained")


def letter_scale() -> float:
    """Answer how many times our own letters the largest of the style are."""
    sizes: Any = mpl.rcParams
    names = ("axes.labelsize", "axes.titlesize", "legend.fontsize", "xtick.labelsize")
    largest = max(FontProperties(size=sizes[name]).get_size_in_points() for name in names)
    return max(1.0, float(largest) / 10)


def panel_size(axes: Axes) -> tuple[float, float]:
    """Answer about how wide and high *axes* will be, in inches before the style's letters."""
    figure, spec = axes.get_figure(), axes.get_subplotspec()
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches() / letter_scale()
    rows, columns = spec.get_gridspec().get_geometry() if spec else (1, 1)
    return 0.8 * float(width) / columns, 0.7 * float(height) / rows


def fit(text: str, inches: float) -> str:
    """Answer *text*, broken where it is longer than *inches* in letters of ours."""
    return textwrap.fill(text, max(int(11.5 * inches), 12), break_on_hyphens=False)


def is_geometric(values: Series) -> bool:
    """Answer whether ascending *values* are more even by their logarithm than as they are."""
    if len(values) < 3 or values[0] <= 0 or values[-1] < 4 * values[0]:
        return False

    def unevenness(places: Series) -> float:
        gaps = np.diff(places)
        return float(gaps.std() / gaps.mean())

    return unevenness(np.log(values)) < unevenness(values)
