"""Cuts a JSON array into its elements while it is read: what is in them is not looked at."""

import re
from collections.abc import Iterable, Iterator

from workloads.errors import TraceError

_MARK = re.compile(rb'["{}\[\],]')
_IN_STRING = re.compile(rb'(?:[^"\\]|\\.)*+', re.DOTALL)


def elements(blocks: Iterable[bytes], max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of the JSON array in *blocks*, each with the line where it starts.

    Raises:
        TraceError: an element is longer than *max_bytes*; the array has no end, or something
            behind it. The message starts with the line.
    """
    depth, line = 0, 1
    in_string = has_ended = False
    parts: list[bytes] = []
    held = b""  # an escape that a block cuts

    def element() -> tuple[int, bytes]:
        nonlocal line
        text = b"".join(parts)
        number = line + text[: len(text) - len(text.lstrip())].count(b"\n")
        line += text.count(b"\n")
        parts.clear()
        return number, text.strip()

    for data in blocks:
        block, held = held + data, b""
        start = position = 0
        while not has_ended:
            if in_string:
                inside = _IN_STRING.match(block, position)
                position = inside.end() if inside else position
                if position == len(block):
                    break
                if block[position] != 0x22:
                    block, held = block[:position], block[position:]
                    break
                in_string = False
                position += 1
            mark = _MARK.search(block, position)
            if mark is None:
                break
            position = mark.end()
            match mark[0]:
                case b'"':
                    in_string = True
                case b"[" | b"{":
                    depth += 1
                    if depth == 1:
                        start = position
                case b"]" | b"}":
                    depth -= 1
                    has_ended = depth == 0
            if depth == 0 or (depth == 1 and mark[0] == b","):
                parts.append(block[start : mark.start()])
                number, text = element()
                if text or not has_ended:
                    yield number, text
                start = position
        parts.append(block[start:])
        if has_ended and b"".join(parts).strip():
            raise TraceError("text behind the end of the JSON array: expected nothing")
        if sum(map(len, parts)) > max_bytes:
            raise TraceError(f"JSON value of more than {max_bytes:,} bytes in the array")
    if not has_ended:
        raise TraceError("JSON array ends too early: truncated?")
