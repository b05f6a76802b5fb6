"""Timing tables in our own format: rows in any order, as Parquet or CSV, and the JSON file beside.

For what our kernels' measurements and hand-made tables are before they are sorted and checked. A
CSV file may leave out columns that no operation in it uses.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sim.errors import ConfigError, FileError
from sim.files import reason, regular
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing.table import (
    COLUMNS,
    COUNT_COLUMNS,
    LATENCY,
    MAX_LATENCY_US,
    MIN_LATENCY_US,
    OPERATIONS,
    PRINTABLE,
    PROVENANCES,
    TEXT_COLUMNS,
    TableInfo,
    TimingTable,
    make_table,
    max_of,
)
from sim.timing.table_file import read_columns, read_info, sidecar
from workloads.errors import did_you_mean, plain, quote

_ALWAYS = ("op", "latency_us")


class _Row(NamedTuple):
    """A row, and where it stands."""

    place: str
    values: dict[str, Any]


def read_native(path: str | Path) -> TimingTable:
    """Answer the table in the Parquet or CSV file *path*; names of GPU and model as we spell them.

    Raises:
        ConfigError: a name that ends in neither.
        FileError: a file that cannot be read, or is no table: with file, line or row, and column.
    """
    path = Path(path)
    shown = plain(str(path))
    readers = {".parquet": _parquet, ".csv": _csv}
    if path.suffix.lower() not in readers:
        raise ConfigError(f"{shown}: expected a name ending in {' or '.join(readers)}")
    info_shown = plain(str(sidecar(path)))
    info = named(read_info(sidecar(path), info_shown), info_shown)
    seen: dict[tuple[Any, ...], str] = {}
    rows = []
    for place, row in readers[path.suffix.lower()](path, shown):
        _check_row(row, f"{shown}, {place}", info)
        key = tuple(row.get(name, 0) for name in ("op", *_used(row["op"])))
        if key in seen:
            raise FileError(
                f"{shown}, {place}: the same operation, kernel and sizes as {seen[key]}; expected "
                "one row a measurement"
            )
        seen[key] = place
        rows.append(row)
    return make_table(info, rows, shown)


def named(info: TableInfo, where: str) -> TableInfo:
    """Answer *info* with GPU and model spelt as in ``sim/data``.

    Raises:
        FileError: we know no such GPU or model; *where* begins the message.
    """
    try:
        model = get_model(info.model).name if info.model else ""
        return msgspec.structs.replace(info, gpu=get_gpu(info.gpu).name, model=model)
    except ConfigError as error:
        key, _, problem = str(error).removeprefix("--").partition(" ")
        raise FileError(f"{where}: key {key}: {problem}") from None


def _used(op: str) -> tuple[str, ...]:
    operation = OPERATIONS[op]
    return (*operation.identity, *operation.sizes)


def _parquet(path: Path, shown: str) -> Iterator[_Row]:
    columns = read_columns(path, shown)
    lists = [columns[name].tolist() for name in COLUMNS]
    for number, values in enumerate(zip(*lists, strict=True), start=1):
        yield _Row(f"row {number}", dict(zip(COLUMNS, values, strict=True)))


def _csv(path: Path, shown: str) -> Iterator[_Row]:
    try:
        text = regular(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise FileError(f"{shown}: {reason(error)}; expected a CSV file") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        _check_header(header, shown)
        for values in reader:
            if values:
                yield _Row(f"line {reader.line_num}", _parsed(header, values, shown, reader))
    except csv.Error as error:
        raise FileError(f"{shown}, line {reader.line_num}: {error}; expected CSV") from None


def _check_header(header: list[str], shown: str) -> None:
    for name in header:
        if name not in COLUMNS:
            raise FileError(
                f"{shown}, line 1: unknown column {quote(name)}; {did_you_mean(name, COLUMNS)}"
            )
        if header.count(name) > 1:
            raise FileError(f"{shown}, line 1: column {name} is there twice")
    missing = [name for name in _ALWAYS if name not in header]
    if missing:
        raise FileError(f"{shown}, line 1: no column {', '.join(missing)}; expected it")


def _parsed(header: list[str], values: list[str], shown: str, reader: Any) -> dict[str, Any]:
    """Answer the values of a line in the types of their columns; empty ones are left out."""
    where = f"{shown}, line {reader.line_num}"
    if len(values) != len(header):
        raise FileError(f"{where}: {len(values)} values; expected {len(header)}, as in line 1")
    row: dict[str, Any] = {}
    for name, value in zip(header, (value.strip() for value in values), strict=True):
        if not value:
            continue
        if name in TEXT_COLUMNS:
            row[name] = value
            continue
        is_count = name in COUNT_COLUMNS
        try:
            row[name] = int(value) if is_count else float(value)
        except ValueError:
            expected = "a whole number" if is_count else "microseconds"
            raise FileError(
                f"{where}, column {name}: expected {expected}, got {quote(value)}"
            ) from None
    return row


def _check_row(row: dict[str, Any], where: str, info: TableInfo) -> None:
    """Refuse a row that has no operation, lacks what that uses, or has values that cannot be."""
    op = row.get("op", "")
    if op not in OPERATIONS:
        near = did_you_mean(str(op), OPERATIONS)
        raise FileError(f"{where}, column op: unknown operation {quote(op)}; {near}")
    for name in (*_used(op), "latency_us"):
        if name not in row:
            raise FileError(f"{where}, column {name}: nothing there; expected it, as in any {op}")
    for name in TEXT_COLUMNS:
        if not row.get(name, "").isprintable():
            raise FileError(f"{where}, column {name}: {quote(row[name])}; expected {PRINTABLE}")
    for name in COUNT_COLUMNS:
        least = 1 if name in OPERATIONS[op].positive else 0
        if not least <= row.get(name, 0) <= max_of(name):
            raise FileError(
                f"{where}, column {name}: {quote(row[name])}; expected {least} or more, "
                f"at most {max_of(name)}"
            )
    if not MIN_LATENCY_US <= row["latency_us"] <= MAX_LATENCY_US:
        raise FileError(f"{where}, column latency_us: {row['latency_us']}; expected {LATENCY}")
    spread = row.get("spread_us", 0)
    if spread < 0 or spread > MAX_LATENCY_US:
        raise FileError(f"{where}, column spread_us: {row['spread_us']}; expected 0 or more")
    worth = PROVENANCES[PROVENANCES.index(info.provenance) :]
    if row.get("provenance", info.provenance) not in worth:
        raise FileError(
            f"{where}, column provenance: {quote(row['provenance'])}; expected "
            f"{' or '.join(worth)} in a table that is {info.provenance}"
        )
