"""C12: what does a max_model_len that nobody uses cost?

The same 1,000 requests, none longer than 2,047 tokens, with the limit from 2,048 to 32,768. vLLM's
start-up check is the one thing about it that binds paging: one request of that length has to fit.
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from claims.charts import curves


def _running(frame: pd.DataFrame, allocator: str) -> "pd.Series[float]":
    rows = frame[frame["allocator"] == allocator].set_index("max_model_len").sort_index()
    return rows["mean_num_requests_running"]


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the smallest limit with the largest."""
    reserve, paged = _running(frame, "reserve-max"), _running(frame, "paged")
    low, high = reserve.index[0], reserve.index[-1]
    unmoved = paged.max() - paged.min() < 0.01 * paged.min()
    moved = reserve.iloc[-1] < 0.9 * reserve.iloc[0]
    slots = one(frame, allocator="paged", max_model_len=low)["kv_cache_slots"]
    paging = "not with paging" if unmoved else "with paging, too"
    outcome = f"holds when memory is reserved, {paging}" if moved else "does not hold"
    return Verdict(
        outcome,
        f"{low:,} to {high:,} tokens: reserve-max from {reserve.iloc[0]:.1f} to "
        f"{reserve.iloc[-1]:.1f} running requests, paged {paged.iloc[0]:.1f} and "
        f"{paged.iloc[-1]:.1f}; start-up refuses above {slots:,}",
        "what users need, up to what the start-up check admits; shorter buys nothing with paging",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw concurrency and throughput over the limit."""
    reserve, paged = _running(frame, "reserve-max"), _running(frame, "paged")
    return curves(
        frame,
        "max_model_len",
        ("mean_num_requests_running", "output_throughput"),
        f"Reserving falls from {reserve.iloc[0]:.0f} requests to {reserve.iloc[-1]:.0f} as "
        f"max_model_len grows; paging stays at {paged.iloc[-1]:.0f}",
    )


CLAIM = Claim(draw, judge, cell={"max_model_len": 32768, "allocator": "paged"})
