"""Linear interpolation between measured sizes.

Linear on both axes: interpolating on logarithmic axes prices what lies between two knots too high,
and a sum over steps would have no closed form.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.columns import FloatArray


class Bracket(NamedTuple):
    """A place on an axis of knots: *weight* of knot *high*, the rest of knot *low*."""

    low: int
    high: int
    weight: float


def bracket(knots: Sequence[float], value: float) -> Bracket | None:
    """Answer where *value* lies among ascending *knots*; None above the last.

    Below the first it is taken for the first: kernels have a floor.
    """
    high = bisect_left(knots, value)
    if high == len(knots):
        return None
    if high == 0 or knots[high] == value:
        return Bracket(high, high, 0.0)
    low = high - 1
    return Bracket(low, high, (value - knots[low]) / (knots[high] - knots[low]))


class Curve:
    """A time in picoseconds over one size, linear between measured sizes.

    Args:
        sizes: ascending.
        times_ps: one a size.
    """

    __slots__ = ("sizes", "times_ps")

    def __init__(self, sizes: Sequence[float], times_ps: Sequence[float]) -> None:
        self.sizes = list(sizes)
        self.times_ps = list(times_ps)

    @property
    def last(self) -> float:
        """The largest size that was measured."""
        return self.sizes[-1]

    def at(self, size: float) -> float | None:
        """Answer the time of *size*; None above the last."""
        place = bracket(self.sizes, size)
        if place is None:
            return None
        low, high, weight = place
        times = self.times_ps
        return times[low] + weight * (times[high] - times[low])

    def at_all(self, sizes: FloatArray) -> FloatArray:
        """Answer the times of *sizes* [n]; NaN above the last."""
        return np.interp(sizes, self.sizes, self.times_ps, right=np.nan)
