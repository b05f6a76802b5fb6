"""Timing tables from a profile folder of LLMServingSim.

Its home is github.com/casys-kaist/LLMServingSim, its licence MIT. A folder has ``meta.yaml``; in it
or in ``tp<N>`` below it are ``attention.csv``, ``dense.csv``, ``per_sequence.csv`` and, for models
with experts, ``moe.csv``: CUDA kernel times in microseconds, of one layer of one model on one rank.
``hardware.yaml`` above it may have collectives.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from sim.errors import ConfigError, FileError
from sim.hardware import get_gpu
from sim.models import ModelSpec, get_model
from sim.timing.layers import attention_shape
from sim.timing.table import LAYER_OPS, TableInfo, TimingTable, make_table
from workloads.errors import plain

_SOURCE = "LLMServingSim profile, github casys-kaist/LLMServingSim"
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
_KEYED_ATTENTION = ("prefill_chunk", "prefill_key", "n_decode", "kv_decode", "time_us")
"""Of newer profiles: a key is the history and half the chunk, what a query attends on average."""

_HISTORIES = (0, *(2**k for k in range(4, 18)))
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
    weights, _, cache = str(meta.get("variant")).partition("-kv")
    dtype = _DTYPES.get(weights, "bfloat16")
    notes: list[str] = []
    kernel = {"kernel": "vllm", "dtype": dtype, "kv_dtype": _DTYPES.get(cache, dtype)}
    rows = [
        *_attention(
            data, spec, tensor_parallel_size, _block_size(meta, tensor_parallel_size), notes
        ),
        *_layers(data, meta_path, notes),
        *_experts(data, spec, tensor_parallel_size),
        *(_experts(meta_path / "tp1", spec, 1) if not (data / "moe.csv").is_file() else ()),
        *_collectives(meta_path),
    ]
    info = TableInfo(
        gpu=gpu_spec.name,
        provenance="measured",
        source=_SOURCE,
        licence="MIT",
        date=str(meta.get("profiled_at", "")),
        l2_policy="cold",  # between two calls the rest of the layer runs
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


def _block_size(meta: dict[str, Any], tp: int) -> int:
    """Answer the block size that the profiled engine ended up with, which some backends raise."""
    resolved = ((meta.get("engine_resolved") or {}).get("per_tp") or {}).get(str(tp)) or {}
    asked = meta.get("engine_effective") or {}
    return int(resolved.get("block_size") or asked.get("block_size") or 16)


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
    """Answer decodes, chunks, and chunks with decodes, these drawn on to more decodes."""
    shape = attention_shape(model, tp)
    identity = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "block_size": block_size,
    }
    mixed: dict[_Shot, float] = {}
    batches: set[int] = set()
    for shot, time in _shots(data / "attention.csv", notes):
        row = identity | {"latency_us": time, "batch": shot.batch or 1}
        if shot.batch and shot.chunk:
            mixed[shot] = time
        elif shot.batch:
            batches.add(shot.batch)
            yield row | {"op": "decode_attention", "query_len": 1, "context": shot.context}
        else:
            sizes = {"query_len": shot.chunk, "query_context": shot.before}
            yield row | {"op": "prefill_attention", **sizes}
    more = _drawn_on(mixed, batches)
    if more:
        notes.append(f"{len(more)} rows of mixed_attention with more decodes than were measured")
    for shots, provenance in ((mixed, "measured"), (more, "fitted")):
        for shot, time in shots.items():
            yield identity | {
                "op": "mixed_attention",
                "batch": shot.batch,
                "context": shot.context,
                "query_len": shot.chunk,
                "query_context": shot.before,
                "latency_us": time,
                "provenance": provenance,
            }


class _Shot(NamedTuple):
    """One call: *batch* decodes behind *context* each, a *chunk* behind *before* tokens."""

    batch: int
    context: int
    chunk: int
    before: int


def _shots(path: Path, notes: list[str]) -> Iterator[tuple[_Shot, float]]:
    """Answer the calls of ``attention.csv`` and their times in microseconds."""
    columns = _ATTENTION
    keyed: dict[_Shot, list[tuple[float, float]]] = {}
    for line, record in _records(path, ("prefill_chunk", "n_decode", "kv_decode", "time_us")):
        if "prefill_key" in record:
            columns = _KEYED_ATTENTION
        elif "kv_prefill" not in record:
            raise ConfigError(f"{plain(str(path))}: no column kv_prefill or prefill_key")
        if (
            record.get("layer", "attention") != "attention"
            or record.get("decode_q_len", "1") != "1"
        ):
            continue  # of layers that are not full attention, and of speculative decoding
        chunk, key, batch, context, time = _numbers(path, line, record, columns)
        shot = _Shot(int(batch), int(context), int(chunk), int(key))
        if columns is _ATTENTION or not chunk:
            yield shot, time
        elif key >= chunk / 2:  # else of several short prompts
            keyed.setdefault(shot._replace(before=0), []).append((key - chunk / 2, time))
    if keyed:
        notes.append("keys of chunks are means over their queries: brought to equal histories")
    for shot, points in keyed.items():
        yield from _at_equal_histories(shot, points)


def _at_equal_histories(
    shot: _Shot, points: list[tuple[float, float]]
) -> Iterator[tuple[_Shot, float]]:
    """Answer *points* (history, time) of a chunk at `_HISTORIES`; the line is drawn on to 0."""
    points.sort()
    if len(points) > 1 and points[0][0] > 0:
        (first, time), (second, other) = points[:2]
        points.insert(0, (0.0, max(time - first * (other - time) / (second - first), time / 2)))
    histories, times = zip(*points, strict=True)
    for history in _HISTORIES:
        if histories[0] <= history <= histories[-1]:
            time = float(np.interp(history, histories, times))
            yield shot._replace(before=history), time


def _drawn_on(mixed: Mapping[_Shot, float], batches: set[int]) -> dict[_Shot, float]:
    """Answer chunks beside more decodes than were measured, as many as decodes alone were.

    A profiler cannot run max_num_seqs decodes and a chunk. The line through the last two numbers
    of decodes is drawn on to at most twice the last.
    """
    measured = sorted({shot.batch for shot in mixed})
    if len(measured) < 2:
        return {}
    before, last = measured[-2:]
    return {
        shot._replace(batch=batch): time + (batch - last) / (last - before) * (time - earlier)
        for batch in sorted(batches)
        if last < batch <= 2 * last
        for shot, time in mixed.items()
        if shot.batch == last
        and (earlier := mixed.get(shot._replace(batch=before))) is not None
        and time >= earlier
    }


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
    """Answer the rows of whole expert blocks, router included.

    Experts of expert-parallel ranks (``ep``) are whole, whatever *tp*: they are measured once, in
    ``tp1``. Rows of one rank of 1 have n of that rank, and match no other.
    """
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
    """Answer the collectives in the nearest ``hardware.yaml`` above the profile, if any."""
    folders = (meta_path, *meta_path.parents[:4])
    path = next((p for f in folders if (p := f / "hardware.yaml").is_file()), None)
    if path is None:
        return
    link = (_yaml(path).get("measured") or {}).get("interconnect") or {}
    for sample in link.get("samples") or ():
        if sample.get("collective") in {"all_reduce", "all_gather"}:
            yield {
                "op": sample["collective"],
                "num_gpus": int(link["npus"]),
                "message_bytes": int(sample["bytes"]),
                "latency_us": float(sample["us"]),
            }
