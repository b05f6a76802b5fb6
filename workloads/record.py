"""What a trace is: one record a request, kept as columns, with the identity of every prompt prefix.

A prompt is a sequence of segments ``(content id, length)``; token *i* of a segment is the pair
(content id, *i*). A shared system prompt is one segment, a Mooncake hash id is a segment of 512
tokens, a token id is a segment of length 1. The output of a request is a segment of its own,
``out:<request id>``, so that a later prompt can repeat it.

Prefix identity needs no hashing of tokens. Two prompts agree up to a token exactly when they agree
on all segments before it, on the content id of the segment that holds it, and on the offset in that
segment. `Trace` therefore gives every segment a *node*: an integer shared by all segments with the
same content behind the same prefix. The pair (node, offset) names a whole prefix, which is what
vLLM's chained block hash does (``v1/core/kv_cache_utils.py``, ``hash_block_tokens``).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workloads.errors import TraceError, quote

PS_PER_S = 10**12
"""Ticks a second. Time is an integer number of picoseconds, so that sums are exact."""

MAX_ARRIVAL_S = 9_000_000
"""Latest arrival in seconds (104 days): int64 picoseconds end at 9.22e6 s."""

MAX_TOKENS = 2**31 - 1
"""Longest prompt or output, so that (node, offset) fits one 64-bit key."""

ContentId = str | int
Segment = tuple[ContentId, int]
IntArray = npt.NDArray[np.int64]


class RequestRecord(NamedTuple):
    """One request as a reader found it. Readers yield these; `build_trace` checks them.

    *line* is where it stood (1-based), for messages. *segments* is None where the trace says
    nothing about content: then no other prompt shares anything with it. Requests of one
    *session_id* are its turns, in the order of arrival; *think_ps* is how long after the end of the
    turn before one is asked.
    """

    line: int
    arrival_ps: int
    num_prompt_tokens: int
    num_output_tokens: int
    request_id: str | None = None
    segments: Sequence[Segment] | None = None
    session_id: str | None = None
    think_ps: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in arrival order, as columns of equal length.

    Attributes:
        arrival_ps: int64 [num_requests], picoseconds, never decreasing.
        num_prompt_tokens: int64 [num_requests].
        num_output_tokens: int64 [num_requests], what the request would generate if nothing cut it.
        request_ids: one name a request, unique.
        segment_offsets: int64 [num_requests + 1]; request *i* owns segments
            ``[segment_offsets[i], segment_offsets[i + 1])``, at least one.
        segment_nodes: int64 [num_segments], prefix node of each prompt segment (module docstring).
        segment_ends: int64 [num_segments], prompt tokens up to and including the segment.
        output_nodes: int64 [num_requests], prefix node of the output segment.
        num_shareable_tokens: int64 [num_requests], leading tokens of prompt and output in segments
            whose node some other request has too.
        previous_turn: int64 [num_requests], the row of the turn before in the same session; -1
            where there is none.
        think_ps: int64 [num_requests], picoseconds from the end of that turn to this one.
        name: the file, for messages and the manifest.
        trace_format: the reader's name.
        sha256: of the bytes read.
        notes: what the reader changed or left out, in words for the report.
    """

    arrival_ps: IntArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    request_ids: list[str]
    segment_offsets: IntArray
    segment_nodes: IntArray
    segment_ends: IntArray
    output_nodes: IntArray
    num_shareable_tokens: IntArray
    previous_turn: IntArray
    think_ps: IntArray
    name: str
    trace_format: str
    sha256: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.request_ids)


class _PrefixNodes:
    """Numbers every distinct (prefix, content): equal numbers, equal token sequences.

    The key of a node is (node before it, tokens of that node before it, content id).
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, Hashable], int] = {}

    def walk(self, segments: Iterable[tuple[Hashable, int]]) -> tuple[list[int], list[int]]:
        """Answer the node of each of *segments* and the tokens up to and including it."""
        numbers = self._numbers
        nodes: list[int] = []
        ends: list[int] = []
        node, length_before, end = 0, 0, 0
        for content, length in segments:
            node = numbers.setdefault((node, length_before, content), len(numbers) + 1)
            length_before = length
            end += length
            nodes.append(node)
            ends.append(end)
        return nodes, ends


def _check(record: RequestRecord, where: str, seen: dict[str, int], request_id: str) -> None:
    """Raise `TraceError` unless the engine can run *record*."""
    at = f"{where}, line {record.line}"
    if not 0 <= record.arrival_ps <= MAX_ARRIVAL_S * PS_PER_S:
        raise TraceError(
            f"{at}: arrival time {record.arrival_ps / PS_PER_S:g} s: "
            f"expected 0 to {MAX_ARRIVAL_S} seconds from the start of the trace"
        )
    for what, value in (
        ("prompt length", record.num_prompt_tokens),
        ("output length", record.num_output_tokens),
    ):
        if not 1 <= value <= MAX_TOKENS:
            raise TraceError(f"{at}: {what} {value}: expected 1 to {MAX_TOKENS} tokens")
    if record.segments is not None:
        lengths = [length for _, length in record.segments]
        if min(lengths, default=0) < 1 or sum(lengths) != record.num_prompt_tokens:
            raise TraceError(
                f"{at}: prompt length {record.num_prompt_tokens}: expected it to be the sum of "
                f"its segments' lengths, each 1 or more: {quote(lengths)}"
            )
    if request_id in seen:
        raise TraceError(
            f"{at}: request id {quote(request_id)} is already used on line {seen[request_id]}"
            + ("" if record.request_id else " (this line has none, so its row names it)")
        )


def build_trace(
    records: Iterable[RequestRecord],
    *,
    name: str,
    trace_format: str,
    sha256: str = "",
    notes: Sequence[str] = (),
) -> Trace:
    """Check *records*, sort them by arrival (stable) and turn them into columns.

    Requests without an id are named ``r<row>`` by their place in the file.

    Raises:
        TraceError: on the first record that cannot be run, naming *name* and its line; or if
            there is no record at all.
    """
    seen: dict[str, int] = {}
    rows: list[tuple[str, RequestRecord]] = []
    for row, record in enumerate(records):
        request_id = f"r{row}" if record.request_id is None else record.request_id
        _check(record, name, seen, request_id)
        seen[request_id] = record.line
        rows.append((request_id, record))
    if not rows:
        raise TraceError(f"{name}: no requests in it: expected at least one")
    notes = list(notes)
    arrivals = [record.arrival_ps for _, record in rows]
    out_of_order = sum(later < earlier for earlier, later in pairwise(arrivals))
    if out_of_order:
        rows.sort(key=lambda row: row[1].arrival_ps)
        notes.append(
            f"sorted by arrival time: {out_of_order} requests came before their predecessor"
        )
    return _to_columns(rows, name, trace_format, sha256, tuple(notes))


def _to_columns(
    rows: list[tuple[str, RequestRecord]],
    name: str,
    trace_format: str,
    sha256: str,
    notes: tuple[str, ...],
) -> Trace:
    """Answer checked *rows* of (request id, record), in their order, as columns."""
    prefix = _PrefixNodes()
    offsets: list[int] = [0]
    nodes: list[int] = []
    ends: list[int] = []
    outputs: list[int] = []
    for request_id, record in rows:
        # Unknown content: one segment under a name that no other prompt can use.
        prompt: Sequence[tuple[Hashable, int]] = record.segments or [
            ((request_id,), record.num_prompt_tokens)
        ]
        row_nodes, row_ends = prefix.walk(
            [*prompt, (f"out:{request_id}", record.num_output_tokens)]
        )
        outputs.append(row_nodes.pop())
        nodes += row_nodes
        ends += row_ends[:-1]
        offsets.append(len(nodes))
    records = [record for _, record in rows]

    def column(values: list[int]) -> IntArray:
        return np.array(values, dtype=np.int64)

    columns = {
        "num_prompt_tokens": column([record.num_prompt_tokens for record in records]),
        "num_output_tokens": column([record.num_output_tokens for record in records]),
        "segment_offsets": column(offsets),
        "segment_nodes": column(nodes),
        "segment_ends": column(ends),
        "output_nodes": column(outputs),
    }
    last: dict[str, int] = {}
    previous = []
    for row, record in enumerate(records):
        previous.append(-1 if record.session_id is None else last.get(record.session_id, -1))
        if record.session_id is not None:
            last[record.session_id] = row
    return Trace(
        arrival_ps=column([record.arrival_ps for record in records]),
        num_shareable_tokens=_shareable_tokens(**columns),
        previous_turn=column(previous),
        think_ps=column([record.think_ps for record in records]),
        request_ids=[request_id for request_id, _ in rows],
        name=name,
        trace_format=trace_format,
        sha256=sha256,
        notes=notes,
        **columns,
    )


def _shareable_tokens(
    *,
    num_prompt_tokens: IntArray,
    num_output_tokens: IntArray,
    segment_offsets: IntArray,
    segment_nodes: IntArray,
    segment_ends: IntArray,
    output_nodes: IntArray,
) -> IntArray:
    """Answer `Trace.num_shareable_tokens`. What follows a private segment is private too."""
    uses = np.bincount(np.concatenate([segment_nodes, output_nodes]))
    first = segment_offsets[:-1]
    num_shared = np.add.reduceat((uses[segment_nodes] > 1).astype(np.int64), first)
    in_prompt = np.where(num_shared > 0, segment_ends[first + np.maximum(num_shared, 1) - 1], 0)
    return np.where(uses[output_nodes] > 1, num_prompt_tokens + num_output_tokens, in_prompt)
