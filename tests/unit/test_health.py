"""The check list on facts: what each check finds, and what it leaves alone."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.health import CHECKS, SEVERITIES, Facts, Finding, go_through
from sim.health.facts import Point, merged
from sim.health.prefix_checks import DROP, find_drop

BARE = Facts(source="metrics", name="server")


def _found(**facts: Any) -> dict[str, Finding]:
    report = go_through(msgspec.structs.replace(BARE, **facts))
    return {finding.check: finding for finding in report.findings}


def _points(*rows: tuple[float, float, float]) -> list[Point]:
    return [Point(f"{place} s", *row) for place, row in enumerate(rows)]


def test_nothing_known_is_nothing_found() -> None:
    report = go_through(BARE)
    assert not report.findings
    assert not report.passed
    assert set(report.unknown) == {name for name, check in CHECKS.items() if check.needs}


_numbers = st.none() | st.floats(0, 100)
_shares = st.none() | st.floats(0, 1)
_counts = st.none() | st.integers(1, 10**6)
_series = st.lists(
    st.builds(
        Point,
        st.just("1 s"),
        _numbers,
        _numbers,
        _shares,
        _shares,
        st.floats(0, 1000),
        _numbers,
    ),
    max_size=5,
)
_facts = st.builds(
    Facts,
    source=st.sampled_from(("configuration", "run", "log", "metrics")),
    name=st.just("any"),
    allocator=st.sampled_from((None, "prefix", "reserve-max")),
    block_size=_counts,
    kernel_block_size=st.sampled_from((None, 16)),
    max_model_len=_counts,
    max_num_seqs=_counts,
    max_num_batched_tokens=_counts,
    gpu_memory_utilization=st.none() | st.floats(0.01, 1),
    enable_prefix_caching=st.none() | st.booleans(),
    is_sized=st.none() | st.booleans(),
    total_gib=st.none() | st.floats(1, 200),
    outside_gib=_numbers,
    activation_gib=_numbers,
    room_gib=st.none() | st.floats(-10, 100),
    step_gib=_numbers,
    steps_overrun=_shares,
    graph_gib=_numbers,
    graphs_outside=st.none() | st.booleans(),
    kv_gib=st.none() | st.floats(-3, 100),
    bytes_per_token=st.none() | st.floats(1, 1e6),
    own_rates=st.none() | st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)),
    padding=_shares,
    concurrency=_numbers,
    num_tables=_counts,
    longest=_counts,
    mean_len=st.none() | st.floats(1, 1e5),
    num_requests=_counts,
    num_clipped=st.none() | st.integers(0, 9),
    num_refused=st.none() | st.integers(0, 9),
    shared_prefixes=st.none() | st.lists(st.tuples(st.integers(2, 9), st.integers(1, 99))),
    possible_hit_rate=_shares,
    possible_by_token=_shares,
    hit_rate=_shares,
    num_preemptions=st.none() | st.integers(0, 10**6),
    recomputed=_shares,
    series=_series,
    possible_series=_series,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(_facts)
def test_every_check_answers_once_whatever_is_known(facts: Facts) -> None:
    report = go_through(facts)
    names = [finding.check for finding in report.findings]
    assert len(names) == len(set(names))
    assert not set(names) & set(report.passed)
    assert not set(report.passed) & set(report.unknown)
    assert set(names) | set(report.passed) | set(report.unknown) <= set(CHECKS)
    ranks = [SEVERITIES.index(finding.severity) for finding in report.findings]
    assert ranks == sorted(ranks)
    for finding in report.findings:
        assert CHECKS[finding.check].find(facts) == finding
        assert finding.figure
        assert finding.change
        assert "\n" not in finding.figure + finding.reason + finding.change


@given(st.floats(0, 1), st.floats(0, 1), st.integers(3, 30), st.integers(3, 30))
def test_a_step_down_is_found_where_it_is(high: float, low: float, before: int, after: int) -> None:
    series = [Point(f"{place}", hit_rate=high) for place in range(before)]
    series += [Point(f"{before + place}", hit_rate=low) for place in range(after)]
    drop = find_drop(series)
    if high - low < DROP - 1e-9:
        assert drop is None
    elif high - low > DROP + 1e-9:
        assert drop is not None
        assert drop.before == pytest.approx(high)
        assert drop.after == pytest.approx(low)
        assert drop.where == f"{before}"


def test_a_cache_that_fills_or_wavers_is_no_drop() -> None:
    filling = [Point(str(n), hit_rate=min(0.9, 0.1 * n)) for n in range(20)]
    assert find_drop(filling) is None
    wavering = [Point(str(n), hit_rate=0.9 if n % 2 else 0.5) for n in range(20)]
    assert find_drop(wavering) is None
    assert find_drop([Point("0", hit_rate=0.9), Point("1", hit_rate=0.1)]) is None


def test_margin() -> None:
    assert "margin" not in _found(gpu_memory_utilization=0.92)
    assert _found(gpu_memory_utilization=0.97)["margin"].severity == "warning"
    assert _found(room_gib=1.0, activation_gib=1.2)["margin"].severity == "error"
    assert _found(room_gib=1.0, activation_gib=0.95)["margin"].severity == "warning"
    assert "margin" not in _found(room_gib=4.0, activation_gib=1.2)
    # What the steps took counts, not what was profiled.
    assert "margin" not in _found(room_gib=1.0, activation_gib=1.2, step_gib=0.3)
    assert _found(steps_overrun=0.001, room_gib=1.0)["margin"].severity == "error"


def test_seats_before_memory() -> None:
    rows = [(64, 40, 0.4)] * 8
    found = _found(max_num_seqs=64, series=_points(*rows))["seats"]
    assert found.settings == {"max_num_seqs": 144}  # 64 / 0.4, less a tenth
    assert "seats" in _found(series=_points(*rows))  # a limit that is not known
    assert "seats" not in _found(max_num_seqs=64, series=_points(*[(64, 40, 0.95)] * 8))
    assert "seats" not in _found(max_num_seqs=64, series=_points(*[(64, 0, 0.4)] * 8))
    growing = _points(*[(10 + 6 * n, 90 - 6 * n, 0.02 * (10 + 6 * n)) for n in range(6)])
    assert "seats" not in _found(series=growing)


def test_the_pool_against_its_budget() -> None:
    over = _found(series=_points(*[(50, 50, 0.99)] * 4))["budget"]
    assert over.severity == "warning"
    assert "about 51 fit, 100 are there" in over.figure
    assert _found(series=_points(*[(5, 0, 0.2)] * 4))["budget"].severity == "info"
    assert "budget" not in _found(series=_points(*[(50, 0, 0.9)] * 4))
    burst = [(50, 50, 0.99), *[(50, 0, 0.9)] * 9]
    assert "budget" not in _found(series=_points(*burst))


@pytest.mark.parametrize(
    ("count", "requests", "recomputed", "severity"),
    [(5, 1000, 0.0, None), (20, 1000, 0.0, "warning"), (300, 1000, 0.0, "error"),
     (20, 1000, 0.2, "error"), (3, None, None, "warning"), (0, 10, 0.0, None)],
)  # fmt: skip
def test_preemptions(
    count: int, requests: int | None, recomputed: float | None, severity: str | None
) -> None:
    found = _found(num_preemptions=count, num_requests=requests, recomputed=recomputed)
    assert (found["preemptions"].severity if "preemptions" in found else None) == severity


def test_lengths() -> None:
    assert _found(max_model_len=100, longest=150, num_refused=2)["lengths"].severity == "error"
    assert _found(max_model_len=100, longest=150, num_clipped=2)["lengths"].severity == "warning"
    reserved: dict[str, Any] = {"max_model_len": 8192, "longest": 1000}
    assert "lengths" in _found(allocator="reserve-max", **reserved)
    assert "lengths" not in _found(allocator="prefix", **reserved)


def test_few_fit_counts_requests_that_come() -> None:
    few: dict[str, Any] = {"concurrency": 1.2, "max_model_len": 8000}
    assert "few_fit" in _found(**few)
    assert "few_fit" in _found(**few, longest=8000)
    assert "few_fit" not in _found(**few, longest=1000)
    assert "few_fit" in _found(**few, longest=1000, allocator="reserve-max")


def test_blocks() -> None:
    assert "kernel_blocks" in _found(block_size=8, kernel_block_size=16)
    assert "kernel_blocks" not in _found(block_size=48, kernel_block_size=16)
    assert "tails" in _found(block_size=64, kernel_block_size=16, mean_len=300)
    assert "tails" not in _found(block_size=64, kernel_block_size=16, mean_len=3000)
    shared: dict[str, Any] = {
        "enable_prefix_caching": True,
        "shared_prefixes": [(90, 100)],
        "possible_by_token": 0.5,
    }
    large = _found(block_size=128, possible_hit_rate=0.0, **shared)["block_and_prefix"]
    least = _found(block_size=16, possible_hit_rate=0.2, **shared)["block_and_prefix"]
    assert (large.severity, large.settings) == ("warning", {"block_size": 16})
    assert (least.severity, least.settings) == ("info", {})
    assert "block_and_prefix" not in _found(block_size=16, possible_hit_rate=0.48, **shared)


def test_prefix_caching() -> None:
    off: dict[str, Any] = {"enable_prefix_caching": False}
    assert _found(**off, possible_hit_rate=0.4)["caching_on"].severity == "warning"
    assert "caching_on" not in _found(**off, possible_hit_rate=0.01)
    assert "hit_rate" in _found(hit_rate=0.3, possible_hit_rate=0.6)
    assert "hit_rate" not in _found(hit_rate=0.55, possible_hit_rate=0.6)
    assert not {"hit_rate"} & set(_found(**off, hit_rate=0.0, possible_hit_rate=0.6))


def test_graphs_in_what_utilization_leaves() -> None:
    found = _found(graphs_outside=True, graph_gib=2.0, outside_gib=1.0, total_gib=20.0)["graphs"]
    assert found.severity == "error"
    assert found.settings == {"gpu_memory_utilization": 0.9}
    assert "graphs" not in _found(graphs_outside=True, graph_gib=2.0, outside_gib=3.0)


def test_what_a_source_says_goes_before_what_is_computed() -> None:
    computed = Facts(source="configuration", name="c", kv_gib=10.0, max_num_seqs=256)
    said = Facts(source="log", name="l", kv_gib=9.5, refusals=[])
    both = merged(computed, said)
    assert (both.source, both.kv_gib, both.max_num_seqs, both.refusals) == ("log", 9.5, 256, [])
