"""Timing tables from a profile folder of LLMServingSim (github.com/casys-kaist/LLMServingSim, MIT).

A folder has ``meta.yaml``; in it or in ``tp<N>`` below it are ``attention.csv``, ``dense.csv``,
``per_sequence.csv`` and, for models with experts, ``moe.csv``: CUDA kernel times in microseconds,
of one layer of one model on one rank. ``hardware.yaml`` above it may have collectives.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from sim.errors import ConfigError, FileError
from sim.hardware import get_gpu
from sim.models import ModelSpec, get_model
from sim.timing.layers import attention_shape
from sim.timing.table import LAYER_OPS, TableInfo, TimingTable, make_table
from workloads.errors import plain

_SOURCE = "LLMServingSim profile, github casys-kaist/LLMServingSim"
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}

Row = dict[str, Any]


def read_profile(
    folder: str | Path, *, tensor_parallel_size: int = 1, gpu: str | None = None,
    model: str | None = None,
) -> TimingTable:  # fmt: skip
    """Answer the table of one rank of *tensor_parallel_size* in the profile *folder*.

    *gpu* and *model* overrule the names in ``meta.yaml``.

    Raises:
        FileError: a file that is missing or cannot be read.
        ConfigError: a GPU or model that is unknown, or a file that is not as described.
    """
    folder = Path(folder)
    meta_path = next((p for p in (folder, folder.parent) if (p / "meta.yaml").is_file()), folder)
    meta = _yaml(meta_path / "meta.yaml")
    spec = get_model(model or str(meta.get("model")))
    gpu_spec = get_gpu(gpu or str(meta.get("hardware")))
    ranked = meta_path / f"tp{tensor_parallel_size}"
    data = ranked if ranked.is_dir() else folder
    dtype = _DTYPES.get(str(meta.get("variant")), "bfloat16")
    engine = meta.get("engine_effective") or {}
    notes: list[str] = []
    kernel = {"kernel": "vllm", "dtype": dtype, "kv_dtype": dtype}
    rows = [
        *_attention(data, spec, tensor_parallel_size, int(engine.get("block_size", 16)), notes),
        *_layers(data, meta_path, notes),
        *_experts(data, spec, tensor_parallel_size),
        *_collectives(meta_path),
    ]
    info = TableInfo(
        gpu=gpu_spec.name,
        provenance="measured",
        source=_SOURCE,
        licence="MIT",
        date=str(meta.get("profiled_at", "")),
        l2_policy="unknown",
        versions={
            name: str(meta[f"{name}_version"])
            for name in ("vllm", "cuda", "profiler")
            if f"{name}_version" in meta
        },
        model=spec.name,
        tensor_parallel_size=tensor_parallel_size,
        notes=tuple(notes),
    )
    return make_table(info, [kernel | row for row in rows], plain(str(data)))


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(
            f"{plain(str(path))}: {plain(reason.partition(chr(10))[0])}; expected the meta.yaml of "
            "a profile folder of LLMServingSim"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{plain(str(path))}: expected keys and values")
    return content


def _records(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Answer line number and record of every line of a CSV file that has *columns*."""
    shown = plain(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(f"{shown}: {reason}; expected a CSV file of a profile") from None
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{shown}: no column {', '.join(missing)}; expected {', '.join(columns)}, got "
            f"{plain(', '.join(reader.fieldnames or ()))}"
        )
    for record in reader:
        yield reader.line_num, record


def _numbers(path: Path, line: int, record: dict[str, str], names: tuple[str, ...]) -> list[float]:
    values = []
    for name in names:
        try:
            values.append(float(record[name]))
        except (TypeError, ValueError):
            raise ConfigError(
                f"{plain(str(path))}, line {line}, {name}: expected a number, got {record[name]!r}"
            ) from None
    return values


def _attention(
    data: Path, model: ModelSpec, tp: int, block_size: int, notes: list[str]
) -> Iterator[Row]:
    """Answer decodes, chunks, and chunks with decodes; the grid of the last made whole."""
    shape = attention_shape(model, tp)
    identity = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "block_size": block_size,
    }
    path = data / "attention.csv"
    mixed: list[list[float]] = []
    decode_batches: set[float] = set()
    for line, record in _records(path, _ATTENTION):
        chunk, before, batch, context, time = _numbers(path, line, record, _ATTENTION)
        if batch and chunk:
            mixed.append([batch, context, chunk, before, time])
            continue
        row = identity | {"latency_us": time, "batch": int(batch or 1)}
        if batch:
            decode_batches.add(batch)
            yield row | {"op": "decode_attention", "query_len": 1, "context": int(context)}
        else:
            sizes = {"query_len": int(chunk), "query_context": int(before)}
            yield row | {"op": "prefill_attention", **sizes}
    num_filled = 0
    for sizes_of_row, time, is_measured in _whole(np.array(mixed), decode_batches):
        batch, context, chunk, before = sizes_of_row
        num_filled += not is_measured
        yield identity | {
            "op": "mixed_attention",
            "batch": int(batch),
            "context": int(context),
            "query_len": int(chunk),
            "query_context": int(before),
            "latency_us": time,
            "provenance": "measured" if is_measured else "fitted",
        }
    if num_filled:
        notes.append(f"{num_filled} rows of mixed_attention filled in between or beyond neighbours")


def _whole(
    rows: npt.NDArray[np.float64], decode_batches: set[float]
) -> Iterator[tuple[tuple[float, ...], float, bool]]:
    """Answer every combination of the sizes of *rows*, with its time and whether it was measured.

    Holes are filled linearly between neighbours on one axis after the other. The number of decodes
    ends at half of what decodes alone were measured for: a profiler cannot run max_num_seqs decodes
    and a chunk. The line through the last two is drawn on to there.
    """
    if not len(rows):
        return
    axes = [np.unique(rows[:, column]) for column in range(4)]
    more = [batch for batch in sorted(decode_batches) if axes[0][-1] < batch <= 2 * axes[0][-1]]
    places = [np.searchsorted(axis, rows[:, column]) for column, axis in enumerate(axes)]
    axes[0] = np.append(axes[0], more)
    times = np.full([len(axis) for axis in axes], np.nan)
    times[tuple(places)] = rows[:, 4]
    measured = np.isfinite(times)
    for axis in (1, 3, 2, 0):
        times = np.apply_along_axis(_between, axis, times, axes[axis])
    if len(axes[0]) - len(more) > 1:
        for place in range(len(axes[0]) - len(more), len(axes[0])):
            step = (axes[0][place] - axes[0][place - 1]) / (axes[0][place - 1] - axes[0][place - 2])
            times[place] = times[place - 1] + step * (times[place - 1] - times[place - 2])
    for index in np.argwhere(np.isfinite(times)):
        sizes = tuple(float(axis[place]) for axis, place in zip(axes, index, strict=True))
        yield sizes, float(times[tuple(index)]), bool(measured[tuple(index)])


def _between(times: npt.NDArray[np.float64], knots: npt.NDArray[np.float64]) -> Any:
    known = np.isfinite(times)
    if known.sum() < 2:
        return times
    return np.interp(knots, knots[known], times[known], left=np.nan, right=np.nan)


def _layers(data: Path, meta_path: Path, notes: list[str]) -> Iterator[Row]:
    """Answer dense and per-sequence layers; what a rank's folder lacks is every rank's, in tp1."""
    for name, size in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        seen: set[str] = set()
        for path in dict.fromkeys((data / name, meta_path / "tp1" / name)):
            if seen and not path.is_file():
                continue
            found: set[str] = set()
            for line, record in _records(path, ("layer", size, "time_us")):
                layer = record["layer"]
                found.add(layer)
                if layer in seen:
                    continue
                if layer not in LAYER_OPS:
                    note = f"layer {plain(layer)} of {name} left out: not known"
                    if note not in notes:
                        notes.append(note)
                    continue
                count, time = _numbers(path, line, record, (size, "time_us"))
                yield {"op": layer, "num_tokens": int(count), "latency_us": time}
            seen |= found


def _experts(data: Path, model: ModelSpec, tp: int) -> Iterator[Row]:
    """Answer the rows of whole expert blocks, router included."""
    path = data / "moe.csv"
    if not path.is_file():
        return
    columns = ("tokens", "activated_experts", "time_us")
    for line, record in _records(path, columns):
        ranks = int(_numbers(path, line, record, ("ep",))[0]) if "ep" in record else 1
        tokens, touched, time = _numbers(path, line, record, columns)
        yield {
            "op": "moe",
            "n": model.moe_intermediate_size if ranks > 1 else model.moe_intermediate_size // tp,
            "k": model.hidden_size,
            "num_experts": model.num_experts // ranks,
            "top_k": model.num_experts_per_tok,
            "num_gpus": ranks,
            "num_tokens": int(tokens),
            "num_active_experts": int(touched),
            "latency_us": time,
        }


def _collectives(meta_path: Path) -> Iterator[Row]:
    """Answer the all-reduces in the nearest ``hardware.yaml`` above the profile, if any."""
    path = next(
        (
            p / "hardware.yaml"
            for p in (meta_path, *meta_path.parents[:4])
            if (p / "hardware.yaml").is_file()
        ),
        None,
    )
    if path is None:
        return
    link = (_yaml(path).get("measured") or {}).get("interconnect") or {}
    for sample in link.get("samples") or ():
        if sample.get("collective") == "all_reduce":
            yield {
                "op": "all_reduce",
                "num_gpus": int(link["npus"]),
                "message_bytes": int(sample["bytes"]),
                "latency_us": float(sample["us"]),
            }
