"""A table whose block_size cost is known moves throughput as computed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.models import get_model
from sim.timing.table import LAYER_OPS, TableInfo, make_table
from sim.timing.table_file import save
from tests.cli.conftest import Kvsim

MODEL = "meta-llama/Llama-3.1-8B"
DECODE_US = {0: 100.0, 1: 230.0, 16: 110.0}
"""One layer's decode attention by block size, of any batch and context; 0: contiguous memory."""

PREFILL_US = 50.0
LEAST_US = 1e-6
OUTPUT_LEN = 101


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Attention that takes the times above, and kernels besides that take none to speak of."""
    kinds: dict[str, Any] = {"kernel": "made_up", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    heads: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    rows: list[dict[str, Any]] = [
        kinds | {"op": op, "num_tokens": tokens, "latency_us": LEAST_US}
        for op in LAYER_OPS
        for tokens in (1, 2048)
    ]
    for block_size, decode_us in DECODE_US.items():
        blocks = kinds | heads | {"block_size": block_size, "batch": 1}
        for size in (1, 4096):
            decode = {"op": "decode_attention", "context": size, "latency_us": decode_us}
            chunk = {"op": "prefill_attention", "query_len": size, "latency_us": PREFILL_US}
            rows += [blocks | decode, blocks | chunk]
    info = TableInfo(
        gpu="A100-40", provenance="assumed", source="made up", licence="CC0-1.0", model=MODEL
    )
    save(make_table(info, rows, "made up"), tmp_path / "table.parquet")
    return tmp_path / "table.parquet"


def _by_hand(block_size: int) -> float:
    """Answer tokens a second: the prompt's step gives the first token, one decode each other."""
    layers = get_model(MODEL).num_hidden_layers
    step_us = PREFILL_US + (OUTPUT_LEN - 1) * DECODE_US[block_size]
    return OUTPUT_LEN / (layers * step_us * 1e-6)


@pytest.mark.parametrize("block_size", [1, 16])
def test_throughput_moves_as_computed_by_hand(
    kvsim: Kvsim, tmp_path: Path, table: Path, block_size: int
) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text(f'{{"arrival_time": 0, "input_length": 16, "output_len": {OUTPUT_LEN}}}\n')
    flags = ("--gpu", "A100-40", "--model", MODEL, "--allocator", "reserve-max,paged")
    sizes = ("--block-size", str(block_size), "--max-model-len", "1024")
    out = tmp_path / "out"
    done = kvsim("compare", "--trace", trace, "--timing-table", table, *flags, *sizes, "-o", out)
    assert done.code == 0, done.err
    contiguous, paged = json.loads((out / "compare.json").read_bytes())
    assert contiguous["output_throughput"] == pytest.approx(_by_hand(0), rel=1e-5)
    assert paged["output_throughput"] == pytest.approx(_by_hand(block_size), rel=1e-5)
