"""What a trace is: one record a request, kept as columns, with the identity of every prompt prefix.

A prompt is a sequence of segments ``(content id, length)``; token *i* of a segment is the pair
(content id, *i*). A shared system prompt is one segment, a run of consecutive hash ids is one, and
so is what a prompt of token ids does not share with those before it. Content None is known to
nobody else. The output of a request is a segment of its own, ``out:<request id>``, so that a later
prompt can repeat it.

Prefix identity needs no hashing of tokens. Two prompts agree up to a token exactly when they agree
on all segments before it, on the content id of the segment that holds it, and on the offset in that
segment. `Trace` therefore gives every segment a *node*: an integer shared by all segments with the
same content behind the same prefix. The pair (node, offset) names a whole prefix, which is what
vLLM's chained block hash does (``v1/core/kv_cache_utils.py``, ``hash_block_tokens``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PS_PER_S = 10**12
"""Ticks a second. Time is an integer number of picoseconds, so that sums are exact."""

MAX_ARRIVAL_S = 9_000_000
"""Latest arrival in seconds (104 days): int64 picoseconds end at 9.22e6 s."""

MAX_TOKENS = 2**31 - 1
"""Longest prompt or output, so that (node, offset) fits one 64-bit key."""

ContentId = str | int | tuple[str | int, ...] | None
Segment = tuple[ContentId, int]

IntArray = npt.NDArray[np.int64]


class RequestRecord(NamedTuple):
    """One request as a reader found it. Readers yield these; `workloads.build` checks them.

    *line* is where it stood (1-based), for messages. *segments* is None where the trace says
    nothing about content: then no other prompt shares anything with it. Requests of one
    *session_id* are its turns, in the order of arrival; *think_ps* is how long after the end of the
    turn before one is asked, None where that is not known.
    """

    line: int
    arrival_ps: int
    num_prompt_tokens: int
    num_output_tokens: int
    request_id: str | None = None
    segments: Sequence[Segment] | None = None
    session_id: str | None = None
    think_ps: int | None = None


class Rows(NamedTuple):
    """Many requests, as columns of equal length: what a `RequestRecord` has of the same name.

    A column that is None is that of requests which have none.
    """

    lines: Sequence[int] | IntArray
    arrival_ps: Sequence[int] | IntArray
    num_prompt_tokens: Sequence[int] | IntArray
    num_output_tokens: Sequence[int] | IntArray
    request_ids: Sequence[str | None] | None = None
    segments: Sequence[Sequence[Segment] | None] | None = None
    session_ids: Sequence[str | None] | None = None
    think_ps: Sequence[int | None] | None = None

    def record(self, row: int) -> RequestRecord:
        """Answer one of the requests."""
        line, *times = (int(column[row]) for column in self[:4])
        named = (None if column is None else column[row] for column in self[4:])
        return RequestRecord(line, *times, *named)  # type: ignore[arg-type]


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
        num_shareable_tokens: int64 [num_requests], leading tokens of prompt and output that some
            other request has too.
        previous_turn: int64 [num_requests], the row of the turn before in the same session; -1
            where there is none.
        think_ps: int64 [num_requests], picoseconds from the end of that turn to this one; 0 where
            there is none.
        name: the file, for messages and the manifest.
        trace_format: the reader's name.
        sha256: of the bytes read.
        notes: what the reader changed or left out, in words for the report.
        session_ids: the session of each request; empty where the trace has no sessions.
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
    session_ids: list[str | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_ids)
