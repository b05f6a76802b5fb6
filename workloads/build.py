"""Make a trace of what readers yield: checked, sorted by arrival, with a node for every prefix."""

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from workloads.errors import TraceError, quote
from workloads.prefix import PrefixNodes, shareable_tokens
from workloads.record import (
    MAX_ARRIVAL_S,
    MAX_TOKENS,
    PS_PER_S,
    IntArray,
    RequestRecord,
    Rows,
    Trace,
)

MAX_SEGMENTS = 20_000_000
"""Most segments of all prompts: each turn repeats those before it, and memory has an end."""

_CHUNK = 4096
"""Records that are turned into columns at a time, if they have few segments."""

_CHUNK_SEGMENTS = 1 << 20
"""Segments that are turned into columns at a time, about: prompts get longer slowly."""


class _Columns(NamedTuple):
    """Columns of a trace in the making; each array is int64."""

    lines: IntArray
    arrivals: IntArray
    prompts: IntArray
    outputs: IntArray
    counts: IntArray
    """Segments of each request."""
    nodes: IntArray
    ends: IntArray
    output_nodes: IntArray


def _check(record: RequestRecord, where: str) -> None:
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


class TraceBuilder:
    """Makes the columns of a trace from what readers yield, a few thousand requests at a time."""

    def __init__(self) -> None:
        self._prefix = PrefixNodes()
        self._rows: list[_Columns] = []
        self._ids: dict[str, int] = {}  # row by request id, of the requests that have one
        self._session_ids: list[str | None] = []  # empty until there is one
        self._think_ps: list[int | None] = []
        self._files: list[tuple[int, str]] = []  # first row and name
        self._origins: list[tuple[tuple[int, str], int | None]] = []
        self._num_rows = self._num_segments = 0
        self._notes: list[str] = []

    def add(self, found: Iterable[RequestRecord | Rows | str], where: str) -> None:
        """Take in what the reader of the file *where* yields.

        Raises:
            TraceError: on the first request that cannot be run, naming *where* and its line.
        """
        self._files.append((self._num_rows, where))
        rest = iter(found)
        size, is_done = 64, False
        while not is_done:
            chunk: list[RequestRecord | Rows | str] = []
            before = self._num_segments
            try:
                chunk.extend(islice(rest, size))
            finally:  # an error of the reader is not told before one of an earlier request
                is_done = len(chunk) < size
                self._add_chunk(chunk)
            longest = (self._num_segments - before) // size + 1
            size = max(1, min(2 * size, _CHUNK, _CHUNK_SEGMENTS // longest))

    def count_from(self, origin_ps: int | None) -> None:
        """Note when the times of the latest file count from; None: from the start of the trace."""
        self._origins.append((self._files[-1], origin_ps))

    def _shift(self, arrivals: IntArray) -> None:
        """Move *arrivals* of files with times of their own to where they are in the trace."""
        first = min((origin for _, origin in self._origins if origin is not None), default=0)
        ends = [row for (row, _), _ in self._origins[1:]]
        for ((start, where), origin), end in zip(
            self._origins, [*ends, self._num_rows], strict=False
        ):
            later = 0 if origin is None else origin - first
            if start < end and int(arrivals[start:end].max()) + later > MAX_ARRIVAL_S * PS_PER_S:
                raise TraceError(
                    f"{where}: starts {later / PS_PER_S:.6g} s after the earliest file: expected "
                    f"all of them within {MAX_ARRIVAL_S:,} s"
                )
            arrivals[start:end] += later

    def _add_chunk(self, chunk: list[RequestRecord | Rows | str]) -> None:
        for kind, some in groupby(chunk, type):
            if kind is RequestRecord:
                self._add_rows(Rows(*zip(*some, strict=True)))
            elif kind is str:
                self._notes += some  # type: ignore[arg-type]
            else:
                for rows in some:
                    self._add_rows(rows)  # type: ignore[arg-type]

    def _add_rows(self, rows: Rows) -> None:
        count = len(rows.lines)
        columns: tuple[Sequence[int] | IntArray, ...]
        if rows.segments is None:
            nodes = self._prefix.new(count) + np.arange(count)
            columns = (*rows[:4], np.ones(count, dtype=np.int64), nodes, rows.num_prompt_tokens)
        else:
            prompts = zip(rows.num_prompt_tokens, rows.segments, strict=True)
            walked = self._prefix.walk(
                ((None, int(prompt)),) if own is None else own for prompt, own in prompts
            )
            columns = (*rows[:4], *walked)
        try:
            self._append(_Columns(*(np.asarray(c, dtype=np.int64) for c in (*columns, ()))), rows)
        except OverflowError:
            for row in range(count):
                _check(rows.record(row), self._files[-1][1])
            raise
        self._name(rows.request_ids or ())
        self._add_sessions(rows.session_ids or [None] * count, rows.think_ps or [None] * count)

    def _append(self, columns: _Columns, rows: Rows) -> None:
        """Keep *columns* with nodes for their outputs, or refuse the first that cannot run."""
        latest = MAX_ARRIVAL_S * PS_PER_S
        wrong = (columns.arrivals < 0) | (columns.arrivals > latest) | (columns.counts < 1)
        wrong |= np.minimum(columns.prompts, columns.outputs) < 1
        wrong |= np.maximum(columns.prompts, columns.outputs) > MAX_TOKENS
        if not wrong.any():
            last = np.cumsum(columns.counts) - 1
            lengths = np.diff(columns.ends, prepend=0)
            lengths[last[:-1] + 1] = columns.ends[last[:-1] + 1]
            wrong |= (columns.ends[last] != columns.prompts) | (lengths < 1).any()
        for row in np.flatnonzero(wrong).tolist():
            _check(rows.record(row), self._files[-1][1])
        count = len(columns.lines)
        self._num_segments += len(columns.nodes)
        if self._num_segments > MAX_SEGMENTS:
            raise TraceError(
                f"{self._files[-1][1]}, line {columns.lines[-1]}: more than {MAX_SEGMENTS:,} "
                "segments in the prompts up to here: expected fewer requests, or turns of a session"
            )
        output_nodes = self._prefix.new(count) + np.arange(count)
        self._rows.append(columns._replace(output_nodes=output_nodes))
        self._num_rows += count

    def _name(self, ids: Sequence[str | None]) -> None:
        """Note the names of the latest requests; None has none."""
        if not any(ids):
            return
        first = self._num_rows - len(ids)
        for row, request_id in enumerate(ids, first):
            if request_id is not None and self._ids.setdefault(request_id, row) != row:
                raise self._used_twice(row, request_id)

    def _used_twice(self, row: int, request_id: str, why: str = "") -> TraceError:
        lines = np.concatenate([columns.lines for columns in self._rows])
        earlier = self._ids[request_id]
        where, other = (
            [name for start, name in self._files if start <= r][-1] for r in (row, earlier)
        )
        place = f"line {lines[earlier]}" if other == where else f"line {lines[earlier]} of {other}"
        return TraceError(
            f"{where}, line {lines[row]}: request id {quote(request_id)} is already used on {place}"
            f"{why}"
        )

    def _add_sessions(self, ids: Sequence[str | None], thinks: Sequence[int | None]) -> None:
        if self._session_ids or any(ids):
            missing = [None] * (self._num_rows - len(ids) - len(self._session_ids))
            self._session_ids += [*missing, *(name or None for name in ids)]
            self._think_ps += [*missing, *thinks]

    def finish(
        self, *, name: str, trace_format: str, sha256: str = "", notes: Sequence[str] = ()
    ) -> Trace:
        """Answer the trace of all requests, sorted by arrival (stable).

        Requests without an id are named ``r<row>`` by their place.

        Raises:
            TraceError: there is no request, or a name of such a request is another's id.
        """
        if not self._rows:
            raise TraceError(f"{name}: no requests in it: expected at least one")
        names = self._names()
        rows = _Columns(*(np.concatenate(column) for column in zip(*self._rows, strict=True)))
        self._rows = []
        self._shift(rows.arrivals)
        self._repeat_outputs(rows, names)
        notes = [*notes, *self._notes]
        out_of_order = int((np.diff(rows.arrivals) < 0).sum())
        if out_of_order:
            order = np.argsort(rows.arrivals, kind="stable")
            rows = _ordered(rows, order)
            names = [names[row] for row in order.tolist()]
            if self._session_ids:
                self._session_ids = [self._session_ids[row] for row in order.tolist()]
                self._think_ps = [self._think_ps[row] for row in order.tolist()]
            notes.append(
                f"sorted by arrival time: {out_of_order} requests came before their predecessor"
            )
        previous, think_ps = self._turns(rows.arrivals, notes)
        offsets = np.concatenate([[0], np.cumsum(rows.counts)])
        tokens = (rows.prompts, rows.outputs)
        shape = (offsets, rows.nodes, rows.ends, rows.output_nodes)
        return Trace(
            rows.arrivals,
            *tokens,
            names,
            *shape,
            shareable_tokens(*tokens, *shape),
            previous,
            think_ps,
            name=name,
            trace_format=trace_format,
            sha256=sha256,
            notes=tuple(notes),
            session_ids=self._session_ids,
        )

    def _names(self) -> list[str]:
        """Answer the id of every request."""
        names = [f"r{row}" for row in range(self._num_rows)]
        for request_id, row in self._ids.items():
            names[row] = request_id
        if self._ids:
            for row, request_id in enumerate(names):
                if self._ids.get(request_id, row) != row:
                    why = " (this line has none, so its row names it)"
                    raise self._used_twice(row, request_id, why)
        return names

    def _repeat_outputs(self, rows: _Columns, names: list[str]) -> None:
        """Give the outputs that prompts repeat the nodes that they have there."""
        last = np.cumsum(rows.counts) - 1
        row_of = self._ids if len(self._ids) == len(names) else None
        for before, length, request_id, node in self._prefix.repeats:
            if row_of is None:
                row_of = {name: row for row, name in enumerate(names)}
            row = row_of.get(request_id)
            if row is None or rows.nodes[last[row]] != before:
                continue
            start = rows.ends[last[row] - 1] if rows.counts[row] > 1 else 0
            if rows.ends[last[row]] - start == length:  # else it is behind another prompt
                rows.output_nodes[row] = node

    def _turns(self, arrivals: IntArray, notes: list[str]) -> tuple[IntArray, IntArray]:
        """Answer the columns `Trace.previous_turn` and `Trace.think_ps`."""
        previous = np.full(self._num_rows, -1, dtype=np.int64)
        think_ps = np.zeros(self._num_rows, dtype=np.int64)
        latest: dict[str, int] = {}
        unknown: list[int] = []
        for row, session in enumerate(self._session_ids):
            if session is None:
                continue
            earlier = latest.get(session)
            latest[session] = row
            if earlier is not None:
                previous[row] = earlier
                think = self._think_ps[row]
                if think is None:
                    unknown.append(row)
                else:
                    think_ps[row] = think
        if unknown:
            think_ps[unknown] = arrivals[unknown] - arrivals[previous[unknown]]
            notes.append(
                f"{len(unknown)} think times are not known: gaps between arrivals stand for them"
            )
        return previous, think_ps


def _ordered(rows: _Columns, order: IntArray) -> _Columns:
    """Answer *rows* in *order*, their segments with them."""
    counts = rows.counts[order]
    ends = np.cumsum(counts)
    firsts = np.cumsum(rows.counts) - rows.counts
    segments = np.arange(ends[-1]) + np.repeat(firsts[order] - (ends - counts), counts)
    return rows._replace(
        lines=rows.lines[order],
        arrivals=rows.arrivals[order],
        prompts=rows.prompts[order],
        outputs=rows.outputs[order],
        counts=counts,
        nodes=rows.nodes[segments],
        ends=rows.ends[segments],
        output_nodes=rows.output_nodes[order],
    )


def build_trace(
    records: Iterable[RequestRecord | Rows | str],
    *,
    name: str,
    trace_format: str,
    sha256: str = "",
    notes: Sequence[str] = (),
) -> Trace:
    """Check *records*, sort them by arrival and turn them into columns; see `TraceBuilder`.

    Raises:
        TraceError: on the first record that cannot be run, naming *name* and its line; or if
            there is no record at all.
    """
    builder = TraceBuilder()
    builder.add(records, name)
    return builder.finish(name=name, trace_format=trace_format, sha256=sha256, notes=notes)
