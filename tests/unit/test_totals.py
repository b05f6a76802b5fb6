"""Totals of step rows against the same rows expanded to single steps, the slow way."""

import tracemalloc
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.columns import FloatArray
from sim.engine import steps_until
from sim.gaps import (
    PERCENTILES,
    GapRuns,
    describe,
    gaps_of,
    joined,
    neighbours,
    single_gaps,
)
from sim.timing.base import TICKS_PER_PS, TICKS_PER_S
from sim.totals import COUNTS, Rows, Totals, add_up
from workloads.record import PS_PER_S

STATES = ("live", "free")


@dataclass(frozen=True)
class Run:
    """A row; times in ticks. Without steps it is idle for *first*."""

    num_steps: int
    first: int
    increment: int = 0
    num_decodes: int = 1
    num_sampled_prefills: int = 0

    @property
    def total(self) -> int:
        n = self.num_steps
        return max(n, 1) * self.first + self.increment * (n * (n - 1) // 2)

    def gap_ps(self, step: int) -> float:
        return self.first / TICKS_PER_PS + step * (self.increment / TICKS_PER_PS)


def gather(chunks: Sequence[Rows], gaps: Mapping[int, int]) -> GapRuns:
    return joined([single_gaps(gaps), *map(gaps_of, chunks)])


def make_rows(runs: list[Run], start: int = 0) -> Rows:
    """Answer the columns of *runs* one after the other from tick *start*, as narrow as can be."""
    ends = start + np.cumsum([0, *(run.total for run in runs)], dtype=object)
    ends_ps = (ends // TICKS_PER_PS).astype(np.int64)
    busy = [run.num_steps > 0 for run in runs]
    rows: dict[str, npt.NDArray[Any]] = {
        "num_steps": np.array([run.num_steps for run in runs], dtype=np.int64),
        "start_ps": ends_ps[:-1],
        "duration_ps": np.diff(ends_ps),
        "num_decodes": np.array([run.num_decodes for run in runs], dtype=np.int64) * busy,
        "num_sampled_prefills": np.array(
            [run.num_sampled_prefills * (run.num_steps == 1) for run in runs], dtype=np.int64
        ),
        **{name: np.arange(len(runs)) + i for i, name in enumerate(("running", *COUNTS))},
        "held_slots": 3 * np.arange(len(runs)),
    }
    for index, (name, column) in enumerate(rows.items()):
        most = np.min_scalar_type(int(column.max(initial=0)))
        signed = np.min_scalar_type(-1 - int(column.max(initial=0)))
        rows[name] = column.astype(signed if index % 2 else most)
    rows["first_step_ps"] = np.array([run.first / TICKS_PER_PS for run in runs], dtype=np.float64)
    rows["increment_ps"] = np.array(
        [run.increment / TICKS_PER_PS for run in runs], dtype=np.float64
    )
    for state in STATES:
        rows[f"kv_{state}_slots"] = np.linspace(0.5, 99 if state == "live" else 3, len(runs))
    return rows


def cut(rows: Rows, *at: int) -> list[Rows]:
    """Answer *rows* in chunks that end before the rows *at*."""
    bounds = [0, *sorted(at), len(rows["num_steps"])]
    return [
        {name: column[begin:end] for name, column in rows.items()}
        for begin, end in pairwise(bounds)
    ]


def totals_of(chunks: list[Rows], gaps: dict[int, int], first_served_ps: int = 0) -> Totals:
    return add_up(
        chunks,
        slot_states=STATES,
        extra_gaps=gaps,
        first_served_ps=first_served_ps,
        duration_ps=123,
        waiting_time=45,
    )


def expanded_gaps(rows: Rows, gaps: dict[int, int]) -> FloatArray:
    """Answer every single gap in picoseconds, sorted."""
    found = [float(gap) for gap, count in gaps.items() for _ in range(count)]
    columns = ("num_steps", "num_decodes", "duration_ps", "first_step_ps", "increment_ps")
    for n, decodes, duration, first, increment in zip(*(rows[c] for c in columns), strict=True):
        for step in range(n):
            gap = first + step * increment if n > 1 else float(duration)
            found.extend([gap] * int(decodes))
    return np.sort(np.array(found, dtype=np.float64))


def expanded_tokens(runs: list[Run], rows: Rows, first_served_ps: int) -> dict[int, int]:
    """Answer the tokens in each second that has any, in integers."""
    tokens = Counter[int]()
    for run, start, duration in zip(runs, rows["start_ps"], rows["duration_ps"], strict=True):
        clock = int(start) * TICKS_PER_PS
        for step in range(run.num_steps):
            clock += run.first + step * run.increment
            last = step == run.num_steps - 1
            end_ps = int(start) + int(duration) if last else clock // TICKS_PER_PS
            sampled = run.num_sampled_prefills * (run.num_steps == 1)
            tokens[(end_ps - first_served_ps) // PS_PER_S] += run.num_decodes + sampled
    return {second: count for second, count in tokens.items() if count}


# Tenths and eighths of a second meet the bounds of seconds; small numbers are often equal.
TIMES = st.one_of(
    st.integers(1, 40),
    st.integers(1, 3 * TICKS_PER_S // 10),
    st.sampled_from([TICKS_PER_S // 10, TICKS_PER_S // 8, TICKS_PER_S // 2, 2 * TICKS_PER_S]),
)
INCREMENTS = st.one_of(
    st.just(0),
    st.integers(0, 10),
    st.integers(0, 10**12),
    st.sampled_from([TICKS_PER_S // 100, TICKS_PER_S // 8]),
)
RUNS = st.builds(
    Run,
    num_steps=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    first=TIMES,
    increment=INCREMENTS,
    num_decodes=st.integers(0, 5),
    num_sampled_prefills=st.integers(0, 3),
)
GAPS = st.dictionaries(st.one_of(st.integers(1, 5), st.integers(1, 10**13)), st.integers(1, 9))
ROWS = st.lists(RUNS, max_size=12)


@settings(deadline=None)
@given(ROWS, GAPS, st.data())
def test_every_order_statistic(runs: list[Run], gaps: dict[int, int], data: st.DataObject) -> None:
    rows = make_rows(runs)
    expected = expanded_gaps(rows, gaps)
    found = gather(cut(rows, data.draw(st.integers(0, len(runs)))), gaps)
    assert found.counts.sum() == len(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.gaps.SAMPLE_SIZE", data.draw(st.integers(1, 50)))
        for rank in data.draw(st.sets(st.integers(0, max(0, len(expected) - 1)), max_size=9)):
            if len(expected):
                assert neighbours(found, rank) == (*expected[rank : rank + 2], np.inf)[:2]


@pytest.mark.parametrize(
    "runs",
    [
        [Run(10**9, 10**11, 1, 3)],
        [Run(10**6, 10**11, 10**4, 7)] * 2000,
        [Run(1, 10**11), Run(1000, 2 * 10**11, 10**8)] * 2000,
        [Run(1, (1 + row % 2048) * TICKS_PER_PS) for row in range(1 << 16)],
    ],
    ids=["one long run", "equal runs", "two kinds of runs", "a rhythm"],
)
def test_order_statistics_take_few_rounds(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Counter[int]()
    found = gather([make_rows(runs)], {10**15: 2})
    count = int(found.counts.sum())
    split = GapRuns.split
    for rank in (0, 1, count // 3, count // 2, 99 * count // 100, count - 3, count - 1):

        def counted(runs: GapRuns, pivot: float, rank: int = rank) -> Any:
            rounds[rank] += 1
            return split(runs, pivot)

        monkeypatch.setattr(GapRuns, "split", counted)
        neighbours(found, rank)
    assert max(rounds.values()) <= 12


@settings(deadline=None)
@given(ROWS, GAPS)
def test_statistics_of_gaps(runs: list[Run], gaps: dict[int, int]) -> None:
    rows = make_rows(runs)
    expected = expanded_gaps(rows, gaps)
    found = describe(gather([rows], gaps))
    assert found.count == len(expected)
    if found.count:
        close = partial(pytest.approx, rel=1e-9, abs=0)
        assert found.mean_ps == close(expected.mean())
        # Less its smallest gap, the list tells its deviation but for the rounding of each gap.
        std, rounding = (expected - expected[0]).std(), np.spacing(expected[-1])
        assert found.std_ps == pytest.approx(std, rel=1e-9, abs=rounding)
        for percent in PERCENTILES:
            assert found.percentiles_ps[percent] == close(np.percentile(expected, percent))


def test_deviation_of_nearly_equal_gaps() -> None:
    low = 10**12
    runs = [Run(2, low * TICKS_PER_PS, TICKS_PER_PS, 10**6)]
    assert describe(gather([make_rows(runs)], {})).std_ps == 0.5
    assert describe(gather([make_rows([Run(7, low, 0, 3)] * 5)], {})).std_ps == 0
    assert describe(gather([], {low: 1, low + 3: 1})).std_ps == 1.5


def test_gaps_that_round_to_the_same_number() -> None:
    """Of steps of 2000 s one tick more is lost in the rounding, most of the time."""
    rows = make_rows([Run(2000, 2000 * TICKS_PER_S, 1), Run(2000, 2000 * TICKS_PER_S + 900, 2)])
    expected = expanded_gaps(rows, {})
    assert len(np.unique(expected)) < len(expected) / 100
    found = gather([rows], {})
    for rank in range(0, 4000, 97):
        assert neighbours(found, rank) == (*expected[rank : rank + 2], np.inf)[:2]


@settings(deadline=None, max_examples=500)
@given(
    first=st.one_of(st.integers(1, 1000), st.integers(1, 10**13)),
    increment=st.integers(1, 10**13),
    index=st.integers(0, 199),
    side=st.sampled_from([-np.inf, 0, np.inf]),
)
def test_split_is_exact(first: int, increment: int, index: int, side: float) -> None:
    """A pivot is found where it is among the rounded gaps, also one bit beside a gap."""
    runs = gather([make_rows([Run(200, first, increment)])], {})
    gaps = runs.first + np.arange(200) * runs.increment
    pivot = float(np.nextafter(gaps[index], side) if side else gaps[index])
    reached, passed = runs.split(pivot)
    assert reached == np.searchsorted(gaps, pivot, side="left")
    assert passed == np.searchsorted(gaps, pivot, side="right")


@settings(deadline=None)
@given(ROWS, st.integers(0, 2 * TICKS_PER_S), st.data())
@example([Run(35, TICKS_PER_S // 10), Run(0, TICKS_PER_S // 2), Run(5, TICKS_PER_S)], 0, None)
@example([Run(3, 4 * TICKS_PER_S // 9), Run(40, TICKS_PER_S // 3 + 1, 0)], 0, None)
def test_tokens_in_second(runs: list[Run], start: int, data: st.DataObject | None) -> None:
    rows = make_rows(runs, start)
    start_ps = start // TICKS_PER_PS
    served = data.draw(st.sampled_from([0, start_ps, start_ps // 2])) if data else 0
    at = data.draw(st.lists(st.integers(0, len(runs)), max_size=3)) if data else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.totals.BLOCK", data.draw(st.integers(1, 9)) if data else 4)
        found = totals_of(cut(rows, *at), {}, served).tokens_in_second
    expected = expanded_tokens(runs, rows, served)
    assert {second: n for second, n in enumerate(found.tolist()) if n} == expected


LONG = st.builds(
    Run,
    num_steps=st.integers(1, 10**9),
    first=st.integers(1, 10**12),
    increment=st.sampled_from([0, 1, 17, 10**4, 12345]),
    num_decodes=st.integers(1, 300),
)


@settings(deadline=None, max_examples=30)
@given(st.lists(LONG, min_size=1, max_size=5), st.floats(0, 1))
def test_order_statistics_of_long_runs(runs: list[Run], quantile: float) -> None:
    # Single steps last whole picoseconds, and ends fit into 64 bits, also with the longest runs.
    runs = [run for run in runs if run.num_steps > 1 and run.total < 10**22]
    found = gather([make_rows(runs)], {})
    count = sum(run.num_steps * run.num_decodes for run in runs)
    assert found.counts.sum() == count
    if not count:
        return
    rank = min(int(quantile * count), count - 1)
    gap, above = neighbours(found, rank)

    def num_gaps(bisect: Any, gap: float) -> int:
        steps = (bisect(range(run.num_steps), gap, key=run.gap_ps) for run in runs)
        return sum(n * run.num_decodes for n, run in zip(steps, runs, strict=True))

    assert num_gaps(bisect_left, gap) <= rank < num_gaps(bisect_right, gap)
    if rank < count - 1:
        assert num_gaps(bisect_left, above) <= rank + 1 < num_gaps(bisect_right, above)


@pytest.mark.parametrize(
    "run",
    [
        Run(10**9, 10**11 + 1, 0, 3),  # 10 us
        Run(10**9, 10**11, 1, 3),
        Run(10**9, 10**11 + 3, 137, 1),
        Run(10**6, 9 * TICKS_PER_S // 4, 0),
        Run(10**6, TICKS_PER_S // 3 + 1, 17),
        Run(98830600, 3923209485515, 24, 2),  # a step ends one tick before 38785 s
        Run(10**9, 9 * 10**13, 3, 3),  # nearly as long as a run can be
        Run(2**33, 1, 1),  # half the square of its steps overflows 64 bits
    ],
    ids=str,
)
def test_tokens_of_a_long_run(run: Run) -> None:
    rows = make_rows([run])
    found = totals_of([rows], {}).tokens_in_second
    end_ps = int(rows["duration_ps"][0])
    assert len(found) == end_ps // PS_PER_S + 1
    before = np.cumsum(found)
    for second in range(1, len(found), max(1, len(found) // 50_000)):
        ended = steps_until(second * TICKS_PER_S, run.first, run.increment) - 1
        assert before[second - 1] == run.num_decodes * ended
    assert before[-1] == run.num_decodes * run.num_steps


def test_a_billion_steps_need_no_more_than_their_seconds() -> None:
    n, decodes = 10**9, 3
    rows = make_rows([Run(n, 10**11, 1, decodes)])  # 10 us at first, 10.1 us at last
    tracemalloc.start()
    try:
        totals = totals_of([rows], {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    gaps = totals.inter_token
    last = 10**7 + (n - 1) * 1e-4
    assert gaps.count == n * decodes
    assert gaps.mean_ps == pytest.approx((10**7 + last) / 2, rel=1e-12)
    assert gaps.std_ps == pytest.approx((n**2 / 12) ** 0.5 * 1e-4, rel=1e-12)
    assert gaps.percentiles_ps[50] == pytest.approx((10**7 + last) / 2, rel=1e-12)
    assert gaps.percentiles_ps[99] == pytest.approx(10**7 + 0.99 * (last - 10**7), rel=1e-12)
    assert totals.num_steps == n
    assert totals.tokens_in_second.sum() == n * decodes


def test_sums_over_chunks() -> None:
    runs = [Run(3, 10**15), Run(0, 5 * 10**15), Run(1, 10**15, 0, 2, 1), Run(40, 10**15, 10**11)]
    rows = make_rows(runs)
    whole, pieces = totals_of([rows], {7: 2}), totals_of(cut(rows, 1, 1, 3), {7: 2})
    duration = rows["duration_ps"].astype(float)
    for totals in (whole, pieces):
        assert totals.num_steps == 44
        assert (totals.duration_ps, totals.waiting_time) == (123, 45)
        assert totals.max_running == 3
        assert totals.max_held_slots == 9
        assert totals.running_time == pytest.approx(float(np.arange(4) @ duration))
        for state in STATES:
            expected = float(rows[f"kv_{state}_slots"] @ duration)
            assert totals.slot_time[state] == pytest.approx(expected)
        for name in COUNTS:
            assert getattr(totals, name) == int(rows[name].sum()), name
        assert totals.inter_token == whole.inter_token
        assert totals.tokens_in_second.tolist() == whole.tokens_in_second.tolist()


@pytest.mark.parametrize("chunks", [[], [make_rows([])]], ids=["no chunk", "empty chunk"])
def test_nothing(chunks: list[Rows]) -> None:
    totals = totals_of(chunks, {}, first_served_ps=-1)
    assert totals.num_steps == totals.max_running == totals.inter_token.count == 0
    assert totals.running_time == totals.slot_time["live"] == 0
    assert not totals.tokens_in_second.any()
