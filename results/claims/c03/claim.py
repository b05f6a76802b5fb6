"""C3: how many more requests does paging run on the same card?

Reserve-max against paging, same pool, same trace, all requests at once; only the longest request
allowed grows. Nobody needs more than 2,047 tokens (ShareGPT's published means) or about 1,000.
"""

from pathlib import PurePath

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from claims.charts import curves

WASTE = 4.0
CASE = ["trace", "max_model_len"]


def gains(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer, a row a case: running requests of both, their ratio, waste of paging, closed form."""
    rows = frame.assign(trace=frame["trace"].map(lambda path: PurePath(path).stem))
    held = rows["kv_live_pct"] + rows["kv_reserved_pct"] + rows["kv_internal_pct"]
    rows = rows.assign(
        waste=100 * (1 - rows["kv_live_pct"] / held),
        slots_a_request=held / 100 * rows["kv_cache_slots"] / rows["mean_num_requests_running"],
    )
    paged, reserve = (
        rows[rows["allocator"] == a].set_index(CASE) for a in ("paged", "reserve-max")
    )
    answer = pd.DataFrame(
        {
            "reserve": reserve["mean_num_requests_running"],
            "paged": paged["mean_num_requests_running"],
            "waste": paged["waste"],
        }
    )
    answer["gain"] = answer["paged"] / answer["reserve"]
    answer["expected"] = answer.index.get_level_values(1) / paged["slots_a_request"]
    return answer.sort_values("gain")


def judge(frame: pd.DataFrame) -> Verdict:
    """Find how much more than double it is, and whether waste is as small as the paper's."""
    cases = gains(frame)
    least, most = cases.iloc[0], cases.iloc[-1]
    waste = cases["waste"].max()
    holds = waste < WASTE and least.gain >= 2
    off = (cases["expected"] / cases["gain"] - 1).abs().max()
    return Verdict(
        f"holds, and {least.gain:.1f} to {most.gain:.1f} times is what it is here"
        if holds
        else f"holds when max_model_len is {cases[cases.gain >= 2].index[0][1]:,} or more",
        f"{least.reserve:.0f} → {least.paged:.0f} running requests at max_model_len "
        f"{cases.index[0][1]:,}, {most.reserve:.0f} → {most.paged:.0f} at {cases.index[-1][1]:,}; "
        f"waste {waste:.1f} % of what is held (paper 3.7). The gain is max_model_len over the "
        f"slots a request holds on average (within {100 * off:.0f} %): double where that is half",
        "paging; then max_model_len costs nothing (C12)",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw running requests over the longest request allowed."""
    cases = gains(frame)
    return curves(
        frame.assign(trace=frame["trace"].map(lambda path: PurePath(path).stem)),
        "max_model_len",
        ("mean_num_requests_running",),
        f"Paging runs {cases.gain.iloc[0]:.1f} to {cases.gain.iloc[-1]:.0f} times as many requests "
        "as reserving, the more the longer the longest request allowed",
        swept=["trace", "max_model_len"],
    )


CLAIM = Claim(
    draw,
    judge,
    cell={
        "allocator": "paged",
        "trace": "../../traces/spread.jsonl",
        "max_model_len": 1024,
    },
)
