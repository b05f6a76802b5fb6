"""Typed JSON lines: msgspec checks every value; here its errors become one line for a user."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from workloads.errors import TraceError, did_you_mean, quote
from workloads.readers.source import Source
from workloads.record import MAX_ARRIVAL_S, MAX_TOKENS, PS_PER_S

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
"""A number of tokens. msgspec takes neither 10.0 nor true for an int."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S)]
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S * 1000)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_ARRIVAL_S * 10**9)]

Multiplier = Annotated[float, Meta(gt=0, le=1e9)]
"""Seconds in a unit of time."""

PS_PER_MS = PS_PER_S // 1000

T = TypeVar("T", bound=msgspec.Struct)


def rows(struct: type[T], source: Source) -> Iterator[tuple[int, T]]:
    """Yield the number of every item of *source* and the item as a *struct*.

    Raises:
        TraceError: naming the field, its value and the expected form; `Source.number` is the line.
    """
    for numbers, texts, found in batches(struct, source):
        items = zip(numbers, texts, found, strict=True)
        for source.number, source.text, row in items:
            yield source.number, row


def batches(
    struct: type[T], source: Source
) -> Iterator[tuple[Sequence[int], Sequence[bytes], Sequence[T]]]:
    """Yield the items of *source* some at a time: their numbers, texts and structs; see `rows`."""
    for numbers, texts in source.chunks():
        yield from decoded(struct, source, numbers, texts)


def decoded(
    struct: type[T], source: Source, numbers: Sequence[int], texts: Sequence[bytes]
) -> Iterator[tuple[Sequence[int], Sequence[bytes], Sequence[T]]]:
    """Yield the items *texts* of a chunk of *source*, as `batches` does."""
    decoder = msgspec.json.Decoder(struct)
    for start in range(0, len(texts), _BATCH):
        some = texts[start : start + _BATCH]
        places = numbers[start : start + _BATCH]
        found = decode_lines(decoder, some)
        if found is not None:
            yield places, some, found
            continue
        for source.number, source.text in zip(places, some, strict=True):  # which is at fault?
            yield (source.number,), (source.text,), (decode_line(struct, source.text),)


def decode_lines(decoder: msgspec.json.Decoder[T], lines: Sequence[bytes]) -> list[T] | None:
    """Answer *lines* decoded, or None if one of them is not what *decoder* expects."""
    try:
        found = decoder.decode_lines(b"\n".join(lines))
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if len(found) == len(lines) else None


_BATCH = 1024
"""Lines that are decoded at a time."""


def decode_line(struct: type[T], line: bytes) -> T:
    """Answer *line* as a *struct*.

    Raises:
        TraceError: naming the field, its value and the expected form.
    """
    try:
        return msgspec.json.decode(line, type=struct)
    except msgspec.ValidationError as error:
        _refuse_value(struct, line, error)
    except msgspec.DecodeError as error:
        _refuse_syntax(line, error)
    except RecursionError as error:
        raise TraceError(f"nested too deeply: {quote(_text(line))}") from error


def _text(line: bytes) -> str:
    """Answer the start of *line* for a message."""
    return line[:400].decode(errors="replace")


def _refuse_value(
    struct: type[msgspec.Struct], line: bytes, error: msgspec.ValidationError
) -> NoReturn:
    """Raise `TraceError` for JSON that is well formed but holds a wrong key or value."""
    reason = str(error)
    keys = struct.__struct_encode_fields__
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL):
        key = unknown[1]
        raise TraceError(f"unknown key {quote(key)}: {did_you_mean(key, keys)}") from error
    if missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
        raise TraceError(f"{missing[1]} is missing: expected keys {', '.join(keys)}") from error
    reason, _, path = reason.partition(" - at `$")
    if not path:
        raise TraceError(f"line {quote(_text(line))}: expected a JSON object") from error
    reason = reason.replace("out of range", "out of range: expected a finite one, of fewer digits")
    reason = reason.replace(" | null", "").replace("`", "").replace("Expected", "expected", 1)
    field = path.rstrip("`").lstrip(".")
    raise TraceError(f"{field} {_value_at(line, path)}: {reason}") from error


_MAX_SHOWN = 1 << 20
"""Longest line that is decoded once more, for the sake of a message."""


def _value_at(line: bytes, path: str) -> str:
    """Answer the value at *path* (".prompt[0][1]") of *line* for a message, or else *line*."""
    if len(line) > _MAX_SHOWN:
        return quote(_text(line))
    try:
        value: Any = msgspec.json.decode(line)
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[key] if key else value[int(index)]
    # The lookups fail where a key stands twice: the last one counts here, the faulty one there.
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        return quote(_text(line))
    return quote(value)


def _refuse_syntax(line: bytes, error: msgspec.DecodeError) -> NoReturn:
    """Raise `TraceError` for a line that is no JSON, naming the key before the fault."""
    if "truncated" in str(error):
        end = line[-40:].decode(errors="replace")
        end = f"...{end}" if len(line) > 40 else end
        raise TraceError(f"line ends too early, {quote(end)}: truncated?") from error
    what, _, position = str(error).removeprefix("JSON is malformed: ").partition(" (byte ")
    column = int(position.rstrip(")") or 0)
    before = line[:column].decode(errors="replace")
    keys = re.findall(r'"(\w{1,80})"\s*:', before[-10_000:])
    field = f"{keys[-1]}: " if keys and "trailing" not in what else ""
    found = line[column : column + 80].decode(errors="replace")
    expected = "a finite number" if found.startswith(("NaN", "Infinity")) else "valid JSON"
    raise TraceError(
        f"{field}{what} at column {len(before) + 1}, {quote(found)}: expected {expected}"
    ) from error
