"""Result files: written whole or not at all; equal configuration and trace give equal bytes."""

import functools
import io
import itertools
import math
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from sim.errors import FileError
from sim.files import atomic, encode_json, reason, temporary_file, write_json
from sim.simulation import RunResult
from workloads.errors import plain

if TYPE_CHECKING:
    import pyarrow as pa

RUN_FILES = ("requests", "steps", "summary", "manifest", "block_tables")
"""Names, without their ends, of what a run's folder may hold."""


def make_output_dir(path: str | Path) -> Path:
    """Create the folder if need be and answer it, writable.

    Raises:
        FileError: if it cannot be made or written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_file(folder / "writable"):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise FileError(
            f"--output-dir {plain(str(path))}: {reason(error)}; "
            "expected a folder that can be made and written to"
        ) from None
    return folder


def write_table(folder: Path, name: str, tables: Iterable["pa.Table"], table_format: str) -> None:
    """Write *tables*, one or more parts of one, as ``<name>.parquet`` or ``<name>.csv``.

    The other of the two is taken away: one that an earlier run left would be taken for this run's.
    """
    path = folder / f"{name}.{table_format}"
    with atomic(path) as temporary, temporary.open("wb") as file:
        _put_table(file, tables, table_format)
    for other in {"csv", "parquet"} - {table_format}:
        (folder / f"{name}.{other}").unlink(missing_ok=True)


def _put_table(file: BinaryIO, tables: Iterable["pa.Table"], table_format: str) -> None:
    """Write *tables*, parts of one, to *file*."""
    parts = iter(tables)
    first = next(parts)
    writer: Any
    if table_format == "csv":
        from pyarrow import csv  # noqa: PLC0415  # each format pays for its own

        options = csv.WriteOptions(quoting_style="needed")
        writer = csv.CSVWriter(file, first.schema, write_options=options)
    else:
        from pyarrow import parquet  # noqa: PLC0415

        writer = parquet.ParquetWriter(file, first.schema)
    with writer:
        for part in itertools.chain([first], parts):
            writer.write_table(part)


def _run_tables(result: RunResult) -> Iterator[tuple[str, Iterable["pa.Table"]]]:
    """Answer the tables of a run by name, each made when it is its turn."""
    from sim.result_tables import (  # noqa: PLC0415  # only who wants tables pays for pyarrow
        request_table,
        step_tables,
    )

    yield "requests", [request_table(result.recorder)]
    yield "steps", step_tables(result.recorder)


def write_run(folder: Path, result: RunResult, summary: dict[str, Any], table_format: str) -> None:
    """Write ``summary.json``, ``requests``, ``steps`` and ``manifest.json`` of one run."""
    for name, tables in _run_tables(result):
        write_table(folder, name, tables, table_format)
    write_json(folder / "summary.json", summary)
    write_json(folder / "manifest.json", manifest(result))


def run_files(result: RunResult, summary: dict[str, Any]) -> dict[str, bytes]:
    """Answer what `write_run` would write, tables as Parquet, by the names of the files."""
    files = {}
    for name, tables in _run_tables(result):
        buffer = io.BytesIO()
        _put_table(buffer, tables, "parquet")
        files[f"{name}.parquet"] = buffer.getvalue()
    files["summary.json"] = encode_json(summary)
    files["manifest.json"] = encode_json(manifest(result))
    return files


def flat_summaries(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer *summaries* as rows of one table: equal keys, a number, a text or None under each."""
    reasons = sorted({reason for summary in summaries for reason in summary["refused"]})
    terms = dict.fromkeys(term for summary in summaries for term in summary["step_time_s"])
    rows = [
        {
            name: math.inf if value == "inf" and name.endswith("request_rate") else value
            for name, value in summary.items()
            if name not in {"refused", "step_time_s"}
        }
        | {f"refused_{reason}": summary["refused"].get(reason, 0) for reason in reasons}
        | {f"{_identifier(term)}_s": summary["step_time_s"].get(term, 0.0) for term in terms}
        | {"timing": "; ".join(summary["timing"])}
        for summary in summaries
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _identifier(term: str) -> str:
    return term.replace(" ", "_").replace("-", "_")


def write_comparison(folder: Path, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Write ``compare.json`` and ``compare.csv``, a row an allocator; answer the files."""
    write_json(folder / "compare.json", rows)
    return [folder / "compare.json", *write_rows(folder, "compare", flat_summaries(rows), ["csv"])]


def write_rows(
    folder: Path,
    name: str,
    rows: Sequence[dict[str, Any]],
    formats: Sequence[str],
    columns: Sequence[str] = (),
) -> list[Path]:
    """Write *rows*, which have equal keys, as ``<name>`` in each of *formats*; answer the files.

    *columns* are those of a table without rows.
    """
    import pyarrow as pa  # noqa: PLC0415  # kvsim run needs it for its tables only

    table, paths = pa.Table.from_pylist(list(rows)), []
    if not rows:
        table = pa.table({column: pa.array([], pa.string()) for column in columns})
    for table_format in formats:
        paths.append(folder / f"{name}.{table_format}")
        with atomic(paths[-1]) as temporary, temporary.open("wb") as file:
            _put_table(file, [table], table_format)
    return paths


def versions() -> dict[str, Any]:
    """Answer the versions of what may decide the bytes of results."""
    packages = ("simpy", "numpy", "pyarrow", "msgspec")
    return {
        "kvsim": {"version": metadata.version("kvsim"), "git_commit": _git_commit()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }


def manifest(result: RunResult) -> dict[str, Any]:
    """Answer all that decided a run: configuration, trace, versions, and what its times rest on."""
    table = result.step_time.table
    return {
        **versions(),
        "config": result.config.flat()
        | {
            "trace": result.config.load.trace and result.trace.name,
            "timing_table": result.config.timing.timing_table and table and table.name,
        },
        "seeds": {"seed": result.config.load.seed},
        "trace": {
            "name": result.trace.name,
            "format": result.trace.trace_format,
            "sha256": result.trace.sha256,
            "num_requests": len(result.trace),
            "notes": result.trace.notes,
        },
        "kv_pool": msgspec.to_builtins(result.pool),
        "timing": {
            "sources": [source._asdict() for source in result.step_time.sources],
            "table": table and msgspec.to_builtins(table._asdict()),
        },
    }


@functools.cache
def _git_commit() -> str | None:
    """Answer the commit of the source tree that runs, None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
