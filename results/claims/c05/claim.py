"""C5: what does keeping a common prefix once bring, by how much of the prompt is common?

The same 600 requests (prompts of 1,600 tokens, outputs exponential around 200: assumed) with a
growing common part, plain paging against prefix sharing. At 2 requests/s the card serves them as
they come, which shows TTFT; all at once memory is full, which shows capacity.
"""

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from claims.charts import curves
from sim.plots.labels import Metric

SHARE = "common part of the prompt (%)"
RATE = 2.0
PROMISED = (1.2, 1.4)


def by_share(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer a row a share and allocator: capacity of the full load, TTFT of the light one."""
    frame = frame.assign(**{SHARE: frame["trace"].str.extract(r"_(\d+)\.toml$")[0].astype(int)})
    keys = [SHARE, "allocator"]
    full = frame[frame["request_rate"] == math.inf].set_index(keys)
    light = frame[frame["request_rate"] == RATE].set_index(keys)
    full["light_ttft_ms"] = light["mean_ttft_ms"]
    full["slots_a_request"] = full["kv_live_pct"] / full["mean_num_requests_running"]
    return full.reset_index()


def gains(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer, for each share, how many times plain paging's the figures of sharing are."""
    rows = by_share(frame).set_index(SHARE)
    columns = ["mean_num_requests_running", "light_ttft_ms", "slots_a_request", "output_throughput"]
    sharing, plain = (rows[rows["allocator"] == name][columns] for name in ("prefix", "paged"))
    return sharing / plain


def judge(frame: pd.DataFrame) -> Verdict:
    """Find the shares of the prompt for which the promised capacity is what one gets."""
    gain = gains(frame)
    running = gain["mean_num_requests_running"]
    low, high = np.interp(PROMISED, running, running.index)
    most = gain.iloc[-1]
    hits = by_share(frame).set_index("allocator").loc["prefix"]["prefix_cache_hit_rate"].max()
    share = gain.index[-1]
    return Verdict(
        f"holds when {low:.0f} to {high:.0f} % of the prompt is common; with more it is too modest"
        if high < share
        else "does not hold",
        f"At {share} % common: {most.mean_num_requests_running:.1f} times the running requests, "
        f"{most.output_throughput:.1f} times the throughput, "
        f"{100 * (1 - most.slots_a_request):.0f} % of a request's blocks saved, TTFT down by "
        f"{100 * (1 - most.light_ttft_ms):.0f} % at {RATE:g} requests/s, hit rate "
        f"{100 * hits:.0f} %; nothing common: {gain.iloc[0].mean_num_requests_running:.2f} times",
        "`--enable-prefix-caching` (on by default); the common part first, as long as may be",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw capacity and TTFT over the share."""
    gain = gains(frame)["mean_num_requests_running"]
    return curves(
        by_share(frame),
        SHARE,
        (
            Metric("mean_num_requests_running", "running, all at once (mean)", "", True),
            Metric("output_throughput", "output tokens/s, all at once", "", True),
            Metric("light_ttft_ms", f"mean TTFT at {RATE:g} requests/s (ms)", "", False),
        ),
        f"Sharing 20 % of the prompt serves {100 * (gain[20] - 1):.0f} % more requests at once; "
        f"90 %, {gain[90]:.1f} times as many, who wait less",
        swept=[SHARE],
    )


CLAIM = Claim(
    draw,
    judge,
    cell={"request_rate": 2.0, "trace": "workload_60.toml", "allocator": "prefix"},
)
