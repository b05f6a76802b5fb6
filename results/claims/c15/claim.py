"""C15: what each remedy at the memory limit gains, on one workload.

The shipped workload (1,000 chats, 12 requests/s, a common system prompt) on an A100 of 40 GB, from
plain paging: the ladder of `kvsim advise` for TTFT 500 ms and TPOT 50 ms, and each remedy alone.
Then 1 to 8 cards by tensor parallelism, 300 requests for each at once (``workload.toml``) and
max_num_seqs out of the way: replicas, each with its own 300, would be linear. What quantization
does to answers is not modelled; fp8 KV is priced as 16 bits (no fit of it on an A100: assumed), and
so are quantized weights.
"""

from collections.abc import Iterator
from pathlib import Path
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
from sim.what_if import Outcome, changed, compared, ran, what_if
from workloads.editing import sample
from workloads.record import Trace

SLOS = "ttft:500 tpot:50"
ALONE: dict[str, dict[str, Any]] = {
    "prefix caching": {"enable_prefix_caching": True},
    "utilization 0.95": {"gpu_memory_utilization": 0.95},
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
}
CARDS = (1, 2, 4, 8)
SEATS = 1024
"""As many as vLLM has on large GPUs: never the limit here."""
COMMUNICATION = ("all-reduce", "gather of logits")
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
    return pd.DataFrame([*_ladder(config, trace), *_alone(config, trace), *_cards(config)])


def _row(
    part: str, step: str, found: Outcome, before: Outcome | None, verdict: str = ""
) -> dict[str, Any]:
    gains = compared(before, found) if before is not None else {}
    factors = {
        f"{name}_factor": gains[name].ratio if gains else None
        for name in ("users_held", "output_throughput")
    }
    figures = {name: getattr(found, name) for name in FIGURES}
    return {"part": part, "step": step, "verdict": verdict, **factors, **figures}


def _ladder(config: RunConfig, trace: Trace) -> Iterator[dict[str, Any]]:
    for step in advise(config, trace, Simulation.run).steps:
        if step.outcome is not None:
            yield _row("ladder", step.name, step.outcome, step.before, step.verdict)


def _alone(config: RunConfig, trace: Trace) -> Iterator[dict[str, Any]]:
    start = what_if(config, trace)
    for name, changes in ALONE.items():
        yield _row("alone", name, what_if(config, trace, changes), start)


def _cards(config: RunConfig) -> Iterator[dict[str, Any]]:
    path = Path(__file__).with_name("workload.toml")
    trace = recorded(changed(config, {"trace": str(path)}).load, path)
    start = None
    for cards in CARDS:
        part = sample(trace, every=CARDS[-1] // cards)
        seats = {"tensor_parallel_size": cards, "max_num_seqs": SEATS}
        found, summary = ran(changed(config, seats), part)
        start = start or found
        spent = summary["step_time_s"]
        sent = sum(spent.get(term, 0.0) for term in COMMUNICATION) / sum(spent.values())
        yield _row("cards", str(cards), found, start) | {"communication_pct": 100 * sent}


def _gains(frame: pd.DataFrame, part: str) -> "pd.Series[float]":
    return frame[frame["part"] == part].set_index("step")["output_throughput_factor"]


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the chapter's order with what each remedy gains alone; cards with their number."""
    alone = _gains(frame, "alone").sort_values(ascending=False)
    cards = frame[frame["part"] == "cards"].set_index("step")
    most = cards.iloc[-1]
    ladder = frame[frame["part"] == "ladder"]
    start, last = ladder.iloc[0], ladder[ladder["verdict"] == "kept"].iloc[-1]
    order = ", ".join(f"{name} {gain:.2f}" for name, gain in alone.items())
    first = alone.index[0] == "prefix caching"
    sublinear = most.output_throughput_factor < 0.9 * most.num_gpus
    kind = "holds when prompts share a prefix" if first and sublinear else "does not hold"
    held = one(frame, part="alone", step="fp8 KV cache")["users_held_factor"]
    gains = cards["output_throughput_factor"]
    return Verdict(
        f"{kind}, as an order by cost; by gain {alone.index[-1]} is last. Cards are sublinear "
        f"from {gains[gains < gains.index.astype(int)].index[0]} on",
        f"Throughput, each alone: {order} times (fp8 KV holds {held:.1f} times the users). "
        f"{', '.join(gains.index[1:])} cards: "
        f"{', '.join(f'{gain:.1f}' for gain in gains.iloc[1:])} times one "
        f"({most.communication_pct:.0f} % of step time is communication at {most.num_gpus:.0f}; "
        f"two also hold {cards.loc['2'].users_held_factor:.1f} times the users). "
        f"The ladder: SLOs met by {100 * start.slo_attainment:.0f} %, in the end by "
        f"{100 * last.slo_attainment:.0f} % on {last.num_gpus:.0f} cards, "
        f"{start.usd_per_million_output_tokens:.2f} then "
        f"{last.usd_per_million_output_tokens:.2f} USD a million tokens",
        "`kvsim advise` on your own trace: the free remedies first, cards for latency",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw what each step gains, and throughput over the number of cards."""
    figure = new_figure(9, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    _draw_ladder(left, frame)
    _draw_cards(right, frame)
    alone, cards = _gains(frame, "alone"), _gains(frame, "cards")
    put_title(
        figure,
        f"Sharing prefixes gains {100 * (alone['prefix caching'] - 1):.0f} % for nothing, "
        f"utilization {100 * (alone['utilization 0.95'] - 1):.0f} %; {cards.index[-1]} cards are "
        f"worth {cards.iloc[-1]:.1f}",
        "Llama-3.1-8B, A100 of 40 GB; left: the shipped 1,000 chats, TTFT 500 ms, TPOT 50 ms",
    )
    return figure


def _draw_ladder(axes: Axes, frame: pd.DataFrame) -> None:
    rows = frame[frame["part"] == "ladder"].iloc[::-1].reset_index(drop=True)
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
    gains = _gains(frame, "cards")
    label = "linear: replicas, each with its own load"
    axes.plot(CARDS, CARDS, color="#BBBBBB", linestyle="--", label=label)
    axes.plot(CARDS, gains, marker="o", color=PALETTE[0], label="tensor parallel")
    for cards, gain in zip(CARDS, gains, strict=True):
        axes.annotate(f"{gain:.1f}", (cards, gain), (4, -14), textcoords="offset points")
    axes.set_xticks(CARDS)
    axes.set_xlim(0.6, 9)
    axes.set_ylim(0, 10.5)
    axes.set_xlabel("cards")
    axes.set_ylabel("output tokens/s (times one card's)")
    axes.set_title("more cards, 300 requests for each", loc="left", fontsize=10)
    axes.legend(fontsize=9, loc="upper left")


CLAIM = Claim(draw, judge, make=make)
