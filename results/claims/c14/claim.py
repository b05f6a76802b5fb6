"""C14: does more memory for KV raise throughput, and why?

The default workload (1,000 chats, 12 a second) on a card whose memory is the limit, and on one that
has enough. A step reads all weights once, however many requests are in it; attention reads each
request's KV. Seconds of all steps, by kind of kernel, say which of the two got cheaper.
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from sim.plots.axis import new_figure
from sim.plots.curves import legend_below
from sim.plots.style import PALETTE
from sim.plots.titles import put_title

SHORT, ENOUGH = "A100-40", "H100"
PARTS = {
    "linear layers (weights)": ["linear_layers_s"],
    "attention (KV)": ["decode_attention_s", "prefill_attention_s"],
    "rest": ["norms_and_activations_s", "lm_head_and_sampling_s"],
}
MORE = 1.05
"""Times the throughput from which on it counts as a gain."""


def gain(frame: pd.DataFrame, gpu: str) -> float:
    """Answer how many times reserve-max's throughput paging has on *gpu*."""
    paged, reserve = (one(frame, gpu=gpu, allocator=a) for a in ("paged", "reserve-max"))
    return float(paged["output_throughput"] / reserve["output_throughput"])


def seconds(row: "pd.Series[float]", part: str) -> float:
    """Answer what the run of *row* spent on *part*."""
    return float(row[PARTS[part]].sum())


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare throughput, and what steps spend their time on."""
    short, enough = gain(frame, SHORT), gain(frame, ENOUGH)
    reserve, paged, prefix = (
        one(frame, gpu=SHORT, allocator=a) for a in ("reserve-max", "paged", "prefix")
    )
    weights, attention = list(PARTS)[:2]
    outcome = "holds" if min(short, enough) > MORE else "holds when memory limits the batch"
    return Verdict(
        outcome if short > MORE else "does not hold",
        f"{SHORT}: {short:.2f} times the throughput with "
        f"{paged['mean_num_requests_running']:.0f} instead of "
        f"{reserve['mean_num_requests_running']:.0f} running requests: linear layers "
        f"{seconds(reserve, weights):.0f} → {seconds(paged, weights):.0f} s, attention "
        f"{seconds(reserve, attention):.0f} → {seconds(paged, attention):.0f} s. {ENOUGH}, same "
        f"load: {enough:.2f} times. Sharing then cuts what is left, computing prompts: "
        f"{seconds(prefix, weights):.0f} s",
        "paging and sharing; where no request waits for memory, more of it buys none",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw seconds by part, a bar an allocator, a panel a card."""
    figure = new_figure(9, 3.8)
    panels = figure.subplots(1, 2)
    bars = []
    for axes, gpu in zip(panels, (SHORT, ENOUGH), strict=True):
        rows = [row for _, row in frame[frame["gpu"] == gpu].iterrows()]
        names = [str(row["allocator"]) for row in rows]
        bottom = [0.0] * len(rows)
        for part, color in zip(PARTS, PALETTE, strict=False):
            heights = [seconds(row, part) for row in rows]
            bar = axes.bar(names, heights, 0.7, bottom=bottom, color=color, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
            bars += [bar] if gpu == SHORT else []
        for name, row, top in zip(names, rows, bottom, strict=True):
            text = f"{row['output_throughput']:,.0f}\ntok/s"
            axes.annotate(
                text, (name, top), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_title(gpu, loc="left", fontsize=10)
        axes.set_ylim(0, 1.2 * max(bottom))
        axes.tick_params(axis="x", labelrotation=20)
    panels[0].set_ylabel("time of all steps (s)")
    legend_below(figure, bars)
    put_title(
        figure,
        f"{gain(frame, SHORT):.2f} times the throughput where memory is short, as weights are read "
        f"less often; {gain(frame, ENOUGH):.2f} where it is not",
        "Llama-3.1-8B, 1,000 chats at 12 requests/s; times fitted, assumed",
    )
    return figure


CLAIM = Claim(draw, judge, cell={"gpu": SHORT, "allocator": "reserve-oracle"})
