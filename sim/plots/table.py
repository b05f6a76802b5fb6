"""The cells of a sweep or comparison: what varies among them, and what is drawn over what."""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.errors import ConfigError, FileError
from sim.plots.labels import named, text_of
from sim.plots.style import looks
from workloads.errors import did_you_mean, plain, quote

EXPECTED = "expected a folder of kvsim run -o, kvsim compare or kvsim sweep"

MAX_CURVES = 6
"""Most values of a setting that are told apart as curves of one panel."""

MAX_PANELS = 12
"""Most panels of a figure."""

Series = npt.NDArray[np.float64]


def numbers(frame: pd.DataFrame, column: str, path: Path) -> Series:
    """Answer *column* as numbers; NaN where there is none, or none that can be drawn.

    Raises:
        FileError: it is missing, or is text.
    """
    where = plain(str(path))
    if column not in frame.columns:
        raise FileError(f"{where}: column {plain(column)} is missing; {EXPECTED}")
    try:
        values = pd.to_numeric(frame[column]).to_numpy(float, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise FileError(
            f"{where}: column {plain(column)}: {quote(str(error))}; expected numbers"
        ) from None
    return np.where(np.isfinite(values), values, np.nan)


class Cells:
    """Rows of a comparison or sweep, one a run.

    Attributes:
        frame: swept settings are numbers, or text where one of the values is none.
        swept: the settings that were, in their order; not ``allocator`` and ``seed``.

    Raises:
        FileError: two rows have the same settings.
    """

    def __init__(self, frame: pd.DataFrame, swept: Sequence[str], path: Path) -> None:
        self.path = path
        self.frame = frame.reset_index(drop=True).copy()
        self.swept = [name for name in dict.fromkeys(swept) if name not in {"allocator", "seed"}]
        if "seed" not in self.frame.columns:
            self.frame["seed"] = 0
        for name in (*self.swept, "seed", "allocator"):
            values = self.frame[name]
            if is_text(values) or values.isna().any() or name == "allocator":
                self.frame[name] = [text_of(value) for value in values]
        twice = self.frame.duplicated([*self.swept, "allocator", "seed"])
        if twice.any():
            row = self.frame[twice].iloc[0]
            shown = ", ".join(named(n, row[n]) for n in (*self.swept, "allocator", "seed"))
            raise FileError(f"{plain(str(path))}: two rows for {shown}; expected one a cell")

    @property
    def variables(self) -> list[str]:
        """The names that `--x` may have."""
        return [*self.swept, "allocator", "seed"]

    def varies(self, name: str) -> bool:
        """Answer whether *name* has more than one value."""
        return bool(self.frame[name].nunique() > 1)

    def numbers(self, column: str) -> Series:
        """Answer *column* of every row (`numbers`)."""
        return numbers(self.frame, column, self.path)

    def has(self, column: str) -> bool:
        """Answer whether *column* is there with a number that can be drawn."""
        return column in self.frame.columns and bool(np.isfinite(self.numbers(column)).any())

    def variable(self, name: str | None) -> str:
        """Answer the variable to draw over: *name*, else the first of those swept that varies.

        Raises:
            ConfigError: there is no variable *name*.
        """
        if name is None:
            varying = [each for each in self.variables if self.varies(each)]
            return next(iter([*varying, *self.swept]), "allocator")
        if name not in self.variables:
            raise ConfigError(f"--x {quote(name)}: not swept; {did_you_mean(name, self.variables)}")
        return name

    def only(self, conditions: Iterable[str]) -> "Cells":
        """Answer the rows for which all *conditions*, ``NAME=VALUE`` each, hold.

        Raises:
            ConfigError: a name or value that is not there.
        """
        frame = self.frame
        for condition in conditions:
            name, equals, value = (part.strip() for part in condition.partition("="))
            if not equals or name not in self.variables:
                raise ConfigError(
                    f"--where {quote(condition)}: expected NAME=VALUE; "
                    f"{did_you_mean(name, self.variables)}"
                )
            texts = [text_of(each) for each in frame[name]]
            chosen = [_same(text, value) for text in texts]
            if not any(chosen):
                raise ConfigError(
                    f"--where {quote(condition)}: no such cell; "
                    f"{did_you_mean(value, dict.fromkeys(texts))}"
                )
            frame = frame[chosen]
        return Cells(frame, self.swept, self.path)


def _same(text: str, value: str) -> bool:
    try:
        return text == value or float(text) == float(value)
    except ValueError:
        return False


def is_text(values: "pd.Series[Any]") -> bool:
    """Answer whether *values* have no order of their own: names, true and false."""
    return not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values)


class Curve(NamedTuple):
    """One curve of one panel.

    Attributes:
        points: x, mean, low and high over seeds, and their count; NaN where no run has a value.
    """

    panel: int
    label: str
    points: pd.DataFrame


class Layout(NamedTuple):
    """What is drawn over what.

    Attributes:
        x: variable of the axis.
        by: variable that has one curve a value; None if *x* is that.
        panels: (title, rows) of each.
        curves: names of the curves, in the order of the legend.
        along: variables that change with *x*, as those zipped with it do.
        left_out: how many panels there are beyond `MAX_PANELS`.
    """

    x: str
    by: str | None
    panels: list[tuple[str, pd.DataFrame]]
    curves: list[str]
    along: list[str]
    left_out: int

    def of(self, values: Series) -> list[Curve]:
        """Answer the curves of *values*, one a row of the cells; those without a number are not."""
        answer = []
        for place, (_, rows) in enumerate(self.panels):
            for label, group in in_curves(rows, self.by):
                points = _points(group[self.x], values[group.index])
                if points["mean"].notna().any():
                    answer.append(Curve(place, label, points))
        return answer


def in_curves(rows: pd.DataFrame, by: str | None) -> list[tuple[str, pd.DataFrame]]:
    """Answer the *rows* of each value of *by*, in the order of legends; all of them if None."""
    if by is None:
        return [("", rows)]
    return [(text_of(value), rows[rows[by] == value]) for value in in_order(rows[by])]


def _points(x: "pd.Series[Any]", values: Series) -> pd.DataFrame:
    """Answer mean, low, high and count of *values* at each x, in their order."""
    groups = pd.Series(values, index=x.index).groupby(x, sort=not is_text(x))
    points = groups.agg(["mean", "min", "max", "count"])
    points.columns = pd.Index(["mean", "low", "high", "count"])
    return points.rename_axis("x").reset_index()


def arrange(
    cells: Cells, x: str, *, beside: Sequence[str] = (), max_curves: int = MAX_CURVES
) -> Layout:
    """Answer how *cells* are drawn over *x*: one curve an allocator, one panel for all the rest.

    Where there is one allocator only, the next setting has a curve a value, if they are at most
    *max_curves*. Settings that follow from *x* and the allocator need no panel of their own, nor
    do those *beside*, which the caller draws.
    """
    frame = cells.frame
    rest = [name for name in cells.swept if name not in {x, *beside} and cells.varies(name)]
    known = [name for name in dict.fromkeys([x, *beside, "allocator"]) if cells.varies(name)]
    free = [name for name in rest if not _follows(frame, name, known)]
    along = [name for name in rest if name not in free and _follows(frame, name, [x])]
    by: str | None = "allocator"
    if not cells.varies("allocator") and free and frame[free[0]].nunique() <= max_curves:
        by = free.pop(0)
    elif x == "allocator":
        by = None
    panels = _panels(frame, free)
    curves = [""] if by is None else [text_of(value) for value in in_order(frame[by])]
    return Layout(x, by, panels[:MAX_PANELS], curves, along, len(panels[MAX_PANELS:]))


def _follows(frame: pd.DataFrame, name: str, known: list[str]) -> bool:
    """Answer whether *name* has one value for each of those of *known*."""
    return bool(known) and bool((frame.groupby(known)[name].nunique() <= 1).all())


def in_order(values: "pd.Series[Any]") -> list[Hashable]:
    """Answer the distinct *values*: numbers ascending, text as it comes, allocators as ever."""
    if values.name == "allocator":
        return list(looks(values))
    distinct = values.unique().tolist()
    return distinct if is_text(values) else sorted(distinct)


def _panels(frame: pd.DataFrame, names: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """Answer the rows of each combination of *names* that there is, with its title."""
    if not names:
        return [("", frame)]
    ranks = [{value: i for i, value in enumerate(in_order(frame[name]))} for name in names]
    groups: list[tuple[Any, pd.DataFrame]] = list(frame.groupby(names, sort=False))
    groups.sort(key=lambda group: [rank[v] for rank, v in zip(ranks, group[0], strict=True)])
    return [(", ".join(map(named, names, values)), rows) for values, rows in groups]
