"""C15: what each remedy at the memory limit gains, on one workload.

The shipped workload (1,000 chats, 12 requests/s, a common system prompt) on an A100 of 40 GB, from
plain paging: the ladder of `kvsim advise` for TTFT 500 ms and TPOT 50 ms; each remedy alone; and 2
to 8 cards with all requests at once and max_num_seqs out of the way, by tensor parallelism and by
replicas. What quantization does to answers is not modelled. fp8 KV is priced as 16 bits: no fit of
it on an A100 (assumed).
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from sim.advice import advise
from sim.arrivals import recorded
from sim.config import RunConfig
from sim.plots.axis import new_figure
from sim.plots.style import PALETTE
from sim.plots.titles import put_title
from sim.settings import FLAG_RANK, Given, resolve
from sim.simulation import Simulation
from sim.what_if import Outcome, compared, what_if
from workloads.record import Trace

SLOS = "ttft:500 tpot:50"
ALONE: dict[str, dict[str, Any]] = {
    "prefix caching": {"enable_prefix_caching": True},
    "utilization 0.95": {"gpu_memory_utilization": 0.95},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
}
CARDS = (2, 4, 8)
FIGURES = (
    "users_held", "mean_num_requests_running", "output_throughput", "slo_attainment",
    "prefix_cache_hit_rate", "p99_ttft_ms", "p99_tpot_ms", "num_gpus", "usd_per_hour",
    "usd_per_million_output_tokens", "timing_provenance",
)  # fmt: skip


def make() -> pd.DataFrame:
    """Answer a row a step of the ladder, a remedy alone, and a number of cards."""
    given = {"allocator": "paged", "goodput": SLOS}
    config = resolve({n: Given(value, FLAG_RANK, n) for n, value in given.items()}).run
    trace = recorded(config.load)
    return pd.DataFrame([*_ladder(config, trace), *_alone(config, trace), *_cards(config, trace)])


def _row(
    part: str, step: str, found: Outcome | None, before: Outcome | None, verdict: str = ""
) -> dict[str, Any]:
    row: dict[str, Any] = {"part": part, "step": step, "verdict": verdict}
    if found is None:
        return row
    gains = compared(before, found) if before is not None else {}
    for name in ("users_held", "output_throughput"):
        row[f"{name}_factor"] = gains[name].ratio if gains else None
    return row | {name: getattr(found, name) for name in FIGURES}


def _ladder(config: RunConfig, trace: Trace) -> Iterator[dict[str, Any]]:
    for step in advise(config, trace, Simulation.run).steps:
        yield _row("ladder", step.name, step.outcome, step.before, step.verdict)


def _alone(config: RunConfig, trace: Trace) -> Iterator[dict[str, Any]]:
    start = what_if(config, trace)
    for name, changes in ALONE.items():
        yield _row("alone", name, what_if(config, trace, changes), start)


def _cards(config: RunConfig, trace: Trace) -> Iterator[dict[str, Any]]:
    seats = {"request_rate": "inf", "max_num_seqs": len(trace)}
    start = what_if(config, trace, seats)
    for cards in CARDS:
        shared = what_if(config, trace, {**seats, "tensor_parallel_size": cards})
        yield _row("tensor parallel", str(cards), shared, start)
        yield _row("replicas", str(cards), what_if(config, trace, seats, replicas=cards), start)


def _gains(frame: pd.DataFrame, part: str) -> "pd.Series[float]":
    return frame[frame["part"] == part].set_index("step")["output_throughput_factor"]


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the chapter's order with the gains of each remedy alone, and cards with their number."""
    alone = _gains(frame, "alone").sort_values(ascending=False)
    shared, replicas = (_gains(frame, part) for part in ("tensor parallel", "replicas"))
    most = str(CARDS[-1])
    ladder = frame[(frame["part"] == "ladder") & frame["output_throughput"].notna()]
    start, last = ladder.iloc[0], ladder[ladder["verdict"] == "kept"].iloc[-1]
    order = ", ".join(f"{name} {gain:.2f}" for name, gain in alone.items())
    first = alone.index[0] == "prefix caching"
    sublinear = shared[most] < 0.9 * int(most)
    kind = "holds when prompts share a prefix" if first and sublinear else "does not hold"
    held = one(frame, part="alone", step="fp8 KV cache")["users_held_factor"]
    return Verdict(
        f"{kind}, as an order by cost; by gain {alone.index[-1]} is last",
        f"Throughput, each alone: {order} times (fp8 KV holds {held:.1f} times the users). "
        f"{most} cards: {shared[most]:.1f} times by tensor parallelism, {replicas[most]:.1f} by "
        f"replicas. The ladder: SLOs met by {100 * start.slo_attainment:.0f} %, then "
        f"{100 * last.slo_attainment:.0f} % on {last.num_gpus:.0f} cards at "
        f"{last.usd_per_million_output_tokens:.2f} USD a million tokens "
        f"({start.usd_per_million_output_tokens:.2f} before)",
        "`kvsim advise` on your own trace: the free remedies first, cards for latency",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw what each step gains, and throughput over the number of cards."""
    figure = new_figure(9, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_ladder(left, frame)
    _draw_cards(right, frame)
    alone = _gains(frame, "alone")
    shared = _gains(frame, "tensor parallel")
    put_title(
        figure,
        f"Sharing prefixes gains {100 * (alone.iloc[0] - 1):.0f} % for nothing, utilization "
        f"{100 * (alone['utilization 0.95'] - 1):.0f} %; 8 cards are worth "
        f"{shared.iloc[-1]:.1f}",
        "Llama-3.1-8B, A100 of 40 GB, the shipped 1,000 chats; SLOs TTFT 500 ms, TPOT 50 ms",
    )
    return figure


def _draw_ladder(axes: Axes, frame: pd.DataFrame) -> None:
    rows = frame[(frame["part"] == "ladder") & frame["output_throughput"].notna()]
    rows = rows.iloc[::-1].reset_index(drop=True)
    names = [
        f"{'+ ' if verdict == 'kept' else '- ' if verdict != 'start' else ''}{step}"
        + (f" ({gpus:.0f})" if step == "more cards" else "")
        for step, verdict, gpus in zip(rows["step"], rows["verdict"], rows["num_gpus"], strict=True)
    ]
    kept = rows["verdict"].isin(("kept", "start"))
    colors = [PALETTE[0] if each else "#BBBBBB" for each in kept]
    bars = axes.barh(names_at := rows.index, rows["output_throughput"], color=colors)
    labels = [
        f"{rate:,.0f}, {share:.0%} meet SLOs"
        for rate, share in zip(rows["output_throughput"], rows["slo_attainment"], strict=True)
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(names_at, names, fontsize=9)
    axes.set_xlim(0, 1.7 * rows["output_throughput"].max())
    axes.set_xlabel("output tokens/s (grey: no gain, dropped)")
    axes.set_title("the ladder, on what was kept before", loc="left", fontsize=10)


def _draw_cards(axes: Axes, frame: pd.DataFrame) -> None:
    number = [1, *CARDS]
    axes.plot(number, number, color="#BBBBBB", linestyle="--", label="linear")
    for place, part in enumerate(("tensor parallel", "replicas")):
        gains = [1.0, *_gains(frame, part)]
        axes.plot(number, gains, marker="os"[place], color=PALETTE[place], label=part)
        axes.annotate(f"{gains[-1]:.1f}", (number[-1], gains[-1]), (-4, 6 - 18 * place),
                      textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
    axes.set_xticks(number)
    axes.set_xlabel("cards")
    axes.set_ylabel("output tokens/s (times one card's)")
    axes.set_title("more cards, all requests at once", loc="left", fontsize=10)
    axes.legend(fontsize=9)


CLAIM = Claim(draw, judge, make=make)
