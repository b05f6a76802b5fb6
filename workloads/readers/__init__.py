"""Every trace format: one function in a file of its own and one line in `workloads.formats`.

A reader gets the numbered lines of a file, without line ends and without blank lines, and yields a
`RequestRecord` for each request, and a string for each note on what it changed or left out. It
raises `TraceError` with the field and the expected form only: `read_trace` adds file and line.
"""

import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from workloads.errors import TraceError, did_you_mean, nearest, plain, quote
from workloads.formats import READERS
from workloads.record import RequestRecord, Trace, build_trace

_BOM = b"\xef\xbb\xbf"


class _Lines:
    """The lines of a file as (1-based number, stripped text), blank ones skipped.

    One line is in memory at a time. Where all lines are blank, `TraceError` is raised.
    *number*, *text* and *digest* speak of what was read so far.
    """

    def __init__(self, path: Path) -> None:
        self.number = 0
        self.text = ""
        self.empty = True
        self.digest = hashlib.sha256()
        self._raw = _raw_lines(path)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        for raw in self._raw:
            self.number += 1
            self.text = ""
            self.digest.update(raw)
            self.text = _decoded(raw.removeprefix(_BOM) if self.number == 1 else raw).strip()
            if self.text:
                self.empty = False
                return self.number, self.text
        if self.empty:
            raise TraceError("empty: expected at least one request")
        raise StopIteration


def _raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of *path* with their ends; raise `TraceError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings)
        raise TraceError(
            f"no such file: {hint or 'expected the path of a trace'}".strip()
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise TraceError(f"cannot be read ({reason}): expected a readable file") from error


def _decoded(raw: bytes) -> str:
    """Answer *raw* as text; raise `TraceError` naming the first byte that is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise TraceError(
            f"byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8: "
            "expected plain text, uncompressed"
        ) from error


def _format_of(line: str) -> str | None:
    """Answer the first format whose marks *line* holds."""
    return next((n for n, r in READERS.items() if all(mark in line for mark in r.marks)), None)


def _detected(first_line: str) -> str:
    """Answer the format of a file that starts with *first_line*, or raise `TraceError`."""
    found = _format_of(first_line)
    if found is None and first_line.startswith("{"):
        hinted = (n for n, r in READERS.items() if any(hint in first_line for hint in r.hints))
        found = next(hinted, None)
    if found is None:
        known = "; ".join(f"{name} ({' and '.join(r.marks)})" for name, r in READERS.items())
        raise TraceError(
            f"unknown format {quote(first_line)}: expected the first line of one of {known}"
        )
    return found


def read_trace(path: str | Path, trace_format: str | None = None) -> Trace:
    """Answer the trace in the file *path*, read as *trace_format*, by default by its first line.

    Raises:
        TraceError: one line that names the file, the line, the field and what was expected.
    """
    if trace_format is not None and trace_format not in READERS:
        raise TraceError(
            f"{plain(str(path))}: trace format {quote(trace_format)} is unknown: "
            f"{did_you_mean(trace_format, READERS)}"
        )
    where = plain(str(path))
    lines = _Lines(Path(path))
    try:
        first = next(lines)
        trace_format = trace_format or _detected(first[1])
        found = list(READERS[trace_format].read(chain([first], lines)))
    except TraceError as error:
        at = f"{where}, line {lines.number}" if lines.number else where
        other = _format_of(lines.text)
        hint = f" (this line looks like {other})" if other not in {None, trace_format} else ""
        raise TraceError(f"{at}: {error}{hint}") from error
    return build_trace(
        [record for record in found if isinstance(record, RequestRecord)],
        name=where,
        trace_format=trace_format,
        sha256=lines.digest.hexdigest(),
        notes=[note for note in found if isinstance(note, str)],
    )
