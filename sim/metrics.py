"""What a run leaves behind: one row a request, one row a run of steps, and totals over time.

Names and definitions are vLLM 0.33.0's where it has them (``v1/metrics/loggers.py``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sim.allocators.values import NOTHING_TAKEN, MemoryStats, Taken
from sim.columns import SLOT_STATES, Columns, Rows
from sim.errors import ConfigError
from sim.request import UNSET, Request, RequestStatus
from sim.scheduler_output import SchedulerOutput
from sim.slots import mean_slots
from sim.timing.base import TICKS_PER_PS
from sim.totals import COUNTS, Totals, add_up
from workloads.record import PS_PER_S, IntArray, Trace

MAX_PS = 2**63 - 1
"""Latest time that the tables can hold: 106 days."""


class StepTimes:
    """Times of a run of steps, in ticks: step j lasts ``first + j * increment``; *total* is all."""

    __slots__ = ("first", "increment", "num_steps", "total")

    def __init__(self, first: int, increment: int, num_steps: int, total: int) -> None:
        self.first, self.increment, self.num_steps = first, increment, num_steps
        self.total = total

    @property
    def last(self) -> int:
        """The time of the last step."""
        return self.first + (self.num_steps - 1) * self.increment


class Cursor:
    """How far step rows have been read (`Recorder.read`): at first, nothing of them."""

    def __init__(self, start_ps: int) -> None:
        self.place = 0  # chunk, and rows read of each of its parts
        self.starts = [0] * 6
        self.step, self.time_ps = 0, start_ps  # of the next row


class Events(NamedTuple):
    """What happened to single requests, as columns; *row* is that of the step row.

    Attributes:
        first_tokens: a row a first token, at the end of step row *row*: ``row``, ``index``,
            ``num_cached_tokens``.
        gaps: a row a gap between tokens that a preemption lengthened: ``row``, ``gap_ps``.
        requests: a row a request that finished, as many a step row as its ``num_finished``.
    """

    first_tokens: Columns
    gaps: Columns
    requests: Columns


_REQUEST_COLUMNS = (
    "index",
    "num_output_tokens",
    "scheduled_step",
    "first_token_step",
    "finish_step",
    "num_cached_tokens",
    "num_preemptions",
    "scheduled_ps",
    "first_token_ps",
    "finish_ps",
)
_STEP_COLUMNS = (
    "num_steps",
    "duration_ps",
    "running",
    "waiting",
    "num_decodes",
    "decode_context",
    "num_prefills",
    "num_prefill_tokens",
    "num_late_decodes",
    "num_sampled_prefills",
    "num_admitted",
    "num_finished",
    "live",
    "held_slots",
    "internal",
    "cached",
    "external",
)
_RARE_COLUMNS = ("row", *(name for name in COUNTS if name not in _STEP_COLUMNS))
_RUN_COLUMNS = ("first_step_ps", "increment_ps", "held_taken", "internal_taken", "cached_taken")
_FIRST_TOKEN_COLUMNS = ("row", "index", "num_cached_tokens")
_GAP_COLUMNS = ("row", "gap_ps")
CHUNK_ROWS = 1 << 15
"""Step rows that are kept as they came; older ones are packed."""


class Recorder:
    """Listens to the engine. Keeps request columns and step rows, packed (`sim.columns`).

    Args:
        trace: what is replayed.
        block_size: to count held slots in blocks; contiguous reservations are rounded up.
        capacity: slots of the pool.
        save_steps: keep the names of the requests of every step; the engine single-steps.
        async_scheduling: a step comes with the tokens and the finished of the one before it.
        arrival_ps: when each row of *trace* arrives, if not as recorded; it may fill up as it goes.

    Attributes:
        arrival_ps: int64 [num_requests], when each row arrived.
        start_ps: the first arrival.
        now_ps: the end of the last step or idle time noted.
        num_done: requests that have finished or were refused.
        num_steps: steps that have ended.
        refused: requests that could not be served, by row of the trace, and why.
        names: with *save_steps*, who was preempted, admitted, resumed, finished and scheduled in
            every step.
        held_after: with *save_steps*, slots held after every step.
    """

    def __init__(
        self,
        trace: Trace,
        block_size: int,
        capacity: int,
        *,
        save_steps: bool,
        async_scheduling: bool = False,
        arrival_ps: IntArray | None = None,
    ) -> None:
        self.arrival_ps = trace.arrival_ps if arrival_ps is None else arrival_ps
        self.capacity = capacity
        self.num_done = 0
        self.num_steps = 0
        self.trace = trace
        self.block_size = block_size
        self.save_steps = save_steps
        self._lag = int(async_scheduling)
        self.start_ps = int(trace.arrival_ps[0])
        self.now_ps = self.start_ps
        self._first_served_ps = UNSET
        self._steps = Rows(_STEP_COLUMNS, "q")
        self._rare = Rows(_RARE_COLUMNS, "q")  # of the rows that have any
        self._runs = Rows(_RUN_COLUMNS, "d")  # of the rows of several steps
        self._row = 0  # of those not packed
        self._num_packed = 0
        self._first_tokens = Rows(_FIRST_TOKEN_COLUMNS, "q")
        self._gaps = Rows(_GAP_COLUMNS, "q")  # between tokens, that are no step's duration
        self._requests = Rows(_REQUEST_COLUMNS, "q")
        self._parts = (
            self._steps,
            self._rare,
            self._runs,
            self._first_tokens,
            self._gaps,
            self._requests,
        )
        self.refused: dict[int, str] = {}
        self.names: list[tuple[str, ...]] = []
        self.held_after: list[int] = []
        self._waiting_ps = 0
        self._preempted_ps: dict[Request, int] = {}

    def on_refused(self, request: Request, reason: str) -> None:
        """Note a request that can never be served."""
        self.refused[request.index] = reason
        self.num_done += 1

    def on_idle(self, until: int, stats: MemoryStats) -> None:
        """Note that nothing ran from the last step to *until* (ticks)."""
        now_ps, until_ps = self.now_ps, until // TICKS_PER_PS
        if until_ps > now_ps:
            row = dict.fromkeys(_STEP_COLUMNS, 0) | {
                "duration_ps": until_ps - now_ps,
                "live": stats.live,
                "held_slots": stats.held,
                "internal": stats.internal,
                "cached": stats.cached,
                "external": stats.external,
            }
            self._steps.add(row.values())
            self.now_ps = until_ps
            self._end_row()

    def on_step(
        self,
        end: int,
        times: StepTimes,
        num_running: int,
        num_waiting: int,
        output: SchedulerOutput,
        stats: MemoryStats,
        taken: Taken,
        finished: Sequence[Request],
    ) -> None:
        """Note one step or run of steps that has ended.

        *end* in ticks; the counts and *stats* are those right after scheduling, *stats* with the
        memory of all steps of the run, *taken* what they took.
        """
        step, start_ps, end_ps = self.num_steps, self.now_ps, _in_ps(end)
        num_steps = times.num_steps
        batch = output.batch
        num_prefills = len(output.prefills)
        self._steps.add(
            (
                num_steps,
                end_ps - start_ps,
                num_running,
                num_waiting,
                output.num_decodes,
                batch.decode_context if num_prefills else output.decode_context,
                num_prefills,
                batch.num_prefill_tokens,
                num_prefills - len(batch.prefills),
                len(output.sampled),
                len(output.admitted),
                len(finished),
                stats.live,
                stats.held,
                stats.internal,
                stats.cached,
                stats.external,
            )
        )
        self.now_ps = end_ps
        self.num_steps = step + num_steps
        if num_steps > 1:
            self._on_run(times, taken)
        if num_prefills:
            self._on_prefills(output, step, start_ps, end_ps)
        if (
            output.num_refusals  # whoever is preempted was in the way of one
            or output.prefix_cache_queries
            or output.resumed
            or output.recomputed_tokens
        ):
            self._on_rare(output)
        if output.preempted:
            self._on_preempted(output, step, start_ps)
        if finished:
            self._on_finished(finished, start_ps if self._lag else end_ps)
        self._end_row()

    def on_names(
        self,
        output: SchedulerOutput,
        scheduled: Sequence[tuple[Request, int]],
        finished: Sequence[Request],
        stats_after: MemoryStats,
    ) -> None:
        """Note who was in the step just noted (only with *save_steps*)."""

        def joined(requests: Sequence[Request]) -> str:
            return ";".join(request.request_id for request in requests)

        self.names.append(
            (
                joined(output.preempted),
                joined(output.admitted),
                joined(output.resumed),
                joined(finished),
                ";".join(f"{request.request_id}:{n}" for request, n in scheduled),
            )
        )
        self.held_after.append(stats_after.held)

    def request_columns(self) -> Columns:
        """Answer one row a request, in arrival order, times in ps; `UNSET` where not reached."""
        columns = {
            name: np.full(len(self.trace), UNSET, dtype=np.int64) for name in _REQUEST_COLUMNS[1:]
        }
        for chunk in self._requests.chunks():
            for name, column in columns.items():
                column[chunk["index"]] = chunk[name]
        return columns

    def step_chunks(self) -> Iterator[Columns]:
        """Answer one row a run of steps, a chunk at a time; a row without steps is idle time.

        ``kv_<state>_slots`` are time-weighted; of the other columns of slots, those of the end.
        """
        cursor = Cursor(self.start_ps)
        for _ in range(self._num_packed + 1):
            yield self.read(cursor)[0]

    def read(self, cursor: "Cursor") -> tuple[Columns, Events]:
        """Answer the step rows behind *cursor*, and move it there; nothing if there are none.

        As `step_chunks`, each up to the end of its chunk, and what happened to single requests.
        """
        place, starts = cursor.place, cursor.starts
        parts = [rows.chunk(place, start) for rows, start in zip(self._parts, starts, strict=True)]
        for part in parts:
            if "row" in part:
                part["row"] = part["row"].astype(np.int64) - starts[0]
        steps, rare, runs, first_tokens, gaps, requests = parts
        columns = dict(steps)
        for name in _RARE_COLUMNS[1:]:
            columns[name] = np.zeros(len(steps["num_steps"]), dtype=rare[name].dtype)
            columns[name][rare["row"]] = rare[name]
        single = steps["num_steps"] == 1
        for name in _RUN_COLUMNS:
            columns[name] = np.zeros(len(single))
            columns[name][steps["num_steps"] > 1] = runs[name]
        columns["first_step_ps"][single] = steps["duration_ps"][single]
        last_steps = cursor.step + np.cumsum(steps["num_steps"], dtype=np.int64)
        ends = cursor.time_ps + np.cumsum(steps["duration_ps"], dtype=np.int64)
        columns["step"], columns["start_ps"] = (
            last_steps - steps["num_steps"],
            ends - steps["duration_ps"],
        )
        if len(ends):
            cursor.step, cursor.time_ps = int(last_steps[-1]), int(ends[-1])
        for number, part in enumerate(parts):
            starts[number] += len(next(iter(part.values())))
        if place < self._num_packed:
            cursor.place, cursor.starts = place + 1, [0] * len(parts)
        return columns | mean_slots(columns, self.capacity), Events(first_tokens, gaps, requests)

    @property
    def totals(self) -> Totals:
        """The rows added up, anew each time."""
        return self.add_up(self.step_chunks())

    def add_up(self, chunks: Iterable[Columns]) -> Totals:
        """Answer the sums over *chunks*, which are `step_chunks`."""
        gaps: Counter[int] = Counter()
        for chunk in self._gaps.chunks():
            gaps.update(chunk["gap_ps"].tolist())
        return add_up(
            chunks,
            slot_states=SLOT_STATES,
            extra_gaps=gaps,
            first_served_ps=self._first_served_ps,
            duration_ps=self.now_ps - self.start_ps,
            waiting_time=self._waiting_ps,
        )

    def _end_row(self) -> None:
        self._row += 1
        if self._row == CHUNK_ROWS:
            self._row = 0
            self._num_packed += 1
            for rows in self._parts:
                rows.pack()

    def _on_run(self, times: StepTimes, taken: Taken) -> None:
        first, increment, total = float(times.first), float(times.increment), float(times.total)
        held = internal = cached = 0.0
        if taken is not NOTHING_TAKEN:
            j, pairs = taken.held
            on_last_blocks, evicted = taken.internal, taken.cached
            held = (first * j + increment * pairs) / total
            if on_last_blocks[0]:
                internal = (first * on_last_blocks[0] + increment * on_last_blocks[1]) / total
            if evicted[0]:
                cached = (first * evicted[0] + increment * evicted[1]) / total
        self._runs.add((first / TICKS_PER_PS, increment / TICKS_PER_PS, held, internal, cached))

    def _on_rare(self, output: SchedulerOutput) -> None:
        self._rare.add(
            (
                self._row,
                len(output.resumed),
                len(output.preempted),
                output.num_refusals,
                output.recomputed_tokens,
                output.prefix_cache_queries,
                output.prefix_cache_hits,
                output.preempted_cache_queries,
                output.preempted_cache_hits,
            )
        )

    def _on_prefills(self, output: SchedulerOutput, step: int, start_ps: int, end_ps: int) -> None:
        if self._first_served_ps == UNSET and output.admitted:  # first come, first served
            self._first_served_ps = output.admitted[0].arrival_ps
        for request in output.admitted:
            request.scheduled_step, request.scheduled_ps = step, start_ps
            self._waiting_ps += start_ps - request.arrival_ps
        for request in output.resumed:
            self._waiting_ps += start_ps - self._preempted_ps.pop(request)
        token_step = step + self._lag
        for request in output.sampled:
            if request.first_token_step == UNSET:
                request.first_token_step, request.first_token_ps = token_step, end_ps
                self._first_tokens.add((self._row, request.index, request.num_cached_tokens))
            else:
                self._gaps.add((self._row, end_ps - request.last_token_ps))

    def _on_preempted(self, output: SchedulerOutput, step: int, start_ps: int) -> None:
        for request in output.preempted:
            if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
                continue  # its last token was on its way: it does not wait
            self._preempted_ps[request] = start_ps
            if request.last_token_step == step - 1:
                request.last_token_ps = start_ps

    def _on_finished(self, finished: Sequence[Request], end_ps: int) -> None:
        last_step = self.num_steps - 1
        for request in finished:
            self._requests.add(
                (
                    request.index,
                    request.num_output_tokens,
                    request.scheduled_step,
                    request.first_token_step,
                    last_step,
                    request.num_cached_tokens,
                    request.num_preemptions,
                    request.scheduled_ps,
                    request.first_token_ps,
                    end_ps,
                )
            )
        self.num_done += len(finished)


def _in_ps(ticks: int) -> int:
    """Answer the picoseconds of *ticks*; ConfigError if no table can hold them."""
    ps = ticks // TICKS_PER_PS
    if ps > MAX_PS:
        raise ConfigError(
            f"the run reaches {ps / PS_PER_S:.3g} simulated seconds, "
            f"expected at most {MAX_PS / PS_PER_S:.3g}: shorten --step-time"
        )
    return ps
