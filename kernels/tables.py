"""The timing tables of a journal: one that prices runs, and one of everything else.

A run takes one kernel for each shape, so that the table it reads has one: ours. Other kernels,
block ids in a row and what belongs to one model's vocabulary are in ``NAME-others.parquet``.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels.grid import CPU, PYTORCH, TRITON, Case
from kernels.journal import Record
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.timing.table import TableInfo, make_table
from sim.timing.table_check import check_peaks, check_units
from sim.timing.table_file import save
from workloads.errors import plain, quote

MAIN_KERNELS = {TRITON, PYTORCH, "torch", "torch_grouped_mm", "nccl"}
"""What prices runs."""

_SAID_BY_SELLERS = re.compile(
    r"(\d+gb|hbm\w*|tesla|nvidia|amd|instinct|blackwell|server|edition|graphics)", re.IGNORECASE
)
_VOCABULARY_OF = "meta-llama/Llama-3.1-8B"


class Written(NamedTuple):
    """Files that were written, and what a reader of them must know."""

    paths: list[Path]
    notes: list[str]


def gpu_name(device_name: str) -> str:
    """Answer our name of the GPU that a driver calls *device_name*; `CPU` for a CPU.

    Raises:
        ConfigError: we know no such GPU, or several.
    """
    if device_name == CPU:
        return CPU
    words = device_name.split()
    shorter = " ".join(word for word in words if not _SAID_BY_SELLERS.fullmatch(word))
    try:
        return get_gpu(device_name).name
    except ConfigError:
        pass
    try:
        return get_gpu(shorter).name
    except ConfigError as error:
        raise ConfigError(
            f"the GPU {device_name!r} is not in sim/data/gpus.toml: expected an entry there, or "
            f"--gpu NAME of one that it is ({error})"
        ) from None


def table_name(header: Record, gpu: str | None) -> str:
    """Answer our name of what was measured: *gpu* if the driver's name says nothing else.

    Raises:
        ConfigError: we know no such GPU, or another than *gpu* by the name that the driver has.
    """
    if header["device"] == "cpu":
        return CPU
    if gpu is None:
        return gpu_name(header["gpu"])
    given = get_gpu(gpu).name
    try:
        found = gpu_name(header["gpu"])
    except ConfigError:
        return given
    if found != given:
        raise ConfigError(
            f"--gpu {given}: the driver says {quote(header['gpu'])}, which is {found}: expected "
            "no --gpu, or the journal of another GPU"
        )
    return given


def write(
    folder: Path, header: Record, records: Sequence[Record], cases: Iterable[Case], gpu: str | None
) -> Written:
    """Write the tables of *records* into *folder*; *gpu* is its name if not to be guessed.

    Raises:
        ConfigError: the GPU has no entry or is not *gpu*, or times are such as no GPU has.
        FileError: a file cannot be written.
    """
    name = table_name(header, gpu)
    whole = _groups_that_are_whole(cases, records)
    measured = [record for record in records if "us" in record]
    rows = [record for record in measured if record["how"] != "events" or _is_transfer(record)]
    kept = [record for record in rows if whole(record)]
    notes = []
    for count, what in (
        (len(measured) - len(rows), "were not captured by a CUDA graph and may count launches"),
        (len(rows) - len(kept), "belong to batches of which not all contexts are measured yet"),
    ):
        if count:
            notes.append(f"{count} measured calls left out: they {what}")
    copies = [record for record in records if "copy_bytes_per_s" in record]
    written = []
    for others in (False, True):
        part = [_table_row(record) for record in kept if _is_other(record["row"]) is others]
        if not part:
            continue
        path = folder / f"{name}{'-others' if others else ''}.parquet"
        info = _info(name, header, copies, [*notes, *_facts(kept)], others=others)
        table = make_table(info, part, plain(str(path)))
        if name != CPU:
            for check in (check_units, check_peaks):
                check(table, f"{plain(str(path))} is not written")
        save(table, path)
        written.append(path)
    return Written(written, notes)


def _table_row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = record["row"]
    return row | {"latency_us": record["us"], "spread_us": record["spread_us"]}


def _is_other(row: dict[str, Any]) -> bool:
    """Whether a run must not see *row*: a second kernel, or rows that would tie it to one model."""
    return row["kernel"] not in MAIN_KERNELS or row["op"] == "sampler"


def _is_transfer(record: Record) -> bool:
    return bool(record["row"]["op"] == "all_reduce")


def _groups_that_are_whole(cases: Iterable[Case], records: Iterable[Record]) -> Any:
    """Answer whether a record belongs to a group of which all was measured, or cannot be."""
    tried = {record["key"] for record in records if "key" in record}
    missing: dict[str, int] = defaultdict(int)
    groups = {}
    for case in cases:
        groups[case.key] = case.group
        missing[case.group] += case.key not in tried
    return lambda record: not missing[groups.get(record["key"], "")]


def _facts(records: Sequence[Record]) -> Iterator[str]:
    warm = sum(
        not record["cold"] and record["row"]["op"] in {"decode_attention", "prefill_attention"}
        for record in records
    )
    if any(_is_transfer(record) for record in records):
        yield "all-reduces are timed in a loop, their launches included"
    if warm:
        yield f"{warm} calls of attention may have found part of their data in the L2 cache"


def _info(
    name: str, header: Record, copies: list[Record], notes: list[str], *, others: bool
) -> TableInfo:
    is_gpu = name != CPU
    facts = [
        f"{header['gpu']}, {header['device']}: "
        + ", ".join(
            f"{key} {header[key]}"
            for key in ("num_sms", "l2_bytes", "clocks.max.sm", "clocks.max.mem", "power.limit")
            if key in header
        ),
        "medians of replays of CUDA graphs; spread_us is the largest less the smallest; keys, "
        "values and weights rotate among copies, activations do not; block ids are scattered",
        f"kernels of kvsim {header['code']}",
    ]
    if copies:
        last = copies[-1]
        clocks = "".join(
            f", {key} {last[key]}" for key in ("clocks.sm", "clocks.mem") if key in last
        )
        rate = last["copy_bytes_per_s"] / 1e12
        facts.append(f"copying 1 GiB moved {rate:.3f} TB/s, read and written{clocks}")
    if not is_gpu:
        facts = ["PyTorch on a CPU, to test the program: the times are no GPU's", *facts[2:3]]
    has_model = others and is_gpu
    return TableInfo(
        gpu=name,
        provenance="measured" if is_gpu else "assumed",
        source="kvsim kernels.bench" if is_gpu else "kvsim kernels.bench --device cpu (a test)",
        licence="Apache-2.0",
        date=str(header.get("date", "")),
        l2_policy="cold" if is_gpu else "unknown",
        driver=str(header["driver"]),
        versions={key: str(version) for key, version in header["versions"].items()},
        model=_VOCABULARY_OF if has_model else "",
        notes=(*facts, *notes),
    )
