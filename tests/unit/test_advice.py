"""When a remedy is kept."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.advice import LEAST_GAIN, OVERLOADED, Setup, _helps, longest_request
from sim.arrivals import recorded
from sim.settings import FLAG_RANK, Given, resolve
from sim.what_if import Outcome, Ran

CONFIG = resolve({}).run
FIGURES: dict[str, Any] = dict.fromkeys(Outcome._fields)


def setup(throughput: float | None, attainment: float | None = None, cards: int = 1) -> Setup:
    found = Outcome(**FIGURES | {"output_throughput": throughput, "slo_attainment": attainment})
    return Setup(CONFIG, cards, Ran(found, {}), "")


@pytest.mark.parametrize(
    ("before", "after", "helps"),
    [
        (setup(100), setup(101.1), True),
        (setup(100), setup(100.9), False),
        (setup(100), setup(90), False),
        (setup(None), setup(None), False),
        (setup(None), setup(1), True),
        # Who meets the SLOs counts first, once half of all do.
        (setup(100, 0.90), setup(100, 0.91), True),
        (setup(100, 0.90), setup(100, 0.909), False),
        (setup(100, 0.90), setup(150, 0.85), False),
        (setup(100, 0.90), setup(90, 0.95), True),
        (setup(100, 0.02), setup(150, 0.0), True),
        (setup(100, 0.02), setup(100, 0.3), False),
        # More cards: without SLOs they have to pay.
        (setup(100), setup(190, cards=2), False),
        (setup(100), setup(199, cards=2), True),
        (setup(100, 0.1), setup(190, 0.2, cards=2), True),
    ],
)
def test_rule(before: Setup, after: Setup, helps: bool) -> None:
    assert _helps(before, after) == helps


def test_what_starts_helps_one_that_does_not() -> None:
    nothing = Setup(CONFIG, 1, None, "no memory")
    assert _helps(nothing, setup(1))
    assert not _helps(setup(1), nothing)
    assert not _helps(nothing, nothing)


shares = st.floats(0, 1) | st.sampled_from([0.0, OVERLOADED, 1 - LEAST_GAIN, 1.0])
rates = st.floats(0, 1e4)
setups = st.builds(setup, rates, shares)


@given(setups, setups)
def test_no_two_help_each_other(one: Setup, other: Setup) -> None:
    assert not (_helps(one, other) and _helps(other, one))
    assert not _helps(one, one)


def test_the_longest_request_fits() -> None:
    trace = recorded(CONFIG.load)
    longest = longest_request(trace)
    assert longest % 16 == 0
    whole = trace.num_prompt_tokens + trace.num_output_tokens
    assert (whole <= longest).all()
    assert (whole > longest - 16).any()
    resolve({"max_model_len": Given(longest, FLAG_RANK, "--max-model-len")})
