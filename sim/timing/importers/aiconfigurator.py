"""Timing tables from the measurements that NVIDIA ships with aiconfigurator-core (Apache-2.0).

The installed package has ``<system>/<family>/<backend>/<version>/<name>_perf.parquet`` under
``systems/data``: times in milliseconds of single kernels on one GPU, replayed as a CUDA graph over
the same buffers, so that what fits in the L2 cache was there. What each column means was checked on
version 0.12.0.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sim.columns import BoolArray, Columns
from sim.errors import ConfigError, FileError
from sim.hardware import get_gpu
from sim.models import ModelSpec, get_model
from sim.timing.curves import bracket
from sim.timing.layers import attention_shape, calls_of, expert_shape, has_latent_block
from sim.timing.table import TableInfo, TimingTable, of_columns
from sim.timing.table_attention import LATENT_BLOCK_OPS
from sim.timing.table_check import check_peaks, check_units
from sim.timing.table_costs import expert_rows
from workloads.errors import did_you_mean, plain

SYSTEMS = {
    "a100_sxm": "A100-80",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000",
}
"""Systems that have data, with our names of their GPUs."""

BACKENDS = ("vllm", "trtllm", "sglang")

_PACKAGE = "aiconfigurator-core"
_FIRST_VERSION = "0.12"
"""The first version whose wheel has data in this layout; 0.11.0 is a stub."""

_BLOCK_SIZE = 64
"""Tokens in a KV block where nothing else is known: vLLM's and TensorRT-LLM's collectors fix it."""

_SGLANG_BLOCK_SIZES = {"trtllm_mha": 64, "trtllm_mla": 64}
"""By kernel; SGLang's others were measured with blocks of one token."""

_LATENT_DIM = 576
_DTYPES = {"half": "float16"}
"""Names of ours for names of theirs; the rest are the same."""

_BLOCK_MODEL = "deepseek-ai/DeepSeek-V3"


def read_aiconfigurator(
    system: str, *, backend: str = "vllm", backend_version: str | None = None,
    model: str | None = None, tensor_parallel_size: int = 1,
) -> TimingTable:  # fmt: skip
    """Answer the table of *system* (`SYSTEMS`) as measured with *backend* (`BACKENDS`).

    Every file is of *backend_version*, else of the newest before it; that is by default the newest
    that attention was measured with. With *model*, only rows that one of *tensor_parallel_size*
    ranks needs.

    Raises:
        ConfigError: the package is missing or has no data; no such system, backend, version or
            model; or times that cannot be right (`check_units`, `check_peaks`).
        FileError: a file that cannot be read.
    """
    systems, package_version = _package()
    if system not in SYSTEMS:
        if re.fullmatch(r"\w+", system) and (systems / "data" / system / "attention").is_dir():
            known = ", ".join(SYSTEMS)
            raise ConfigError(f"{_PACKAGE} system {system}: its GPU is not known; choices: {known}")
        raise ConfigError(
            f"{_PACKAGE} system {system!r} is unknown; {did_you_mean(system, SYSTEMS)}"
        )
    if backend not in BACKENDS:
        near = did_you_mean(backend, BACKENDS)
        raise ConfigError(f"{_PACKAGE} backend {backend!r} is unknown; {near}")
    gpu = get_gpu(SYSTEMS[system])
    spec = None if model is None else get_model(model)
    files = _Files(systems / "data" / system, backend, backend_version)
    columns = _stacked(list(_operations(files)))
    info = TableInfo(
        gpu=gpu.name,
        provenance="measured",
        source=f"{_PACKAGE} {package_version} {system}",
        licence="Apache-2.0",
        l2_policy="warm",
        versions=files.versions(),
        notes=tuple(files.notes),
    )
    where = f"{_PACKAGE} {package_version}, {system}, {backend} {files.version}"
    table = of_columns(info, columns, where, merge_repeats=True)
    check_units(table, where)
    check_peaks(table, where)
    return table if spec is None else _needed(table, spec, tensor_parallel_size, where)


def _package() -> tuple[Path, str]:
    """Answer the folder of the systems in the installed package, and the package's version."""
    found = importlib.util.find_spec("aiconfigurator_core")
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        raise ConfigError(f"needs {_PACKAGE}: pip install 'kvsim[tables]'")
    version = importlib.metadata.version(_PACKAGE)
    systems = Path(places[0]) / "systems"
    if next((systems / "data").glob("*/attention/*/*/*.parquet"), None) is None:
        raise ConfigError(
            f"{_PACKAGE} {version} has no data: expected {_FIRST_VERSION} or later, "
            "pip install 'kvsim[tables]'"
        )
    return systems, version


class _Files:
    """The files of one system and backend, and what was noticed on the way.

    Attributes:
        version: of the backend.
        notes: for who uses the table.
    """

    def __init__(self, folder: Path, backend: str, version: str | None) -> None:
        self.backend, self._folder = backend, folder
        there = self._versions("attention", backend) or self._versions("mla", backend)
        every = {path.name for path in folder.glob(f"*/{backend}/*")}
        if not there or (version is not None and version not in every):
            known = ", ".join(sorted(every, key=_version_key)) or "none"
            raise ConfigError(
                f"{_PACKAGE} has no {backend} {version or 'attention'} for {folder.name}; "
                f"versions: {known}"
            )
        self.version = version or there[-1]
        self.notes: list[str] = []
        self._used: dict[str, set[str]] = {}

    def _versions(self, family: str, source: str) -> list[str]:
        """Answer the versions that *family* was measured with, ascending."""
        names = (path.name for path in (self._folder / family / source).glob("*"))
        return sorted(names, key=_version_key)

    def versions(self) -> dict[str, str]:
        """Answer the versions that were read, by name; the backend's others are in the notes."""
        others = {name: max(used, key=_version_key) for name, used in self._used.items()}
        return {**others, self.backend: self.version}

    def read(
        self, family: str, name: str, columns: tuple[str, ...], *, source: str | None = None,
        optional: Mapping[str, int | str] | None = None,
    ) -> Columns | None:  # fmt: skip
        """Answer *columns* of a file, and *optional* ones or their values; None if there is none.

        *source* is another than the backend, of which the newest version is taken.
        """
        source = source or self.backend
        limit = _version_key(self.version)
        found = [
            version
            for version in self._versions(family, source)
            if (self._folder / family / source / version / f"{name}_perf.parquet").is_file()
            and (source != self.backend or _version_key(version) <= limit)
        ]
        if not found:
            return None
        self._used.setdefault(source, set()).add(found[-1])
        if source == self.backend and found[-1] != self.version:
            self.notes.append(f"{name} is of {source} {found[-1]}")
        path = self._folder / family / source / found[-1] / f"{name}_perf.parquet"
        return _read(path, columns, optional or {})


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _read(path: Path, columns: tuple[str, ...], optional: Mapping[str, int | str]) -> Columns:
    from sim import arrow  # noqa: PLC0415  # slow to import

    shown = plain(str(Path(*path.parts[-5:])))
    try:
        found = arrow.read_parquet(path, (*columns, *optional))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        reason = plain(reason.partition("\n")[0])
        raise FileError(f"{_PACKAGE}: {shown}: {reason}; expected a Parquet file") from None
    missing = [name for name in columns if name not in found]
    if missing:
        raise ConfigError(f"{_PACKAGE}: {shown}: no column {', '.join(missing)}")
    num_rows = len(found[columns[0]])
    for name, value in optional.items():
        found.setdefault(name, np.full(num_rows, value))
    return found


def _operations(files: _Files) -> Iterator[Columns]:
    """Answer the columns of every operation that there is."""
    yield from _attention(files)
    yield from _latent_attention(files)
    if files.backend == "vllm":
        yield from _latent_blocks(files)
    gemm = files.read("gemm", "gemm", ("kernel_source", "gemm_dtype", "m", "n", "k", "latency"))
    if gemm is not None:
        sizes = {"n": gemm["n"], "k": gemm["k"], "num_tokens": gemm["m"]}
        yield _rows("gemm", gemm, gemm["gemm_dtype"], sizes)
    yield from _experts(files)
    yield from _all_reduce(files)


def _rows(
    op: str, found: Columns, dtype: npt.NDArray[np.object_], columns: Columns,
    kv_dtype: npt.NDArray[np.object_] | None = None,
) -> Columns:  # fmt: skip
    num_rows = len(found["latency"])
    return {
        "op": np.full(num_rows, op, dtype=object),
        "kernel": found["kernel_source"],
        "dtype": _named(dtype),
        "kv_dtype": np.full(num_rows, "", dtype=object) if kv_dtype is None else _named(kv_dtype),
        **columns,
        "latency_us": found["latency"] * 1e3,
    }


def _named(dtypes: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    return np.array([_DTYPES.get(name, name) for name in dtypes.tolist()], dtype=object)


def _where(found: Columns, rows: BoolArray) -> Columns:
    return {name: column[rows] for name, column in found.items()}


def _attention(files: _Files) -> Iterator[Columns]:
    """Answer decodes (one query behind *step* tokens) and whole prompts, without windows."""
    shape = ("num_heads", "num_key_value_heads", "head_dim")
    names = (
        "kernel_source",
        "attn_dtype",
        "kv_cache_dtype",
        "batch_size",
        "isl",
        "step",
        "latency",
    )
    for op, name in (
        ("decode_attention", "generation_attention"),
        ("prefill_attention", "context_attention"),
    ):
        found = files.read("attention", name, (*names, *shape), optional={"window_size": 0})
        if found is None:
            continue
        windowed = found["window_size"] != 0
        if windowed.any():
            files.notes.append(f"{name}: {windowed.sum()} rows with sliding windows left out")
            found = _where(found, ~windowed)
        identity = {
            "num_heads": found["num_heads"],
            "num_kv_heads": found["num_key_value_heads"],
            "head_dim": found["head_dim"],
            "block_size": _block_sizes(files, found),
        }
        sizes = _attention_sizes(op, found)
        yield _rows(op, found, found["attn_dtype"], identity | sizes, found["kv_cache_dtype"])


def _attention_sizes(op: str, found: Columns) -> Columns:
    if op.endswith(("decode_attention", "decode_block")):
        ones = np.ones_like(found["step"])
        return {"batch": found["batch_size"], "context": found["step"], "query_len": ones}
    return {
        "batch": found["batch_size"],
        "query_len": found["isl"],
        "query_context": found["step"],
    }


def _block_sizes(files: _Files, found: Columns) -> npt.NDArray[np.int64]:
    if files.backend != "sglang":
        return np.full(len(found["latency"]), _BLOCK_SIZE)
    kernels = found["kernel_source"].tolist()
    return np.array([_SGLANG_BLOCK_SIZES.get(kernel, 1) for kernel in kernels], dtype=np.int64)


def _latent_attention(files: _Files) -> Iterator[Columns]:
    """Answer the attention kernel of MLA alone; its column tp_size says nothing that counts."""
    names = ("kernel_source", "mla_dtype", "kv_cache_dtype", "num_heads", "batch_size", "isl",
             "step", "latency")  # fmt: skip
    for op, name in (("decode_attention", "generation_mla"), ("prefill_attention", "context_mla")):
        found = files.read("mla", name, names)
        if found is not None:
            columns = _latent_shape(files, found) | _attention_sizes(op, found)
            yield _rows(op, found, found["mla_dtype"], columns, found["kv_cache_dtype"])


def _latent_shape(files: _Files, found: Columns) -> Columns:
    num_rows = len(found["latency"])
    return {
        "num_heads": found["num_heads"],
        "num_kv_heads": np.ones(num_rows, dtype=np.int64),
        "head_dim": np.full(num_rows, _LATENT_DIM),
        "block_size": _block_sizes(files, found),
    }


def _latent_blocks(files: _Files) -> Iterator[Columns]:
    """Answer whole blocks of latent attention of DeepSeek-V3, attention itself in bf16.

    *step* of the decodes runs over 2 to 131072 where that of kernels runs over 1 to 131071: it
    counts the new token.
    """
    names = ("kernel_source", "model", "mla_dtype", "kv_cache_dtype", "gemm_type", "num_heads",
             "batch_size", "isl", "step", "latency")  # fmt: skip
    for op, name in zip(
        LATENT_BLOCK_OPS, ("mla_generation_module", "mla_context_module"), strict=True
    ):
        found = files.read("mla", name, names)
        if found is None:
            continue
        plain_rows = (found["model"] == _BLOCK_MODEL) & (found["mla_dtype"] == "bfloat16")
        if not plain_rows.all():
            left = (~plain_rows).sum()
            files.notes.append(f"{name}: {left} rows of fp8 attention or other models left out")
        found = _where(found, plain_rows)
        sizes = _attention_sizes(op, found)
        if "context" in sizes:
            sizes["context"] = sizes["context"] - 1
        columns = _latent_shape(files, found) | sizes
        yield _rows(op, found, found["gemm_type"], columns, found["kv_cache_dtype"])


def _experts(files: _Files) -> Iterator[Columns]:
    """Answer the experts of one rank, where the ranks of each split share out evenly."""
    names = ("kernel_source", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk",
             "num_experts", "moe_tp_size", "moe_ep_size", "distribution", "latency")  # fmt: skip
    found = files.read("moe", "moe", names)
    if found is None:
        return
    loads = set(found["distribution"].tolist())
    load = "balanced" if "balanced" in loads else min(loads, key=_skew)
    files.notes.append(f"moe: distribution {load} of {', '.join(sorted(loads))}")
    width, rest = np.divmod(found["inter_size"], found["moe_tp_size"])
    experts, left = np.divmod(found["num_experts"], found["moe_ep_size"])
    kept = (found["distribution"] == load) & (rest == 0) & (left == 0)
    sizes = {
        "n": width[kept],
        "k": found["hidden_size"][kept],
        "num_experts": experts[kept],
        "top_k": found["topk"][kept],
        "num_gpus": found["moe_ep_size"][kept],
        "num_tokens": found["num_tokens"][kept],
    }
    if load == "balanced":  # so evenly that tokens touch as many experts as they can
        pairs = np.ceil(sizes["num_tokens"] * sizes["top_k"] / sizes["num_gpus"])
        sizes["num_active_experts"] = np.minimum(pairs.astype(np.int64), sizes["num_experts"])
    found = _where(found, kept)
    yield _rows("moe", found, found["moe_dtype"], sizes)


def _skew(distribution: str) -> float:
    numbers = re.findall(r"[\d.]+", distribution)
    return float(numbers[-1]) if numbers else np.inf


def _all_reduce(files: _Files) -> Iterator[Columns]:
    """Answer the backend's own all-reduces, in a CUDA graph where there are such; else NCCL's.

    Sizes of messages are in elements of two bytes.
    """
    names: tuple[str, ...] = (
        "kernel_source", "allreduce_dtype", "num_gpus", "message_size", "latency",
    )  # fmt: skip
    found = files.read("comm", "custom_allreduce", names)
    if found is not None:
        graph = np.array(["graph" in kernel for kernel in found["kernel_source"].tolist()])
        if graph.any():
            found = _where(found, graph)
    else:
        names = ("kernel_source", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
        found = files.read("comm", "nccl", names, source="nccl")
        if found is None:
            return
        found = _where(found, (found["op_name"] == "all_reduce") & (found["nccl_dtype"] == "half"))
        found["allreduce_dtype"] = found["nccl_dtype"]
    sizes = {"num_gpus": found["num_gpus"], "message_bytes": 2 * found["message_size"]}
    yield _rows("all_reduce", found, found["allreduce_dtype"], sizes)


def _stacked(parts: list[Columns]) -> Columns:
    """Answer *parts* one below the other; a column that one lacks is 0 there."""
    columns: Columns = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        columns[name] = np.concatenate(
            [
                part[name] if name in part else np.zeros(len(part["op"]), dtype=np.int64)
                for part in parts
            ]
        )
    return columns


def _needed(table: TimingTable, model: ModelSpec, tp: int, where: str) -> TimingTable:
    """Answer the rows of *table* that one of *tp* ranks of *model* needs."""
    shape = attention_shape(model, tp)
    c = table.columns
    block = np.isin(c["op"], LATENT_BLOCK_OPS)
    attention = np.isin(c["op"], ("decode_attention", "prefill_attention"))
    kept = (
        (attention | (block & has_latent_block(model)))
        & (c["num_heads"] == shape.num_heads)
        & (c["num_kv_heads"] == shape.num_kv_heads)
        & (c["head_dim"] == shape.head_dim)
    )
    notes = [f"rows that one of {tp} ranks of {model.name} needs"]
    for what in ("decode", "prefill"):
        if not any(what in op for op in c["op"][kept].tolist()):
            notes.append(f"no {what} attention for {shape}")
    kept |= (c["op"] == "all_reduce") & (c["num_gpus"] == tp)
    for (dtype,) in table.where(op="gemm").distinct("dtype"):
        kept |= _neighbours(table, (c["op"] == "gemm") & (c["dtype"] == dtype), model, tp)
    numbers = np.arange(len(table))
    numbered = TimingTable(table.info, {**c, "row": numbers}).where(op="moe")
    for enable_expert_parallel in {False, tp > 1} if model.is_moe else ():
        experts = expert_shape(model, tp, enable_expert_parallel=enable_expert_parallel)
        kept[expert_rows(numbered, experts, model.hidden_size).columns["row"]] = True
    if not kept.any():
        raise ConfigError(f"{where}: nothing for {model.name} on one of {tp} ranks")
    idle: tuple[str, ...] = () if model.is_moe else ("moe",)
    idle += () if model.is_mla else ("generation_mla", "context_mla", "mla_")
    others = [
        note
        for note in table.info.notes
        if not note.startswith(idle) and "sliding windows" not in note  # no model of ours has any
    ]
    info = msgspec.structs.replace(table.info, notes=(*others, *notes))
    return TimingTable(info, table.at(np.flatnonzero(kept)).columns)


def _neighbours(table: TimingTable, gemm: BoolArray, model: ModelSpec, tp: int) -> BoolArray:
    """Answer which products in *gemm* are next to one of *model*'s, in n and in k."""
    c = table.columns
    kept = np.zeros(len(table), dtype=np.bool_)
    axes = {name: np.unique(c[name][gemm]) for name in ("n", "k")}
    for call in calls_of(model, tp):
        if not call.n:
            continue
        near = gemm.copy()
        for name, size in (("n", call.n), ("k", call.k)):
            place = bracket(axes[name].tolist(), size)
            near &= np.isin(c[name], [] if place is None else axes[name][list(place[:2])])
        kept |= near
    return kept
