"""What a run looks like at a simulated time, from the rows of its recorder.

Each sample takes in the rows that have come since the one before. Granularity: what the scheduler
decides (who runs and waits, look-ups, preemptions, refusals) counts from the start of a step, what
a step brings (tokens, who finished) from its end. Steps of a run are told apart; within a run of
decodes the slots are taken to change evenly, so that its average and its end are met.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.allocators.values import MemoryStats
from sim.columns import SLOT_STATES, Columns
from sim.engine import run_ticks, steps_until
from sim.gaps import gaps_of
from sim.metrics import Cursor, Events, Recorder
from sim.slots import end_slots
from sim.timing.base import TICKS_PER_PS
from sim.totals import COUNTS
from sim.watch.histograms import Histogram, of_gaps, of_values
from workloads.record import PS_PER_S, IntArray

Bounds = tuple[float, ...]
_Numbers = npt.NDArray[Any]

_OF_FIRST_TOKENS = ("prompt_tokens", "cached_tokens")
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
STEPS = "vllm:iteration_tokens_total"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a run.

    Attributes:
        time_ps: when, on the trace's clock.
        running: requests in the step under way.
        waiting: requests in the queue, after that step was scheduled.
        slots: slots in each of `SLOT_STATES`.
        counts: since the start: those of `sim.totals.COUNTS`, ``generation_tokens``, and of the
            requests that had their first token ``prompt_tokens`` and ``cached_tokens``.
        histograms: by name, of what the observer was given bounds for.
    """

    time_ps: int
    running: int
    waiting: int
    slots: dict[str, float]
    counts: dict[str, int]
    histograms: dict[str, Histogram]

    @property
    def seconds(self) -> float:
        """When, in simulated seconds."""
        return self.time_ps / PS_PER_S

    @property
    def usage(self) -> float:
        """The share of the pool that requests hold."""
        slots = self.slots
        capacity = sum(slots.values())
        return (slots["live"] + slots["reserved"] + slots["internal"]) / capacity


class Observer:
    """Looks at one run, now or later. Not for two threads at once.

    Args:
        recorder: of the run.
        bounds: of the histograms that are wanted, by name; seconds where the name says so.
    """

    def __init__(self, recorder: Recorder, bounds: Mapping[str, Bounds] | None = None) -> None:
        self._recorder = recorder
        self._scale = {name: PS_PER_S if name.endswith("_seconds") else 1 for name in bounds or {}}
        self._bounds = {
            name: np.array([round(bound * self._scale[name]) for bound in own])
            for name, own in (bounds or {}).items()
        }
        self._counts = dict.fromkeys((*COUNTS, "generation_tokens", *_OF_FIRST_TOKENS), 0)
        self._histograms = {
            name: Histogram(np.zeros(len(own) + 1, dtype=np.int64), 0.0)
            for name, own in self._bounds.items()
        }
        self._time_ps = recorder.start_ps
        self._cursor, self._row = Cursor(recorder.start_ps), 0  # rows of `_rows` taken in
        self._rows: Columns
        self._events: Events
        self._ends: IntArray = np.zeros(0, dtype=np.int64)
        self._last: Columns | None = None
        self._final: MemoryStats | None = None

    def finish(self, stats: MemoryStats) -> None:
        """Take in that the run is over and left *stats* behind."""
        self._final = stats

    def sample(self, until_ps: int | None = None) -> Sample:
        """Answer the state at *until_ps*, or after all that has been recorded.

        A time before the last sample's is taken to be that, one after the last step the end of it.
        """
        now_ps = self._recorder.now_ps
        if until_ps is None or until_ps > now_ps:
            until_ps = now_ps
        self._time_ps = time_ps = max(until_ps, self._time_ps)
        self._take_in(time_ps)
        row, counts, histograms = self._last, dict(self._counts), dict(self._histograms)
        elapsed_ps = None
        if self._row < len(self._ends):
            row = _one(self._rows, self._row)
            elapsed_ps = time_ps - int(row["start_ps"][0])
            begun = _begun(row, elapsed_ps)
            for name, count in self._counted(begun).items():
                counts[name] += count
            none = _within(self._events, self._rows, slice(self._row, self._row))
            for name, more in self._seen(begun, none).items():
                histograms[name] = histograms[name].plus(more)
        running, waiting, slots = self._gauges(row, elapsed_ps, time_ps)
        return Sample(time_ps, running, waiting, slots, counts, histograms)

    def _take_in(self, until_ps: int) -> None:
        """Count all rows that end by *until_ps*."""
        while True:
            if self._row == len(self._ends):
                self._row = 0
                self._rows, self._events = self._recorder.read(self._cursor)
                self._ends = self._rows["start_ps"] + self._rows["duration_ps"]
            last = int(np.searchsorted(self._ends, until_ps, side="right"))
            if last > self._row:
                self._add(slice(self._row, last))
                self._row = last
            if last < len(self._ends) or not last:
                return

    def _add(self, part: slice) -> None:
        rows = {name: column[part] for name, column in self._rows.items()}
        events = _within(self._events, self._rows, part)
        self._last = _one(self._rows, part.stop - 1)
        for name, count in self._counted(rows).items():
            self._counts[name] += count
        for name, column in self._of_first_tokens(events).items():
            self._counts[name] += int(column.sum())
        for name, more in self._seen(rows, events).items():
            self._histograms[name] = self._histograms[name].plus(more)

    def _counted(self, rows: Columns) -> dict[str, int]:
        counts = {name: int(rows[name].sum(dtype=np.int64)) for name in COUNTS}
        return counts | {"generation_tokens": int(_sampled(rows).sum())}

    def _of_first_tokens(self, events: Events) -> Columns:
        index = events.first_tokens["index"]
        prompts = self._recorder.trace.num_prompt_tokens[index]
        cached = events.first_tokens["num_cached_tokens"]
        return dict(zip(_OF_FIRST_TOKENS, (prompts, cached), strict=True))

    def _seen(self, rows: Columns, events: Events) -> dict[str, Histogram]:
        """Answer what *rows* and *events* add to the histograms."""
        if not self._bounds:
            return {}
        sampled, num_steps = _sampled(rows), rows["num_steps"].astype(np.int64)
        tokens = np.where(num_steps > 1, rows["num_decodes"], sampled)  # of each step
        row, index = events.first_tokens["row"], events.first_tokens["index"]
        first = self._of_first_tokens(events)
        np.add.at(tokens, row, first["prompt_tokens"] - first["cached_tokens"])
        ends = rows["start_ps"] + rows["duration_ps"]
        bounds = self._bounds[ITL]
        seen = {
            ITL: of_gaps(gaps_of(rows), bounds).plus(of_values(events.gaps["gap_ps"], bounds)),
            # vLLM counts a step only if it brought a token.
            STEPS: of_values(tokens, self._bounds[STEPS], num_steps * (sampled > 0)),
            TTFT: of_values(ends[row] - self._recorder.arrival_ps[index], self._bounds[TTFT]),
        }
        for name, values in self._of_requests(events.requests).items():
            seen[name] = of_values(values, self._bounds[name])
        return {
            name: Histogram(got.counts, got.total / self._scale[name]) for name, got in seen.items()
        }

    def _of_requests(self, rows: Columns) -> dict[str, _Numbers]:
        """Answer what histograms count of requests that finished; times in picoseconds."""
        recorder, index = self._recorder, rows["index"]
        arrival, prompts = recorder.arrival_ps[index], recorder.trace.num_prompt_tokens[index]
        scheduled, first, last = (
            rows[name].astype(np.int64) for name in ("scheduled_ps", "first_token_ps", "finish_ps")
        )
        outputs = rows["num_output_tokens"]
        return {
            "vllm:request_time_per_output_token_seconds": (last - first)
            / np.maximum(outputs - 1, 1),
            "vllm:e2e_request_latency_seconds": last - arrival,
            "vllm:request_queue_time_seconds": scheduled - arrival,
            "vllm:request_inference_time_seconds": last - scheduled,
            "vllm:request_prefill_time_seconds": first - scheduled,
            "vllm:request_decode_time_seconds": last - first,
            "vllm:request_prompt_tokens": prompts,
            "vllm:request_generation_tokens": outputs,
            "vllm:request_max_num_generation_tokens": outputs,
            "vllm:request_params_max_tokens": outputs,
            "vllm:request_prefill_kv_computed_tokens": prompts - rows["num_cached_tokens"],
            "vllm:request_params_n": np.ones_like(outputs),
            "vllm:request_num_preemptions": rows["num_preemptions"],
        }

    def _gauges(
        self, row: Columns | None, elapsed_ps: int | None, time_ps: int
    ) -> tuple[int, int, dict[str, float]]:
        """Answer running, waiting, slots, *elapsed_ps* after the start of *row* or at its end."""
        final, capacity = self._final, self._recorder.capacity
        if final is not None and time_ps == self._recorder.now_ps:
            free = final.free - final.external
            values = (
                final.live, final.reserved, final.internal, final.external, final.cached, free,
            )  # fmt: skip
            return 0, 0, dict(zip(SLOT_STATES, map(float, values), strict=True))
        if row is None:
            return 0, 0, dict.fromkeys(SLOT_STATES, 0.0) | {"free": float(capacity)}
        left = 0.0 if elapsed_ps is None else 1 - elapsed_ps / int(row["duration_ps"][0])
        ends, slots, rest = end_slots(row, capacity), {}, float(capacity)
        for state in ("live", "internal", "external", "cached", "reserved"):  # surest first
            end, mean = (float(slot[f"kv_{state}_slots"][0]) for slot in (ends, row))
            slots[state] = min(max(0.0, end - 2 * (end - mean) * left), rest)
            rest -= slots[state]
        slots = {state: slots.get(state, rest) for state in SLOT_STATES}
        return int(row["running"][0]), int(row["waiting"][0]), slots


def _sampled(rows: Columns) -> IntArray:
    """Answer the tokens that each row brought."""
    num_steps = rows["num_steps"].astype(np.int64)
    return num_steps * rows["num_decodes"] + rows["num_sampled_prefills"]


def _one(rows: Columns, row: int) -> Columns:
    return {name: column[row : row + 1] for name, column in rows.items()}


def _begun(row: Columns, elapsed_ps: int) -> Columns:
    """Answer what *row*, which is not over, counts *elapsed_ps* after its start."""
    num_steps, ended, ticks = int(row["num_steps"][0]), 0, 0
    if num_steps > 1:
        first, increment = (
            round(float(row[name][0]) * TICKS_PER_PS) for name in ("first_step_ps", "increment_ps")
        )
        ended = steps_until(elapsed_ps * TICKS_PER_PS + 1, first, increment) - 1
        ended = min(ended, num_steps - 1)
        ticks = run_ticks(first, increment, ended)
    nothing = np.zeros(1, dtype=np.int64)
    return row | {
        "num_steps": np.array([ended]),
        "duration_ps": np.array([ticks // TICKS_PER_PS]),
        "num_refusals": row["num_refusals"].astype(np.int64) * (ended + 1) // max(num_steps, 1),
        "num_sampled_prefills": nothing,
        "num_finished": nothing,
        "recomputed_tokens": nothing,
    }


def _within(events: Events, rows: Columns, part: slice) -> Events:
    """Answer the *events* of the *rows* that *part* has, counted from its start."""
    first_tokens, gaps = (_of_rows(column, part) for column in (events.first_tokens, events.gaps))
    ends = np.concatenate([[0], np.cumsum(rows["num_finished"], dtype=np.int64)])
    chosen = slice(int(ends[part.start]), int(ends[part.stop]))
    requests = {name: column[chosen] for name, column in events.requests.items()}
    return Events(first_tokens, gaps, requests)


def _of_rows(columns: Columns, part: slice) -> Columns:
    chosen = slice(*np.searchsorted(columns["row"], [part.start, part.stop]).tolist())
    mine = {name: column[chosen] for name, column in columns.items()}
    return mine | {"row": mine["row"].astype(np.int64) - part.start}
