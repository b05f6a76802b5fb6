"""C18: does a careless prompt template show in the three series, and how soon?

Llama-3.1-8B on an A100 of 40 GB, 6 requests a second for five minutes; in the middle the template
of nine in ten prompts gets the time of day in front (workload.toml). A window is 10 s, as vLLM's
log has it. Whether it is a drop is `kvsim check`'s own rule.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from sim.arrivals import recorded
from sim.health.facts import Point
from sim.health.from_run import in_memory
from sim.health.prefix_checks import find_drop
from sim.plots.axis import new_figure
from sim.plots.style import PALETTE
from sim.plots.titles import put_title
from sim.settings import FILE_RANK, Given, resolve
from sim.simulation import Simulation
from sim.summary import summarize

HERE = Path(__file__).parent
CHANGE = 150
"""Second from which prompts are perturbed, as in workload.toml."""
WINDOW = 10
SETTINGS = {"model": "meta-llama/Llama-3.1-8B", "gpu": "A100-40", "max_model_len": 4096}


def make() -> pd.DataFrame:
    """Answer the series of one run, a row a window."""
    given = {name: Given(value, FILE_RANK, name) for name, value in SETTINGS.items()}
    given["trace"] = Given(str(HERE / "workload.toml"), FILE_RANK, "trace")
    config = resolve(given).run
    result = Simulation(config, recorded(config.load)).run()
    summary = summarize(result)
    run = in_memory(result, summary)
    edges = np.append(np.arange(0, run.end, WINDOW), run.end)
    sums = {
        name: run.sum_over_time(name, edges)
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_refusals", "num_preempted")
    }
    held = [run.mean_over_time(f"kv_{state}_slots", edges) for state in ("live", "internal")]
    return pd.DataFrame(
        {
            "time": edges[:-1],
            "kv_cache_usage_perc": sum(held) / summary["kv_cache_slots"],
            "num_requests_running": run.mean_over_time("running", edges),
            "num_requests_waiting": run.mean_over_time("waiting", edges),
            **sums,
            "timing_provenance": summary["timing_provenance"],
        }
    )


def _rates(frame: pd.DataFrame) -> "pd.Series[float]":
    """Answer the hit rate of each window; none where nothing was looked up."""
    queries = frame["prefix_cache_queries"]
    return frame["prefix_cache_hits"].where(queries > 0.5) / queries


def _points(frame: pd.DataFrame) -> list[Point]:
    rates, weights = _rates(frame), frame["prefix_cache_queries"]
    rows = zip(frame["time"], rates, weights, strict=True)
    return [
        Point(f"{time:.0f}", hit_rate=None if np.isnan(rate) else rate, weight=weight)
        for time, rate, weight in rows
    ]


def judge(frame: pd.DataFrame) -> Verdict:
    """Find the drop, and how long after the change each series shows it."""
    drop = find_drop(_points(frame))
    if drop is None:
        return Verdict("does not hold", "no drop is found", "nothing")
    after = frame[frame["time"] >= CHANGE]
    before = frame[frame["time"] < CHANGE]
    refused = after[after["num_refusals"] > 0.5]["time"].iloc[0] + WINDOW - CHANGE
    soon = float(drop.where) + WINDOW - CHANGE <= 60
    early = before["num_refusals"].sum() < 0.5
    # The same windows as far as they were known: how many it takes until the rule sees it.
    rows = range(1, len(frame) + 1)
    seen = next(row for row in rows if find_drop(_points(frame.iloc[:row])) is not None)
    lag = frame["time"].iloc[seen - 1] + WINDOW - CHANGE
    outcome = "holds" if soon and early and lag <= 120 else "holds when the load is watched longer"
    usage = frame["kv_cache_usage_perc"]
    return Verdict(
        outcome,
        f"The hit rate falls from {100 * drop.before:.0f} to {100 * drop.after:.0f} % in the first "
        f"window of 10 s, `kvsim check` sees it after {lag:.0f} s; pool usage from "
        f"{100 * usage[: len(before)].mean():.0f} to {100 * usage.max():.0f} %, failed allocations "
        f"from none to {after['num_refusals'].sum():,.0f}, the first after {refused:.0f} s",
        "an alert on the hit rate: it moves first, the pool and the queue only where the load is "
        "high; `kvsim check --trace` shows the first token that differs",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the three series, and who waits, over time."""
    figure = new_figure(8, 6.4)
    panels = list(figure.subplots(3, 1, sharex=True))
    middle = frame["time"] + WINDOW / 2
    for axes, label, values in (
        (panels[0], "prefix hit rate (%)", 100 * _rates(frame)),
        (panels[1], "KV pool usage (%)", 100 * frame["kv_cache_usage_perc"]),
        (panels[2], "failed allocations\n(in 10 s)", frame["num_refusals"]),
    ):
        axes.plot(middle, values, color=PALETTE[0], marker="o", markersize=3)
        axes.set_ylabel(label)
        axes.set_ylim(0, 105 if "%" in label else None)
        axes.axvline(CHANGE, color="0.4", linestyle="--")
    panels[0].annotate(
        "time of day in front of the prompt", (CHANGE, 50), (6, 0), textcoords="offset points"
    )
    panels[-1].set_xlabel(f"simulated time (s; {frame['timing_provenance'].iloc[0]})")
    panels[-1].set_xlim(left=0)
    drop = find_drop(_points(frame))
    assert drop is not None
    put_title(
        figure,
        f"A time of day in front takes the hit rate from {100 * drop.before:.0f} to "
        f"{100 * drop.after:.0f} %: the hit rate shows it first",
        "Llama-3.1-8B on an A100 of 40 GB, 6 requests a second behind one prompt of 1,800 tokens",
    )
    return figure


CLAIM = Claim(draw, judge, make=make)
