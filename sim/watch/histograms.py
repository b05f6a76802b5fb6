"""Values counted in buckets as Prometheus does: within its bound, and beyond the one before."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.gaps import GapRuns
from workloads.record import IntArray


class Histogram(NamedTuple):
    """How many values each bucket has, the last those beyond all bounds; and their sum."""

    counts: IntArray
    total: float

    def plus(self, other: "Histogram") -> "Histogram":
        """Answer both together."""
        return Histogram(self.counts + other.counts, self.total + other.total)


def of_values(
    values: npt.NDArray[Any], bounds: npt.NDArray[Any], weights: IntArray | None = None
) -> Histogram:
    """Answer the histogram of *values*, each as often as its weight says."""
    buckets = np.searchsorted(bounds, values)
    counts = np.bincount(buckets, weights, len(bounds) + 1).astype(np.int64)
    sums = values.astype(np.float64) * (1 if weights is None else weights)
    return Histogram(counts, float(sums.sum()))


def of_gaps(gaps: GapRuns, bounds: npt.NDArray[Any]) -> Histogram:
    """Answer the histogram of *gaps* in picoseconds; no run is expanded."""
    low = np.searchsorted(bounds, gaps.gap(gaps.start))
    whole = low == np.searchsorted(bounds, gaps.gap(gaps.stop - 1))
    counts = np.bincount(low[whole], gaps.counts[whole], len(bounds) + 1).astype(np.int64)
    rest = gaps.where(~whole)
    if len(rest.first):
        within = [(rest.split(bound)[1] - rest.start) @ rest.weight for bound in bounds]
        counts += np.diff([0, *within, rest.counts.sum()])
    middle = gaps.first + gaps.increment * (gaps.start + gaps.stop - 1) / 2
    return Histogram(counts, float((middle * gaps.counts).sum()))
