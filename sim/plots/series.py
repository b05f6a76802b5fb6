"""Runs over time: how many requests run, where the KV slots are, what happens in one run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sim.columns import SLOT_STATES
from sim.plots.axis import new_figure
from sim.plots.bars import look_of
from sim.plots.curves import legend_below
from sim.plots.labels import number, short
from sim.plots.results import RunFiles
from sim.plots.style import looks
from sim.plots.table import Series
from sim.plots.titles import BASELINE, put_title

NUM_BINS = 300
"""Points a curve: each is the time-weighted mean of its bin, so no step is lost."""

NUM_MARKS = 12
"""Markers a curve: enough to tell it from the others, few enough to see it."""

NUM_EVENT_BINS = 60
"""Bins for what happens now and then: preemptions, look-ups in the prefix cache."""


def _edges(end: float) -> Series:
    return np.linspace(0, max(end, 1e-9), NUM_BINS + 1)


def running_requests(runs: Sequence[RunFiles]) -> Figure:
    """Draw how many requests run at once, over time, one curve an allocator."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    edges = _edges(max(run.end for run in runs))
    look = looks(run.label for run in runs)
    for place, run in enumerate(runs):
        step = NUM_BINS // NUM_MARKS
        _line(
            axes,
            edges,
            run,
            "running",
            label=f"{short(run.label)} (mean {run.summary['mean_num_requests_running']:.0f})",
            markevery=(step * place // len(runs), step),  # not one above the other
            **look[run.label].of_line(),
        )
    axes.set_xlabel(_time_label(runs))
    axes.set_ylabel("running requests")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    put_title(figure, _running_message(runs))
    legend_below(figure, axes.get_lines())
    return figure


def _line(axes: Axes, edges: Series, run: RunFiles, column: str, **look: Any) -> None:
    middle = (edges[:-1] + edges[1:]) / 2
    shown = middle <= run.end
    axes.plot(middle[shown], run.mean_over_time(column, edges)[shown], **look)


def _time_label(runs: Sequence[RunFiles]) -> str:
    """Answer the label of a time axis, with what its seconds rest on."""
    rests_on = dict.fromkeys(str(run.summary.get("timing_provenance", "")) for run in runs)
    return f"simulated time (s; {', '.join(filter(None, rests_on)) or 'of unknown origin'})"


def _where(run: RunFiles) -> str:
    return f"{short(run.summary['model_id'], 40)} on {short(run.summary['gpu'])}"


def _running_message(runs: Sequence[RunFiles]) -> str:
    """Answer what the curves say: who serves most at once, and how many times the baseline."""
    where = _where(runs[0])
    means = {run.label: run.summary["mean_num_requests_running"] for run in runs}
    base = BASELINE if BASELINE in means else runs[0].label
    best = max(means, key=lambda label: means[label])
    if len(means) == 1:
        return f"{short(base)} serves {number(means[base])} at once on average: {where}"
    if not means[base] or f"{means[best] / means[base]:.1f}" == "1.0":
        return f"All serve about as many requests at once: {where}"
    times = f"{means[best] / means[base]:.1f}x"
    return f"{short(best)} serves {times} as many at once as {short(base)}: {where}"


def slot_split(runs: Sequence[RunFiles]) -> Figure:
    """Draw where the KV slots are, over time, one panel an allocator."""
    rows = -(-len(runs) // 2) if len(runs) > 1 else 1
    columns = 2 if len(runs) > 1 else 1
    figure = new_figure(4.4 * columns, 2.2 * rows + 0.7)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    states = _states(runs)
    edges = _edges(max(run.end for run in runs))
    for run, axes in zip(runs, panels, strict=False):
        _stack(axes, edges, run, states)
        live = run.summary["kv_live_pct"]
        axes.set_title(f"{short(run.label)}: {live:.0f} % live on average", loc="left")
        axes.set_xlim(0, edges[-1])
        axes.label_outer()
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(runs) - columns) : len(runs)]:
        axes.set_xlabel(_time_label(runs))
        axes.tick_params(labelbottom=True)
    put_title(figure, f"Where the KV slots are: {_where(runs[0])}")
    legend_below(figure, [Patch(**look_of(state)) for state in states])
    return figure


def _states(runs: Sequence[RunFiles]) -> list[str]:
    return [s for s in SLOT_STATES if any(run.steps[f"kv_{s}_slots"].any() for run in runs)]


def _stack(axes: Axes, edges: Series, run: RunFiles, states: Sequence[str]) -> None:
    """Draw the share of the pool in each of *states*, one above the other."""
    middle = (edges[:-1] + edges[1:]) / 2
    shown = middle <= run.end
    capacity = run.summary["kv_cache_slots"]
    shares = [
        100 * run.mean_over_time(f"kv_{state}_slots", edges)[shown] / capacity for state in states
    ]
    for area, state in zip(axes.stackplot(middle[shown], shares), states, strict=True):
        area.set(**look_of(state))
    axes.set_ylim(0, 100)
    axes.set_ylabel("KV slots (%)")


def time_series(runs: Sequence[RunFiles]) -> Figure:
    """Draw one run over time: requests, KV slots, and hits and preemptions where there are any."""
    (run,) = runs
    hits = bool(run.steps["prefix_cache_queries"].any())
    preempted = bool(run.steps["num_preempted"].any())
    count = 2 + hits + preempted
    figure = new_figure(8, 2.0 * count + 1)
    panels = list(figure.subplots(count, 1, sharex=True))
    edges, few = _edges(run.end), np.linspace(0, run.end, NUM_EVENT_BINS + 1)
    own = looks([run.label])[run.label].color
    for column, line, color in (("running", "-", own), ("waiting", "--", "0.5")):
        _line(panels[0], edges, run, column, linestyle=line, color=color, label=column)
    panels[0].set_ylabel("requests")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    states = _states(runs)
    _stack(panels[1], edges, run, states)
    handles = [Patch(**look_of(state)) for state in states]
    panels[1].legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False
    )
    if hits:
        asked = run.sum_over_time("prefix_cache_queries", few)
        found = run.sum_over_time("prefix_cache_hits", few)
        shares = np.divide(100 * found, asked, out=np.full(len(asked), np.nan), where=asked > 0)
        panels[2].stairs(shares, few, color=own, baseline=None)
        panels[2].set_ylabel("prefix hits\n(% of tokens)")
        panels[2].set_ylim(0, 100)
    if preempted:
        counts = run.sum_over_time("num_preempted", few)
        panels[-1].stairs(counts, few, color=own, fill=True)
        panels[-1].set_ylabel(f"preemptions\nin {number(few[1])} s")
        panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel(_time_label(runs))
    panels[-1].set_xlim(0, run.end)
    figure.align_ylabels(panels)
    summary = run.summary
    put_title(
        figure,
        f"{short(run.label)}: {number(summary['mean_num_requests_running'])} requests at once, "
        f"{summary['kv_live_pct']:.0f} % of the KV slots live, "
        f"{summary['num_preemptions']:,} preemptions",
        _where(run),
    )
    return figure
