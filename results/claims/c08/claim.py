"""C8: does a model with experts gain more from KV memory than a dense one?

Qwen3-30B-A3B (128 experts, 8 a token; weights are 72 % of an H100) and Qwen3-32B (dense; 77 %), all
requests at once, the pool in steps of 10 %. Both are the case of the claim: little is left.
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from claims.charts import curves
from sim.plots.labels import Metric

MOE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B"
POOL = "kv_cache_memory_bytes"
LABEL = "KV pool (% of the smallest)"
COLUMNS = ("mean_num_requests_running", "output_throughput")
MUCH = 5.0
MORE = 1.0
"""Points by which one gain must exceed the other to count as more."""


def gain(frame: pd.DataFrame, model: str, column: str) -> float:
    """Answer the % that *column* grows by with every 10 % of pool, over all of them."""
    rows = frame[frame["model"] == model].set_index(POOL)[column].sort_index()
    return 100 * float((rows.iloc[-1] / rows.iloc[0]) ** (1 / (len(rows) - 1)) - 1)


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare what 10 % of pool add to both."""
    running, tokens = ({m: gain(frame, m, c) for m in (MOE, DENSE)} for c in COLUMNS)
    more = max(of[MOE] - of[DENSE] for of in (running, tokens)) > MORE
    much = min(running.values()) > MUCH
    slots = frame.groupby("model")["kv_cache_slots"].max()
    return Verdict(
        "holds"
        if more and much
        else f"does not hold of experts: {'the same is' if much else 'little is'} gained without",
        f"+10 % of pool adds {running[MOE]:.1f} % running requests and {tokens[MOE]:.1f} % "
        f"throughput with experts, {running[DENSE]:.1f} and {tokens[DENSE]:.1f} % dense. With "
        f"experts a GB holds {slots[MOE] / slots[DENSE]:.1f} times the tokens: fewer KV heads",
        "look at KV bytes a token and at what weights leave of the card, not at experts",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw both over the pool, relative to the smallest."""
    first = frame.sort_values(POOL).groupby("model")[list(COLUMNS)].transform("first")
    relative = {f"{column}_pct": 100 * frame[column] / first[column] for column in COLUMNS}
    frame = frame.assign(**relative, model=frame["model"].map({MOE: "experts", DENSE: "dense"}))
    frame = frame.assign(pool=(frame[POOL] / frame[POOL].min() * 100).round())
    return curves(
        frame.rename(columns={"pool": LABEL}),
        LABEL,
        (
            Metric("mean_num_requests_running_pct", "running requests (% of first)", "", True),
            Metric("output_throughput_pct", "throughput (% of first)", "", True),
        ),
        "A larger KV pool brings a model with experts what it brings a dense one",
        swept=["model", LABEL],
    )


CLAIM = Claim(draw, judge, cell={"model": MOE, POOL: 4000000000})
