"""Result files: written whole or not at all; equal configuration and trace give equal bytes."""

import itertools
import platform
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim.errors import FileError
from sim.files import atomic, reason, temporary_file, write_json
from sim.simulation import RunResult
from workloads.errors import plain

if TYPE_CHECKING:
    import pyarrow as pa


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
    parts = iter(tables)
    first = next(parts)
    with atomic(folder / f"{name}.{table_format}") as temporary:
        writer: Any
        if table_format == "csv":
            from pyarrow import csv  # noqa: PLC0415  # each format pays for its own

            options = csv.WriteOptions(quoting_style="needed")
            writer = csv.CSVWriter(temporary, first.schema, write_options=options)
        else:
            from pyarrow import parquet  # noqa: PLC0415

            writer = parquet.ParquetWriter(temporary, first.schema)
        with writer:
            for part in itertools.chain([first], parts):
                writer.write_table(part)
    for other in {"csv", "parquet"} - {table_format}:
        (folder / f"{name}.{other}").unlink(missing_ok=True)


def write_run(folder: Path, result: RunResult, summary: dict[str, Any], table_format: str) -> None:
    """Write ``summary.json``, ``requests``, ``steps`` and ``manifest.json`` of one run."""
    from sim.result_tables import (  # noqa: PLC0415  # only who wants tables pays for pyarrow
        request_table,
        step_tables,
    )

    write_table(folder, "requests", [request_table(result.recorder)], table_format)
    write_table(folder, "steps", step_tables(result.recorder), table_format)
    write_json(folder / "summary.json", summary)
    write_json(folder / "manifest.json", manifest(result))


def _identifier(term: str) -> str:
    return term.replace(" ", "_").replace("-", "_")


def write_comparison(folder: Path, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Write ``compare.json`` and ``compare.csv``, a row an allocator; answer the files."""
    write_json(folder / "compare.json", rows)
    reasons = sorted({reason for row in rows for reason in row["refused"]})
    flat = [
        {name: value for name, value in row.items() if name not in {"refused", "step_time_s"}}
        | {f"refused_{reason}": row["refused"].get(reason, 0) for reason in reasons}
        | {f"{_identifier(term)}_s": seconds for term, seconds in row["step_time_s"].items()}
        | {"timing": "; ".join(row["timing"])}
        for row in rows
    ]
    import pyarrow as pa  # noqa: PLC0415  # kvsim run needs it for its tables only

    write_table(folder, "compare", [pa.Table.from_pylist(flat)], "csv")
    return [folder / "compare.json", folder / "compare.csv"]


def manifest(result: RunResult) -> dict[str, Any]:
    """Answer all that decided a run: configuration, trace, versions, and what its times rest on."""
    table = result.step_time.table
    packages = ("kvsim", "simpy", "numpy", "pyarrow", "msgspec")
    return {
        "kvsim": {"version": metadata.version("kvsim"), "git_commit": _git_commit()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages[1:]},
        },
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
