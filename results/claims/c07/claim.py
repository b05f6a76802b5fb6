"""C7: what is left of sharing when there are many prefixes?

The requests of C5 behind one of n system prompts of 1,440 tokens, equally popular or by Zipf's law
(exponent 1.2: assumed), all at once on a pool of 46,016 tokens: 31 such prompts and no request.
Looking up and hashing takes no time here; SGLang measured below 0.3 % without any reuse
(RadixAttention, arXiv 2312.07104).
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict
from claims.charts import curves
from sim.plots.labels import Metric, metric_of

NUMBER = "different prefixes"
PREFIX_TOKENS = 1440


def by_number(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer a row a number of prefixes, popularity and allocator."""
    parts = frame["trace"].str.extract(r"workload_(equal|zipf)_(\d+)")
    frame = frame.assign(popularity=parts[0], **{NUMBER: parts[1]})
    alone = frame[frame["popularity"].isna()].assign(**{NUMBER: 1})
    rows = [frame.dropna(subset=["popularity"])]
    rows += [alone.assign(popularity=name) for name in ("equal", "zipf")]
    answer = pd.concat(rows, ignore_index=True).astype({NUMBER: int})
    return answer.sort_values([NUMBER, "popularity"], kind="stable")


def gains(frame: pd.DataFrame) -> pd.DataFrame:
    """Answer sharing's throughput over plain paging's, by popularity and number, and hits lost.

    Each prefix has to be computed once; what of equally popular ones was computed more often had
    been evicted. (Of the others not all come up.)
    """
    rows = by_number(frame).set_index(["popularity", NUMBER]).sort_index()
    sharing, plain = (rows[rows["allocator"] == name] for name in ("prefix", "paged"))
    needed_once = sharing.index.get_level_values(NUMBER)
    possible = PREFIX_TOKENS * (sharing["num_prompts"] - needed_once)
    return pd.DataFrame(
        {
            "gain": sharing["output_throughput"] / plain["output_throughput"],
            "lost_pct": 100 * (1 - sharing["prefix_cache_hits"] / possible),
        }
    )


def judge(frame: pd.DataFrame) -> Verdict:
    """Say how the gain falls with the number of prefixes, and whether sharing ever costs."""
    gain = gains(frame)
    equal, zipf = gain.loc["equal"], gain.loc["zipf"]
    first, middle, last = (equal.index[place] for place in (0, -2, -1))
    costs = gain["gain"].min() < 0.995
    fades = equal["gain"][last] - 1 < 0.2 * (equal["gain"][first] - 1)
    slots = int(frame["kv_cache_slots"].iloc[0])
    fit = slots // PREFIX_TOKENS
    outcome = f"holds when the prefixes outgrow the pool (here {fit} fit) and none is popular"
    if not fades:
        outcome = "does not hold"
    return Verdict(
        outcome + ("" if costs else "; even then it costs no throughput"),
        "Throughput over plain paging "
        + ", ".join(f"{row.gain:.2f} ({number})" for number, row in equal.iterrows())
        + f" by number of prefixes; {zipf['gain'][last]:.2f} ({last}) if some are popular; "
        f"possible hits lost to eviction: {equal['lost_pct'][middle]:.0f} % ({middle}), "
        f"{equal['lost_pct'][last]:.0f} % ({last})",
        "leave sharing on; few and popular system prompts, and requests of one go to one replica",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw hits, hits lost and throughput over the number of prefixes."""
    gain = gains(frame)["gain"]
    equal, zipf = gain["equal"], gain["zipf"]
    return curves(
        by_number(frame),
        NUMBER,
        (
            metric_of("prefix_cache_hit_rate"),
            Metric("output_throughput", "output tokens/s", "", True),
        ),
        f"Throughput by sharing: {equal.iloc[0]:.1f} times with one prefix, {equal.iloc[-1]:.2f} "
        f"with {equal.index[-1]} equally popular, {zipf.iloc[-1]:.2f} with some popular",
        swept=["popularity", NUMBER],
    )


CLAIM = Claim(draw, judge, cell={"trace": "workload_equal_256.toml", "allocator": "prefix"})
