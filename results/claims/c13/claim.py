"""C13: requests at once by hand, as vLLM counts memory, and simulated; and which limit binds.

The chapter: a card of 80 GB, weights of 40 GB, utilization 0.9, 4K of context. Llama-3.1-70B in 4
bits (42.7 GB) on an A100 of 80 GB comes near; 200 requests of 3,584 tokens that generate 512, all
at once or at a rate. By hand means 0.9 of what weights leave; vLLM takes 0.9 of the whole card,
less weights, activation, CUDA graphs and what is outside torch. Step times are those of 16-bit
weights: they decide how long requests stay, not how many fit.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from sim.arrivals import recorded
from sim.capacity import concurrency, hand_estimate, lengths_of
from sim.config import RunConfig
from sim.hardware import get_gpu
from sim.models import model_of
from sim.plots.axis import new_figure
from sim.plots.style import PALETTE
from sim.plots.titles import put_title
from sim.pool_sizing import pool_of
from sim.settings import FLAG_RANK, Given, resolve
from sim.what_if import changed, what_if
from workloads.record import Trace

GB = 1e9
CARD, WEIGHTS, UTILIZATION, CONTEXT = 80.0, 40.0, 0.9, 4096
"""The chapter's, in GB and tokens."""

BASE = {
    "model": "meta-llama/Llama-3.1-70B",
    "gpu": "A100-80",
    "quantization": "bitsandbytes",
    "gpu_memory_utilization": UTILIZATION,
    "max_model_len": CONTEXT,
    "request_rate": "inf",
}
CASES: dict[str, dict[str, Any]] = {
    "paged": {},
    "paged, max_model_len 32,768": {"max_model_len": 32768},
    "paged, max_num_seqs 8": {"max_num_seqs": 8},
    "paged, one request in 20 s": {"request_rate": 0.05},
    "reserve-max": {"allocator": "reserve-max"},
    "reserve-max, max_model_len 32,768": {"allocator": "reserve-max", "max_model_len": 32768},
}
MEMORY, HARDLY = "paged", "reserve-max, max_model_len 32,768"


def _start() -> tuple[RunConfig, Trace]:
    trace = Path(__file__).with_name("workload.toml")
    values = {**BASE, "allocator": "paged", "trace": str(trace)}
    given = {name: Given(value, FLAG_RANK, name) for name, value in values.items()}
    config = resolve(given).run
    return config, recorded(config.load, trace)


def make() -> pd.DataFrame:
    """Answer a row a case: pool and requests by hand, by vLLM's arithmetic, and simulated."""
    start, trace = _start()
    model, gpu = model_of(start.model), get_gpu(start.model.gpu)
    lengths = lengths_of(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), 0, "")
    rows = []
    for case, changes in CASES.items():
        config = changed(start, changes)
        pool, longest = pool_of(config, model, gpu), config.model.max_model_len
        seats = config.scheduler.max_num_seqs
        assert longest is not None, "resolved"
        assert seats is not None, "resolved"
        assert pool.kv_cache_bytes is not None, "sized by utilization"
        held = concurrency(pool, lengths, max_model_len=longest, max_num_seqs=seats)
        fits = held.reserve_max if config.cache.allocator == "contiguous" else held.paged
        hand, by_hand = hand_estimate(model, gpu, config, CONTEXT)
        found = what_if(config, trace)
        rows.append(
            {
                "case": case,
                "hand_gb": hand / GB,
                "pool_gb": pool.kv_cache_bytes / GB,
                "by_hand": by_hand,
                "memory_holds": fits,
                "max_num_seqs": seats,
                "computed": min(fits, seats),
                "running_mean": found.mean_num_requests_running,
                "running_peak": found.max_num_requests_running,
                "users_held": found.users_held,
                "pool_peak": found.max_kv_cache_usage_perc,
                "num_preemptions": found.num_preemptions,
                "timing_provenance": found.timing_provenance,
            }
        )
    return pd.DataFrame(rows)


def binds(row: "pd.Series[Any]") -> str:
    """Answer what keeps more requests from running in *row*."""
    if row["running_peak"] >= row["max_num_seqs"]:
        return "max_num_seqs"
    if row["pool_peak"] < 0.9:
        return "the load"
    return "max_model_len" if row["memory_holds"] < 0.5 * row["by_hand"] else "memory"


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the estimates with the simulated figure where memory binds."""
    row = one(frame, case=MEMORY)
    chapter, most = UTILIZATION * (CARD - WEIGHTS), UTILIZATION * CARD - WEIGHTS
    over = row["by_hand"] / row["running_mean"] - 1
    off = row["computed"] / row["running_mean"] - 1
    seats = next(name for name in frame["case"] if "max_num_seqs" in name)
    reserved, load = one(frame, case=HARDLY), one(frame, case="paged, one request in 20 s")
    right = "holds when" if abs(over) > 0.05 else "holds"
    limits = {binds(one(frame, case=case)) for case in (seats, HARDLY)}
    named = limits == {"max_num_seqs", "max_model_len"}
    return Verdict(
        f"{right} the pool is vLLM's: {UTILIZATION:g} of the whole card less weights and more, not "
        f"{UTILIZATION:g} of what weights leave. "
        + ("max_num_seqs binds as claimed, max_model_len only if reserved; " if named else "")
        + f"{binds(load)} may bind too",
        f"{CARD:.0f} GB, weights of {WEIGHTS:.0f}: {chapter:.0f} GB by hand, {most:.0f} at most. "
        f"Llama-3.1-70B in 4 bits: {row.by_hand:.1f} requests by hand ({100 * over:+.0f} %), "
        f"{row.computed:.1f} computed ({100 * off:+.0f} %), {row.running_mean:.1f} simulated "
        f"({row.users_held:.1f} where the pool is full); "
        f"max_num_seqs 8: {one(frame, case=seats).running_mean:.1f}; reserving 32,768: "
        f"{reserved.running_mean:.1f}, paged {one(frame, case=PAGED_LONG).running_mean:.1f}",
        "`kvsim capacity`, not the rule by hand; max_num_seqs from what it holds",
    )


PAGED_LONG = "paged, max_model_len 32,768"


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the three figures of each case."""
    rows = frame.iloc[::-1].reset_index(drop=True)
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    shown = {
        "by_hand": "by hand",
        "computed": "computed as vLLM does",
        "running_mean": "simulated, mean",
    }
    height = 0.26
    for place, (column, label) in enumerate(shown.items()):
        heights = rows.index + (1 - place) * height
        bars = axes.barh(heights, rows[column], height, label=label, color=PALETTE[place])
        axes.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=8)
    axes.set_yticks(
        rows.index,
        [f"{row['case']}\nbinding: {binds(row)}" for _, row in rows.iterrows()],
        fontsize=9,
    )
    axes.set_xlim(0, 1.12 * rows["by_hand"].max())
    axes.set_ylim(-0.6, len(rows) + 0.1)
    axes.set_xlabel("requests at once")
    row = one(frame, case=MEMORY)
    over = 100 * (row["by_hand"] / row["running_mean"] - 1)
    axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)
    put_title(
        figure,
        f"By hand is {over:.0f} % too high where memory binds: vLLM's pool is smaller",
        "Llama-3.1-70B in 4 bits, A100 of 80 GB, utilization 0.9, 200 requests of 4,096 tokens",
    )
    return figure


CLAIM = Claim(draw, judge, make=make)
