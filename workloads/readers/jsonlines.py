"""Typed JSON lines: msgspec checks every value; here its errors become one line for a user."""

import re
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from workloads.errors import TraceError, did_you_mean, quote
from workloads.record import MAX_TOKENS

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
"""A number of tokens. msgspec takes neither 10.0 nor true for an int."""

T = TypeVar("T", bound=msgspec.Struct)


def decode_line(struct: type[T], line: str) -> T:
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
        raise TraceError(f"nested too deeply: {quote(line)}") from error


def _refuse_value(
    struct: type[msgspec.Struct], line: str, error: msgspec.ValidationError
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
        raise TraceError(f"line {quote(line)}: expected a JSON object") from error
    reason = reason.replace("out of range", "out of range: expected a finite one, of fewer digits")
    reason = reason.replace(" | null", "").replace("`", "").replace("Expected", "expected", 1)
    field = path.rstrip("`").lstrip(".")
    raise TraceError(f"{field} {_value_at(line, path)}: {reason}") from error


def _value_at(line: str, path: str) -> str:
    """Answer the value at *path* (".prompt[0][1]") of *line* for a message, or else *line*."""
    try:
        value: Any = msgspec.json.decode(line)
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[key] if key else value[int(index)]
    # The lookups fail where a key stands twice: the last one counts here, the faulty one there.
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        return quote(line)
    return quote(value)


def _refuse_syntax(line: str, error: msgspec.DecodeError) -> NoReturn:
    """Raise `TraceError` for a line that is no JSON, naming the key before the fault."""
    if "truncated" in str(error):
        end = f"...{line[-40:]}" if len(line) > 40 else line
        raise TraceError(f"line ends too early, {quote(end)}: truncated?") from error
    what, _, position = str(error).removeprefix("JSON is malformed: ").partition(" (byte ")
    text = line.encode()
    column = int(position.rstrip(")") or 0)
    before = text[:column].decode(errors="replace")
    keys = re.findall(r'"(\w{1,80})"\s*:', before[-10_000:])
    field = f"{keys[-1]}: " if keys and "trailing" not in what else ""
    found = text[column : column + 80].decode(errors="replace")
    expected = "a finite number" if found.startswith(("NaN", "Infinity")) else "valid JSON"
    raise TraceError(
        f"{field}{what} at column {len(before) + 1}, {quote(found)}: expected {expected}"
    ) from error
