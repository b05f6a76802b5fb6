"""Arrival times against what defines each process."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.processes import (
    AllAtOnce,
    AnyProcess,
    Constant,
    Diurnal,
    Gamma,
    Poisson,
    Process,
    Profile,
    Ramp,
    Vllm,
)

NUM = 20_000


def _first(process: Process, num: int = NUM, seed: int = 5) -> np.ndarray:
    return process.first(np.random.default_rng(seed), num)


def test_gaps_of_poisson_are_exponential() -> None:
    gaps = np.sort(np.diff(_first(Poisson(rate=4)), prepend=0))
    expected = 1 - np.exp(-4 * gaps)
    steps = np.arange(1, NUM + 1) / NUM
    distance = max(np.abs(steps - expected).max(), np.abs(steps - 1 / NUM - expected).max())
    assert distance < 1.95 / NUM**0.5  # 1 of 1,000 samples exceeds it


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("kind", [Gamma, Vllm])
def test_burstiness_is_one_over_the_squared_variation(kind: type[Gamma], burstiness: float) -> None:
    gaps = np.diff(_first(kind(rate=2, burstiness=burstiness)), prepend=0)
    assert gaps.mean() == pytest.approx(0.5, rel=4 / (NUM * burstiness) ** 0.5)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)


@given(st.integers(1, 500), st.floats(0.01, 100), st.floats(0.05, 20), st.integers(0, 99))
def test_vllm_ends_at_the_total_time(num: int, rate: float, burstiness: float, seed: int) -> None:
    times = _first(Vllm(rate=rate, burstiness=burstiness), num, seed)
    assert times[-1] == pytest.approx(num / rate, rel=1e-12)
    free = _first(Gamma(rate=rate, burstiness=burstiness), num, seed)
    assert times == pytest.approx(free * (times[-1] / free[-1]), rel=1e-9)


def test_constant_and_all_at_once() -> None:
    assert _first(Constant(rate=4), 4).tolist() == [0.25, 0.5, 0.75, 1.0]
    assert _first(AllAtOnce(), 3).tolist() == [0, 0, 0]


# process, from, to, integral of its rate in between
INTEGRALS = [
    (Ramp(start_rate=0, end_rate=10, over=100), 0, 100, 500),
    (Ramp(start_rate=0, end_rate=10, over=100), 50, 100, 375),
    (Ramp(start_rate=10, end_rate=2, over=100), 0, 50, 400),
    (Ramp(start_rate=4, end_rate=4, over=100), 10, 60, 200),
    (Ramp(start_rate=0, end_rate=10, over=100), 100, 200, 1000),
    (Profile(rates=[1, 0, 9], step=50), 0, 150, 500),
    (Profile(rates=[1, 0, 9], step=50), 50, 100, 0),
    (Profile(rates=[1, 0, 9], step=50), 250, 300, 450),
    # rate * (t - amplitude * period / (2 pi) * (cos(2 pi t / period) - 1))
    (Diurnal(rate=5, amplitude=0.8, period=200), 0, 100, 500 + 800 / math.pi),
    (Diurnal(rate=5, amplitude=0.8, period=200), 300, 400, 500 - 800 / math.pi),
    (Diurnal(rate=5, amplitude=1, period=200), 0, 200, 1000),
]


@pytest.mark.parametrize(("process", "start", "end", "integral"), INTEGRALS, ids=str)
def test_counts_follow_the_rate(
    process: Process, start: float, end: float, integral: float
) -> None:
    assert process.expected(end) - process.expected(start) == pytest.approx(integral, rel=1e-6)
    runs = [process.until(np.random.default_rng(seed), end) for seed in range(40)]
    counts = [int((times >= start).sum()) for times in runs]
    assert np.mean(counts) == pytest.approx(integral, abs=4 * (integral / 40) ** 0.5)
    assert all((np.diff(times) >= 0).all() and times[-1] < end for times in runs)


@given(st.sampled_from([each for each, *_ in INTEGRALS]), st.floats(0, 1e4))
def test_seconds_is_the_inverse_of_expected(process: Process, count: float) -> None:
    seconds = float(process.seconds(np.array([count]))[0])
    assert process.expected(seconds) == pytest.approx(count, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "process", [Poisson(rate=3), Gamma(rate=3, burstiness=0.3), Profile(rates=[2, 5], step=7)]
)
def test_fewer_are_the_first_of_more(process: AnyProcess) -> None:
    assert _first(process, 50).tolist() == _first(process, 5000)[:50].tolist()
    inside = process.until(np.random.default_rng(5), 40)
    assert inside.tolist() == [t for t in _first(process, 1000).tolist() if t < 40]
