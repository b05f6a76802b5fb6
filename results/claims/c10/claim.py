"""C10: is there a best block size, and is it 16?

Judged by the experiment ``results/block_size``: three workloads, blocks of 1 to 256 tokens, kernel
times that depend on the block's size (``roofline``, assumed) and that do not.
"""

import pandas as pd

from claims import Claim, Verdict

SIZES = (1, 16, 256)
KEYS = ["trace", "allocator"]


def relative(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer throughput over that of blocks of 16: a row a workload, a column a block size."""
    rows = frame[(frame["step_time"] == "roofline") & (frame["allocator"] != "reserve-max")]
    table = rows.pivot_table("output_throughput", KEYS, "block_size")
    return table.div(table[16], axis="index")


def judge(frame: pd.DataFrame) -> Verdict:
    """Say how much better than 16 the best size is, and how bad the ends are."""
    table = relative(frame)
    small, _, large = (100 * (1 - table[size]) for size in SIZES)
    best = table.idxmax(axis="columns")
    gain = 100 * (table.max(axis="columns") - 1)
    u_shaped = (small > 0).all() and (table[256] < table.max(axis="columns")).all()
    internal = frame[(frame["block_size"] == 256) & (frame["allocator"] == "paged")]
    unused = internal["kv_internal_pct"].max()
    return Verdict(
        "holds when the kernel costs more with small blocks (assumed), and 16 is within "
        f"{gain.max():.1f} % of the best"
        if u_shaped
        else "does not hold",
        f"Against blocks of 16: 1 loses {small.min():.0f} to {small.max():.0f} %, 256 "
        f"{large.min():.0f} to {large.max():.0f} % (up to {unused:.0f} % "
        f"of the pool held and never written); the best are {best.min()} to {best.max()}",
        "leave 16; 32 or 64 if the kernel wants it",
    )


CLAIM = Claim(None, judge, of="block_size", figure="../../block_size/u_curve.png")
