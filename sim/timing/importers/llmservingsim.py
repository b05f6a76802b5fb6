"""Timing tables from a profile folder of LLMServingSim (github.com/casys-kaist/LLMServingSim, MIT).

A folder has ``meta.yaml``; in it or in ``tp<N>`` below it are ``attention.csv``, ``dense.csv``,
``per_sequence.csv`` and, for models with experts, ``moe.csv``: CUDA kernel times in microseconds,
of one layer of one model on one rank. ``hardware.yaml`` above it may have collectives.
"""

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from sim.errors import ConfigError, FileError
from sim.files import reason
from sim.hardware import get_gpu
from sim.kv_spec import check_tensor_parallel
from sim.models import ModelSpec, get_model
from sim.timing.layers import attention_shape
from sim.timing.table import LAYER_OPS, TableInfo, TimingTable, make_table
from workloads.errors import plain, quote

_SOURCE = "LLMServingSim profile, github casys-kaist/LLMServingSim"
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_NEWER_AXES = ("prefill_tokens", "prefill_key")
MAX_MIXED = 2_000_000
"""Most combinations of the sizes of chunks with decodes that are filled in."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}

Row = dict[str, Any]


def read_profile(
    folder: str | Path, *, tensor_parallel_size: int = 1, gpu: str | None = None,
    model: str | None = None,
) -> TimingTable:  # fmt: skip
    """Answer the table of one rank of *tensor_parallel_size* in the profile *folder*.

    *gpu* and *model* overrule the names in ``meta.yaml``.

    Raises:
        FileError: a file that is missing, cannot be read or is not as described, with the line.
        ConfigError: a GPU or model that is unknown, or not profiled on that many ranks.
    """
    folder = Path(folder)
    meta_path = next((p for p in (folder, folder.parent) if (p / "meta.yaml").is_file()), folder)
    meta = _yaml(meta_path / "meta.yaml")
    spec = get_model(model or str(meta.get("model")))
    gpu_spec = get_gpu(gpu or str(meta.get("hardware")))
    check_tensor_parallel(spec, tensor_parallel_size)
    data = _rank_folder(folder, meta_path, tensor_parallel_size)
    dtype = _DTYPES.get(str(meta.get("variant")), "bfloat16")
    engine = meta.get("engine_effective")
    block_size = engine.get("block_size", 16) if isinstance(engine, dict) else 16
    if not isinstance(block_size, int) or block_size < 1:
        raise FileError(
            f"{plain(str(meta_path / 'meta.yaml'))}: block_size is {quote(block_size)}; expected "
            "a whole number, at least 1"
        )
    notes: list[str] = []
    kernel = {"kernel": "vllm", "dtype": dtype, "kv_dtype": dtype}
    rows = [
        *_attention(data, spec, tensor_parallel_size, block_size, notes),
        *_layers(data, meta_path, notes),
        *_experts(data, spec, tensor_parallel_size, notes),
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


def _rank_folder(folder: Path, meta_path: Path, tp: int) -> Path:
    """Answer the folder with the files of one of *tp* ranks.

    Raises:
        ConfigError: *folder* is of another number, or has none of that number.
    """
    named = re.fullmatch(r"tp(\d+)", folder.resolve().name)
    if named is not None and int(named[1]) != tp:
        raise ConfigError(
            f"{plain(str(folder))} is of one of {named[1]} ranks; expected "
            f"--tensor-parallel-size {named[1]}, or a folder tp{tp}"
        )
    ranked = meta_path / f"tp{tp}"
    if ranked.is_dir():
        return ranked
    others = sorted(p.name for p in meta_path.glob("tp[0-9]*") if p.is_dir())
    if others or tp > 1:
        raise ConfigError(
            f"--tensor-parallel-size {tp}: {plain(str(meta_path))} has no folder tp{tp}, only "
            f"{', '.join(others) or 'files of one rank of 1'}"
        )
    return folder


def _yaml(path: Path) -> dict[str, Any]:
    shown = plain(str(path))
    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else str(error)
        raise FileError(
            f"{shown}: {plain(why.partition(chr(10))[0])}; expected the {path.name} of a profile "
            "folder of LLMServingSim"
        ) from None
    if not isinstance(content, dict):
        raise FileError(f"{shown}: expected keys and values, got {quote(content)}")
    return content


class _Measurement(NamedTuple):
    """A line of a CSV file: its other columns, sizes, and time in microseconds."""

    record: dict[str, str]
    sizes: list[int]
    time: float


def _measurements(
    path: Path, sizes: tuple[str, ...], others: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Iterator[_Measurement]:
    """Answer the lines of a CSV file that has columns *sizes*, *others* and ``time_us``.

    *others* and *optional*, which need not be there, tell lines of equal sizes apart.

    Raises:
        FileError: it cannot be read, lacks a column, or a line is not as described or there twice.
    """
    shown = plain(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise FileError(f"{shown}: {reason(error)}; expected a CSV file of a profile") from None
    reader = csv.DictReader(text.splitlines())
    seen: dict[tuple[object, ...], int] = {}
    try:
        _check_columns(tuple(reader.fieldnames or ()), (*others, *sizes, "time_us"), shown)
        for record in reader:
            where = f"{shown}, line {reader.line_num}"
            if None in record or None in record.values():
                raise FileError(f"{where}: expected {len(reader.fieldnames or ())} values")
            counts = [_count(record[name], f"{where}, {name}") for name in sizes]
            key = (*(record[name] for name in (*others, *optional) if name in record), *counts)
            if key in seen:
                raise FileError(f"{where}: the same sizes as in line {seen[key]}; expected one")
            seen[key] = reader.line_num
            yield _Measurement(record, counts, _time(record["time_us"], f"{where}, time_us"))
    except csv.Error as error:
        raise FileError(f"{shown}, line {reader.line_num}: {error}; expected CSV") from None


def _check_columns(names: tuple[str, ...], expected: tuple[str, ...], shown: str) -> None:
    missing = [name for name in expected if name not in names]
    if missing:
        newer = ""
        if set(_NEWER_AXES) & set(names):
            newer = f"; axes {' and '.join(_NEWER_AXES)} are of a newer profiler, not read yet"
        raise FileError(
            f"{shown}: no column {', '.join(missing)}; expected {', '.join(expected)}, got "
            f"{plain(', '.join(names) or 'nothing')}{newer}"
        )


def _count(text: str, where: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**53 or value != int(value):
        raise FileError(f"{where}: expected a whole number, at least 0, got {quote(text)}")
    return int(value)


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise FileError(f"{where}: expected more than 0 microseconds, got {quote(text)}")
    return value


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
    for _, (chunk, before, batch, context), time in _measurements(path, _ATTENTION):
        if not batch and not chunk:
            continue
        if batch and chunk:
            mixed.append([batch, context, chunk, before, time])
            continue
        row = identity | {"latency_us": time, "batch": batch or 1}
        if batch:
            decode_batches.add(batch)
            yield row | {"op": "decode_attention", "query_len": 1, "context": context}
        else:
            sizes = {"query_len": chunk, "query_context": before}
            yield row | {"op": "prefill_attention", **sizes}
    num_filled = 0
    for place, time, is_measured in _whole(np.array(mixed), decode_batches, path):
        num_filled += not is_measured
        batch, context, chunk, before = map(int, place)
        yield identity | {
            "op": "mixed_attention",
            "batch": batch,
            "context": context,
            "query_len": chunk,
            "query_context": before,
            "latency_us": time,
            "provenance": "measured" if is_measured else "fitted",
        }
    if num_filled:
        notes.append(f"{num_filled} rows of mixed_attention filled in between or beyond neighbours")


def _whole(
    rows: npt.NDArray[np.float64], decode_batches: set[float], path: Path
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
    if math.prod(map(len, axes)) > MAX_MIXED:
        raise FileError(
            f"{plain(str(path))}: chunks with decodes of {' x '.join(str(len(a)) for a in axes)} "
            f"sizes; expected a grid of at most {MAX_MIXED} combinations"
        )
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
        paths = list(dict.fromkeys((data / name, meta_path / "tp1" / name)))
        for path in [path for path in paths if path.is_file()] or paths[:1]:
            found: set[str] = set()
            for record, (count,), time in _measurements(path, (size,), ("layer",)):
                layer = record["layer"]
                found.add(layer)
                if layer in seen:
                    continue
                if layer not in LAYER_OPS:
                    note = f"layer {plain(layer)} of {name} left out: not known"
                    if note not in notes:
                        notes.append(note)
                    continue
                yield {"op": layer, "num_tokens": count, "latency_us": time}
            seen |= found


def _experts(data: Path, model: ModelSpec, tp: int, notes: list[str]) -> Iterator[Row]:
    """Answer the rows of whole expert blocks, router included."""
    path = data / "moe.csv"
    if not path.is_file():
        return
    if not model.is_moe:
        notes.append(f"moe.csv left out: {model.name} has no experts")
        return
    sizes = ("tokens", "activated_experts")
    for record, (tokens, touched), time in _measurements(path, sizes, optional=("ep",)):
        ranks = _count(record.get("ep", "1"), f"{plain(str(path))}: ep") or 1
        yield {
            "op": "moe",
            "n": model.moe_intermediate_size if ranks > 1 else model.moe_intermediate_size // tp,
            "k": model.hidden_size,
            "num_experts": model.num_experts // ranks,
            "top_k": model.num_experts_per_tok,
            "num_gpus": ranks,
            "num_tokens": tokens,
            "num_active_experts": touched,
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
    try:
        link = (_yaml(path).get("measured") or {}).get("interconnect") or {}
        for sample in link.get("samples") or ():
            if sample.get("collective") == "all_reduce":
                yield {
                    "op": "all_reduce",
                    "num_gpus": int(link["npus"]),
                    "message_bytes": int(sample["bytes"]),
                    "latency_us": float(sample["us"]),
                }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise FileError(
            f"{plain(str(path))}: measured.interconnect: {plain(str(error))}; expected npus, and "
            "samples with collective, bytes and us"
        ) from None
