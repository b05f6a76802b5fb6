"""C11: how high may gpu_memory_utilization be?

Activation of every step from its own tokens and requests, by the rule of vLLM's profiling run
(``sim/overrun.py``), beside what weights, memory outside torch, CUDA graphs as they turn out and
the KV pool leave of the card: three cards with a model each, two token budgets, vLLM's accounting
before 0.21, which leaves CUDA graphs out, and 0.33's, which subtracts an estimate. Not in it: a
fragmented pool of PyTorch, and other processes. The room that is left is what they may take.
"""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from claims import Claim, Verdict
from sim.plots.axis import new_figure
from sim.plots.curves import legend_below
from sim.plots.style import PALETTE
from sim.plots.titles import put_title

SETTING = "gpu_memory_utilization"
RISKY = 0.95


def by_utilization(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer, for each utilization: runs, those with an overrun, the worst, GiB to spare."""
    spare = (frame["activation_room_bytes"] - frame["max_activation_bytes"]) / 2**30
    rows = frame.assign(overrun=frame["steps_overrun_pct"] > 0, spare=spare)
    groups = rows.groupby(SETTING)
    return pd.DataFrame(
        {
            "runs": groups.size(),
            "overrun": groups["overrun"].sum(),
            "worst": groups["steps_overrun_pct"].max(),
            "least": groups["spare"].min(),
            "most": groups["spare"].max(),
        }
    )


def _safe(table: pd.DataFrame) -> float:
    """Answer the utilization up to which no run overruns."""
    return float(table.index[(table["overrun"] == 0).cummin()].max())


def running(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer running requests by utilization, a column a card, means of its runs."""
    table = frame.pivot_table("mean_num_requests_running", SETTING, "gpu", sort=True)
    return table[list(dict.fromkeys(frame["gpu"]))]


def judge(frame: pd.DataFrame) -> Verdict:
    """Find from where on runs overrun, and what the margin costs."""
    table, requests = by_utilization(frame), running(frame)
    safe = _safe(table)
    first = table[table.index > safe].iloc[0]
    gain = 100 * (requests.loc[safe] / requests.loc[0.90] - 1)
    at_90 = table.loc[0.90]
    return Verdict(
        f"holds when utilization is above {safe:g}; a margin of 10 % is more than activation "
        "needs, and percents are the wrong measure"
        if safe >= RISKY
        else f"holds, from above {safe:g} on",
        f"Runs with steps that overrun: none up to {safe:g}, {first.overrun:.0f} of "
        f"{first.runs:.0f} at {first.name:g}, {table.iloc[-1].overrun:.0f} at "
        f"{table.index[-1]:g} (where CUDA graphs take more than was subtracted). Spare at 0.9 "
        f"{at_90.least:.1f} to {at_90.most:.1f} GiB by card; 0.9 to {safe:g} adds "
        f"{gain.min():.0f} to {gain.max():.0f} % running requests",
        "vLLM's 0.92; up to 0.95 if nothing else uses the card, and leave GiB, not percents: 1 or "
        "more; lower `--max-num-batched-tokens` before utilization",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw what is gained and what is risked over the utilization."""
    table, requests = by_utilization(frame), running(frame)
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2)
    for name, color, marker in zip(requests, PALETTE, "osv", strict=False):
        relative = 100 * requests[name] / requests[name].iloc[0]
        left.plot(relative, color=color, marker=marker, label=name)
    left.set_ylabel("running requests (% of first)")
    left.set_ylim(0)
    left.set_xticks([value for value in requests.index if value != 0.99])
    legend_below(figure, left.get_lines())
    places = range(len(table))
    right.bar(places, table["overrun"], 0.6, color=PALETTE[3])
    for place, (count, worst) in enumerate(zip(table["overrun"], table["worst"], strict=True)):
        text = f"up to {worst:.3g} %\nof steps" if count else "none"
        right.annotate(
            text, (place, count), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    right.set_xticks(list(places), [f"{value:g}" for value in table.index])
    right.set_ylabel(f"runs that overrun (of {table['runs'].iloc[0]})")
    right.set_ylim(0, table["runs"].iloc[0])
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.set_xlabel(SETTING)
    put_title(
        figure,
        f"No step overruns its room up to {_safe(table):g}; near 1 CUDA graphs tip it over",
        "Llama-3.1-8B on RTX-4090 and A100-40, Qwen3-32B on H100; activation fitted on logs",
    )
    return figure


CLAIM = Claim(
    draw,
    judge,
    cell={
        "vllm_version": "0.33",
        "max_num_batched_tokens": 8192,
        SETTING: 0.98,
        "gpu": "RTX-4090",
        "model": "meta-llama/Llama-3.1-8B",
    },
)
