"""What was measured so far, line by line: what a killed or interrupted measurement leaves behind.

``journal.jsonl`` begins with a header that says what was measured with; each further line is one
case. A line is on the disk before the next case begins, so that the last one alone can be torn.
"""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kernels.grid import Case, Heads
from sim.errors import FileError
from workloads.errors import plain, quote

NAME = "journal.jsonl"
FORMAT, VERSION = "kvsim-kernel-journal", 1
MAX_BYTES = 100_000_000

SAME = ("device", "gpu", "versions", "driver", "code")
"""What all measurements of a folder have in common."""

Record = dict[str, Any]


def read(folder: Path) -> tuple[Record, list[Record]]:
    """Answer the header and the records of *folder*; empty ones if it has none.

    Raises:
        FileError: what is there is no journal: with the line.
    """
    path = folder / NAME
    shown = plain(str(path))
    if path.is_symlink():
        raise FileError(f"{shown} is a link; expected a journal of this folder")
    if not path.exists():
        return {}, []
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise FileError(
                f"{shown} is no journal; expected a file of at most {MAX_BYTES:,} bytes"
            )
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{shown}: {error.strerror}; expected a readable file") from None
    lines = data.split(b"\n")[:-1]  # what follows the last newline was torn
    records = [_parsed(line, f"{shown}, line {n}") for n, line in enumerate(lines, start=1)]
    if not records:
        return {}, []
    header = records[0]
    known = {"device": str, "gpu": str, "versions": dict, "driver": str, "code": str}
    if header.get("format") != FORMAT or not all(
        isinstance(header.get(name), kind) for name, kind in known.items()
    ):
        raise FileError(f"{shown}, line 1: no header of a journal; expected another folder")
    _check_fields(header, f"{shown}, line 1")
    for number, record in enumerate(records[1:], start=2):
        _check(record, f"{shown}, line {number}")
    return header, records[1:]


def _parsed(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise FileError(f"{where}: not JSON; expected a line of a journal") from None
    if not isinstance(record, dict):
        raise FileError(f"{where}: {quote(record)}; expected an object")
    return record


MAX_NUMBER = 2**53
"""Above any size and time of a call, and exact as a float."""

_ROW = {name: kind for name, kind in Case.__annotations__.items() if name != "group"}
_MEASURED = {"row", "us", "spread_us", "how", "cold"}


def _is_number(value: object, least: float = 0) -> bool:
    return type(value) in {int, float} and least <= value <= MAX_NUMBER  # type: ignore[operator]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_NUMBER


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "key": (lambda value: isinstance(value, str), "text"),
    "skip": (lambda value: isinstance(value, str), "text"),
    "how": (lambda value: value in ("graph", "events", "wall"), "graph, events or wall"),
    "row": (lambda value: isinstance(value, dict), "an object"),
    "cold": (lambda value: isinstance(value, bool), "true or false"),
    "us": (lambda value: _is_number(value, 1e-6), "microseconds"),
    "spread_us": (_is_number, "microseconds"),
    "copy_bytes_per_s": (lambda value: _is_number(value, 1), "bytes a second"),
    "for": (lambda value: isinstance(value, str), "text"),
    "tile": (
        lambda value: isinstance(value, list) and len(value) == 4 and all(map(_is_size, value)),
        "four whole numbers above 0",
    ),
    # Of the header.
    "version": (lambda value: value == VERSION, str(VERSION)),
    "device": (lambda value: value in ("cuda", "cpu"), "cuda or cpu"),
    "num_gpus": (_is_size, "a whole number above 0"),
}
"""What fields may be, wherever they are, and how that is said."""

_TOGETHER = ({"tile", "for"}, {"key", "skip"}, {"key", *_MEASURED}, {"copy_bytes_per_s"})
"""A record has all fields of one of these."""


def _check_fields(record: Record, where: str) -> None:
    for name, (is_right, expected) in _FIELDS.items():
        if name in record and not is_right(record[name]):
            raise FileError(f"{where}: key {name}: {quote(record[name])}; expected {expected}")


def _check(record: Record, where: str) -> None:
    """Refuse what cannot be, and a record of which a part is missing."""
    _check_fields(record, where)
    if not any(names <= record.keys() for names in _TOGETHER) or (
        "us" in record and not record.keys() >= _MEASURED
    ):
        raise FileError(
            f"{where}: not all of a record; expected a time and what it is of, the reason why "
            "there is none, a tile or the copy bandwidth"
        )
    if "us" in record:
        _check_row(record["row"], where)


def _check_row(row: dict[str, Any], where: str) -> None:
    for name, value in row.items():
        is_right = isinstance(value, str) if _ROW.get(name) is str else _is_size(value)
        if name not in _ROW or not is_right:
            raise FileError(f"{where}: key row: {quote(name)}: {quote(value)} cannot be")
    if not {"op", "kernel"} <= row.keys() or (
        row["op"] == "decode_attention"
        and not all(row.get(name, 0) for name in (*Heads._fields, "batch", "context", "kv_dtype"))
    ):
        raise FileError(f"{where}: key row: not all that identifies a call")


def refuse_other(header: Record, mine: Record, folder: Path) -> None:
    """Refuse a folder whose measurements are of another GPU or other software.

    Raises:
        FileError: with both.
    """
    for name in SAME:
        if header[name] != mine[name]:
            what = {"code": "other kernels"}.get(name, quote(header[name]))
            now = {"code": "these"}.get(name, quote(mine[name]))
            raise FileError(
                f"--out {plain(str(folder))} holds measurements with {name} {what}, and now it is "
                f"{now}: they are not merged; expected another folder"
            )


class Journal:
    """The open journal of a folder: appends records, each on the disk before the call returns."""

    def __init__(self, folder: Path, header: Record) -> None:
        """Open the journal of *folder*, or begin one with *header*.

        Raises:
            FileError: it is of another GPU, is none, cannot be written, or is in use.
        """
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known, self.records = read(folder)
            # Unbuffered: what finds no room must not wait to be written when the file is closed.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise FileError(
                f"--out {plain(str(folder))}: {error.strerror}; expected a writable folder"
            ) from None
        try:
            self._begin(path, known, header)
        except FileError:
            self._file.close()
            raise

    def _begin(self, path: Path, known: Record, header: Record) -> None:
        """Lock the file; go on after what is *known*, or write *header*."""
        folder = path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FileError(
                f"--out {plain(str(folder))} is being measured by another process; "
                "expected another folder"
            ) from None
        if known:
            refuse_other(known, header, folder)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
        else:
            if any(folder.glob("*.parquet")):
                path.unlink()
                raise FileError(
                    f"--out {plain(str(folder))} has tables and no {NAME}: they would be "
                    "overwritten; expected another folder"
                )
            self._file.truncate(0)
            self.append({"format": FORMAT, "version": VERSION, **header})
            self.records.clear()

    def append(self, record: Record) -> None:
        """Add *record*.

        Raises:
            FileError: there is no room for it.
        """
        try:
            line = json.dumps(record).encode() + b"\n"
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FileError(f"{NAME} cannot be written: {error.strerror}; expected room") from None
        self.records.append(record)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
