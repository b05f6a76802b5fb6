"""C6: what does a time of day in the prompt cost?

The requests of C5 with 1,440 of 1,600 tokens in common, and 16 tokens that differ every time: none,
behind the common text, in its middle, in front of half of the requests, in front of all. Hits are
whole blocks from the first token on, as in vLLM, so what stands behind a difference is lost.
"""

import math

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from claims.charts import curves
from sim.plots.labels import Metric, metric_of

PLACES = {
    "../c05/workload_90.toml": "nowhere",
    "workload_end.toml": "behind",
    "workload_middle.toml": "middle",
    "workload_front_half.toml": "half in front",
    "workload_front.toml": "in front",
}
PLACE = "where the time of day stands"
RATE = 2.0


def by_place(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer a row a place and allocator: capacity of the full load, TTFT of the light one."""
    frame = frame.assign(**{PLACE: frame["trace"].map(PLACES)})
    keys = [PLACE, "allocator"]
    full = frame[frame["request_rate"] == math.inf].set_index(keys)
    full["light_ttft_ms"] = frame[frame["request_rate"] == RATE].set_index(keys)["mean_ttft_ms"]
    return full.reset_index()


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the hit rate without, with, and with a well-placed time of day."""
    rows = by_place(frame)
    sharing = rows[rows["allocator"] == "prefix"].set_index(PLACE)
    hits = 100 * sharing["prefix_cache_hit_rate"]
    running, ttft = sharing["mean_num_requests_running"], sharing["light_ttft_ms"]
    lost = hits["in front"] <= 10 < hits["nowhere"]
    return Verdict(
        f"holds; the fall is to {hits['in front']:.0f} %" if lost else "does not hold",
        f"Hit rate {hits['nowhere']:.0f} %; in front of all {hits['in front']:.0f} %, of half "
        f"{hits['half in front']:.0f} %, in the middle {hits['middle']:.0f} %, behind "
        f"{hits['behind']:.0f} %. In front: running requests {running['nowhere']:.0f} to "
        f"{running['in front']:.0f}, TTFT {ttft['nowhere']:.0f} to {ttft['in front']:.0f} ms",
        "what differs goes behind the common text; alert on vllm:prefix_cache_hits over _queries",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw hit rate, capacity and TTFT by place."""
    rows = by_place(frame)
    hits = 100 * rows[rows["allocator"] == "prefix"].set_index(PLACE)["prefix_cache_hit_rate"]
    return curves(
        rows,
        PLACE,
        (
            metric_of("prefix_cache_hit_rate"),
            Metric("mean_num_requests_running", "running, all at once (mean)", "", True),
            Metric("light_ttft_ms", f"mean TTFT at {RATE:g} requests/s (ms)", "", False),
        ),
        f"16 tokens in front take the hit rate from {hits['nowhere']:.0f} to "
        f"{hits['in front']:.0f} %; behind, to {hits['behind']:.0f} %",
        swept=[PLACE],
    )


CLAIM = Claim(
    draw,
    judge,
    cell={"request_rate": 2.0, "trace": "workload_front_half.toml", "allocator": "prefix"},
)
