"""Cuts a JSON array into its elements while it is read: what is in them is not looked at."""

import re
from collections.abc import Iterable, Iterator

from workloads.errors import TraceError

_MARK = re.compile(rb'["{}\[\],]')
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE = b'"'


def elements(blocks: Iterable[bytes], max_bytes: int, line: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of the JSON array in *blocks*, each with the line where it starts.

    The array starts on *line*.

    Raises:
        TraceError: an element is longer than *max_bytes*; the array has no end, or something
            behind it.
    """
    cutter = _Cutter(line)
    for block in blocks:
        yield from cutter.cut(block)
        if cutter.size > max_bytes:
            raise TraceError(f"JSON value of more than {max_bytes:,} bytes in the array")
    if cutter.depth:
        raise TraceError("JSON array ends too early: truncated?")


class _Cutter:
    """The state between two blocks: *depth* of brackets, and *size* of the element so far."""

    def __init__(self, line: int) -> None:
        self.depth = self.size = 0
        self._line = line
        self._in_string = self._has_ended = False
        self._parts: list[bytes] = []
        self._held = b""  # a backslash that a block ends with

    def cut(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the elements that end in *data*."""
        block, self._held = self._held + data, b""
        start = 0
        for begin, end in self._marks(block):
            mark = block[begin:end]
            self.depth += (mark in b"[{") - (mark in b"]}")
            if mark == b"[" and self.depth == 1:
                start = end
            elif self.depth == 0 or (mark == b"," and self.depth == 1):
                self._parts.append(block[start:begin])
                number, text = self._element()
                if text or mark == b",":
                    yield number, text
                start = end
                self._has_ended = self.depth == 0
        rest = block[start : len(block) - len(self._held)]
        if self._has_ended and rest.strip():
            raise TraceError("text behind the end of the JSON array: expected nothing")
        self._parts.append(rest)
        self.size += len(rest)

    def _marks(self, block: bytes) -> Iterator[tuple[int, int]]:
        """Yield where the brackets and commas outside strings are, until the array has ended."""
        position = 0
        while not self._has_ended:
            if self._in_string:
                inside = _IN_STRING.match(block, position)
                position = inside.end() if inside else position
                if block[position : position + 1] != _QUOTE:
                    self._held = block[position:]
                    return
                position += 1
            mark = _MARK.search(block, position)
            self._in_string = mark is not None and mark[0] == _QUOTE
            if mark is None:
                return
            position = mark.end()
            if not self._in_string:
                yield mark.span()

    def _element(self) -> tuple[int, bytes]:
        text = b"".join(self._parts)
        self._parts, self.size = [], 0
        number = self._line + text[: len(text) - len(text.lstrip())].count(b"\n")
        self._line += text.count(b"\n")
        return number, text.strip()
