"""C2: how much of reserved KV memory holds KV?

The paper's case (figure 2: OPT-13B, 15.7K slots, ShareGPT's published means, lengths exponential:
assumed; at a rate that fills memory under every reservation) and a later one, long prompts under a
max_model_len of 16,384. Orca's reservations: the maximum, powers of two, exactly what is written,
placed by a buddy allocator. Shares are of the pool, weighted by time.
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from claims.charts import cells_of
from sim.plots.bars import draw_slots
from sim.plots.titles import context, put_title

KINDS = ("max", "pow2", "oracle")
PAPER = (20.4, 26.8, 38.2)
BELOW = 40
OPT, LONG = "facebook/opt-13b", "meta-llama/Llama-3.1-8B"


def _live(frame: pd.DataFrame, model: str) -> list[float]:
    return [float(one(frame, model=model, reservation=kind)["kv_live_pct"]) for kind in KINDS]


def _listed(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare with what is claimed and with what the paper measured."""
    short, long = _live(frame, OPT), _live(frame, LONG)
    always = max(short + long) < BELOW
    largest = max(short[0], long[0])
    outcome = "holds" if always else "holds when the maximum is reserved"
    if largest >= BELOW:
        outcome = "does not hold"
    rest = "" if always else f"; with shorter reservations up to {max(short + long):.0f} % is live"
    off = max(abs(ours - theirs) for ours, theirs in zip(short, PAPER, strict=True))
    return Verdict(
        outcome + rest,
        f"Live under maximum / power of two / exact length: {_listed(short)} % in the paper's "
        f"case (paper {_listed(list(PAPER))}, at most {off:.1f} points off), {_listed(long)} % "
        "with long prompts",
        "paging: nothing else knows an output's length before it is there",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw where the slots are."""
    short, long = _live(frame, OPT), _live(frame, LONG)
    cases = {OPT: "paper's case", LONG: "long prompts"}
    cells = cells_of(frame.assign(case=frame["model"].map(cases)), ["case"])
    figure = draw_slots(cells, "case")
    put_title(
        figure,
        f"Reserving the maximum leaves {short[0]:.0f} and {long[0]:.0f} % of the pool live, "
        f"knowing every length {short[2]:.0f} and {long[2]:.0f} %",
        context(cells),
    )
    return figure


CLAIM = Claim(
    draw,
    judge,
    cell={
        "reservation": "pow2",
        "model": LONG,
        "trace": "workload_long.toml",
        "max_model_len": 16384,
        "num_gpu_blocks_override": 9000,
        "request_rate": float("inf"),
    },
)
