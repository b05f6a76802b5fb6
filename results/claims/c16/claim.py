"""C16: do paging and continuous batching multiply?

All four pairs: static batching with reservations (FasterTransformer), continuous with reservations
(Orca, with chunks), static with paging (nobody), continuous with paging (vLLM). Gains are of
output throughput over the first. *Multiply*: the joint gain is the product of the single ones, or
more. *1 + 1 > 2*: it adds more than the two add. Static batching is made too fast here: no padding.
The paper has vLLM at up to 22 times the load of FasterTransformer (ShareGPT, other models).
"""

from pathlib import PurePath
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from sim.plots.axis import new_figure
from sim.plots.curves import legend_below
from sim.plots.style import PALETTE
from sim.plots.titles import put_title


def gains(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer, a row a trace, times the throughput of static batching with reservations."""
    rows = frame.assign(trace=frame["trace"].map(lambda path: PurePath(path).stem))
    table = rows.pivot_table("output_throughput", "trace", ["batching", "allocator"], sort=False)
    first = table["static", "reserve-max"]
    answer = pd.DataFrame(
        {
            "continuous": table["continuous", "reserve-max"] / first,
            "paged": table["static", "paged"] / first,
            "joint": table["continuous", "paged"] / first,
        }
    )
    answer["sum"] = answer["continuous"] + answer["paged"] - 1
    answer["product"] = answer["continuous"] * answer["paged"]
    return answer


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the joint gain with the product and the sum of the single ones."""
    table = gains(frame)
    product, total = table["joint"] / table["product"], table["joint"] / table["sum"]
    more = [str(name) for name in table.index[total > 1.01]]
    shown = "; ".join(
        f"{name} {row.paged:.1f} and {row.continuous:.1f}, joint {row.joint:.1f}"
        for name, row in table.iterrows()
    )
    if (product >= 1).all():
        outcome = "holds"
    elif more:
        outcome = (
            "holds when outputs differ in length, as a sum (1 + 1 > 2); the gains never multiply"
        )
    else:
        outcome = "does not hold"
    return Verdict(
        outcome,
        f"Gain of paging alone and continuous batching alone: {shown}: "
        f"{100 * product.min():.0f} to {100 * product.max():.0f} % of the product, "
        f"{100 * total.min():.0f} to {100 * total.max():.0f} % of 1 plus what each adds",
        "both, as every server today; of a claimed gain ask which one was there before",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the gains by trace, the product beside the joint one."""
    table = gains(frame)
    figure = new_figure(8, 4)
    axes = figure.subplots()
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "continuous": ("continuous batching alone", {"color": PALETTE[0]}),
        "paged": ("paging alone", {"color": PALETTE[1]}),
        "joint": ("both", {"color": PALETTE[2]}),
        "product": ("product of the two", {"facecolor": "white", "edgecolor": "#555555"}),
    }
    for place, (column, (label, look)) in enumerate(looks.items()):
        at = [x + 0.2 * (place - 1.5) for x in range(len(table))]
        bar = axes.bar(at, table[column], 0.18, label=label, **look)
        axes.bar_label(bar, [f"{value:.1f}" for value in table[column]], fontsize=8, padding=2)
    axes.axhline(1, color="#888888", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(table)), list(table.index))
    axes.set_ylabel("throughput (times)")
    legend_below(figure, axes.get_legend_handles_labels()[0])
    share = table["joint"] / table["product"]
    put_title(
        figure,
        f"Together they gain {100 * share.min():.0f} to {100 * share.max():.0f} % of the product "
        "of what each gains alone",
        "over static batching with reserve-max; Llama-3.1-8B on RTX-4090, 1,000 requests at once; "
        "times fitted, assumed",
    )
    return figure


CLAIM = Claim(
    draw,
    judge,
    cell={"trace": "../../traces/spread.jsonl", "batching": "static", "allocator": "paged"},
)
