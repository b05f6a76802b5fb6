"""Azure LLM inference traces of 2023: a CSV of lengths; what the prompts say is unknown.

Source: https://github.com/Azure/AzurePublicDataset, ``AzureLLMInferenceTrace_{conv,code}.csv``.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

from workloads.errors import TraceError, quote
from workloads.formats import AZURE2023_HEADER as HEADER
from workloads.record import MAX_TOKENS, PS_PER_S, RequestRecord

_TICKS_PER_S = 10**7
"""Timestamps have seven fractional digits; Python's datetime keeps six, so ticks are integers."""

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,7}))?", re.ASCII)
_EPOCH = datetime.fromisoformat("1970-01-01")


def _ticks(text: str) -> int:
    """Answer the timestamp *text* in units of 100 ns since 1970."""
    match = _TIMESTAMP.fullmatch(text)
    seconds, fraction = match.groups(default="") if match else ("", "")
    try:
        since = datetime.fromisoformat(seconds) - _EPOCH
    except ValueError as error:
        raise TraceError(
            f"TIMESTAMP {quote(text)}: expected YYYY-MM-DD HH:MM:SS.fffffff"
        ) from error
    return (since.days * 86_400 + since.seconds) * _TICKS_PER_S + int(fraction.ljust(7, "0"))


def _count(column: str, text: str) -> int:
    """Answer *text* as a number of tokens."""
    if text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= MAX_TOKENS:
        return int(text)
    hint = "" if text else " (truncated?)"
    raise TraceError(f"{column} {quote(text)}: expected an integer, 1 to {MAX_TOKENS}{hint}")


def read_azure2023(lines: Iterable[tuple[int, str]]) -> Iterator[RequestRecord]:
    """Yield the requests of CSV *lines*; arrivals count from the earliest timestamp.

    Raises:
        TraceError: on another header, a wrong number of columns, or a value of another form.
    """
    columns = HEADER.split(",")
    rows: list[tuple[int, int, int, int]] = []
    for place, (number, line) in enumerate(lines):
        if place == 0:
            if line != HEADER:
                raise TraceError(f"header {quote(line)}: expected {HEADER}")
            continue
        values = line.split(",", len(columns))
        if len(values) != len(columns):
            hint = " (truncated?)" if len(values) < len(columns) else ""
            raise TraceError(f"row {quote(line)}: expected {len(columns)} columns, {HEADER}{hint}")
        ticks = _ticks(values[0])
        rows.append((number, ticks, _count(columns[1], values[1]), _count(columns[2], values[2])))
    start = min((ticks for _, ticks, _, _ in rows), default=0)
    for number, ticks, prompt, output in rows:
        yield RequestRecord(number, (ticks - start) * (PS_PER_S // _TICKS_PER_S), prompt, output)
