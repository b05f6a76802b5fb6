"""When requests, or sessions, start: arrival processes, each a random clock bent to a rate.

All but `Vllm` and `AllAtOnce` are one renewal process of rate 1, whose gaps have a gamma
distribution, run through the inverse of the expected number of arrivals up to a time. *burstiness*
is the shape of the gamma, as vLLM's ``--burstiness``: 1 is Poisson, less is burstier, and the
coefficient of variation of the gaps is ``burstiness ** -0.5``.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from workloads.distributions import Floats
from workloads.record import MAX_ARRIVAL_S

Rate = Annotated[float, Meta(gt=0, le=1e6)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_ARRIVAL_S)]
Burstiness = Annotated[float, Meta(ge=1e-3, le=1e6)]

_LEAST = 1e-9
"""Arrivals that the busiest step of a profile has at least: floats end where nothing arrives."""

_GRID = 4096
"""Pieces of a period, within each of which a diurnal rate is taken to be constant."""


class Process(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=str.lower,
):
    """How often something starts; rates are a second."""

    def gaps(self, random: np.random.Generator, num: int) -> Floats:
        """Answer *num* gaps of mean 1."""
        return random.exponential(size=num)

    def expected(self, seconds: float) -> float:
        """Answer how many start in the first *seconds*, on average."""
        raise NotImplementedError

    def seconds(self, counts: Floats) -> Floats:
        """Answer when as many as *counts* are expected to have started: inverse of `expected`."""
        raise NotImplementedError

    def first(self, random: np.random.Generator, num: int) -> Floats:
        """Answer when the first *num* start."""
        return self.seconds(np.cumsum(self.gaps(random, num)))

    def until(self, random: np.random.Generator, seconds: float) -> Floats:
        """Answer when those start that do so before *seconds*."""
        end = self.expected(seconds)
        counts = np.cumsum(self.gaps(random, 1024))
        while counts[-1] < end:
            more = self.gaps(random, len(counts))
            counts = np.concatenate([counts, counts[-1] + np.cumsum(more)])
        return self.seconds(counts[: int(np.searchsorted(counts, end))])


class Poisson(Process, frozen=True):
    """At random, *rate* a second."""

    rate: Rate

    def expected(self, seconds: float) -> float:
        """Answer a line."""
        return self.rate * seconds

    def seconds(self, counts: Floats) -> Floats:
        """Answer a line."""
        return counts / self.rate


class Constant(Poisson, frozen=True):
    """Evenly, the first after one gap."""

    def gaps(self, random: np.random.Generator, num: int) -> Floats:  # noqa: ARG002
        """Answer ones."""
        return np.ones(num)


class _Bursty(Process, frozen=True, kw_only=True):
    """Gamma gaps."""

    burstiness: Burstiness = 1.0

    def gaps(self, random: np.random.Generator, num: int) -> Floats:
        """Answer gamma gaps of mean 1."""
        return random.gamma(self.burstiness, 1 / self.burstiness, num)


class Gamma(_Bursty, frozen=True):
    """Gamma gaps of mean 1 / *rate*."""

    rate: Rate

    def expected(self, seconds: float) -> float:
        """Answer a line."""
        return self.rate * seconds

    def seconds(self, counts: Floats) -> Floats:
        """Answer a line."""
        return counts / self.rate


class Vllm(Gamma, frozen=True):
    """As ``vllm bench serve``: gaps of `Gamma`, stretched until the last starts at num / rate.

    vLLM 0.33.0, ``benchmarks/serve.py:500-530``. So the mean rate is exact, and no free process.
    """

    def first(self, random: np.random.Generator, num: int) -> Floats:
        """Answer when the first *num* start."""
        counts = np.cumsum(self.gaps(random, num))
        # Gaps may all be 0 where burstiness is small; vLLM then lets them be.
        return self.seconds(counts * (num / counts[-1]) if counts[-1] else counts)


class Ramp(_Bursty, frozen=True):
    """From *start_rate* to *end_rate* along a line in *seconds*; then it stays.

    vLLM's ``--ramp-up-strategy linear`` goes along the number of requests instead of time.
    """

    start_rate: Annotated[float, Meta(ge=0, le=1e6)]
    end_rate: Rate
    over: Seconds

    def expected(self, seconds: float) -> float:
        """Answer a parabola, then a line."""
        inside = min(seconds, self.over)
        slope = (self.end_rate - self.start_rate) / self.over
        return (
            self.start_rate * inside
            + slope * inside**2 / 2
            + self.end_rate * max(0.0, seconds - self.over)
        )

    def seconds(self, counts: Floats) -> Floats:
        """Answer the root of the parabola, then a line."""
        slope = (self.end_rate - self.start_rate) / self.over
        end = self.expected(self.over)
        inside = np.minimum(counts, end)
        # This form of the root holds where the slope is 0.
        root = np.sqrt(np.maximum(self.start_rate**2 + 2 * slope * inside, 0))
        found: Floats = 2 * inside / np.maximum(self.start_rate + root, 1e-300)
        return found + np.maximum(counts - end, 0) / self.end_rate


class Profile(_Bursty, frozen=True, kw_only=True):
    """Each of *rates* for *step* seconds, over and over.

    *exact*: gaps are stretched step by step until each step has as many as expected, as `Vllm`
    does with the whole; in the first round.
    """

    rates: Annotated[
        list[Annotated[float, Meta(ge=0, le=1e6)]], Meta(min_length=1, max_length=100_000)
    ]
    step: Seconds
    exact: bool = False

    def __post_init__(self) -> None:
        """Refuse rates that are all 0."""
        if not any(self.rates):
            raise ValueError("rates are all 0; expected one above 0")
        if max(self.rates) * self.step < _LEAST:
            raise ValueError(f"rates and step: expected {_LEAST:g} or more in a step")

    def expected(self, seconds: float) -> float:
        """Answer lines."""
        return _expected(self.rates, self.step, seconds)

    def seconds(self, counts: Floats) -> Floats:
        """Answer lines."""
        return _seconds(self.rates, self.step, counts)

    def first(self, random: np.random.Generator, num: int) -> Floats:
        """Answer when the first *num* start."""
        counts = np.cumsum(self.gaps(random, num))
        if self.exact:
            expected = _steps(self.rates, self.step)
            last = np.minimum(np.rint(expected).astype(np.int64), num)  # of each step
            drawn = np.append(0.0, counts)[last]
            beyond = np.maximum(counts - drawn[-1], 0)
            counts = np.interp(counts, drawn, np.minimum(expected, num)) + beyond
        return self.seconds(counts)

    def until(self, random: np.random.Generator, seconds: float) -> Floats:
        """Answer when those start that do so before *seconds*."""
        if not self.exact:
            return super().until(random, seconds)
        return self.first(random, round(self.expected(seconds)))


class Diurnal(_Bursty, frozen=True):
    """*rate* on average, up and down by *amplitude* of it in a sine of *period* seconds.

    It starts at the average, going up.
    """

    rate: Rate
    amplitude: Annotated[float, Meta(ge=0, le=1)]
    period: Seconds = 86_400.0

    def expected(self, seconds: float) -> float:
        """Answer lines."""
        return _expected(self._rates(), self.period / _GRID, seconds)

    def seconds(self, counts: Floats) -> Floats:
        """Answer lines."""
        return _seconds(self._rates(), self.period / _GRID, counts)

    def _rates(self) -> list[float]:
        """Answer the mean rate of each piece of a period."""
        angles = np.linspace(0, 2 * math.pi, _GRID + 1)
        counts = angles / (2 * math.pi) - self.amplitude / (2 * math.pi) * (np.cos(angles) - 1)
        rates: list[float] = (self.rate * _GRID * np.maximum(np.diff(counts), 0)).tolist()
        return rates


class AllAtOnce(Process, frozen=True, tag="all_at_once"):
    """All at time 0, as vLLM's ``--request-rate inf``."""

    def first(self, random: np.random.Generator, num: int) -> Floats:  # noqa: ARG002
        """Answer zeros."""
        return np.zeros(num)


AnyProcess = Poisson | Gamma | Vllm | Constant | Ramp | Profile | Diurnal | AllAtOnce
"""A table with ``kind``."""


def _steps(rates: Sequence[float], step: float) -> Floats:
    """Answer how many are expected by the end of each of *rates*, with 0 in front."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(rates) * step)])


def _expected(rates: Sequence[float], step: float, seconds: float) -> float:
    counts = _steps(rates, step)
    rounds, rest = divmod(seconds, step * len(rates))
    ends = np.arange(len(counts)) * step
    return float(rounds * counts[-1] + np.interp(rest, ends, counts))


def _seconds(rates: Sequence[float], step: float, counts: Floats) -> Floats:
    known = _steps(rates, step)
    rounds, rest = np.divmod(counts, known[-1])
    ends = np.arange(len(known)) * step
    found: Floats = rounds * step * len(rates) + np.interp(rest, known, ends)
    return found
