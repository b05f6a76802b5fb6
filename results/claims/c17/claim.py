"""C17: does a bigger card waste less?

The same chats (means of ShareGPT as published; exponential: assumed), all at once, on cards of 24
to 141 GB. Shares of the pool, weighted by time; the last minutes, in which a pool empties, are in.
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from claims.charts import cells_of
from sim.plots.bars import draw_slots
from sim.plots.titles import context, put_title

SMALL, LARGE = "RTX-4090", "H200"
SAME = 5.0
"""Points of the pool within which a share counts as the same."""


def _live(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.pivot(index="gpu", columns="allocator", values="kv_live_pct")


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the smallest card with the largest."""
    live = _live(frame)
    reserve = live["reserve-max"]
    change = reserve[LARGE] - reserve[SMALL]
    others = ", ".join(
        f"{name} {live[name][SMALL]:.0f} and {live[name][LARGE]:.0f}"
        for name in ("reserve-pow2", "reserve-oracle", "paged")
    )
    held = frame.pivot(index="gpu", columns="allocator", values="mean_num_requests_running")
    times = held["paged"] / held["reserve-max"]
    return Verdict(
        "holds" if change < SAME else "does not hold",
        f"Live % of the pool on 24 and 141 GB: reserve-max {reserve[SMALL]:.0f} and "
        f"{reserve[LARGE]:.0f}, {others} (less where all are served before the pool is full "
        f"again); paging runs {times.min():.1f} to {times.max():.1f} times as many requests",
        "change the allocator, not the card",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw where the slots are."""
    cells = cells_of(frame)
    figure = draw_slots(cells, "gpu")
    reserve = _live(frame)["reserve-max"]
    put_title(
        figure,
        f"Reserving the maximum leaves {reserve[SMALL]:.0f} % live on 24 GB and "
        f"{reserve[LARGE]:.0f} % on 141 GB",
        context(cells),
    )
    return figure


CLAIM = Claim(draw, judge, cell={"gpu": "A100-40", "allocator": "reserve-max"})
