"""Traces made of a trace: as lines of our own format, or a part of it at another rate."""

from collections.abc import Iterator

import msgspec
import numpy as np

from workloads.arrivals import at_request_rate
from workloads.build import build_trace
from workloads.errors import TraceError
from workloads.record import PS_PER_S, IntArray, RequestRecord, Segment, Trace


def first_turns(previous_turn: IntArray) -> IntArray:
    """Answer the row of the first turn of the session that each request belongs to."""
    first = np.arange(len(previous_turn), dtype=np.int64)
    for row in np.flatnonzero(previous_turn >= 0).tolist():
        first[row] = first[previous_turn[row]]  # which comes before it
    return first


def records_of(trace: Trace) -> Iterator[RequestRecord]:
    """Answer the requests of *trace*: what they share stays, its content ids are numbers."""
    names: dict[int, str | int] = {
        node: f"out:{request_id}"
        for node, request_id in zip(trace.output_nodes.tolist(), trace.request_ids, strict=True)
    }
    offsets, ends = trace.segment_offsets.tolist(), trace.segment_ends.tolist()
    nodes = trace.segment_nodes.tolist()
    columns = zip(
        trace.request_ids,
        trace.arrival_ps.tolist(),
        trace.num_prompt_tokens.tolist(),
        trace.num_output_tokens.tolist(),
        trace.num_shareable_tokens.tolist(),
        trace.session_ids or [None] * len(trace),
        (trace.previous_turn >= 0).tolist(),
        trace.think_ps.tolist(),
        strict=True,
    )
    for row, (
        request_id,
        arrival,
        prompt,
        output,
        shareable,
        session,
        is_later,
        think,
    ) in enumerate(columns):
        segments: list[Segment] | None = None
        start, stop = offsets[row], offsets[row + 1]
        if shareable or stop - start > 1:
            lengths = np.diff(ends[start:stop], prepend=0).tolist()
            segments = [
                (names.get(node, node), length)
                for node, length in zip(nodes[start:stop], lengths, strict=True)
            ]
        yield RequestRecord(
            line=row + 1,
            arrival_ps=arrival,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            request_id=request_id,
            segments=segments,
            session_id=session,
            think_ps=think if is_later else None,
        )


def native_lines(trace: Trace) -> Iterator[bytes]:
    """Answer *trace* in our own format, a line a request."""
    for record in records_of(trace):
        line: dict[str, object] = {
            "request_id": record.request_id,
            "arrival_time": _seconds(record.arrival_ps),
        }
        if record.segments is None:
            line["input_length"] = record.num_prompt_tokens
        else:
            line["prompt"] = record.segments
        line["output_len"] = record.num_output_tokens
        if record.session_id is not None:
            line["session_id"] = record.session_id
            if record.think_ps is not None:
                line["think_time"] = _seconds(record.think_ps)
        yield msgspec.json.encode(line) + b"\n"


def _seconds(ps: int) -> float:
    """Answer the seconds that a reader turns into *ps* again, or the nearest where there are none.

    Beyond an hour a float tells picoseconds apart no more.
    """
    seconds = ps / PS_PER_S
    candidates = (seconds, np.nextafter(seconds, 0.0), np.nextafter(seconds, np.inf))
    return float(next((s for s in candidates if round(float(s) * PS_PER_S) == ps), seconds))


def sample(
    trace: Trace,
    *,
    start: float = 0.0,
    end: float | None = None,
    every: int = 1,
    nth: int = 0,
    request_rate: float | None = None,
) -> Trace:
    """Answer a part of *trace*; sessions stay whole.

    Args:
        trace: what is sampled.
        start: seconds; sessions whose first request arrives before it are left out, and it is the
            new time 0.
        end: seconds; sessions that start at it or later are left out.
        every: keep one of so many sessions, in the order of their first requests.
        nth: which of them, from 0: all *nth* below *every* together are all sessions.
        request_rate: requests a second on average of what is left; None: as recorded.

    Raises:
        TraceError: nothing is left, or the rate cannot be had.
    """
    first = first_turns(trace.previous_turn)
    starts = trace.arrival_ps[first]
    kept = starts >= round(start * PS_PER_S)
    if end is not None:
        kept &= starts < round(end * PS_PER_S)
    roots = np.unique(first[kept])[nth::every]
    kept = np.isin(first, roots)
    if not kept.any():
        last = int(trace.arrival_ps[-1]) / PS_PER_S
        raise TraceError(
            f"{trace.name}: no session starts from {start:g} s on"
            + (f" and before {end:g} s" if end is not None else "")
            + f": expected a part of 0 to {last:g} s"
        )
    records = [
        record._replace(arrival_ps=record.arrival_ps - round(start * PS_PER_S))
        for record, keep in zip(records_of(trace), kept.tolist(), strict=True)
        if keep
    ]
    found = build_trace(
        records, name=trace.name, trace_format=trace.trace_format, notes=trace.notes
    )
    return found if request_rate is None else at_request_rate(found, request_rate)
