"""The files of a trace as numbered items: lines, or the elements of a JSON array.

Compressed or not, one block of text is in memory at a time. What is no trace ends in a `TraceError`
before it fills memory: lines without end, archives that expand without end, bytes that are no text.
"""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from workloads.errors import TraceError, nearest
from workloads.readers.elements import elements

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
_PARQUET = b"PAR1"
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""How compressed files start."""

MAX_ITEM_BYTES = 1 << 26
"""Longest line, or element of a JSON array: 64 MiB."""

MAX_DOCUMENT_BYTES = 1 << 27
"""Longest JSON object over many lines, which only results and sessions are."""

MAX_RATIO = 250
"""How many times longer than its file a text may be. Traces compress up to about 50 times."""

Chunk = tuple[Sequence[int], list[bytes]]
"""Numbers (1-based) and texts of some items."""


class _Digested(io.RawIOBase):
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: BinaryIO, digest: Any) -> None:
        self._file = file
        self._digest = digest
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._digest.update(data)
        self.num_bytes += len(data)
        buffer[: len(data)] = data
        return len(data)


def opened(path: Path) -> BinaryIO:
    """Answer the open file *path*, or standard input for ``-``; raise `TraceError` if it cannot."""
    if str(path) == "-":
        if sys.stdin is None:
            raise TraceError("standard input is closed: expected a trace on it")
        return sys.stdin.buffer
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings)
        raise TraceError(
            f"no such file: {hint or 'expected the path of a trace'}".strip()
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _unreadable(error) from error


def _unreadable(error: OSError | ValueError) -> TraceError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    reason = " ".join(reason.split())
    return TraceError(f"cannot be read ({reason}): expected a readable file, whole")


class Source:
    """One file of a trace, read once.

    Attributes:
        path: the file.
        number: of the item that is being read, 1-based; 0 before the first.
        text: that item, nothing where it is no text.
        first: the first item, which tells the format.
        part: which file of a folder it is, from 0.
        origin_ps: when its times count from, on a clock that all files of a folder have; a reader
            sets it that counts from the earliest. Else they all start together.
        prefix: what tells the names in it from those in other files of a folder; else nothing.
    """

    def __init__(self, path: Path, file: BinaryIO, digest: Any, part: int | None) -> None:
        self.path = path
        self.part = part or 0
        self.prefix = "" if part is None else f"{path.name}/"
        self.number = 0
        self.origin_ps: int | None = None
        self.text = b""
        self._raw = _Digested(file, digest)
        self._num_bytes = 0
        self._is_compressed = False
        self._stream: Any = io.BufferedReader(self._raw, _BLOCK)
        self._chunks: Iterator[Chunk] = iter(())
        self._ahead: Chunk | None = None
        self.first = b""

    def begin(self) -> None:
        """Read the start, up to the first item.

        Raises:
            TraceError: there is none, or it is no text.
        """
        start = self.first = self._guarded(lambda: self._stream.peek(4)[:4])
        if start == _PARQUET:
            return
        codec = next((name for magic, name in _CODECS.items() if start.startswith(magic)), None)
        if codec is not None:
            import pyarrow as pa  # noqa: PLC0415  # a plain file need not wait for it

            self._is_compressed = True
            self._stream = pa.CompressedInputStream(pa.PythonFile(self._stream), codec)
        self._chunks = self._read_chunks()
        self._ahead = next(self._chunks, None)
        if self._ahead is None:
            raise TraceError("empty: expected at least one request")
        self.number, self.text = self._ahead[0][0], self._ahead[1][0]
        self.first = self.text

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error

    def _read(self, size: int = _BLOCK) -> bytes:
        """Answer up to *size* more bytes of the text, nothing at its end."""
        data = self._guarded(lambda: self._stream.read(size))
        self._num_bytes += len(data)
        if (
            self._is_compressed
            and self._num_bytes > MAX_ITEM_BYTES + MAX_RATIO * self._raw.num_bytes
        ):
            raise TraceError(f"expands to more than {MAX_RATIO} times its size: expected a trace")
        return data

    def file(self) -> BinaryIO:
        """Open the file again, to be read in any order; raise `TraceError` for a pipe."""
        if str(self.path) == "-":
            raise TraceError("Parquet cannot be read from a pipe: expected a file")
        return opened(self.path)

    def drain(self) -> None:
        """Read what is left, so that the digest is that of the whole file."""
        while self._guarded(lambda: self._raw.read(_BLOCK) or b""):
            pass

    def chunks(self) -> Iterator[Chunk]:
        """Yield the items that are not blank, some at a time. To be called once.

        Raises:
            TraceError: an item is longer than `MAX_ITEM_BYTES`, or is no UTF-8.
        """
        while self._ahead is not None:
            yield self._ahead
            self._ahead = next(self._chunks, None)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the items one by one; *number* and *text* follow."""
        for numbers, texts in self.chunks():
            for self.number, self.text in zip(numbers, texts, strict=True):
                yield self.number, self.text

    def _read_chunks(self) -> Iterator[Chunk]:
        start = self._read().removeprefix(_BOM)
        end = 0  # number of the last line before the start
        while not start.strip():
            end += start.count(b"\n")
            start = self._read()
            if not start or self._num_bytes > MAX_ITEM_BYTES:
                self.number = end or int(self._num_bytes > 0)
                raise TraceError("empty: expected at least one request")
        if start.lstrip().startswith(b"["):
            for number, text in elements(self._blocks(start), MAX_ITEM_BYTES, end + 1):
                self.number, self.text = number, b""
                self._check_text([number], [text])
                yield [number], [text]
            return
        lines = self._lines(start, end)
        first = next(lines)
        if first[1][0].startswith(b"{") and _is_cut(first[1][0]):
            yield self._document(first, lines)
        else:
            yield first
            yield from lines

    def _blocks(self, start: bytes) -> Iterator[bytes]:
        while start:
            yield start
            start = self._read()

    def _lines(self, start: bytes, end: int) -> Iterator[Chunk]:
        """Yield the lines after line *end* without their ends, blank ones skipped."""
        parts: list[bytes] = []
        size = 0
        for data in self._blocks(start):
            cut = data.rfind(b"\n")
            if cut >= 0:
                text = b"".join([*parts, data[:cut]])
                lines = text.split(b"\n")
                yield from self._numbered(end, lines, is_ascii=text.isascii())
                end += len(lines)
                parts, size = [], 0
            parts.append(data[cut + 1 :])
            size += len(parts[-1])
            if size > MAX_ITEM_BYTES:
                self.number, self.text = end + 1, b""
                raise TraceError(
                    f"line of more than {MAX_ITEM_BYTES:,} bytes: expected one request a line"
                )
        yield from self._numbered(end, [b"".join(parts)], is_ascii=False)

    def _numbered(self, end: int, lines: list[bytes], *, is_ascii: bool) -> Iterator[Chunk]:
        """Yield *lines*, which come after line *end*, as a chunk if they are not all blank."""
        texts = list(map(bytes.strip, lines))
        numbers: Sequence[int] = range(end + 1, end + 1 + len(texts))
        if not all(texts):
            numbers = [number for number, text in zip(numbers, texts, strict=True) if text]
            texts = [text for text in texts if text]
        if texts:
            if not is_ascii:
                self._check_text(numbers, texts)
            yield numbers, texts

    def _check_text(self, numbers: Sequence[int], texts: list[bytes]) -> None:
        """Raise `TraceError` naming the first byte that is not UTF-8."""
        if all(map(bytes.isascii, texts)):
            return
        for number, text in zip(numbers, texts, strict=True):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                self.number, self.text = number, b""
                raise TraceError(
                    f"byte 0x{text[error.start]:02x} at column {error.start + 1} is not UTF-8: "
                    "expected text, plain or compressed by gzip or zstd"
                ) from error

    def _document(self, first: Chunk, lines: Iterator[Chunk]) -> Chunk:
        """Answer a JSON object that goes over many lines as one item."""
        (number, *_), texts = first
        size = sum(map(len, texts))
        for _, more in lines:
            texts += more
            size += sum(map(len, more))
            if size > MAX_DOCUMENT_BYTES:
                self.number, self.text = number, b""
                raise TraceError(f"JSON object of more than {MAX_DOCUMENT_BYTES:,} bytes")
        return [number], [b"\n".join(texts)]


def _is_cut(line: bytes) -> bool:
    """Answer whether *line* is the start of a JSON value that goes on."""
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except RecursionError:
        return False
    return False
