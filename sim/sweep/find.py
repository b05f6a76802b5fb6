"""The highest request rate that still meets a goal, by doubling and bisection."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

MAX_HALVINGS = 10
"""Rates below a thousandth of the first one are not tried: a lone request fails there as well."""

TRIED_BEFORE_ALL_AT_ONCE = 5
"""Doublings after which it is asked whether any rate at all is too high."""


class Found(NamedTuple):
    """Where the goal is met and where it is not.

    Attributes:
        rate: the highest rate at which it was met; 0 if at none, inf if even with all at once.
        failing: the lowest at which it was not; inf if at none.
        num_runs: how often it was tried.
    """

    rate: float
    failing: float
    num_runs: int


def highest_rate(meets: Callable[[float], bool], start: float, tolerance: float) -> Found:
    """Answer the highest rate for which *meets* is true, within a factor of 1 + *tolerance*.

    *start* is tried first. It is taken for granted that what fails at one rate fails at all higher
    ones; where that is not so, both rates answered were tried all the same.
    """
    num_runs = 0

    def tried(rate: float) -> bool:
        nonlocal num_runs
        num_runs += 1
        return meets(rate)

    low, high = _bracket(tried, start)
    while 0 < low < math.inf and high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        if tried(middle):
            low = middle
        else:
            high = middle
    return Found(low, high, num_runs)


def _bracket(meets: Callable[[float], bool], start: float) -> tuple[float, float]:
    """Answer a rate that meets the goal and twice that rate, which fails; or 0, or inf twice."""
    rate = start
    if not meets(start):
        while rate > start / 2**MAX_HALVINGS:
            rate /= 2
            if meets(rate):
                return rate, 2 * rate
        return 0.0, rate
    for doubling in itertools.count():
        if doubling == TRIED_BEFORE_ALL_AT_ONCE and meets(math.inf):
            return math.inf, math.inf
        if not meets(2 * rate):
            break
        rate *= 2
    return rate, 2 * rate
