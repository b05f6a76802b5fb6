"""Result files: written whole or not at all; equal configuration and trace give equal bytes."""

import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sim.errors import OutputError
from sim.simulation import RunResult


def make_output_dir(path: str | Path) -> Path:
    """Create the folder if need be and answer it, writable.

    Raises:
        OutputError: if it cannot be made or written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"--output-dir {path}: {error.strerror or error}; expected a folder that can be written"
        ) from None
    return folder


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Lend a temporary name beside *path*; what was written there replaces *path* at the end."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write *value* as indented JSON with a final newline."""
    with atomic(path) as temporary:
        encoded = msgspec.json.format(msgspec.json.encode(value), indent=2)
        temporary.write_bytes(encoded + b"\n")


def write_table(folder: Path, name: str, table: pa.Table, table_format: str) -> None:
    """Write *table* as ``<name>.parquet`` or ``<name>.csv``."""
    with atomic(folder / f"{name}.{table_format}") as temporary:
        if table_format == "csv":
            options = pa.csv.WriteOptions(quoting_style="needed")
            pa.csv.write_csv(table, temporary, options)
        else:
            pa.parquet.write_table(table, temporary)


def write_run(folder: Path, result: RunResult, summary: dict[str, Any], table_format: str) -> None:
    """Write ``summary.json``, ``requests``, ``steps`` and ``manifest.json`` of one run."""
    write_table(folder, "requests", result.recorder.request_table(), table_format)
    write_table(folder, "steps", result.recorder.step_table(), table_format)
    write_json(folder / "summary.json", summary)
    write_json(folder / "manifest.json", manifest(result))


def manifest(result: RunResult) -> dict[str, Any]:
    """Answer all that decided a run: configuration, trace, versions, and what its times rest on."""
    packages = ("kvsim", "simpy", "numpy", "pyarrow", "msgspec")
    return {
        "kvsim": {"version": metadata.version("kvsim"), "git_commit": _git_commit()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages[1:]},
        },
        "config": result.config.flat() | {"trace": result.trace.name},
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
            "provenance": result.step_time.provenance,
            "description": result.step_time.description,
        },
    }


def _git_commit() -> str | None:
    """Answer the commit of the source tree that runs, None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
