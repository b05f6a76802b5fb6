"""Charts that several claims draw."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from sim.plots.curves import draw_curves
from sim.plots.labels import Metric, metric_of
from sim.plots.table import Cells
from sim.plots.titles import context, put_title

_FIRST_OF_SUMMARY = "model_id"


def cells_of(frame: pd.DataFrame, swept: Sequence[str] | None = None) -> Cells:
    """Answer the rows of a sweep; *swept* are the columns before those of the summary, or these."""
    columns = list(frame.columns)
    if swept is None:
        swept = columns[: columns.index(_FIRST_OF_SUMMARY)]
    return Cells(frame, swept, Path("summary.csv"))


def curves(
    frame: pd.DataFrame,
    x: str,
    columns: Sequence[str | Metric],
    title: str,
    *,
    swept: Sequence[str] | None = None,
) -> Figure:
    """Draw *columns* of *frame* over the setting *x*, a panel each, under *title*."""
    cells = cells_of(frame, swept)
    metrics = [metric_of(c) if isinstance(c, str) else c for c in columns]
    figure = draw_curves(cells, x, metrics)
    put_title(figure, title, context(cells))
    return figure
