"""What a run leaves behind: one row a request, one row a run of steps, and totals over time.

Names and definitions are vLLM 0.33.0's where it has them (``v1/metrics/loggers.py``).
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sim.allocators.base import MemoryStats, Taken
from sim.errors import ConfigError
from sim.gaps import FloatArray
from sim.request import UNSET, Request
from sim.scheduler import SchedulerOutput
from sim.timing.base import TICKS_PER_PS
from sim.totals import COUNTS, Totals, add_up
from workloads.record import PS_PER_S, IntArray, Trace

MAX_PS = 2**63 - 1
"""Latest time that the tables can hold: 106 days."""

SLOT_STATES = ("live", "reserved", "internal", "external", "cached", "free")
"""Where a token slot can be, as reported; ``free`` without ``external``, so that they add up."""


class StepTimes(NamedTuple):
    """Times of a run of steps, in ticks: step j lasts ``first + j * increment``."""

    first: int
    increment: int
    num_steps: int

    @property
    def total(self) -> int:
        """How long all steps last."""
        return self.before(self.num_steps)

    def before(self, step: int) -> int:
        """Answer how long the steps before *step* last."""
        return step * self.first + self.increment * (step * (step - 1) // 2)

    @property
    def first_moment(self) -> int:
        """The sum over steps j of j times the time of step j."""
        n = self.num_steps
        pairs = n * (n - 1) // 2
        return self.first * pairs + self.increment * (pairs * (2 * n - 1) // 3)


_REQUEST_COLUMNS = (
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
    "step",
    "num_steps",
    "start_ps",
    "duration_ps",
    "first_step_ps",
    "running",
    "waiting",
    "num_decodes",
    "num_prefills",
    "num_prefill_tokens",
    "num_late_decodes",
    "num_sampled_prefills",
    "held_slots",
    *COUNTS,
)
_SLOT_COLUMNS = tuple(f"kv_{state}_slots" for state in SLOT_STATES)


class Recorder:
    """Listens to the engine. Keeps request columns and step rows, in flat arrays.

    Args:
        trace: what is replayed.
        block_size: to count held slots in blocks; contiguous reservations are rounded up.
        capacity: slots of the pool.
        save_steps: keep the names of the requests of every step; the engine single-steps.
    """

    def __init__(self, trace: Trace, block_size: int, capacity: int, *, save_steps: bool) -> None:
        self.capacity = capacity
        self.num_done = 0
        self.num_steps = 0
        self._trace = trace
        self._block_size = block_size
        self._save_steps = save_steps
        self._start_ps = int(trace.arrival_ps[0])
        self._now_ps = self._start_ps
        self._first_served_ps = UNSET
        self._steps = array("q")
        self._slots = array("d")
        self._times = array("d")
        self._requests = array("q", [UNSET]) * (len(_REQUEST_COLUMNS) * len(trace))
        self._refused: dict[int, str] = {}
        self._names: list[tuple[str, ...]] = []
        self._held_after: list[int] = []
        self._waiting_ps = 0
        self._preempted_ps: dict[Request, int] = {}
        self._gaps: Counter[int] = Counter()

    def on_refused(self, request: Request, reason: str) -> None:
        """Note a request that can never be served."""
        self._refused[request.index] = reason
        self.num_done += 1

    def on_idle(self, until: int, stats: MemoryStats) -> None:
        """Note that nothing ran from the last step to *until* (ticks)."""
        now_ps, until_ps = self._now_ps, until // TICKS_PER_PS
        if until_ps > now_ps:
            row = [0] * len(_STEP_COLUMNS)
            row[0], row[2], row[3] = self.num_steps, now_ps, until_ps - now_ps
            self._steps.extend(row)
            self._slots.extend(_split(stats))
            self._times.extend((0.0, 0.0))
            self._now_ps = until_ps

    def on_step(
        self,
        *,
        start: int,
        times: StepTimes,
        num_running: int,
        num_waiting: int,
        output: SchedulerOutput,
        stats: MemoryStats,
        taken: Sequence[Taken],
        finished: Sequence[Request],
    ) -> None:
        """Note one step or run of steps that has ended.

        *start* in ticks; the counts and *stats* are those right after scheduling, *stats* with the
        memory of all steps of the run, *taken* what they took.
        """
        step, num_steps = self.num_steps, times.num_steps
        start_ps, end_ps = start // TICKS_PER_PS, (start + times.total) // TICKS_PER_PS
        if end_ps > MAX_PS:
            raise ConfigError(
                f"the run reaches {end_ps / PS_PER_S:.3g} simulated seconds, "
                f"expected at most {MAX_PS / PS_PER_S:.3g}: shorten --step-time"
            )
        single = num_steps == 1
        first_step_ps = end_ps - start_ps if single else times.first // TICKS_PER_PS
        held = stats.live + stats.reserved + stats.internal
        self._steps.extend(
            (step, num_steps, start_ps, end_ps - start_ps, first_step_ps, num_running, num_waiting)
        )
        self._steps.extend(_work_of(output, held, len(finished)))
        self._times.extend((times.first / TICKS_PER_PS, times.increment / TICKS_PER_PS))
        if single:
            self._slots.extend(_split(stats))
        else:
            self._slots.extend(_mean_split(stats, output.num_decodes, taken, times))
        if output.prefills:
            self._on_prefills(output, step, start_ps, end_ps)
        if output.preempted:
            self._on_preempted(output, step, start_ps)
        last_step = step + num_steps - 1
        for request in finished:
            self._on_finished(request, last_step, end_ps)
        self._now_ps = end_ps
        self.num_steps = step + num_steps

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

        self._names.append(
            (
                joined(output.preempted),
                joined(output.admitted),
                joined(output.resumed),
                joined(finished),
                ";".join(f"{request.request_id}:{n}" for request, n in scheduled),
            )
        )
        self._held_after.append(stats_after.held)

    def request_table(self) -> pa.Table:
        """Answer one row a request, in arrival order; times in seconds, empty where not reached."""
        trace = self._trace
        table: dict[str, Any] = {
            "request_id": trace.request_ids,
            "refused": pa.array(
                [self._refused.get(index) for index in range(len(trace))], pa.string()
            ),
            "arrival_time": trace.arrival_ps / PS_PER_S,
            "num_prompt_tokens": trace.num_prompt_tokens,
        }
        columns = np.array(self._requests).reshape(len(trace), len(_REQUEST_COLUMNS))
        for name, values in zip(_REQUEST_COLUMNS, columns.T, strict=True):
            missing = values == UNSET
            if name.endswith("_ps"):
                seconds = pa.array(values / PS_PER_S, mask=missing)
                table[f"{name.removesuffix('_ps')}_time"] = seconds
            else:
                table[name] = pa.array(np.ascontiguousarray(values), mask=missing)
        return pa.table(table)

    def step_table(self) -> pa.Table:
        """Answer one row a run of steps; with *save_steps* one a step, and who was scheduled.

        ``running``, ``waiting`` and ``used_blocks`` hold right after scheduling (``used_blocks`` of
        the last step, ``waiting`` of the first); counts are those of the whole run;
        ``kv_<state>_slots`` are time-weighted. A row without steps is idle time.
        """
        rows, slots = self._rows()
        if self._save_steps:
            busy = rows["num_steps"] > 0
            rows = {name: values[busy] for name, values in rows.items()}
            slots = {name: values[busy] for name, values in slots.items()}
        num_steps, num_decodes = rows["num_steps"], rows["num_decodes"]
        prefill_tokens = rows["num_prefill_tokens"]
        decode_tokens = num_decodes * num_steps + rows["num_late_decodes"]
        table: dict[str, Any] = {
            "step": rows["step"],
            "num_steps": num_steps,
            "time": rows["start_ps"] / PS_PER_S,
            "duration": rows["duration_ps"] / PS_PER_S,
            "first_step_duration": rows["first_step_ps"] / PS_PER_S,
            "running": rows["running"],
            "waiting": rows["waiting"],
            "num_scheduled_reqs": num_decodes * num_steps + rows["num_prefills"],
            "num_scheduled_tokens": decode_tokens + prefill_tokens,
            "num_prefill_tokens": prefill_tokens,
            "num_decode_tokens": decode_tokens,
            "used_blocks": -(-rows["held_slots"] // self._block_size),
            **{name: rows[name] for name in COUNTS},
            **slots,
        }
        if self._save_steps:
            held_after = np.array(self._held_after, dtype=np.int64)
            table["used_blocks_after"] = -(-held_after // self._block_size)
            names = ("preempted", "admitted", "resumed", "finished", "scheduled")
            columns = zip(*self._names, strict=True) if self._names else ((),) * len(names)
            for name, values in zip(names, columns, strict=True):
                table[name] = pa.array(values, pa.string())
        return pa.table(table)

    @property
    def totals(self) -> Totals:
        """The rows added up, anew each time."""
        rows, slots = self._rows()
        first, increment = np.array(self._times).reshape(-1, 2).T
        return add_up(
            [{**rows, **slots, "first_step_ps": first, "increment_ps": increment}],
            slot_states=SLOT_STATES,
            extra_gaps=self._gaps,
            first_served_ps=self._first_served_ps,
            duration_ps=self._now_ps - self._start_ps,
            waiting_time=self._waiting_ps,
        )

    def _rows(self) -> tuple[dict[str, IntArray], dict[str, FloatArray]]:
        rows = np.array(self._steps, dtype=np.int64).reshape(-1, len(_STEP_COLUMNS))
        slots = np.array(self._slots, dtype=np.float64).reshape(-1, len(_SLOT_COLUMNS))
        return (
            dict(zip(_STEP_COLUMNS, np.ascontiguousarray(rows.T), strict=True)),
            dict(zip(_SLOT_COLUMNS, np.ascontiguousarray(slots.T), strict=True)),
        )

    def _on_prefills(self, output: SchedulerOutput, step: int, start_ps: int, end_ps: int) -> None:
        if self._first_served_ps == UNSET and output.admitted:  # first come, first served
            self._first_served_ps = output.admitted[0].arrival_ps
        for request in output.admitted:
            request.scheduled_step, request.scheduled_ps = step, start_ps
            self._waiting_ps += start_ps - request.arrival_ps
        for request in output.resumed:
            self._waiting_ps += start_ps - self._preempted_ps.pop(request)
        for request in output.sampled:
            if request.first_token_step == UNSET:
                request.first_token_step, request.first_token_ps = step, end_ps
            else:
                self._gaps[end_ps - request.last_token_ps] += 1

    def _on_preempted(self, output: SchedulerOutput, step: int, start_ps: int) -> None:
        for request in output.preempted:
            self._preempted_ps[request] = start_ps
            if request.last_token_step == step - 1:
                request.last_token_ps = start_ps

    def _on_finished(self, request: Request, step: int, end_ps: int) -> None:
        self.num_done += 1
        width = len(_REQUEST_COLUMNS)
        first = request.index * width
        self._requests[first : first + width] = array(
            "q",
            (
                request.num_output_tokens,
                request.scheduled_step,
                request.first_token_step,
                step,
                request.num_cached_tokens,
                request.num_preemptions,
                request.scheduled_ps,
                request.first_token_ps,
                end_ps,
            ),
        )


def _work_of(output: SchedulerOutput, held_slots: int, num_finished: int) -> tuple[int, ...]:
    """Answer the columns of a step row from num_decodes on."""
    num_chunks = len(output.batch.prefills)
    return (
        output.num_decodes,
        len(output.prefills),
        sum(chunk for chunk, _ in output.batch.prefills),
        len(output.prefills) - num_chunks,
        len(output.sampled),
        held_slots,
        len(output.admitted),
        len(output.resumed),
        len(output.preempted),
        num_finished,
        output.num_refusals,
        output.recomputed_tokens,
        output.prefix_cache_queries,
        output.prefix_cache_hits,
        output.preempted_cache_queries,
        output.preempted_cache_hits,
    )


def _split(stats: MemoryStats) -> tuple[float, ...]:
    """Answer the slots in each of `SLOT_STATES`; they add up to the capacity."""
    _, live, reserved, internal, cached, free, external = stats
    return (live, reserved, internal, external, cached, free - external)


def _mean_split(
    stats: MemoryStats, num_decodes: int, taken: Sequence[Taken], times: StepTimes
) -> tuple[float, ...]:
    """Answer `_split` averaged over the time of a run, at whose end *stats* hold."""
    total = times.total
    # What was taken in step j was not held before it; every step writes one token a request.
    held = internal = cached = 0
    for offset, held_slots, internal_slots, cached_slots in taken:
        before = times.before(offset)
        held += held_slots * before
        internal += internal_slots * before
        cached += cached_slots * before
    unwritten = num_decodes * ((times.num_steps - 1) * total - times.first_moment)
    mean_live = stats.live - unwritten / total
    mean_held = stats.held - held / total
    mean_internal = stats.internal - internal / total
    mean_cached = stats.cached + cached / total
    external = stats.external
    free = stats.capacity - mean_held - mean_cached - external
    reserved = mean_held - mean_live - mean_internal
    return (mean_live, reserved, mean_internal, external, mean_cached, free)
