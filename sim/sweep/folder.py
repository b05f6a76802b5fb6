"""The folder of a sweep: cells that are whole or not there, and the table of those that finished.

Only the process that holds the folder's lock writes in it; the lock goes with the process, however
it ends. A cell is written beside its place and moved there when it is complete, so that whatever
lies under a cell's name can be relied on, and all other names are of no use to anybody.
"""

import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import ConfigError, FileError
from sim.files import reason, write_json
from sim.results import flat_summaries, make_output_dir, write_rows
from sim.sweep.cells import Cell, Plan
from sim.sweep.spec import Spec
from sim.sweep.work import ERROR_FILE, Files
from workloads.errors import plain, quote

FORMAT_VERSION = 1
"""Of the folder's layout."""

SWEEP_FILE, LOCK_FILE, SUMMARY = "sweep.json", ".sweep.lock", "summary"
_FORMATS = ("parquet", "csv")
_SECTIONS = {"spec": "", "files": "file ", "versions": "version of "}
"""What of `SWEEP_FILE` must not change, and how a change of a part is announced."""

INTERRUPTIONS = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off interruptions: what takes a moment is done whole, processes begun in it get none."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


WHOLE = {"refused", "step_time_s", "timing"}
"""Keys without which a summary is none of ours, and its cell has not finished."""


class SweepFolder:
    """Results of one sweep on disk.

    Args:
        path: the folder, which need not be there.
        spec: what was asked for.
        plan: its cells.
    """

    def __init__(self, path: str, spec: Spec, plan: Plan) -> None:
        self.path = Path(path)
        self._cells_path = self.path / "cells"
        self._cells = plan.cells
        self._record: dict[str, Any] = {
            "kvsim_sweep": FORMAT_VERSION,
            "swept": list(spec.swept),
            "spec": spec.record(),
            "files": plan.files,
            "versions": plan.inputs.versions["versions"] | _of_kvsim(plan),
            "cells": len(plan.cells),
        }

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for this process alone, without what dead ones left behind.

        Raises:
            FileError: it cannot be written to, or another process holds it.
            ConfigError: as `check`.
        """
        make_output_dir(self.path)
        with _locked(self.path):
            self.check()
            try:
                self._cells_path.mkdir(exist_ok=True)
                self._clean()
            except OSError as error:
                raise FileError(f"{self._shown}: {reason(error)}") from None
            if not (self.path / SWEEP_FILE).exists():
                self._write_record([])
            yield

    def check(self) -> None:
        """Refuse a folder with the results of anything else.

        Raises:
            ConfigError: it is another sweep's: what is different, and a folder that is free.
        """
        path = self.path / SWEEP_FILE
        if not path.exists():
            for name in ("cells", *(f"{SUMMARY}.{kind}" for kind in _FORMATS)):
                if (self.path / name).exists():
                    self._refuse(f"has {name} but no {SWEEP_FILE}, so that no sweep wrote it")
            return
        try:
            there = msgspec.json.decode(path.read_bytes())
            version = there["kvsim_sweep"]
        except (OSError, ValueError, KeyError, TypeError):
            self._refuse(f"has a {SWEEP_FILE} that no sweep wrote")
        if version != FORMAT_VERSION:
            self._refuse(f"was written by another version (format {quote(version)})")
        changes = [
            change
            for section, words in _SECTIONS.items()
            for change in _changes(there.get(section), self._record[section], words)
        ]
        if changes:
            more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
            self._refuse(f"is of another sweep: {'; '.join(changes[:3])}{more}")

    def finished(self) -> dict[str, dict[str, Any]]:
        """Answer the summary of every cell that has finished, by its name."""
        found = {}
        for cell in self._cells:
            summary = self._read(cell, "summary.json")
            if summary is not None and summary.keys() >= WHOLE:
                found[cell.name] = summary
        return found

    def failed(self) -> dict[str, str]:
        """Answer why, of every cell whose last try failed, by its name."""
        errors = {cell.name: self._read(cell, ERROR_FILE) for cell in self._cells}
        return {name: str(error.get("error")) for name, error in errors.items() if error}

    def save(self, cell: Cell, files: Files) -> None:
        """Keep the *files* of *cell* instead of what is there: all of them, or none.

        Raises:
            FileError: no room, say; what was there may be gone, if it was a failure.
        """
        place = self._cells_path / cell.name
        new, old = (place.with_name(f".{cell.name}.{kind}") for kind in ("new", "old"))
        with uninterrupted():
            try:
                new.mkdir()
                for name, content in files.items():
                    (new / Path(name).name).write_bytes(content)
                if place.exists():
                    place.rename(old)
                new.rename(place)
            except OSError as error:
                raise FileError(
                    f"{plain(str(place))} cannot be written: {reason(error)}; what has finished "
                    "is kept: the same command goes on with the rest"
                ) from error
            finally:
                for left in (new, old):
                    shutil.rmtree(left, ignore_errors=True)

    def write_summary(self) -> list[Path]:
        """Write the table of what has finished and the list of what failed; answer the files.

        Raises:
            FileError: it cannot be written.
        """
        finished, failed = self.finished(), self.failed()
        cells = [cell for cell in self._cells if cell.name in finished]
        flat = flat_summaries([finished[cell.name] for cell in cells])
        rows = [_row(cell, summary) for cell, summary in zip(cells, flat, strict=True)]
        columns = ["cell", *self._cells[0].settings]
        files = write_rows(self.path, SUMMARY, rows, _FORMATS, columns)
        self._write_record(
            [
                {"cell": cell.name, **cell.settings, "error": failed[cell.name]}
                for cell in self._cells
                if cell.name in failed
            ]
        )
        return [*files, self.path / SWEEP_FILE]

    @property
    def _shown(self) -> str:
        return f"--output-dir {plain(str(self.path))}"

    def _refuse(self, why: str) -> None:
        path = self.path if self.path.name else self.path.resolve()
        free = next(
            name for number in itertools.count(2) if not Path(name := f"{path}-{number}").exists()
        )
        raise ConfigError(f"{self._shown} {why}; expected the same sweep, or another: -o {free}")

    def _read(self, cell: Cell, name: str) -> dict[str, Any] | None:
        """Answer the JSON object in a file of *cell*; None if it is not there, or is none."""
        try:
            return msgspec.json.decode(
                (self._cells_path / cell.name / name).read_bytes(), type=dict[str, Any]
            )
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return None

    def _clean(self) -> None:
        """Take away what processes that died were writing."""
        for left in self._cells_path.glob(".*"):
            if re.fullmatch(r"\.[0-9a-f]+\.(new|old)", left.name) and not left.is_symlink():
                shutil.rmtree(left)
        for name in (SWEEP_FILE, *(f"{SUMMARY}.{kind}" for kind in _FORMATS)):
            for left in self.path.glob(f".{name}.*"):
                left.unlink()

    def _write_record(self, failed: list[dict[str, Any]]) -> None:
        write_json(self.path / SWEEP_FILE, self._record | {"failed": failed})


def _of_kvsim(plan: Plan) -> dict[str, Any]:
    kvsim = plan.inputs.versions["kvsim"]
    return {"kvsim": kvsim["version"], "git_commit": kvsim["git_commit"]}


def _row(cell: Cell, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the row of *cell*: name, what was swept, seed, then the rest of its flat *summary*."""
    settings = {
        name: float("inf") if (name, value) == ("request_rate", "inf") else value
        for name, value in cell.settings.items()
    }
    first = {name: summary.get(name, value) for name, value in settings.items()}
    return {"cell": cell.name, **first, **{n: v for n, v in summary.items() if n not in first}}


def _changes(old: Any, new: Any, where: str) -> Iterator[str]:
    """Answer what is different between two JSON values, place by place."""
    new = msgspec.to_builtins(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                parts = (old.get(name), new.get(name))
                if any(isinstance(part, dict) for part in parts):
                    yield from _changes(parts[0] or {}, parts[1] or {}, f"{where}[{name}] ")
                else:
                    yield from _changes(*parts, f"{where}{name}")
    elif old != new:
        yield f"{where} was {quote(old)}, is {quote(new)}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of *folder*, which ends with this process at the latest."""
    import fcntl  # noqa: PLC0415  # not there on every system, which --help need not mind

    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise FileError(f"{plain(str(folder / LOCK_FILE))}: {reason(error)}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(
                f"--output-dir {plain(str(folder))}: another kvsim sweep is writing there: "
                "wait for it, or give another folder"
            ) from None
        yield
    finally:
        with suppress(OSError):
            os.close(lock)
