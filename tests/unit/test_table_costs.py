"""Experts from a table: of balanced tokens, of counts of touched experts; types of weights."""

import pytest

from sim.timing.base import PS_PER_US
from sim.timing.layers import ExpertShape
from sim.timing.table import TimingTable
from sim.timing.table_costs import BalancedExperts, MeasuredExperts, experts_of, of_dtype
from tests.timing_tables import KINDS, table

EXPERTS = ExpertShape(num_local=64, num_experts=64, top_k=4, width=512, num_matrices=3)


def rows(*points: tuple[int, int, float], **more: str) -> TimingTable:
    """Answer rows of (tokens, touched experts, microseconds)."""
    return table(
        KINDS
        | {"op": "moe", "n": 512, "k": 1024, "num_experts": 64, "top_k": 4, "num_gpus": 1}
        | {"num_tokens": tokens, "num_active_experts": touched, "latency_us": time}
        | more
        for tokens, touched, time in points
    )


def test_balanced_rows_are_read_at_the_experts_that_tokens_really_touch() -> None:
    """16 balanced tokens touch all 64 experts; real ones 41.2, as many as 10.3 balanced ones."""
    balanced = rows((1, 4, 14.0), (8, 32, 42.0), (16, 64, 74.0), (64, 64, 80.0), (256, 64, 104.0))
    cost = experts_of(balanced, EXPERTS)
    assert isinstance(cost, BalancedExperts)
    touched = EXPERTS.touched(16)
    assert touched == pytest.approx(64 * (1 - (60 / 64) ** 16))
    assert cost.at(16) == pytest.approx((10 + touched) * PS_PER_US)
    many = EXPERTS.touched(64)
    assert cost.at(64) == pytest.approx((10 + many + 6) * PS_PER_US)
    assert cost.at(256) == pytest.approx(104 * PS_PER_US, rel=1e-5)
    assert cost.at(1) == pytest.approx(14 * PS_PER_US)
    assert cost.at(257) is None


def test_rows_by_touched_experts_are_interpolated_in_both() -> None:
    grid = rows(*((n, e, 10 + e + n / 10) for n in (1, 64) for e in (8, 64)))
    cost = experts_of(grid, EXPERTS)
    assert isinstance(cost, MeasuredExperts)
    assert cost.at(20) == pytest.approx((10 + EXPERTS.touched(20) + 2) * PS_PER_US)
    assert cost.at(65) is None


def test_weights_of_another_type_price_nothing() -> None:
    assert len(of_dtype(rows((1, 4, 14.0), dtype="fp8_block"))) == 0
    both = rows((1, 4, 14.0), dtype="float16")
    assert of_dtype(both).columns["dtype"].tolist() == ["float16"]
