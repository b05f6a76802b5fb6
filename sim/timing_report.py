"""Timing tables and fits in words."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tabulate

from sim.hardware import get_gpu
from sim.tables import load_table
from sim.timing.table import LAYER_OPS, OPERATIONS, TimingTable
from workloads.errors import plain

tabulate.MIN_PADDING = 0  # as in sim.comparison

Row = dict[str, Any]

_MAX_LISTED = 4
"""Most kernels, types or shapes that are named one by one."""

_WIDTH = 32
"""Most characters of one of them."""

_SHAPES = ("num_heads", "num_kv_heads", "head_dim")


def fit_rows() -> list[Row]:
    """Answer what is fitted for every GPU that has a fit: a row a GPU; errors in percent."""
    rows = []
    for fit in load_table("timing_fits").values():
        decode = fit.get("decode_attention", {})
        for name in fit["gpus"]:
            rows.append(
                {
                    "gpu": name,
                    "provenance": "fitted",
                    "system": fit["system"],
                    "fitted_on": fit["fitted_on"],
                    "operations": [key for key, value in fit.items() if isinstance(value, dict)],
                    **{
                        f"decode_{key}": decode.get(key)
                        for key in ("error_p50", "error_p90", "error_all_p50", "error_all_p90")
                    },
                }
            )
    return sorted(rows, key=lambda row: str(row["gpu"]))


def table_row(path: Path, table: TimingTable) -> Row:
    """Answer what the table in *path* is, and its rows by operation."""
    info = table.info
    return {
        "path": plain(str(path)),
        "gpu": info.gpu,
        "provenance": info.provenance,
        "source": info.source,
        "licence": info.licence,
        "versions": info.versions,
        "model": info.model,
        "tensor_parallel_size": info.tensor_parallel_size,
        "date": info.date,
        "num_rows": len(table),
        "rows": rows_by_operation(table),
        "notes": list(info.notes),
    }


def rows_by_operation(table: TimingTable) -> dict[str, int]:
    """Answer how many rows each operation has, in alphabetical order."""
    operations, counts = np.unique(table.columns["op"].astype(str), return_counts=True)
    return dict(zip(operations.tolist(), counts.tolist(), strict=True))


def listing(fits: Sequence[Row], tables: Sequence[Row], places: str = "") -> str:
    """Answer the text of ``kvsim tables list``; *places* says where tables were looked for."""
    shown = [
        [
            fit["gpu"],
            fit["provenance"],
            fit["system"]
            + ("" if fit["gpu"] == fit["fitted_on"] else f"\nscaled from {fit['fitted_on']}"),
            _pair(fit["decode_error_p50"], fit["decode_error_p90"]),
            _pair(fit["decode_error_all_p50"], fit["decode_error_all_p90"]),
        ]
        for fit in fits
    ]
    headers = ["GPU", "provenance", "system", "HBM-resident\np50/p90 %", "all rows\np50/p90 %"]
    parts = [
        "Fits (--step-time roofline); errors are of decode attention",
        _text(shown, headers, right=(3, 4)),
    ]
    if not tables:
        return "\n".join([*parts, "", f"Tables (--timing-table){places}: none found"])
    shown = [
        [
            textwrap.fill(Path(row["path"]).name, 24),
            row["gpu"],
            row["provenance"],
            "\n".join(textwrap.wrap(_source(row), 30)),
            _lines([row["model"] and f"{row['model']}\ntp {row['tensor_parallel_size']}"]) or "-",
            _lines(f"{op} {count:,}" for op, count in _grouped(row["rows"]).items()),
            row["date"][:10] or "-",
        ]
        for row in tables
    ]
    headers = ["table", "GPU", "provenance", "source", "model", "rows", "date"]
    return "\n".join([*parts, "", f"Tables (--timing-table){places}", _text(shown, headers)])


def _grouped(rows: dict[str, int]) -> dict[str, int]:
    """Answer *rows* by operation with all layers in one."""
    layers = {op: count for op, count in rows.items() if op in LAYER_OPS}
    others = {op: count for op, count in rows.items() if op not in layers}
    return others | ({f"{len(layers)} layers": sum(layers.values())} if layers else {})


def _source(row: Row) -> str:
    versions = [f"{name} {version}" for name, version in row["versions"].items()]
    return ", ".join([row["source"], *versions])


def _lines(lines: Any) -> str:
    return "\n".join(line for line in lines if line)


def _pair(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.1f}/{high:.1f}"


def description(name: str, table: TimingTable) -> str:
    """Answer the text of ``kvsim tables show``: what *table* is, and a row an operation."""
    info = table.info
    about = {
        "GPU": info.gpu,
        "provenance": info.provenance,
        "source": info.source,
        "licence": info.licence,
        "date": info.date or "unknown",
        "versions": ", ".join(f"{key} {value}" for key, value in info.versions.items())
        or "unknown",
        "driver": info.driver or "unknown",
        "L2 cache": info.l2_policy,
        "model": f"{info.model}, one of {info.tensor_parallel_size} ranks" if info.model else "any",
        "rows": f"{len(table):,}",
    }
    lines = [f"{key + ':':<12}{value}" for key, value in about.items()]
    lines += [f"{'note:':<12}{note}" for note in info.notes]
    return "\n".join([plain(name), *lines, "", operations_text(table)])


def operations_text(table: TimingTable) -> str:
    """Answer a table with a row an operation: how many rows, of what, and the ranges of sizes."""
    cells = []
    for op, count in rows_by_operation(table).items():
        rows = table.where(op=op)
        _, sizes = OPERATIONS[op]
        kinds = [
            "/".join(dict.fromkeys(filter(None, kind)))
            for kind in rows.distinct("dtype", "kv_dtype")
        ]
        worth = rows_by(rows, "provenance")
        ranges = [f"{size} {_range(rows, size)}" for size in sizes if rows.columns[size].any()]
        cells.append(
            [
                op,
                f"{count:,}",
                _few(str(kernel) for (kernel,) in rows.distinct("kernel")),
                _few(kinds),
                _few(_shapes(op, rows)),
                "\n".join([*ranges, f"latency {_range(rows, 'latency_us')} us"]),
                _lines(f"{kind} {number:,}" for kind, number in worth.items()),
            ]
        )
    headers = ["operation", "rows", "kernel", "type", "shape", "sizes", "provenance"]
    return _text(cells, headers, right=(1,))


def rows_by(table: TimingTable, column: str) -> dict[str, int]:
    """Answer how many rows have each value of *column*."""
    values, counts = np.unique(table.columns[column].astype(str), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _shapes(op: str, rows: TimingTable) -> list[str]:
    """Answer what tells calls of *op* apart but kernel and types."""
    identity = OPERATIONS[op].identity
    if "num_heads" in identity:
        return [
            f"{heads}/{kv_heads}/{dim} " + (f"page {page}" if page else "contiguous")
            for heads, kv_heads, dim, page in rows.distinct(*_SHAPES, "block_size")
        ]
    names = [name for name in identity if name not in {"kernel", "dtype"}]
    if not names:
        return []
    labels = {"num_experts": "experts", "top_k": "top", "num_gpus": "GPUs"}
    return [
        " ".join(
            f"{labels.get(name, name)} {value}" for name, value in zip(names, row, strict=True)
        )
        for row in rows.distinct(*names)
    ]


def _few(values: Any) -> str:
    listed = [f"{v[:_WIDTH]}..." if len(v) > _WIDTH + 3 else v for v in values if v]
    more = len(listed) - _MAX_LISTED
    return "\n".join([*listed[:_MAX_LISTED], *([f"and {more:,} more"] if more > 0 else [])]) or "-"


def _range(rows: TimingTable, column: str) -> str:
    low, high = rows.columns[column].min(), rows.columns[column].max()
    shown = [f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in (low, high)]
    return "-".join(dict.fromkeys(shown))


def fit_description(name: str) -> str:
    """Answer the numbers of the fit of GPU *name*, a row an operation; empty if it has none."""
    gpu = get_gpu(name)
    fit = next((f for f in load_table("timing_fits").values() if gpu.name in f["gpus"]), None)
    if fit is None:
        return ""
    cells = [
        [op, "\n".join(f"{key} {value}" for key, value in part.items() if _is_number(value))]
        for op, part in fit.items()
        if isinstance(part, dict)
    ]
    cells = [row for row in cells if row[1]]
    scaled = "" if gpu.name == fit["fitted_on"] else f", scaled from {fit['fitted_on']}"
    lines = [
        gpu.name,
        f"{'provenance:':<12}fitted ({fit['system']}{scaled})",
        f"{'bandwidth:':<12}{gpu.hbm_bandwidth / 1e9:,.0f} GB/s at peak",
        f"{'bf16:':<12}{gpu.bf16_flops / 1e12:,.0f} TFLOP/s at peak, dense",
    ]
    return "\n".join([*lines, "", _text(cells, ["operation", "fit"])])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(cells: Sequence[Sequence[str]], headers: Sequence[str], right: Sequence[int] = ()) -> str:
    align = ["right" if column in right else "left" for column in range(len(headers))]
    return tabulate.tabulate(
        cells, headers, tablefmt="simple", colalign=align, disable_numparse=True
    )
