"""What charts say in words: the message, where figures have one, and what they rest on."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sim.plots.axis import fit, letter_scale
from sim.plots.labels import Metric, named, number, short, text_of
from sim.plots.table import Cells, Curve, Layout

BASELINE = "reserve-max"
"""The allocator that others are measured by, where it is there."""


def put_title(figure: Figure, *lines: str) -> None:
    """Write *lines* above *figure*, broken where they do not fit."""
    scale = letter_scale()
    width = figure.get_figwidth() / scale
    text = "\n".join(fit(line, width) for line in lines if line)
    figure.suptitle(text, x=0.01, ha="left", fontsize=11 * scale)


def context(cells: Cells, *more: str) -> str:
    """Answer what all *cells* have in common: model, GPU, load, and what their times rest on."""
    frame = cells.frame

    def common(column: str) -> str:
        values = set(map(text_of, frame[column])) if column in frame.columns else set()
        return short(values.pop(), 40) if len(values) == 1 else ""

    model, gpu, prompts = (common(column) for column in ("model_id", "gpu", "num_prompts"))
    where = " on ".join(part for part in (model, gpu) if part)
    load = f"{int(prompts):,} requests" if prompts.isdigit() else ""
    times: Iterable[str] = ()
    if "timing_provenance" in frame.columns:
        words = ", ".join(map(text_of, frame["timing_provenance"])).split(", ")
        times = [word for word in dict.fromkeys(words) if word not in {"default", ""}]
    return "; ".join(
        part for part in (where, load, "times " + ", ".join(times) if times else "", *more) if part
    )


def seeds(curves: Sequence[Curve]) -> str:
    """Answer how many seeds a point is the mean of, and what its bar spans."""
    counts = [int(n) for curve in curves for n in curve.points["count"] if n]
    low, high = min(counts, default=1), max(counts, default=1)
    if high == 1:
        return ""
    span = f"{low}" if low == high else f"{low} to {high}"
    return f"mean of {span} seeds, bars from the smallest to the largest"


def over_seeds(cells: Cells) -> str:
    """Answer that values are means over seeds, if there are several."""
    return "means over seeds" if cells.varies("seed") else ""


def left_out(shown: int, count: int) -> str:
    """Answer how many of *count* panels are not shown; nothing if all are."""
    return f"the first {shown} of {count} panels (--where chooses)" if count > shown else ""


def message(layout: Layout, metric: Metric, curves: Sequence[Curve]) -> str:
    """Answer what *curves* of *metric* show: the best against the baseline, else the extremes."""
    values = _by_allocator(layout, curves)
    if not len(values):
        return metric.label
    if not values.to_numpy()[~np.isnan(values.to_numpy())].any():
        return f"No {_words(metric)}"
    compared = len(values.columns) > 1 and layout.by in {"allocator", None}
    if compared and metric.more_is_better is not None:
        text = _ratio(values, metric)
        if text:
            return text
    return _extremes(layout, metric, curves)


def _by_allocator(layout: Layout, curves: Sequence[Curve]) -> pd.DataFrame:
    """Answer the means: a row each x of each panel, a column each curve (or x)."""
    rows = [
        {
            "at": curve.panel if layout.by is None else (curve.panel, x),
            "who": x if layout.by is None else curve.label,
            "value": value,
        }
        for curve in curves
        for x, value in zip(curve.points["x"], curve.points["mean"], strict=True)
    ]
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows).pivot(index="at", columns="who", values="value")


def _ratio(values: pd.DataFrame, metric: Metric) -> str:
    """Answer how many times the baseline's the best values are, or those of the worst.

    Nothing where no x has them all, or the values compared with are 0.
    """
    means = values.dropna().mean()
    if means.isna().any():
        return ""
    best, worst = str(means.idxmax()), str(means.idxmin())
    if not metric.more_is_better:
        best, worst = worst, best
    for base in (BASELINE, worst):
        if base == best or base not in values.columns:
            continue
        ratios = (values[best] / values[base]).replace([np.inf, -np.inf], np.nan).dropna()
        if len(ratios) and not ratios.any():
            most = number(values[base].max() * metric.scale)
            return f"{short(best)} has no {_words(metric)}, {short(base)} up to {most}"
        low, high = (_times(ratio) for ratio in (ratios.min(), ratios.max()))
        if len(ratios) and not low == high == "1.0":
            span = low if low == high else f"{low} to {high}"
            return f"{short(best)} has {span} times the {metric.noun} of {short(base)}"
    return f"All have about the same {metric.noun}" if means.all() else ""


def _words(metric: Metric) -> str:
    return metric.label.partition(" (")[0]


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 0.95 else f"{ratio:.2g}"


def _extremes(layout: Layout, metric: Metric, curves: Sequence[Curve]) -> str:
    """Answer the smallest and the largest value, and where they are."""
    points = [
        (float(mean) * metric.scale, curve, x)
        for curve in curves
        for x, mean in zip(curve.points["x"], curve.points["mean"], strict=True)
        if not np.isnan(mean)
    ]
    low, high = min(points, key=lambda p: p[0]), max(points, key=lambda p: p[0])
    noun = metric.noun[:1].upper() + metric.noun[1:]
    if number(low[0]) == number(high[0]):
        return f"{noun}: {number(low[0])}{metric.unit} throughout"

    def where(point: tuple[float, Curve, object]) -> str:
        value, curve, x = point
        parts = [named(layout.x, x)]
        if len(layout.curves) > 1 and layout.by is not None:
            label = curve.label
            parts.insert(0, short(label) if layout.by == "allocator" else named(layout.by, label))
        parts += [layout.panels[curve.panel][0]] * bool(layout.panels[curve.panel][0])
        return f"{number(value)}{metric.unit} at {', '.join(parts)}"

    return f"{noun}: from {where(low)} to {where(high)}"
