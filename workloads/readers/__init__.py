"""Every trace format: one function and one line in `workloads.formats`.

A reader gets a `Source` (numbered lines, or the elements of a JSON array, without blank ones) and
its options by name, and yields a `RequestRecord` for each request, or `Rows` for many, and a string
for each note on what it changed or left out. It raises `TraceError` with the field and the expected
form only: `read_trace` adds file and line.
"""

import hashlib
import math
import os
from collections.abc import Generator
from contextlib import closing
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from workloads.build import TraceBuilder
from workloads.collector import few_collections
from workloads.errors import OptionError, TraceError, did_you_mean, plain, quote
from workloads.formats import READERS
from workloads.readers.source import Source, opened
from workloads.record import RequestRecord, Rows, Trace

if TYPE_CHECKING:
    from workloads.formats import Read


def _format_of(item: str) -> str | None:
    """Answer the first format whose marks *item* holds."""
    fitting = (n for n, r in READERS.items() if r.marks and all(mark in item for mark in r.marks))
    return next(fitting, None)


def _detected(first_item: str) -> str:
    """Answer the format of a file that starts with *first_item*, or raise `TraceError`."""
    found = _format_of(first_item)
    if found is None and first_item.startswith("{"):
        hinted = (n for n, r in READERS.items() if any(hint in first_item for hint in r.hints))
        found = next(hinted, None)
    if found is None:
        raise TraceError(
            f"unknown format {quote(first_item)}: expected the first line of one of "
            f"{', '.join(READERS)}"
        )
    return found


def read_trace(path: str | os.PathLike[str], trace_format: str | None = None) -> Trace:
    """Answer the trace in *path*, read as *trace_format*, by default by its first line.

    *path* is a file, plain or compressed by gzip or zstd, a folder of files of one format, or ``-``
    for standard input. *trace_format* may set options of the format: ``NAME:KEY=VALUE,KEY=VALUE``.

    Raises:
        TraceError: one line that names the file, the line, the field and what was expected.
    """
    where = plain(os.fspath(path))
    name, options = None, ""
    if trace_format is not None:
        name, _, options = trace_format.partition(":")
        if name not in READERS:
            raise TraceError(
                f"{where}: trace format {quote(name)} is unknown: {did_you_mean(name, READERS)}"
            )
    builder = TraceBuilder()
    digest = hashlib.sha256()
    files = _files(Path(path), where)
    for part, one in enumerate(files):
        is_alone = one == Path(path)
        file = _File(one, where if is_alone else plain(str(one)), None if is_alone else part)
        with few_collections(), closing(file.read(name, options, digest)) as found:
            builder.add(found, file.where)
        builder.count_from(file.origin_ps)
        name = file.name
    assert name is not None, "there is a file"
    return builder.finish(name=where, trace_format=name, sha256=digest.hexdigest())


def read_records(
    path: str | os.PathLike[str], trace_format: str | None = None
) -> Generator[tuple[RequestRecord, bytes], None, None]:
    """Yield the requests of a trace, as its reader found them, each with the text of its item.

    Of requests that were read many at once there is no text; those of lengths only are left out.
    *path* and *trace_format* as of `read_trace`.

    Raises:
        TraceError: as `read_trace`, up to where it is read.
    """
    name, _, options = (trace_format or "").partition(":")
    for part, one in enumerate(_files(Path(path), plain(os.fspath(path)))):
        file = _File(one, plain(str(one)), None if one == Path(path) else part)
        with closing(file.read(name or None, options, hashlib.sha256())) as found:
            for some in found:
                if isinstance(some, RequestRecord):
                    yield some, file.text
                elif isinstance(some, Rows) and some.segments is not None:
                    for row in range(len(some.lines)):
                        yield some.record(row), b""


def _files(path: Path, where: str) -> list[Path]:
    """Answer the files of a trace, by name; of a folder those that are not hidden, nor prose."""
    try:
        if not path.is_dir():
            return [path]
        files = sorted(
            p
            for p in path.iterdir()
            if p.is_file() and not p.name.startswith(".") and p.suffix not in {".md", ".txt"}
        )
    except (OSError, ValueError):
        return [path]  # opening it tells why
    if not files:
        raise TraceError(f"{where}: no files in this folder: expected those of a trace")
    return files


class _File:
    """One file of a trace: what it yields, with file and line in every error."""

    def __init__(self, path: Path, where: str, part: int | None) -> None:
        self.path = path
        self.where = where
        self._part = part
        self._source: Source | None = None
        self._name: str | None = None

    def read(
        self, name: str | None, options: str, digest: Any
    ) -> Generator[RequestRecord | Rows | str, None, None]:
        """Yield what the reader *name* yields; None finds out which. `name` says it then.

        Raises:
            TraceError: naming file and line.
        """
        try:
            with opened(self.path) as file:
                self._source = source = Source(self.path, file, digest, self._part)
                source.begin()
                self._name = name or _detected(source.first.decode(errors="replace"))
                reader = READERS[self._name].read
                yield from reader(source, **_options(reader, self._name, options))
                source.drain()
        except TraceError as error:
            raise self._located(error) from error

    @property
    def text(self) -> bytes:
        """The item that was read last."""
        return b"" if self._source is None else self._source.text

    @property
    def name(self) -> str:
        """The format, once it has been read."""
        assert self._name is not None
        return self._name

    @property
    def origin_ps(self) -> int | None:
        """When its times count from, once it has been read."""
        return None if self._source is None else self._source.origin_ps

    def _located(self, error: TraceError) -> TraceError:
        source = self._source
        if isinstance(error, OptionError):
            return OptionError(f"{self.where}: {error}")
        if source is None or not source.number:
            return TraceError(f"{self.where}: {error}")
        other = _format_of(source.text.decode(errors="replace"))
        hint = f" (this line looks like {other})" if other not in {None, self._name} else ""
        return TraceError(f"{self.where}, line {source.number}: {error}{hint}")


def _options(reader: "Read", name: str, text: str) -> dict[str, Any]:
    """Answer the options of the format *name* that *text* sets, KEY=VALUE,KEY=VALUE.

    Raises:
        OptionError: there is no such option, or its value is of another type or out of bounds.
    """
    defaults = {
        key: parameter.default
        for key, parameter in signature(reader).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    }
    types = get_type_hints(reader, include_extras=True)
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if key not in defaults:
            choices = did_you_mean(key, defaults) if defaults else f"{name} has none"
            raise OptionError(f"option {quote(key)} is unknown: {choices}")
        kind = type(defaults[key])
        expected = _KINDS[kind]
        try:
            options[key] = msgspec.convert(value, types[key], strict=False)
            usable = bool(equals and value) and (kind is not float or math.isfinite(options[key]))
        except msgspec.ValidationError as error:
            usable = False
            _, is_bound, bound = str(error).partition("` ")  # "Expected `int` >= 1"
            expected += f" {bound}" if is_bound and bound[0] in "<>" else ""
        if not usable:
            raise OptionError(f"option {key} {quote(value)}: expected {expected}")
    return options


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
