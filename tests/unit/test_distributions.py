"""Drawn values against the closed forms of their distributions."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.distributions import (
    AnyDistribution,
    Distribution,
    Empirical,
    Exponential,
    Fixed,
    Geometric,
    Lognormal,
    Normal,
    Quantiles,
    Uniform,
    Zipf,
    correlated,
    draw,
)
from workloads.errors import TraceError

NUM = 40_000
HERE = Path()


def _drawn(distribution: AnyDistribution, *, whole: bool = False, least: float = 0) -> np.ndarray:
    shares = np.random.default_rng(7).random(NUM)
    return draw(distribution, shares, least=least, whole=whole, folder=HERE)[0]


def _zipf(exponent: float, most: int) -> tuple[float, float]:
    """Answer mean and variance by the sums that define them."""
    weights = [k**-exponent for k in range(1, most + 1)]
    mean, square = (
        sum(k**power * w for k, w in enumerate(weights, 1)) / sum(weights) for power in (1, 2)
    )
    return mean, square - mean**2


_SIGMA = math.log(5000 / 800) / 2.3263478740408408

# distribution, whole, mean, variance; from any textbook
CLOSED_FORMS = [
    (Fixed(value=12), True, 12, 0),
    (Uniform(low=3, high=9), True, 6, 4),  # (7**2 - 1) / 12
    (Uniform(low=3, high=9), False, 6, 3),  # 6**2 / 12
    (Normal(mean=500, std=40), False, 500, 1600),
    (Exponential(mean=15), False, 15, 225),
    (Geometric(mean=4), True, 4, 12),  # (1 - p) / p**2, p = 1 / 4
    (Zipf(exponent=1.2, max=200), True, *_zipf(1.2, 200)),
    (Zipf(exponent=0, max=9), True, 5, 80 / 12),
    (
        Lognormal(median=800, p99=5000),
        False,
        800 * math.exp(_SIGMA**2 / 2),
        800**2 * math.exp(_SIGMA**2) * (math.exp(_SIGMA**2) - 1),
    ),
    (Quantiles(values=[0, 10, 30]), False, 12.5, (10**2 + 10 * 30 + 30**2) / 6 + 100 / 6 - 12.5**2),
]


@pytest.mark.parametrize(
    ("distribution", "whole", "mean", "variance"), CLOSED_FORMS, ids=lambda x: str(x)[:30]
)
def test_mean_and_variance(
    distribution: AnyDistribution, whole: bool, mean: float, variance: float
) -> None:
    values = _drawn(distribution, whole=whole)
    assert abs(values.mean() - mean) <= 4 * math.sqrt(variance / NUM) + 1e-9
    fourth = float(((values - values.mean()) ** 4).mean())
    error = math.sqrt(max(fourth - variance**2, 0) / NUM)
    assert abs(values.var() - variance) <= 4 * error + 1e-6


def test_percentiles_of_a_lognormal_are_those_asked_for() -> None:
    values = _drawn(Lognormal(median=800, p99=5000))
    assert (values < 800).mean() == pytest.approx(0.5, abs=4 * 0.5 / NUM**0.5)
    assert (values < 5000).mean() == pytest.approx(0.99, abs=4 * 0.0995 / NUM**0.5)


@pytest.mark.parametrize(
    "distribution",
    [Normal(mean=5, std=9), Lognormal(median=5, p99=90), Zipf(exponent=1, max=50), 3.0],
    ids=str,
)
@given(low=st.floats(0, 60), width=st.floats(0, 60))
def test_bounds_hold_and_say_how_many_they_moved(
    distribution: AnyDistribution, low: float, width: float
) -> None:
    if isinstance(distribution, Zipf) and low > 50:
        low = 50
    if isinstance(distribution, Distribution) and not isinstance(distribution, Zipf):
        distribution = msgspec.structs.replace(distribution, min=low, max=low + width)
    shares = np.linspace(0, 1, 200, endpoint=False)
    values, moved = draw(distribution, shares, least=1, whole=False, folder=HERE)
    assert values.min() >= 1
    if isinstance(distribution, Distribution) and distribution.max is not None:
        assert values.max() <= max(distribution.max, 1)
    assert 0 <= moved <= len(shares)


@given(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([each for each, *_ in CLOSED_FORMS]),
    st.booleans(),
)
def test_more_of_the_distribution_is_a_larger_value(
    share: float, distribution: AnyDistribution, whole: bool
) -> None:
    shares = np.array(sorted([share, 0.0, 0.3, 1 - 2**-53]))
    values, _ = draw(distribution, shares, least=0, whole=whole, folder=HERE)
    assert np.isfinite(values).all()
    assert (np.diff(values) >= 0).all()


@pytest.mark.parametrize("correlation", [-0.9, -0.3, 0.0, 0.5, 1.0])
def test_the_rank_correlation_is_the_one_asked_for(correlation: float) -> None:
    one, other = np.random.default_rng(3).random((2, 20_000))
    bent = correlated(one, other, correlation)
    ranks = [np.argsort(np.argsort(each)) for each in (one, bent)]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] == pytest.approx(correlation, abs=4 / 20_000**0.5)
    # It is still uniform: its distance to the line is one that 1 of 1,000 samples exceeds.
    steps = np.arange(1, 20_001) / 20_000
    assert np.abs(np.sort(bent) - steps).max() < 1.95 / 20_000**0.5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "tokens,other\n5,a\n70,b\n70,c\n"),
        ("x.jsonl", '{"tokens": 5}\n' + 2 * '{"tokens": 70}\n'),
    ],
)
def test_empirical_values_are_as_frequent_as_in_the_file(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    shares = np.random.default_rng(1).random(NUM)
    values, _ = draw(
        Empirical(file=name, column="tokens"), shares, least=1, whole=True, folder=tmp_path
    )
    assert set(values.tolist()) == {5.0, 70.0}
    assert (values == 70).mean() == pytest.approx(2 / 3, abs=4 * (2 / 9 / NUM) ** 0.5)


@pytest.mark.parametrize(
    ("content", "column", "refusal"),
    [
        ("tokens\n5\n", "token", "column 'token' is missing; did you mean 'tokens'?"),
        ("tokens\n5\nx\n", "tokens", "line 3: tokens 'x': expected a number"),
        ("tokens\n-5\n", "tokens", "line 2: tokens '-5': expected a number"),
        ("tokens\n", "tokens", "empty: expected at least one row"),
    ],
)
def test_an_unusable_file_is_refused(
    tmp_path: Path, content: str, column: str, refusal: str
) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(TraceError, match=refusal.replace("?", r"\?")):
        draw(
            Empirical(file="x.csv", column=column),
            np.zeros(1),
            least=1,
            whole=True,
            folder=tmp_path,
        )


@pytest.mark.parametrize("name", ["../x.csv", "/etc/passwd", "sub/../../x.csv"])
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.csv").write_text("tokens\n5\n")
    (tmp_path / "in" / "sub").mkdir(parents=True)
    with pytest.raises(TraceError, match="outside the folder"):
        draw(
            Empirical(file=name, column="tokens"),
            np.zeros(1),
            least=1,
            whole=True,
            folder=tmp_path / "in",
        )
