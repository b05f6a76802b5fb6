"""The figures of this folder, from its CSV files."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiment import save
from sim.plots.bars import look_of
from sim.plots.curves import legend_below, name_panel, panels_of
from sim.plots.style import COLORS, drawing, looks
from sim.plots.titles import put_title

ALLOCATORS = {
    "Orca (Max)": "reserve-max",
    "Orca (Pow2)": "reserve-pow2",
    "Orca (Oracle)": "reserve-oracle",
    "vLLM": "paged",
}
"""Whose colours and markers the systems have."""

STATES = ("live", "reserved", "internal", "external")
PAPER = "#555555"


def draw(folder: Path) -> None:
    """Draw every figure of *folder*."""
    summary = pd.read_csv(folder / "summary.csv", dtype=str)
    curves = pd.read_csv(folder / "curves.csv")
    with drawing():
        save(_memory(summary[summary["figure"] == "Fig. 2"]), folder / "memory.png")
        save(_batches(summary[summary["figure"] == "Fig. 13"]), folder / "batches.png")
        save(_latency(curves[curves["model"] != "LLaMA-13B"], summary), folder / "latency.png")
        save(_ratios(summary), folder / "ratios.png")


def _memory(rows: pd.DataFrame) -> Figure:
    """Draw where the slots are, published and ours beside each other (Figure 2)."""
    figure, (axes,) = panels_of(1, height=3.2)
    ours = {system: _numbers(rows[rows["variant"] == system], "ours") for system in ALLOCATORS}
    paper = {
        system: _numbers(rows[rows["variant"] == system], "published") for system in ALLOCATORS
    }
    for place, system in enumerate(ALLOCATORS):
        for offset, shares in ((-0.21, paper[system]), (0.21, ours[system])):
            bottom = 0.0
            for state in STATES:
                share = shares.get(state, 0.0)
                axes.bar(place + offset, share, 0.38, bottom=bottom, **look_of(state))
                if share > 6:
                    _label(axes, place + offset, bottom + share / 2, f"{share:.1f}")
                bottom += share
            name = "paper" if offset < 0 else "kvsim"
            axes.text(place + offset, 101.5, name, ha="center", fontsize=8, color=PAPER)
    axes.set_xticks(range(len(ALLOCATORS)), list(ALLOCATORS))
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("KV slots (%)")
    orca = [system for system in ALLOCATORS if system != "vLLM"]
    live = [ours[system]["live"] for system in orca]
    title = (
        f"Reserving stores tokens in {min(live):.0f} to {max(live):.0f} % of the KV memory, "
        f"paging in {ours['vLLM']['live']:.0f} %"
    )
    put_title(figure, title, "Figure 2 of the vLLM paper: OPT-13B, ShareGPT-like, 2 requests/s")
    legend_below(figure, [Patch(**look_of(state)) for state in STATES])
    return figure


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)


def _numbers(rows: pd.DataFrame, column: str) -> dict[str, float]:
    """Answer *column* by state."""
    return {
        quantity.partition(" ")[0]: float(value)
        for quantity, value in zip(rows["quantity"], rows[column], strict=True)
        if "/" not in quantity
    }


def _batches(rows: pd.DataFrame) -> Figure:
    """Draw requests batched, published and ours (Figure 13)."""
    loads = list(dict.fromkeys(rows["quantity"]))
    figure, panels = panels_of(len(loads), height=2.4)
    for axes, load in zip(panels, loads, strict=True):
        mine = rows[rows["quantity"] == load].set_index("variant")[["published", "ours"]]
        for place, system in enumerate(ALLOCATORS):
            published, ours = mine.astype(float).loc[system].tolist()
            axes.bar(place - 0.2, published, 0.36, color="white", edgecolor=PAPER, hatch="//")
            axes.bar(place + 0.2, ours, 0.36, color=COLORS[ALLOCATORS[system]])
            for x, value in ((place - 0.2, published), (place + 0.2, ours)):
                axes.text(x, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(ALLOCATORS)), [s.replace(" ", "\n") for s in ALLOCATORS])
        axes.set_ylabel("requests batched (mean)")
        name_panel(axes, load.partition(", ")[2])
    worst = int(rows["difference"].astype(float).abs().argmax())
    who, load = (str(rows[column].iloc[worst]) for column in ("variant", "quantity"))
    title = f"Batches are as large as the paper's, but for {who} on {load.partition(', ')[2]}"
    put_title(figure, title, "Figure 13 of the vLLM paper: OPT-13B on an A100 of 40 GB")
    legend_below(
        figure,
        [
            Patch(facecolor="white", edgecolor=PAPER, hatch="//", label="paper"),
            Patch(facecolor=PAPER, label="kvsim"),
        ],
    )
    return figure


def _speed_ups(summary: pd.DataFrame) -> pd.DataFrame:
    """Answer the rows of ratios of rates at the level that counts."""
    return summary[summary["quantity"].str.contains("0.5 s a token")]


def _latency(curves: pd.DataFrame, summary: pd.DataFrame) -> Figure:
    """Draw normalized latency over the rate, a panel a model (Figure 12)."""
    models = list(dict.fromkeys(curves["model"]))
    figure, panels = panels_of(len(models), height=2.6)
    look = looks(ALLOCATORS.values())
    for axes, model in zip(panels, models, strict=True):
        rows = curves[curves["model"] == model]
        for system, allocator in ALLOCATORS.items():
            mine = rows[rows["system"] == system].sort_values("request_rate")
            x, y = mine["request_rate"].to_numpy(), mine["normalized_latency_s"].to_numpy()
            axes.plot(x, y, **look[allocator].of_line(), markersize=3.5)
        shown = rows[rows["normalized_latency_s"] < 1]
        axes.set_ylim(0, 1)
        axes.set_xlim(0, shown["request_rate"].max() * 1.08)
        axes.set_xlabel("requests a second")
        name_panel(axes, model)
    panels[0].set_ylabel("normalized latency (s a token)")
    times = _speed_ups(summary[summary["figure"] == "Fig. 12"])["ours"].astype(float)
    title = (
        f"At equal latency, paging takes {times.min():.1f} to {times.max():.1f} times the load "
        "of reserving"
    )
    put_title(figure, title, "Figure 12 of the vLLM paper, ShareGPT-like lengths")
    legend_below(
        figure,
        [
            Line2D([], [], label=system, **look[allocator].of_line())
            for system, allocator in ALLOCATORS.items()
        ],
    )
    return figure


def _ratios(summary: pd.DataFrame) -> Figure:
    """Draw ratios beside what is published: a point or a band (Figures 12 and 16)."""
    rows = _speed_ups(summary).iloc[::-1]
    figure, (axes,) = panels_of(1, height=2.9)
    names: list[str] = []
    for place, row in enumerate(rows.itertuples()):
        low, *high = (float(bound) for bound in str(row.published).split(" to "))
        band: Sequence[float] = (low, high[0] if high else low)
        axes.plot(band, [place, place], color="#BBBBBB", linewidth=9, solid_capstyle="butt")
        axes.plot([low], [place], "|", color=PAPER, markersize=12, markeredgewidth=2)
        axes.plot([band[1]], [place], "|", color=PAPER, markersize=12, markeredgewidth=2)
        axes.plot([float(str(row.ours))], [place], "o", color=COLORS["paged"], markersize=7)
        other = str(row.quantity).partition("rate of ")[2].partition("rate of ")[2]
        names.append(f"{row.variant}: over {other.partition(',')[0]}")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=1)
    axes.set_xlabel("rate that vLLM sustains over that of the other, at 0.5 s a token (times)")
    inside = rows[rows["met"] == "yes"]
    title = f"{len(inside)} of {len(rows)} speed-ups are where the paper has them"
    put_title(figure, title, "Figures 12 and 16; those of 16 within 25 %")
    legend_below(
        figure,
        [
            Line2D([], [], color="#BBBBBB", linewidth=9, label="paper"),
            Line2D([], [], color=COLORS["paged"], marker="o", linestyle="", label="kvsim"),
        ],
    )
    return figure
