"""C9: how slow may attention over a block table be before paging loses?

No GPU was at hand, so nothing here is measured by us. What is known: vLLM's kernel of 2023 took
1.20 to 1.26 times a contiguous one (PagedAttention paper, figure 18a); vAttention found 2.8 times
in decodes and 1.42 in prompts at worst (vLLM 0.2.7, arXiv 2405.04437); for today's kernels kvsim
assumes 1.03 at blocks of 16 (``sim/data/block_size_factors.toml``). All requests come at once, so
no decision depends on time, and attention time scales by any factor: closed form on the summary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from sim.plots.axis import new_figure
from sim.plots.style import PALETTE
from sim.plots.titles import put_title
from sim.timing import CONTIGUOUS
from sim.timing.build_attention import block_size_factor

TOP = 28
"""Of the axis: above all curves there is room for words."""

CASES = ["gpu", "trace", "max_model_len"]


class Penalty(NamedTuple):
    """How many times as long as contiguous attention takes, by whose figures."""

    whose: str
    decode: float
    prefill: float


PENALTIES = (
    Penalty("today's kernels (assumed)", block_size_factor(16) / block_size_factor(CONTIGUOUS), 1),
    Penalty("the paper's", 1.26, 1),
    Penalty("vAttention's worst", 2.8, 1.42),
)


class Paged(NamedTuple):
    """A run with paging beside one that reserves the maximum: seconds.

    Attributes:
        decode, prefill: of attention, had it no block table.
        rest: of everything else.
        reserving: of the run that reserves.
    """

    name: str
    decode: float
    prefill: float
    rest: float
    reserving: float

    def gain(self, decode: float, prefill: float) -> float:
        """Answer paging's throughput over reserving's if its kernels take so many times as long."""
        return self.reserving / (self.rest + decode * self.decode + prefill * self.prefill)

    @property
    def break_even(self) -> float:
        """How many times as long attention may take before paging loses."""
        return (self.reserving - self.rest) / (self.decode + self.prefill)


def cases(frame: pd.DataFrame, reserving: str = "reserve-max") -> Iterator[Paged]:
    """Answer each card and workload, paging beside *reserving*."""
    for (gpu, trace, limit), rows in frame.groupby(CASES, sort=False):
        paged = one(rows, allocator="paged")
        size = int(paged["block_size"])
        decode = paged["decode_attention_s"]
        decode /= block_size_factor(size) / block_size_factor(CONTIGUOUS)
        prefill = paged["prefill_attention_s"]
        rest = paged["duration"] - paged["decode_attention_s"] - prefill
        what = "long documents" if "long" in str(trace) else "chats"
        name = f"{gpu}, {what}, max_model_len {limit:,}"
        yield Paged(name, decode, prefill, rest, one(rows, allocator=reserving)["duration"])


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _names(penalties: list[Penalty]) -> str:
    return " and ".join(f"{each.whose} {each.decode:.3g}" for each in penalties) or "none"


def judge(frame: pd.DataFrame) -> Verdict:
    """Find the slowest kernel with which paging still wins everywhere."""
    every = list(cases(frame))
    least = min(every, key=lambda case: case.break_even)
    gains = {each: [c.gain(each.decode, each.prefill) for c in every] for each in PENALTIES}
    passed = [each for each, found in gains.items() if min(found) >= 1]
    failed = [each for each in gains if each not in passed]
    oracle = [case.break_even for case in cases(frame, "reserve-oracle")]
    outcome = f"holds when attention takes at most {least.break_even:.2f} times as long"
    if least.break_even < 1:
        outcome = "does not hold"
    net = "; ".join(f"{_span(found)} with {each.whose}" for each, found in gains.items())
    return Verdict(
        f"{outcome} as contiguous. Passes: {_names(passed)}. Fails: {_names(failed)}",
        f"Net gain over reserving: {net}. Break-even {_span([c.break_even for c in every])}, "
        f"lowest on {least.name}; against exact reservation, which nobody has, {_span(oracle)}",
        "paging; the block size that the attention backend wants (`python -m kernels.bench`)",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the net gain over the penalty."""
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    every = list(cases(frame))
    factors = np.linspace(1, 4, 61)
    for place, case in enumerate(every):
        gains = [case.gain(factor, factor) for factor in factors]
        style = ("-", "--", ":")[place % 3]
        color = PALETTE[place // 3]
        axes.plot(factors, gains, linestyle=style, color=color, label=case.name)
    axes.axhline(1, color="#888888", linewidth=1)
    for penalty, text in zip(PENALTIES, ("today", "paper", "worst"), strict=True):
        at = penalty.decode
        axes.axvline(at, color="#CCCCCC", linewidth=1, zorder=0)
        axes.text(at + 0.02, TOP, f"{at:.3g} {text}", rotation=90, va="top", fontsize=8)
    axes.set_xlim(1, factors[-1])
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.4, TOP)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("attention over blocks takes so many times as long as contiguous")
    axes.set_ylabel("paged / reserve-max throughput")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    least = min(case.break_even for case in every)
    put_title(
        figure,
        f"Paging affords attention {least:.2f} times as slow where memory is plenty, "
        f"{max(case.break_even for case in every):.0f} where it is short",
        "Llama-3.1-8B; times fitted; penalties: 1.03 assumed, the paper's, vAttention's worst",
    )
    return figure


CLAIM = Claim(
    draw,
    judge,
    cell={
        "gpu": "RTX-4090",
        "allocator": "paged",
        "trace": "workload_long.toml",
        "max_model_len": 16384,
    },
)
