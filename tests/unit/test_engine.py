"""The engine's clock: idle time, ties, and how far a run of steps may go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine import steps_until
from tests.checked import plain_run, requests_of, steps_of
from tests.strategies import PAGED, make_config, make_trace


@given(st.integers(1, 10**4), st.integers(1, 1000), st.integers(0, 50))
def test_steps_until_is_the_fewest_that_last_so_long(
    ticks: int, first: int, increment: int
) -> None:
    def total(num_steps: int) -> int:
        return sum(first + j * increment for j in range(num_steps))

    n = steps_until(ticks, first, increment)
    assert total(n) >= ticks
    assert n == 1 or total(n - 1) < ticks


def test_time_after_the_last_step_does_not_count() -> None:
    """A request that is refused long after everybody has finished makes the run no longer."""
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=9)
    trace = make_trace((1, 10, 5), (500, 64, 1))
    result = plain_run(config, trace)
    assert [row["refused"] for row in requests_of(result)] == [None, "prompt_too_long"]
    assert result.recorder.totals.duration_ps == 5 * 10**9


def test_idle_time_between_requests_counts_and_has_no_step() -> None:
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=9)
    result = plain_run(config, make_trace((1, 10, 5), (3, 10, 5)))
    assert result.recorder.totals.duration_ps == 2 * 10**12 + 5 * 10**9
    assert result.recorder.num_steps == len(steps_of(result)) == 10
    assert steps_of(result)[5]["time"] == pytest.approx(3)
