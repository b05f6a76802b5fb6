"""A tiny timing table of our own making, and rows to make others of."""

from typing import Any

from sim.timing.table import TableInfo, TimingTable, make_table

Row = dict[str, Any]

INFO = TableInfo(
    gpu="H200",
    provenance="assumed",
    source="made up for tests",
    licence="Apache-2.0",
    date="2026-01-02",
    versions={"made-up": "1.0"},
    notes=("nobody measured this",),
)

HEADS: Row = {
    "kernel": "made_up",
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
}


def decode(batch: int, context: int, latency_us: float, **more: Any) -> Row:
    sizes = {"batch": batch, "context": context, "latency_us": latency_us}
    return HEADS | {"op": "decode_attention"} | sizes | more


def prefill(query_len: int, latency_us: float, **more: Any) -> Row:
    sizes = {"batch": 1, "query_len": query_len, "query_context": 0, "latency_us": latency_us}
    return HEADS | {"op": "prefill_attention"} | sizes | more


def gemm(num_tokens: int, n: int, k: int, latency_us: float) -> Row:
    row = {"op": "gemm", "kernel": "made_up", "dtype": "bfloat16", "n": n, "k": k}
    return row | {"num_tokens": num_tokens, "latency_us": latency_us}


def tiny_rows() -> list[Row]:
    """Answer rows of decodes, prompts and products that cover a small run of Llama-3.1-8B."""
    return [
        *(decode(b, c, 10 + b * c / 1000) for b in (1, 4, 16) for c in (16, 256, 8192)),
        *(prefill(n, 10 + n * n / 10_000) for n in (16, 128, 2048)),
        *(
            gemm(m, n, k, 5 + n * k / 2e6 + m / 100)
            for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
            for m in (1, 64, 2048)
        ),
    ]


def tiny_table() -> TimingTable:
    return make_table(INFO, tiny_rows(), "tiny")
