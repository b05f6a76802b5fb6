"""Timing tables from a profile folder of LLMServingSim.

Its home is github.com/casys-kaist/LLMServingSim, its licence MIT. A folder has ``meta.yaml``; in it
or in ``tp<N>`` below it are ``attention.csv``, ``dense.csv``, ``per_sequence.csv`` and, for models
with experts, ``moe.csv``: CUDA kernel times in microseconds, of one layer of one model on one rank.
``hardware.yaml`` above it may have collectives.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from sim.errors import ConfigError, FileError
from sim.files import read_small, reason, regular
from sim.hardware import get_gpu
from sim.kv_spec import check_tensor_parallel
from sim.models import ModelSpec, get_model
from sim.timing.layers import attention_shape
from sim.timing.table import (
    LATENCY,
    LAYER_OPS,
    MAX_BYTES,
    MAX_COUNT,
    MAX_LATENCY_US,
    MIN_LATENCY_US,
    PRINTABLE,
    TableInfo,
    TimingTable,
    make_table,
)
from workloads.errors import plain, quote

_SOURCE = "LLMServingSim profile, github casys-kaist/LLMServingSim"
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_KEYED = {"kv_prefill": "prefill_key"}
"""Of newer profiles: a key is the history and half the chunk, what a query attends on average."""

_HISTORIES = (0, *(2**k for k in range(4, 18)))
_NO_AXES: Mapping[str, str] = {}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8"}
_NULLS = ("", "~", "null", "Null", "NULL")
_MAX_YAML_BYTES = 1_000_000
_MAX_BLOCK_SIZE = 2**20

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
    meta, shown = _yaml(meta_path / "meta.yaml"), plain(str(meta_path / "meta.yaml"))
    spec = get_model(model or _name(meta, "model", shown, "--model"))
    gpu_spec = get_gpu(gpu or _name(meta, "hardware", shown, "--gpu"))
    check_tensor_parallel(spec, tensor_parallel_size)
    data = _rank_folder(folder, meta_path, tensor_parallel_size)
    dtype, kv_dtype = _types(_text(meta, "variant", shown), shown)
    block_size = _block_size(meta, tensor_parallel_size, shown)
    notes: list[str] = []
    kernel = {"kernel": "vllm", "dtype": dtype, "kv_dtype": kv_dtype}
    rows = [
        *_attention(data, spec, tensor_parallel_size, block_size, notes),
        *_layers(data, meta_path, notes),
        *_experts(data, meta_path, spec, tensor_parallel_size, notes),
        *_collectives(meta_path),
    ]
    info = TableInfo(
        gpu=gpu_spec.name,
        provenance="measured",
        source=_SOURCE,
        licence="MIT",
        date=_text(meta, "profiled_at", shown),
        l2_policy="unknown",  # between two calls the rest of a layer runs; some is still faster
        versions={
            name: version
            for name in ("vllm", "cuda", "profiler")
            if (version := _text(meta, f"{name}_version", shown))
        },
        model=spec.name,
        tensor_parallel_size=tensor_parallel_size,
        notes=tuple(notes),
    )
    return make_table(info, [kernel | row for row in rows], plain(str(data)))


def _text(meta: dict[str, Any], key: str, shown: str) -> str:
    """Answer what *meta* has at *key*; nothing if it is missing or null."""
    value = meta.get(key, "")
    if not isinstance(value, str) or not value.isprintable():
        what = quote(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise FileError(f"{shown}: key {key}: {what}; expected {PRINTABLE}")
    return "" if value in _NULLS else value


def _there(value: Any) -> Any:
    """Answer *value*, a part of a YAML file; None if it is null."""
    return None if value in _NULLS else value


def _name(meta: dict[str, Any], key: str, shown: str, flag: str) -> str:
    value = _text(meta, key, shown)
    if not value:
        raise FileError(f"{shown}: no key {key}; expected its name there, or {flag}")
    return value


def _types(variant: str, shown: str) -> tuple[str, str]:
    """Answer the types of weights and KV cache, of a name like ``bf16-kvfp8``."""
    weights, has_cache, cache = (variant or "bf16").partition("-kv")
    for name in (weights, cache) if has_cache else (weights,):
        if name not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise FileError(
                f"{shown}: key variant: {quote(variant)}; expected one of {known}, then -kv and "
                "one of them if the KV cache is of another type"
            )
    return _DTYPES[weights], _DTYPES[cache or weights]


def _block_size(meta: dict[str, Any], tp: int, shown: str) -> int:
    """Answer the block size that the profiled engine ended up with, which some backends raise."""
    value: Any = "16"
    for names in (("engine_effective",), ("engine_resolved", "per_tp", str(tp))):
        part: Any = meta
        for name in names:
            part = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, dict):
            value = part.get("block_size", value)
    text = value if isinstance(value, str) else f"a {type(value).__name__}"
    if not re.fullmatch("[0-9]{1,7}", text) or not 1 <= int(text) <= _MAX_BLOCK_SIZE:
        raise FileError(
            f"{shown}: block_size is {quote(text)}; expected a whole number, at least 1, at most "
            f"{_MAX_BLOCK_SIZE}"
        )
    return int(text)


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
    """Answer the keys of a YAML file, of nothing none; every scalar is text, as it is written.

    Aliases are not followed: what they nest is as large as it is long in the file.
    """
    shown = plain(str(path))
    try:
        content = yaml.load(read_small(path, _MAX_YAML_BYTES), yaml.BaseLoader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else str(error)
        raise FileError(
            f"{shown}: {plain(why.partition(chr(10))[0])}; expected the {path.name} of a profile "
            "folder of LLMServingSim"
        ) from None
    if content is None or content == "":
        return {}
    if not isinstance(content, dict):
        raise FileError(f"{shown}: expected keys and values, got a {type(content).__name__}")
    return content


class _Measurement(NamedTuple):
    """A line of a CSV file: where, its other columns, sizes, and time in microseconds."""

    where: str
    record: dict[str, str]
    sizes: list[int]
    time: float


def _measurements(
    path: Path,
    sizes: tuple[str, ...],
    others: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    axes: Mapping[str, str] = _NO_AXES,
) -> Iterator[_Measurement]:
    """Answer the lines of a CSV file that has columns *sizes*, *others* and ``time_us``.

    *others* and *optional*, which need not be there, tell lines of equal sizes apart. A size may go
    by another name, in *axes*.

    Raises:
        FileError: it cannot be read, lacks a column, or a line is not as described or there twice.
    """
    shown = plain(str(path))
    try:
        text = regular(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise FileError(f"{shown}: {reason(error)}; expected a CSV file of a profile") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    seen: dict[tuple[object, ...], int] = {}
    try:
        names = tuple(reader.fieldnames or ())
        sizes = tuple(axes[n] if axes.get(n) in names and n not in names else n for n in sizes)
        _check_columns(names, (*others, *sizes, "time_us"), shown)
        for record in reader:
            where = f"{shown}, line {reader.line_num}"
            if None in record or None in record.values():
                raise FileError(f"{where}: expected {len(reader.fieldnames or ())} values")
            counts = [_count(record[name], f"{where}, {name}") for name in sizes]
            key = (*(record[name] for name in (*others, *optional) if name in record), *counts)
            if key in seen:
                raise FileError(f"{where}: the same sizes as in line {seen[key]}; expected one")
            seen[key] = reader.line_num
            time = _time(record["time_us"], f"{where}, time_us")
            yield _Measurement(where, record, counts, time)
    except csv.Error as error:
        raise FileError(f"{shown}, line {reader.line_num}: {error}; expected CSV") from None


def _check_columns(names: tuple[str, ...], expected: tuple[str, ...], shown: str) -> None:
    missing = [name for name in expected if name not in names]
    if missing:
        raise FileError(
            f"{shown}: no column {', '.join(missing)}; expected {', '.join(expected)}, got "
            f"{plain(', '.join(names) or 'nothing')}"
        )


def _count(text: str, where: str, most: int = MAX_COUNT, least: int = 0) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or value != int(value):
        raise FileError(
            f"{where}: expected a whole number, at least {least}, at most {most}, got {quote(text)}"
        )
    return int(value)


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not MIN_LATENCY_US <= value <= MAX_LATENCY_US:
        raise FileError(f"{where}: expected {LATENCY}, got {quote(text)}")
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
    mixed: dict[_Shot, float] = {}
    batches: set[int] = set()
    measured = list(_shots(data / "attention.csv", notes))
    if not any(shot.batch or shot.chunk for shot, _ in measured):
        shown = plain(str(data / "attention.csv"))
        raise FileError(f"{shown}: no decode and no chunk; expected a line of one at least")
    for shot, time in measured:
        row = identity | {"latency_us": time, "batch": shot.batch or 1}
        if shot.batch and shot.chunk:
            mixed[shot] = time
        elif shot.batch:
            batches.add(shot.batch)
            yield row | {"op": "decode_attention", "query_len": 1, "context": shot.context}
        elif shot.chunk:
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
    keyed: dict[_Shot, list[tuple[float, float]]] = {}
    optional = ("layer", "decode_q_len")
    for _, record, sizes, time in _measurements(path, _ATTENTION, optional=optional, axes=_KEYED):
        if record.get("layer", "attention") != "attention":
            continue
        if record.get("decode_q_len", "1") != "1":
            continue  # of speculative decoding
        chunk, before, batch, context = sizes
        shot = _Shot(batch, context, chunk, before)
        if "kv_prefill" in record or not chunk:
            yield shot, time
        elif before >= chunk / 2:  # else of several short prompts
            keyed.setdefault(shot._replace(before=0), []).append((before - chunk / 2, time))
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
        paths = list(dict.fromkeys((data / name, meta_path / "tp1" / name)))
        for path in [path for path in paths if path.is_file()] or paths[:1]:
            found: set[str] = set()
            for _, record, (count,), time in _measurements(path, (size,), ("layer",)):
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


def _experts(
    data: Path, meta_path: Path, model: ModelSpec, tp: int, notes: list[str]
) -> Iterator[Row]:
    """Answer the rows of whole expert blocks, router included.

    Experts of expert-parallel ranks (``ep``) are whole, whatever *tp*: they are measured once, in
    ``tp1``. Rows of one rank of 1 have n of that rank, and match no other.
    """
    path = data / "moe.csv"
    if not path.is_file():
        path, tp = meta_path / "tp1" / "moe.csv", 1
    if not path.is_file():
        return
    if not model.is_moe:
        notes.append(f"moe.csv left out: {model.name} has no experts")
        return
    sizes = ("tokens", "activated_experts")
    for where, record, (tokens, touched), time in _measurements(path, sizes, optional=("ep",)):
        ranks = _count(record.get("ep", "1"), f"{where}, ep") or 1
        if ranks > model.num_experts:
            raise FileError(
                f"{where}, ep: {ranks} ranks; expected at most the {model.num_experts} experts of "
                f"{model.name}"
            )
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
    """Answer the collectives in the nearest ``hardware.yaml`` above the profile, if any."""
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
    shown = plain(str(path))
    seen: set[tuple[object, ...]] = set()
    try:
        link: Any = _yaml(path)
        for name in ("measured", "interconnect"):
            link = _there(link.get(name)) or {}
        for number, sample in enumerate(_there(link.get("samples")) or (), start=1):
            op = sample.get("collective")
            if op not in ("all_reduce", "all_gather"):
                continue
            where = f"{shown}: sample {number}"
            num_gpus = _count(link["npus"], f"{shown}: npus", least=1)
            message_bytes = _count(sample["bytes"], f"{where}: bytes", MAX_BYTES, least=1)
            if (op, message_bytes) in seen:
                raise FileError(f"{where}: {op} of {message_bytes} bytes is there twice")
            seen.add((op, message_bytes))
            yield {
                "op": op,
                "num_gpus": num_gpus,
                "message_bytes": message_bytes,
                "latency_us": _time(sample["us"], f"{where}: us"),
            }
    except (AttributeError, KeyError, TypeError) as error:
        raise FileError(
            f"{shown}: measured.interconnect: {plain(str(error))}; expected npus, and "
            "samples with collective, bytes and us"
        ) from None
