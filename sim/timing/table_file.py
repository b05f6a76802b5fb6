"""Files of a timing table: a Parquet file of rows, and a JSON file that says what they are."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sim.columns import Columns
from sim.errors import ConfigError, FileError
from sim.files import atomic, read_small, reason, refuse_twice, regular, write_json
from sim.timing.table import (
    COLUMNS,
    COUNT_COLUMNS,
    TEXT_COLUMNS,
    TableInfo,
    TimingTable,
    check_info,
    checked,
)
from workloads.errors import nearest, plain

MAX_INFO_BYTES = 1_000_000
"""Of a JSON file."""

SHIPPED = Path(__file__).parents[2] / "kernels" / "tables"
"""Where a source tree has its tables, and where an installation puts them."""


def shipped(gpu: str) -> Path | None:
    """Answer the table that prices runs on *gpu* (our name) by default; None if none is shipped."""
    path = SHIPPED / f"{gpu}.parquet"
    return path if path.is_file() and sidecar(path).is_file() else None


def sidecar(path: Path) -> Path:
    """Answer the JSON file that belongs to the Parquet file *path*."""
    return path.with_suffix(".json")


def load(path: str | Path, where: str = "--timing-table") -> TimingTable:
    """Answer the table in the Parquet file *path*; *where* is what refusals begin with.

    Raises:
        ConfigError: a path that is no Parquet file, with the command that makes one of it.
        FileError: a file that cannot be read, or is no such table, or as `checked`.
    """
    path = Path(path)
    shown = f"{where} {plain(str(path))}".strip()
    _check_suffix(path, shown)
    columns = read_columns(path, shown)
    info = read_info(sidecar(path), f"{where} {plain(str(sidecar(path)))}".strip())
    return checked(TimingTable(info, columns), shown)


def _check_suffix(path: Path, shown: str) -> None:
    """Refuse a file that is not there, and what has to be imported first, with how."""
    if not path.exists():
        siblings = [p for p in path.parent.glob("*.parquet") if p.is_file()]
        is_near = nearest(path.stem, [p.stem for p in siblings])  # all end in the same
        hint = is_near and nearest(f"{path.stem}.parquet", [p.name for p in siblings])
        raise FileError(f"{shown}: no such file; {hint or 'expected a Parquet file'}".strip())
    if path.is_dir():
        raise ConfigError(
            f"{shown} is a folder; expected a Parquet file: kvsim tables import llmservingsim "
            f"{plain(str(path))} -o TABLE.parquet makes one of a profile of LLMServingSim"
        )
    if path.suffix.lower() == ".csv":
        raise ConfigError(
            f"{shown} is a CSV file; expected a Parquet file: kvsim tables import native "
            f"{plain(str(path))} -o TABLE.parquet makes one, of a file of a profile of "
            "LLMServingSim kvsim tables import llmservingsim FOLDER -o TABLE.parquet"
        )


def read_info(path: Path, shown: str) -> TableInfo:
    """Answer what the JSON file *path* says of a table; refusals call it *shown*.

    Raises:
        FileError: it cannot be read, or is no description of a table.
    """
    try:
        content = read_small(path, MAX_INFO_BYTES)
        info = msgspec.json.decode(content, type=TableInfo)
        refuse_twice(content)
    except RecursionError:
        raise FileError(f"{shown}: nested too deeply; expected a flat object") from None
    except msgspec.MsgspecError as error:
        raise FileError(
            f"{shown}: {plain(str(error))}; expected what describes a timing table"
        ) from None
    except (OSError, ValueError) as error:
        raise FileError(
            f"{shown}: {reason(error)}; expected the JSON file beside the table's Parquet file"
        ) from None
    check_info(info, shown)
    return info


def read_columns(path: Path, shown: str) -> Columns:
    """Answer the columns of the Parquet file *path*, unchecked; refusals call it *shown*.

    Raises:
        FileError: it cannot be read, or a column is missing, there twice, of another type, or has
            holes.
    """
    import pyarrow as pa  # noqa: PLC0415  # slow to import, and few runs read a table
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with regular(path).open("rb") as file, pq.ParquetFile(file) as parquet:
            return _columns(parquet.read(), shown)
    except ConfigError:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        why = plain(reason(error).partition("\n")[0])
        raise FileError(f"{shown}: {why}; expected a Parquet file") from None


def _columns(table: Any, shown: str) -> Columns:
    """Answer the columns of the Arrow *table*."""
    import pyarrow as pa  # noqa: PLC0415  # slow to import, and few runs read a table

    from sim import arrow  # noqa: PLC0415

    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise FileError(f"{shown}: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    columns: Columns = {}
    for name in COLUMNS:
        if table.column_names.count(name) > 1:
            raise FileError(f"{shown}: column {name} is there twice; expected it once")
        column = table.column(name)
        kinds = (
            (_is_text, object, "text")
            if name in TEXT_COLUMNS
            else (pa.types.is_integer, np.int64, "whole numbers")
            if name in COUNT_COLUMNS
            else (pa.types.is_floating, np.float64, "numbers with a decimal point")
        )
        is_kind, dtype, expected = kinds
        if not is_kind(column.type) or (column.null_count and name != "spread_us"):
            what = f"{plain(str(column.type))} with {column.null_count} nulls"
            raise FileError(f"{shown}: column {name} is {what}; expected {expected}, no nulls")
        columns[name] = arrow.values(column).astype(dtype, copy=False)
    return columns


def _is_text(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415  # slow to import, and few runs read a table

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))  # pandas writes these


def save(table: TimingTable, path: str | Path) -> None:
    """Write *table* to the Parquet file *path* and its JSON file, both or neither.

    Both are written whole under other names before either takes its own, the JSON file first: it
    describes rows to come, where a Parquet file without it would belong to no table. Who is killed
    between these two renamings leaves the new JSON file beside the rows there were, each whole.

    Raises:
        FileError: it cannot be written; older files are as they were.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415

    from sim import arrow  # noqa: PLC0415

    path = Path(path)
    texts = {name: arrow.strings(table.columns[name].tolist()) for name in TEXT_COLUMNS}
    arrays = arrow.table({**table.columns, **texts}).select(COLUMNS)
    if path.is_dir():
        raise FileError(f"{plain(str(path))} is a folder; expected the name of a file")
    with atomic(path) as temporary:
        with temporary.open("wb") as file:  # Arrow takes no name that is not UTF-8
            pq.write_table(arrays, file, compression="zstd")
        write_json(sidecar(path), table.info)
