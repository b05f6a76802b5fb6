"""Mean, spread and percentiles of the gaps between tokens, from runs of gaps that grow evenly.

A run of a billion decode steps is a billion gaps and one row. Everything here costs rows: sums have
closed forms, and a percentile is found by narrowing every run to the gaps that it can still be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.columns import BoolArray, FloatArray
from workloads.record import IntArray

PERCENTILES = (50, 99)
"""Reported for every latency; 50 is vLLM's ``median_``."""

SAMPLE_SIZE = 2048
"""Gaps looked at to guess an order statistic: more cost a sort, fewer cost rounds over all runs."""


@dataclass(frozen=True, slots=True)
class GapStatistics:
    """All gaps between a token and the next of its request, in numbers.

    Without any gap, *count* is 0 and the rest has no meaning.

    Attributes:
        count: how many.
        mean_ps: their mean, in picoseconds.
        std_ps: their standard deviation (of the population), in picoseconds.
        percentiles_ps: each of `PERCENTILES`, linear between the two neighbouring gaps.
    """

    count: int
    mean_ps: float
    std_ps: float
    percentiles_ps: dict[int, float]


@dataclass(frozen=True, slots=True)
class GapRuns:
    """Gaps as arithmetic progressions, one an element of these arrays.

    The gaps of a run are ``first + j * increment`` picoseconds in double precision, j from *start*
    to *stop* - 1, each of them *weight* times. Where there is more than one, *increment* > 0.
    """

    first: FloatArray
    increment: FloatArray
    start: IntArray
    stop: IntArray
    weight: IntArray

    @property
    def counts(self) -> IntArray:
        """How many gaps each run has."""
        return (self.stop - self.start) * self.weight

    def gap(self, index: IntArray) -> FloatArray:
        """Answer gap *index* of every run."""
        return self.first + index * self.increment

    def between(self, start: IntArray, stop: IntArray) -> "GapRuns":
        """Answer the gaps *start* to *stop* - 1 of every run, without the runs that have none."""
        left = replace(self, start=start, stop=stop)
        return left.where(start < stop)

    def where(self, chosen: BoolArray) -> "GapRuns":
        """Answer the *chosen* runs."""
        index = np.flatnonzero(chosen)
        return GapRuns(
            self.first[index],
            self.increment[index],
            self.start[index],
            self.stop[index],
            self.weight[index],
        )

    def split(self, pivot: float) -> tuple[IntArray, IntArray]:
        """Answer for every run the index of its first gap >= *pivot* and of its first > *pivot*."""
        guess = np.ceil((pivot - self.first) / self.increment)
        reached = np.clip(guess, self.start, self.stop).astype(np.int64)
        # Division rounds, and so do the gaps; these decide. Each loop ends after a few rounds: gaps
        # that round to the same double are many only where a run's steps are very long, so few.
        while (over := (reached > self.start) & (self.gap(reached - 1) >= pivot)).any():
            reached -= over
        while (short := (reached < self.stop) & (self.gap(reached) < pivot)).any():
            reached += short
        passed = reached.copy()
        while (equal := (passed < self.stop) & (self.gap(passed) == pivot)).any():
            passed += equal
        return reached, passed

    def sample(self, random: np.random.Generator) -> FloatArray:
        """Answer `SAMPLE_SIZE` gaps, sorted, one from each equal part of the runs; all if few."""
        ends = np.cumsum(self.counts)
        total = int(ends[-1])
        size = min(total, SAMPLE_SIZE)
        # At random within the parts: there is no rhythm of the runs that it keeps missing.
        offset = random.random(size) * (total // size)
        picks = np.arange(size) * total // size + offset.astype(np.int64)
        run = np.searchsorted(ends, picks, side="right")
        index = self.stop[run] - 1 - (ends[run] - 1 - picks) // self.weight[run]
        return np.sort(self.first[run] + index * self.increment[run])


def gaps_of(chunk: Mapping[str, npt.NDArray[Any]]) -> GapRuns:
    """Answer the gaps of step rows (`sim.totals.add_up`): a step is one for each of its decodes."""
    num_steps = chunk["num_steps"].astype(np.int64)
    increment = chunk["increment_ps"].astype(np.float64)
    single = num_steps == 1
    equal = single | (increment == 0)  # one gap, num_steps times as often
    runs = GapRuns(
        np.where(single, chunk["duration_ps"], chunk["first_step_ps"]).astype(np.float64),
        np.where(equal, 1.0, increment),  # of no effect then, and no division by zero
        np.zeros_like(num_steps),
        np.where(equal, np.minimum(num_steps, 1), num_steps),
        np.where(equal, num_steps, 1) * chunk["num_decodes"].astype(np.int64),
    )
    return runs.where(runs.counts > 0)


def single_gaps(gaps: Mapping[int, int]) -> GapRuns:
    """Answer single gaps (ps), each as often as it says."""
    return GapRuns(
        np.fromiter(gaps.keys(), np.float64, len(gaps)),
        np.ones(len(gaps)),
        np.zeros(len(gaps), dtype=np.int64),
        np.ones(len(gaps), dtype=np.int64),
        np.fromiter(gaps.values(), np.int64, len(gaps)),
    )


def joined(parts: Sequence[GapRuns]) -> GapRuns:
    """Answer all gaps of *parts*, one or more."""
    return GapRuns(
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.increment for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.stop for part in parts]),
        np.concatenate([part.weight for part in parts]),
    )


def describe(runs: GapRuns) -> GapStatistics:
    """Answer the statistics of *runs*, as NumPy's of the list of all gaps."""
    counts = runs.counts
    count = int(counts.sum())
    if not count:
        return GapStatistics(0, 0.0, 0.0, {})
    # From the smallest gap on: what nearly equal gaps differ by must not drown in their size.
    low = float(runs.first.min())
    spread = runs.increment * (runs.stop - 1)
    middle = runs.first - low + spread / 2
    mean = float(np.average(middle, weights=counts))
    # The mean square of n evenly spaced values about their middle is increment^2 (n^2 - 1) / 12.
    inside = spread * (spread + 2 * runs.increment) / 12
    variance = float(np.average((middle - mean) ** 2 + inside, weights=counts))
    percentiles = {percent: _percentile(runs, count, percent) for percent in PERCENTILES}
    return GapStatistics(count, low + mean, variance**0.5, percentiles)


def _percentile(runs: GapRuns, count: int, percent: int) -> float:
    rank, hundredths = divmod(percent * (count - 1), 100)
    below, above = neighbours(runs, rank)
    return below + (above - below) * hundredths / 100 if hundredths else below


def neighbours(runs: GapRuns, rank: int) -> tuple[float, float]:
    """Answer the gaps at index *rank* and at the next of all gaps sorted; inf behind the last.

    Each round guesses the first from a sample, counts the gaps below and up to the guess, and keeps
    those on the side where it is. The guess is a gap itself, so that every round leaves some out,
    and it is right once the gaps that are left fit into the sample. Exact: nothing is interpolated.
    """
    random = np.random.default_rng(0)  # the answer does not depend on it
    above = np.inf
    while True:
        sample = runs.sample(random)
        guess = float(sample[rank * len(sample) // int(runs.counts.sum())])
        reached, passed = runs.split(guess)
        num_below = int((reached - runs.start) @ runs.weight)
        num_through = int((passed - runs.start) @ runs.weight)
        if rank < num_below:
            runs, above = runs.between(runs.start, reached), guess
        elif rank < num_through - 1:
            return guess, guess
        else:
            runs = runs.between(passed, runs.stop)
            if rank == num_through - 1:
                return guess, float(runs.gap(runs.start).min(initial=above))
            rank -= num_through
