"""Step rows added up: integrals over time, counts, and when and how often tokens come.

A row is a run of steps, of which step j lasts ``first_step_ps + j * increment_ps``. No row is ever
expanded to its steps: time and memory follow rows (and simulated seconds), never tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.columns import FloatArray
from sim.gaps import GapStatistics, describe, gaps_of, joined, single_gaps
from sim.timing.base import TICKS_PER_PS
from workloads.record import PS_PER_S, IntArray

Rows = Mapping[str, npt.NDArray[Any]]
"""Columns of step rows by name (`sim.metrics`); integers of any width, times in picoseconds."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Integrals and counts over a whole run, from its step rows; times in picoseconds.

    The counts without a description are sums of the step rows' columns of that name.

    Attributes:
        slot_time: slots in each state, integrated over time.
        running_time: running requests, integrated over time.
        waiting_time: time that requests spent in the queue, first wait and later ones.
        duration_ps: from the first arrival to the end of the last step.
        inter_token: gaps between a token and the next of its request.
        tokens_in_second: tokens sampled in each second since the first served request arrived.
    """

    num_steps: int
    duration_ps: int
    slot_time: dict[str, float]
    running_time: float
    waiting_time: int
    max_running: int
    max_held_slots: int
    inter_token: GapStatistics
    tokens_in_second: IntArray
    num_admitted: int
    num_resumed: int
    num_preempted: int
    num_finished: int
    num_refusals: int
    recomputed_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_cache_queries: int
    preempted_cache_hits: int


COUNTS = (
    "num_admitted",
    "num_resumed",
    "num_preempted",
    "num_finished",
    "num_refusals",
    "recomputed_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preempted_cache_queries",
    "preempted_cache_hits",
)
"""Counter columns of the step rows; the fields of `Totals` with these names are their sums."""

BLOCK = 1 << 16
"""Seconds looked at together where rows last longer: bounds the memory for one very long row."""


def add_up(
    chunks: Iterable[Rows],
    *,
    slot_states: Sequence[str],
    extra_gaps: Mapping[int, int],
    first_served_ps: int,
    duration_ps: int,
    waiting_time: int,
) -> Totals:
    """Answer the totals of a run.

    Args:
        chunks: the step rows in order, in pieces of any size; one piece is looked at at a time.
        slot_states: ``kv_<state>_slots`` is the column of time-weighted slots in each state.
        extra_gaps: gaps between tokens (ps) that are no step's duration, and how many: preemptions.
        first_served_ps: arrival of the first request served.
        duration_ps: from the first arrival to the end of the last step.
        waiting_time: see `Totals`.
    """
    integrals = dict.fromkeys([*(f"kv_{state}_slots" for state in slot_states), "running"], 0.0)
    sums = dict.fromkeys(["num_steps", *COUNTS], 0)
    most = dict.fromkeys(["running", "held_slots"], 0)
    gaps = [single_gaps(extra_gaps)]
    tokens = _TokensInSecond(first_served_ps)
    for chunk in chunks:
        duration = chunk["duration_ps"].astype(np.float64)
        for name in integrals:
            # Not a dot product: how that rounds, and how long it takes, depends on BLAS's threads.
            integrals[name] += float((chunk[name] * duration).sum())
        for name in sums:
            sums[name] += int(chunk[name].sum(dtype=np.int64))
        for name in most:
            most[name] = max(most[name], int(chunk[name].max(initial=0)))
        gaps.append(gaps_of(chunk))
        tokens.add(chunk)
    return Totals(
        duration_ps=duration_ps,
        slot_time={state: integrals[f"kv_{state}_slots"] for state in slot_states},
        running_time=integrals["running"],
        waiting_time=waiting_time,
        max_running=most["running"],
        max_held_slots=most["held_slots"],
        inter_token=describe(joined(gaps)),
        tokens_in_second=tokens.counts,
        **sums,
    )


class _TokensInSecond:
    """Counts the tokens sampled in each second; those of a step count where it ends.

    The ends of steps within a row are counted from its start, which is rounded down to picoseconds.
    """

    def __init__(self, first_served_ps: int) -> None:
        self._first_served_ps = first_served_ps
        self._counts = np.zeros(0, dtype=np.int64)
        self._num_seconds = 0

    @property
    def counts(self) -> IntArray:
        """Tokens in each second since the first served request arrived, up to the last step."""
        return self._counts[: self._num_seconds]

    def add(self, rows: Rows) -> None:
        """Count the tokens of *rows*."""
        runs = _Runs.of(rows, self._first_served_ps)
        last = runs.end_ps // PS_PER_S
        self._num_seconds = max(self._num_seconds, int(last.max(initial=-1)) + 1)
        missing = self._num_seconds - len(self._counts)
        if missing > 0:
            more = np.zeros(max(missing, len(self._counts)), dtype=np.int64)
            self._counts = np.concatenate([self._counts, more])
        # All tokens of a run in its last second; then, for each second that begins within the run,
        # those of the steps that ended before are one second earlier.
        sampled = runs.num_steps * runs.num_decodes + runs.num_sampled_prefills
        np.add.at(self._counts, last, sampled)
        begun = last - runs.start_ps // PS_PER_S
        num_pairs = np.cumsum(begun)
        for block in range(0, int(begun.sum()), BLOCK):
            pair = np.arange(block, min(block + BLOCK, int(num_pairs[-1])))
            index = np.searchsorted(num_pairs, pair, side="right")
            later: IntArray = num_pairs[index] - 1 - pair  # seconds that begin later in the run
            second = last[index] - later
            some = runs.at(index)
            earlier = some.num_decodes * some.ended_before(second * PS_PER_S - some.start_ps)
            np.add.at(self._counts, second - 1, earlier)
            np.add.at(self._counts, second, -earlier)


class _Ticks(NamedTuple):
    """Times in whole picoseconds and ticks below one; together they may exceed 64 bits of ticks."""

    ps: IntArray
    ticks: IntArray

    @classmethod
    def of(cls, times_ps: FloatArray) -> "_Ticks":
        """Answer *times_ps* in ticks, as they were before: float64 holds a tick up to 0.4 s."""
        whole = np.floor(times_ps)
        ticks = np.rint((times_ps - whole) * TICKS_PER_PS)
        return cls(whole.astype(np.int64), ticks.astype(np.int64))


class _Runs(NamedTuple):
    """The rows with steps; *start_ps* counts from the arrival of the first served request."""

    num_steps: IntArray
    start_ps: IntArray
    duration_ps: IntArray
    first: FloatArray
    increment: FloatArray
    num_decodes: IntArray
    num_sampled_prefills: IntArray

    @classmethod
    def of(cls, rows: Rows, first_served_ps: int) -> "_Runs":
        names = ("num_steps", "start_ps", "duration_ps", "num_decodes", "num_sampled_prefills")
        busy = rows["num_steps"] > 0
        num_steps, start, duration, decodes, sampled = (
            rows[name][busy].astype(np.int64) for name in names
        )
        first, increment = (rows[name][busy] for name in ("first_step_ps", "increment_ps"))
        start -= first_served_ps
        return cls(num_steps, start, duration, first, increment, decodes, sampled)

    @property
    def end_ps(self) -> IntArray:
        """When the last step of each run ends."""
        return self.start_ps + self.duration_ps

    def at(self, index: IntArray) -> "_Runs":
        """Answer the runs at *index*."""
        return _Runs._make(column[index] for column in self)

    def ended_before(self, limit_ps: IntArray) -> IntArray:
        """Answer how many steps of each run end sooner than *limit_ps* after its start.

        *limit_ps* lies within the run, so that its last step does not.
        """
        first, increment = _Ticks.of(self.first), _Ticks.of(self.increment)
        most = self.num_steps - 1

        def elapsed(num_steps: IntArray) -> IntArray:
            return _elapsed_ps(num_steps, first, increment)

        # The root of increment / 2 n^2 + (first - increment / 2) n - limit, then mend the rounding.
        b = self.first - self.increment / 2
        root = b + np.sqrt(b**2 + 2 * self.increment * limit_ps)
        guess = 2.0 * limit_ps / np.maximum(root, 1e-4)  # 2 * limit_ps may exceed 64 bits
        ended = np.clip(guess, 0, most).astype(np.int64)
        while (late := (ended > 0) & (elapsed(ended) >= limit_ps)).any():
            ended -= late
        while (early := (ended < most) & (elapsed(ended + 1) < limit_ps)).any():
            ended += early
        return ended


def _elapsed_ps(num_steps: IntArray, first: _Ticks, increment: _Ticks) -> IntArray:
    """Answer how long the first *num_steps* steps last, in whole picoseconds, rounded down.

    In integers: an int64 holds any run's picoseconds, but neither its ticks nor does a double hold
    all picoseconds, and a step may well end exactly where a second does.
    """
    half, other = num_steps // 2, num_steps - 1 + num_steps % 2
    # Step j has j increments: half * other in all. Divided by TICKS_PER_PS before they are
    # multiplied by ticks, which could overflow.
    rest = half % TICKS_PER_PS * other
    quotient = half // TICKS_PER_PS * other + rest // TICKS_PER_PS
    ticks = num_steps * first.ticks + rest % TICKS_PER_PS * increment.ticks
    whole = num_steps * first.ps + half * other * increment.ps + quotient * increment.ticks
    elapsed: IntArray = whole + ticks // TICKS_PER_PS
    return elapsed
