"""What a run leaves behind: one row a request, one row a run of steps, and totals over time.

Names and definitions are vLLM 0.33.0's where it has them (``v1/metrics/loggers.py``).
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa

from sim.allocators.base import MemoryStats
from sim.request import UNSET, Request
from sim.scheduler import SchedulerOutput
from workloads.record import PS_PER_S, IntArray, Trace

SLOT_STATES = ("live", "reserved", "internal", "external", "cached", "free")
"""Where a token slot can be, as reported; ``free`` without ``external``, so that they add up."""


def slot_split(stats: MemoryStats) -> tuple[int, ...]:
    """Answer the slots in each of `SLOT_STATES`; they add up to the capacity."""
    return (
        stats.live,
        stats.reserved,
        stats.internal,
        stats.external,
        stats.cached,
        stats.free - stats.external,
    )


@dataclass(slots=True)
class StepRow:
    """Consecutive steps that differ only in their contexts: a run of decodes, or a single step.

    Counts are those of the whole run, except *running*, *waiting* and *used_blocks*, which hold
    right after scheduling (of the last step), and *used_blocks_after*, once the requests that
    finished have left. A row without steps is time in which the engine had nothing to do.
    """

    step: int
    num_steps: int
    start_ps: int
    duration_ps: int
    running: int
    waiting: int
    num_scheduled_reqs: int
    num_scheduled_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    used_blocks: int
    used_blocks_after: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_cache_queries: int
    preempted_cache_hits: int
    num_admitted: int
    num_resumed: int
    num_preempted: int
    num_finished: int
    num_refusals: int
    recomputed_tokens: int
    split: tuple[int, ...] = field(metadata={"column": False})
    slot_time: list[int] = field(metadata={"column": False})
    output: SchedulerOutput | None = field(metadata={"column": False})
    finished: list[Request] = field(metadata={"column": False})


_STEP_COUNTS = [f.name for f in fields(StepRow) if f.metadata.get("column", True)]
_SUMMED = ("num_steps", "duration_ps", *_STEP_COUNTS[6:10])
"""Counts that a further step of a run adds to; the later ones are 0 inside a run."""


@dataclass(slots=True)
class Totals:
    """Integrals and counts over the whole run, exact in integers; times in picoseconds."""

    duration_ps: int = 0
    num_steps: int = 0
    running_time: int = 0
    waiting_time: int = 0
    slot_time: list[int] = field(default_factory=lambda: [0] * len(SLOT_STATES))
    max_running: int = 0
    max_held_slots: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preempted_cache_queries: int = 0
    preempted_cache_hits: int = 0
    num_preempted: int = 0
    num_refusals: int = 0
    recomputed_tokens: int = 0
    inter_token_ps: Counter[int] = field(default_factory=Counter)
    tokens_in_second: Counter[int] = field(default_factory=Counter)


class Recorder:
    """Listens to the engine. Keeps request columns, step rows and totals.

    Args:
        trace: what is replayed.
        block_size: to count held slots in blocks; contiguous reservations are rounded up.
        capacity: slots of the pool.
        save_steps: keep one row a step, with the names of the requests.
    """

    def __init__(self, trace: Trace, block_size: int, capacity: int, *, save_steps: bool) -> None:
        self._trace = trace
        self._block_size = block_size
        self.capacity = capacity
        self._save_steps = save_steps
        self._rows: list[StepRow] = []
        self._start_ps = int(trace.arrival_ps[0])
        self._now_ps = self._start_ps
        self._idle_split = (0,) * (len(SLOT_STATES) - 1) + (capacity,)
        self._refused: dict[int, str] = {}
        size = len(trace)
        self._columns: dict[str, IntArray] = {
            name: np.full(size, UNSET, dtype=np.int64)
            for name in (
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
        }
        self.totals = Totals()
        self.num_done = 0

    def on_refused(self, request: Request, reason: str) -> None:
        """Note a request that can never be served."""
        self._refused[request.index] = reason
        self.num_done += 1

    def on_step(
        self,
        *,
        start_ps: int,
        end_ps: int,
        num_running: int,
        num_waiting: int,
        output: SchedulerOutput,
        stats: MemoryStats,
        finished: list[Request],
        stats_after: MemoryStats,
    ) -> None:
        """Note one step: *stats* and counts right after scheduling, *stats_after* at its end."""
        step = self.totals.num_steps
        if start_ps > self._now_ps:
            self._on_idle(step, start_ps)
        duration_ps = end_ps - start_ps
        split = slot_split(stats)
        batch = output.batch
        num_tokens = batch.num_tokens
        row = StepRow(
            step=step,
            num_steps=1,
            start_ps=start_ps,
            duration_ps=duration_ps,
            running=num_running,
            waiting=num_waiting,
            num_scheduled_reqs=len(output.scheduled),
            num_scheduled_tokens=num_tokens,
            num_prefill_tokens=num_tokens - batch.num_decodes,
            num_decode_tokens=batch.num_decodes,
            used_blocks=-(-stats.held // self._block_size),
            used_blocks_after=-(-stats_after.held // self._block_size),
            prefix_cache_queries=output.prefix_cache_queries,
            prefix_cache_hits=output.prefix_cache_hits,
            preempted_cache_queries=output.preempted_cache_queries,
            preempted_cache_hits=output.preempted_cache_hits,
            num_admitted=len(output.admitted),
            num_resumed=len(output.resumed),
            num_preempted=len(output.preempted),
            num_finished=len(finished),
            num_refusals=output.num_refusals,
            recomputed_tokens=output.recomputed_tokens,
            split=split,
            slot_time=[slots * duration_ps for slots in split],
            output=output if self._save_steps else None,
            finished=finished if self._save_steps else [],
        )
        self._add_to_totals(row, stats.held)
        self._on_sampled(output, step, start_ps, end_ps)
        for request in finished:
            self._on_finished(request, step, end_ps)
        self._keep(row)
        self._now_ps = end_ps
        self._idle_split = slot_split(stats_after)

    def request_table(self) -> pa.Table:
        """Answer one row a request, in arrival order; times in seconds, empty where not reached."""
        trace, columns = self._trace, self._columns
        refused = [self._refused.get(index) for index in range(len(trace))]
        table: dict[str, Any] = {
            "request_id": trace.request_ids,
            "refused": pa.array(refused, pa.string()),
            "arrival_time": trace.arrival_ps / PS_PER_S,
            "num_prompt_tokens": trace.num_prompt_tokens,
        }
        for name, values in columns.items():
            missing = values == UNSET
            if name.endswith("_ps"):
                seconds = pa.array(values / PS_PER_S, mask=missing)
                table[f"{name.removesuffix('_ps')}_time"] = seconds
            else:
                table[name] = pa.array(values, mask=missing)
        return pa.table(table)

    def step_table(self) -> pa.Table:
        """Answer one row a run of steps; with *save_steps* one a step, and who was scheduled.

        ``kv_<state>_slots`` are time-weighted over the run (of a run without time: as scheduled).
        """
        rows = [row for row in self._rows if row.num_steps or not self._save_steps]
        table: dict[str, Any] = {
            name: np.array([getattr(row, name) for row in rows], dtype=np.int64)
            for name in _STEP_COUNTS
        }
        table["time"] = table.pop("start_ps") / PS_PER_S
        table["duration"] = table.pop("duration_ps") / PS_PER_S
        for position, state in enumerate(SLOT_STATES):
            table[f"kv_{state}_slots"] = [
                row.slot_time[position] / row.duration_ps
                if row.duration_ps
                else float(row.split[position])
                for row in rows
            ]
        if self._save_steps:
            table.update(_names(rows))
        first = ("step", "num_steps", "time", "duration")
        return pa.table({name: table[name] for name in dict.fromkeys((*first, *table))})

    def _on_idle(self, step: int, until_ps: int) -> None:
        """Note time in which no request was alive or the queue could not move."""
        duration_ps = until_ps - self._now_ps
        empty = dict.fromkeys(_STEP_COUNTS, 0)
        empty |= {"step": step, "start_ps": self._now_ps, "duration_ps": duration_ps}
        row = StepRow(
            **empty,
            split=self._idle_split,
            slot_time=[slots * duration_ps for slots in self._idle_split],
            output=None,
            finished=[],
        )
        self._rows.append(row)
        self._add_to_totals(row, 0)

    def _add_to_totals(self, row: StepRow, held_slots: int) -> None:
        totals = self.totals
        totals.num_steps += row.num_steps
        totals.duration_ps += row.duration_ps
        totals.running_time += row.running * row.duration_ps
        totals.waiting_time += row.waiting * row.duration_ps
        totals.slot_time = [a + b for a, b in zip(totals.slot_time, row.slot_time, strict=True)]
        totals.max_running = max(totals.max_running, row.running)
        totals.max_held_slots = max(totals.max_held_slots, held_slots)
        totals.prefix_cache_queries += row.prefix_cache_queries
        totals.prefix_cache_hits += row.prefix_cache_hits
        totals.preempted_cache_queries += row.preempted_cache_queries
        totals.preempted_cache_hits += row.preempted_cache_hits
        totals.num_preempted += row.num_preempted
        totals.num_refusals += row.num_refusals
        totals.recomputed_tokens += row.recomputed_tokens

    def _keep(self, row: StepRow) -> None:
        """Append *row*, or let the last one take it in: same requests, nothing but decodes."""
        last = self._rows[-1] if self._rows else None
        if (
            last is None
            or self._save_steps
            or last.num_finished
            or not last.num_steps
            or row.waiting != last.waiting
            or row.num_decode_tokens * last.num_steps != last.num_decode_tokens
            or row.num_prefill_tokens
            or last.num_prefill_tokens
            or row.num_preempted
            or row.num_finished
            or row.num_refusals != last.num_refusals
        ):
            self._rows.append(row)
            return
        for name in _SUMMED:
            setattr(last, name, getattr(last, name) + getattr(row, name))
        last.used_blocks, last.used_blocks_after = row.used_blocks, row.used_blocks_after
        last.slot_time = [a + b for a, b in zip(last.slot_time, row.slot_time, strict=True)]

    def _on_sampled(self, output: SchedulerOutput, step: int, start_ps: int, end_ps: int) -> None:
        """Note the tokens of a step: first tokens, and the gap of each other to the one before."""
        in_step = 0
        gaps = self.totals.inter_token_ps
        for request in output.admitted:
            request.scheduled_step, request.scheduled_ps = step, start_ps
        for request in output.sampled:
            last = request.last_token_ps
            request.last_token_ps = end_ps
            if last == start_ps:
                in_step += 1
            elif last == UNSET:
                request.first_token_step, request.first_token_ps = step, end_ps
            else:
                gaps[end_ps - last] += 1
        if in_step:
            gaps[end_ps - start_ps] += in_step
        second = (end_ps - self._start_ps) // PS_PER_S
        self.totals.tokens_in_second[second] += len(output.sampled)

    def _on_finished(self, request: Request, step: int, end_ps: int) -> None:
        self.num_done += 1
        columns, index = self._columns, request.index
        for name in ("num_output_tokens", "scheduled_step", "first_token_step"):
            columns[name][index] = getattr(request, name)
        columns["finish_step"][index] = step
        columns["num_cached_tokens"][index] = request.num_cached_tokens
        columns["num_preemptions"][index] = request.num_preemptions
        columns["scheduled_ps"][index] = request.scheduled_ps
        columns["first_token_ps"][index] = request.first_token_ps
        columns["finish_ps"][index] = end_ps


def _names(rows: list[StepRow]) -> dict[str, list[str]]:
    """Answer the request names of every step, joined by ``;`` in scheduling order."""
    outputs = [row.output or SchedulerOutput() for row in rows]
    return {
        "preempted": [";".join(r.request_id for r in output.preempted) for output in outputs],
        "admitted": [";".join(r.request_id for r in output.admitted) for output in outputs],
        "resumed": [";".join(r.request_id for r in output.resumed) for output in outputs],
        "finished": [";".join(r.request_id for r in row.finished) for row in rows],
        "scheduled": [
            ";".join(f"{r.request_id}:{n}" for r, n in output.scheduled) for output in outputs
        ],
    }
