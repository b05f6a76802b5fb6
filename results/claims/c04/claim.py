"""C4: the chapter's block table, filled by the real allocator (`sim.allocators.paged`), vLLM's.

Twelve others hold a block each of a pool of blocks of 16; those of blocks 12, 9, 3 and 7 end, in
this order, and the latest to come back is handed out first. Then one sequence grows token by token.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from claims import Claim, Verdict, one
from sim.allocators.paged import PagedAllocator
from sim.kv_pool import NULL_BLOCKS, KVPool
from sim.plots.axis import new_figure
from sim.plots.style import SLOT_COLORS
from sim.plots.titles import put_title
from sim.request import Request

BLOCK_SIZE = 16
PROMPT, MOST = 35, 50
CLAIMED_TOKEN = 36
OTHERS, ENDED = 12, (12, 9, 3, 7)


def make() -> pd.DataFrame:
    """Answer the block table at each length of the sequence, and the block that it took there."""
    slots = (OTHERS + 4) * BLOCK_SIZE
    pool = KVPool(
        num_gpu_blocks=OTHERS + 4 + NULL_BLOCKS,
        block_size=BLOCK_SIZE,
        contiguous_slots=slots,
        kv_cache_bytes=None,
        breakdown=(),
        provenance="given",
    )
    allocator = PagedAllocator(pool, slots)
    others = [Request(i, str(i), 0, BLOCK_SIZE, 1) for i in range(OTHERS)]
    sequence = Request(OTHERS, "sequence", 0, PROMPT, MOST - PROMPT + 1)
    for other in others:
        assert allocator.allocate_slots(other, BLOCK_SIZE)
        other.num_computed_tokens = BLOCK_SIZE
    of_block = {allocator.block_table(other)[0]: other for other in others}
    for block in ENDED:
        allocator.free(of_block[block])
    rows: list[dict[str, Any]] = []
    for num_tokens in range(PROMPT, MOST + 1):
        granted = allocator.allocate_slots(sequence, num_tokens - sequence.num_computed_tokens)
        assert granted is not None
        sequence.num_computed_tokens = num_tokens
        sequence.num_tokens = num_tokens + 1
        table = allocator.block_table(sequence)
        rows.append(
            {
                "num_tokens": num_tokens,
                "block_table": " ".join(map(str, table)),
                "new_blocks": " ".join(map(str, granted.new_blocks)),
                "empty_slots": len(table) * BLOCK_SIZE - num_tokens,
            }
        )
        allocator.check_integrity()
    return pd.DataFrame(rows)


def _growth(frame: pd.DataFrame) -> "pd.Series[Any]":
    """Answer the row in which the sequence takes its first block after the prompt's."""
    return frame[frame["new_blocks"].notna()].iloc[1]


def _blocks(row: "pd.Series[Any]") -> list[int]:
    return [int(block) for block in str(row["block_table"]).split()]


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare the table and the token that makes it grow with the chapter's."""
    before, after = _blocks(one(frame, num_tokens=PROMPT)), _blocks(_growth(frame))
    token = int(_growth(frame)["num_tokens"])
    right = before == [7, 3, 9] and after == [7, 3, 9, 12]
    outcome = "holds" if right else "does not hold"
    if right and token != CLAIMED_TOKEN:
        outcome = f"holds when one number is put right: the new block comes with token {token}"
    return Verdict(
        outcome,
        f"Blocks {', '.join(map(str, before))}; tokens {CLAIMED_TOKEN} to {token - 1} fill what is "
        f"left of block {before[-1]}; token {token} takes block {after[-1]}, nothing moves, and at "
        f"most {frame['empty_slots'].max()} slots wait for tokens",
        "nothing: this is why `--max-model-len` reserves no memory",
    )


def _pool(axes: Axes, row: "pd.Series[Any]", title: str) -> None:
    """Draw the blocks of the pool, a row each, and which token each slot of the sequence has."""
    table, num_tokens = _blocks(row), int(row["num_tokens"])
    for block in range(NULL_BLOCKS, OTHERS + 1):
        taken = block not in ENDED
        for slot in range(BLOCK_SIZE):
            color = SLOT_COLORS["reserved" if taken else "free"]
            if block in table:
                written = table.index(block) * BLOCK_SIZE + slot < num_tokens
                color = SLOT_COLORS["live" if written else "free"]
            axes.add_patch(Rectangle((slot, block - 0.4), 0.9, 0.8, color=color, linewidth=0))
    for place, block in enumerate(table):
        first, last = place * BLOCK_SIZE, min((place + 1) * BLOCK_SIZE, num_tokens) - 1
        tokens = f"tokens {first + 1}-{last + 1}" if last > first else f"token {first + 1}"
        axes.text(BLOCK_SIZE + 0.4, block, f"logical {place}: {tokens}", va="center", fontsize=9)
    axes.set_xlim(0, BLOCK_SIZE + 11)
    axes.set_ylim(OTHERS + 0.6, NULL_BLOCKS - 0.6)
    axes.set_yticks(range(NULL_BLOCKS, OTHERS + 1))
    axes.set_xticks([0.45, BLOCK_SIZE - 0.55], ["0", str(BLOCK_SIZE - 1)])
    axes.set_xlabel("slot of the block", loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left")


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the pool with the prompt, and when the first block is added."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    growth = _growth(frame)
    _pool(left, one(frame, num_tokens=PROMPT), f"{PROMPT} tokens")
    _pool(right, growth, f"{growth.num_tokens} tokens")
    left.set_ylabel("physical block")
    put_title(
        figure,
        f"Three blocks hold {PROMPT} tokens and {growth.num_tokens - 1} as well; "
        f"token {growth.num_tokens} takes the next free one",
        "blocks of 16; dark: this sequence, light: other sequences, grey: empty",
    )
    return figure


CLAIM = Claim(draw, judge, make=make)
