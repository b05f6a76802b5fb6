"""Small timing tables, made up, for tests."""

from collections.abc import Callable, Iterator
from typing import Any

from sim.timing.table import TableInfo, TimingTable, make_table

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
KINDS = {"kernel": "made up", "dtype": "bfloat16", "kv_dtype": "bfloat16"}
LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "layernorm", "sampler")

DecodeTime = Callable[[int, int], float]
"""Microseconds of a batch behind a history of each."""


def linear_us(batch: int, history: int) -> float:
    """Answer a time that is linear in the batch and in the total of the histories."""
    return 10 + 0.5 * batch + 0.001 * batch * history


def decodes(
    time: DecodeTime = linear_us,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16),
    histories: tuple[int, ...] = (16, 64, 256, 1024),
) -> Iterator[dict[str, Any]]:
    """Answer rows of decode_attention over a whole grid."""
    for batch in batches:
        for history in histories:
            row = {"op": "decode_attention", "batch": batch, "query_len": 1, "context": history}
            yield KINDS | HEADS | row | {"latency_us": time(batch, history)}


def chunks(histories: tuple[int, ...] = (0, 64, 1024)) -> Iterator[dict[str, Any]]:
    """Answer rows of prefill_attention: 5 us, and a thousandth for each pair of tokens."""
    for length in (16, 64, 256, 2048):
        for history in histories:
            pairs = length * (history + length / 2)
            row = {"op": "prefill_attention", "batch": 1, "query_len": length}
            yield KINDS | HEADS | row | {"query_context": history, "latency_us": 5 + pairs / 1000}


def layers() -> Iterator[dict[str, Any]]:
    """Answer rows of every kernel of `LAYERS`: 2 us and a hundredth a token, from 1 to 2048."""
    for op in LAYERS:
        for num_tokens in (1, 64, 2048):
            row = {"op": op, "num_tokens": num_tokens, "latency_us": 2 + num_tokens / 100}
            yield KINDS | row


def table(*rows: Iterator[dict[str, Any]], **info: Any) -> TimingTable:
    """Answer a table of all *rows*, of Llama-3.1-8B on an A100-40 unless *info* says otherwise."""
    known: dict[str, Any] = {
        "gpu": "A100-40",
        "provenance": "assumed",
        "source": "made up",
        "licence": "CC0-1.0",
        "model": "meta-llama/Llama-3.1-8B",
        "l2_policy": "cold",
    }
    listed = [row for part in rows for row in part]
    return make_table(TableInfo(**known | info), listed, "made up")
