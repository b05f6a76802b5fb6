"""Attention from a table: knots, what lies between and beyond them, several chunks, mixed calls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.timing.attention import RooflineAttention, decode_time, decode_times
from sim.timing.base import PS_PER_US
from sim.timing.table import TimingTable
from sim.timing.table_attention import TableAttention, growing
from tests.timing_tables import HEADS, KINDS, chunks, decodes, linear_us, table


def decode_us(attention: TableAttention, batch: int, context: int) -> float | None:
    time = decode_time(attention.decode_segments(batch), context)
    return None if time is None else time / PS_PER_US


def step_us(
    attention: TableAttention, *chunks: tuple[int, int], decodes: int = 0, context: int = 0
) -> float:
    time = attention.step_time(chunks, decodes, context)
    assert time is not None
    return time / PS_PER_US


@pytest.mark.parametrize("warm_tokens", [0, 1000, 10**9])
@pytest.mark.parametrize("batch", range(1, 17))
def test_what_is_linear_stays_so(batch: int, warm_tokens: float) -> None:
    """Between the batches, too, by equal means and by equal totals."""
    attention = TableAttention(table(decodes()), warm_tokens=warm_tokens)
    for history in (64, 100, 255, 256, 511, 700):
        expected = linear_us(batch, history)
        assert decode_us(attention, batch, batch * (history + 1)) == pytest.approx(expected)


def test_a_row_of_the_table_is_its_own_time() -> None:
    def odd(batch: int, history: int) -> float:
        return float(3 + batch**1.3 + history**0.9 * batch / 100)

    attention = TableAttention(table(decodes(odd)))
    for batch in (1, 2, 4, 8, 16):
        for history in (16, 64, 256, 1024):
            got = decode_us(attention, batch, batch * (history + 1))
            assert got == pytest.approx(odd(batch, history))


def test_below_the_table_is_its_floor_and_beyond_it_nothing() -> None:
    attention = TableAttention(table(decodes()))
    assert decode_us(attention, 4, 4) == decode_us(attention, 4, 4 * 17) == linear_us(4, 16)
    assert decode_us(attention, 4, 4 * 1025) == pytest.approx(linear_us(4, 1024))
    assert decode_us(attention, 4, 4 * 1025 + 1) is None
    assert decode_us(attention, 17, 17) is None
    assert attention.covers == "decodes: batch 1-16, context 16-1024"


def test_a_batch_between_two_reaches_as_far_as_both_requests_do() -> None:
    """By means: 3 requests of 1,024 tokens each lie between 2 and 4 of them."""
    for warm_tokens in (0, 10**9):
        attention = TableAttention(table(decodes()), warm_tokens=warm_tokens)
        assert attention.decode_segments(3)[-1].max_context == 3 * 1025


def test_rows_in_the_cache_are_lengthened_to_what_memory_takes() -> None:
    """The last that fits, to the line of those that do not; shorter ones by their share of it."""

    def cached_us(batch: int, history: int) -> float:
        return 10.0 if batch * history <= 512 else linear_us(batch, history)

    attention = TableAttention(table(decodes(cached_us)), warm_tokens=512)
    assert decode_us(attention, 2, 2 * 1025) == pytest.approx(linear_us(2, 1024))
    # Rows of 8 requests: 16 and 64 tokens each fit, 256 and 1,024 do not.
    extra = linear_us(8, 64) - 10
    assert decode_us(attention, 8, 8 * 65) == pytest.approx(10 + extra)
    assert decode_us(attention, 8, 8 * 17) == pytest.approx(10 + extra / 4)
    cold = TableAttention(table(decodes(cached_us)))
    assert decode_us(cold, 8, 8 * 65) == 10


def _without(rows: TimingTable, batch: int, history: int) -> TimingTable:
    """Answer *rows* but what does not fit: larger batches of long contexts."""
    columns = rows.columns
    return rows.at(np.flatnonzero((columns["batch"] < batch) | (columns["context"] < history)))


def test_a_corner_that_was_not_measured_is_not_known() -> None:
    attention = TableAttention(_without(table(decodes()), 8, 1024))
    assert decode_us(attention, 8, 8 * 257) == pytest.approx(linear_us(8, 256))
    assert decode_us(attention, 8, 8 * 257 + 1) is None
    # Between 4 and 8: as far as the totals of both.
    assert decode_us(attention, 6, 8 * 256 + 6) == pytest.approx(10 + 0.5 * 6 + 0.001 * 2048)
    assert decode_us(attention, 6, 8 * 256 + 7) is None


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12))
def test_growing_is_the_nearest_that_never_falls(values: list[float]) -> None:
    times = np.array(values)
    grown = growing(times)
    assert (np.diff(grown) >= -1e-9).all()
    assert grown.sum() == pytest.approx(times.sum())
    if (np.diff(times) >= 0).all():
        assert grown == pytest.approx(times)


def test_no_segment_falls() -> None:
    def noisy(batch: int, history: int) -> float:
        return linear_us(batch, history) + 2 * (history == 64)

    attention = TableAttention(table(decodes(noisy)))
    for batch in range(1, 17):
        segments = attention.decode_segments(batch)
        assert all(segment.per_context >= 0 for segment in segments)
        ends = [segment.max_context for segment in segments]
        assert ends == sorted(set(ends))


def test_many_at_once_are_as_one_by_one() -> None:
    attention = TableAttention(table(decodes()))
    batches = np.array([0, 1, 3, 16, 17, 3])
    contexts = np.array([0, 500, 1000, 9000, 17, 10**6])
    got = decode_times(attention, batches, contexts) / PS_PER_US
    one_by_one = [decode_us(attention, *pair) for pair in ((1, 500), (3, 1000), (16, 9000))]
    assert got == pytest.approx([0, *one_by_one, np.nan, np.nan], nan_ok=True)


def test_the_factor_of_the_block_size_is_on_the_decodes() -> None:
    rows = table(decodes(), chunks())
    plain, slow = TableAttention(rows), TableAttention(rows, decode_factor=1.5)
    alone = decode_us(plain, 4, 1000)
    assert alone is not None
    assert decode_us(slow, 4, 1000) == pytest.approx(1.5 * alone)
    more = step_us(slow, (64, 64), decodes=4, context=1000)
    assert more == pytest.approx(step_us(plain, (64, 64), decodes=4, context=1000) + 0.5 * alone)


def test_chunks_pay_for_their_launch_once() -> None:
    attention = TableAttention(table(chunks()))
    assert step_us(attention, (64, 64)) == pytest.approx(5 + 64 * 32 / 1000)
    assert step_us(attention, (64, 128)) == pytest.approx(5 + 64 * 96 / 1000)
    floor = 5 + 16 * 8 / 1000  # the shortest chunk measured
    two = step_us(attention, (64, 64), (256, 1280))
    pairs = 64 * 32 + 256 * (1024 + 128)
    assert two == pytest.approx(5 + pairs / 1000 + 5 - floor)
    assert step_us(attention, (1, 1)) == floor
    assert attention.step_time(((2049, 2049),), 0, 0) is None
    assert attention.step_time(((64, 2000),), 0, 0) is None


def test_without_mixed_rows_there_are_two_calls() -> None:
    attention = TableAttention(table(decodes(), chunks()))
    alone = decode_us(attention, 3, 900)
    assert alone is not None
    both = step_us(attention, (64, 64), decodes=3, context=900)
    assert both == pytest.approx(alone + step_us(attention, (64, 64)))
    assert attention.step_time(((64, 64),), 99, 990) is None


def test_mixed_rows_are_the_time_of_one_call() -> None:
    def mixed_us(batch: int, history: int, length: int, before: int) -> float:
        return 20 + 2 * linear_us(batch, history) + length * (1 + before) / 1000

    rows = (
        KINDS
        | HEADS
        | {
            "op": "mixed_attention",
            "batch": batch,
            "context": history,
            "query_len": length,
            "query_context": before,
        }
        | {"latency_us": mixed_us(batch, history, length, before)}
        for batch in (1, 4, 16)
        for history in (16, 1024)
        for length in (16, 256)
        for before in (0, 512)
    )
    attention = TableAttention(table(decodes(), chunks(), rows))
    for batch, history, length, before in ((4, 1024, 256, 512), (1, 16, 16, 0), (10, 500, 100, 77)):
        chunk, context = (length, before + length), batch * (history + 1)
        got = step_us(attention, chunk, decodes=batch, context=context)
        assert got == pytest.approx(mixed_us(batch, history, length, before))
    one = step_us(attention, (100, 100), decodes=4, context=4 * 101)
    two = step_us(attention, (100, 100), (50, 50), decodes=4, context=4 * 101)
    assert two - one == pytest.approx((50 - 16) / 1000)
    assert attention.step_time(((300, 300),), 4, 404) is None


def test_a_chunk_behind_history_from_whole_prompts_only() -> None:
    """What it takes alone, and its pairs with the history at the rate of the longest prompts."""
    attention = TableAttention(table(chunks(histories=(0,))))
    assert step_us(attention, (256, 2048)) == pytest.approx(5 + 256 * (1792 + 128) / 1000)
    assert step_us(attention, (16, 2000)) == pytest.approx(5 + 16 * (1984 + 8) / 1000)
    assert attention.step_time(((256, 2049),), 0, 0) is None, "longer than what was measured"


def test_a_roofline_knows_every_size() -> None:
    attention = RooflineAttention(
        t0=(7.0, 5.0), decode=2.0, per_context=0.5, pair=0.25, chunk=3.0, context=1.0, fill=10.0
    )
    assert decode_time(attention.decode_segments(4), 10**9) == 7 + 8 + 0.5e9
    assert attention.step_time(((4, 4),), 0, 0) == 5 + 0.25 * 8 + 12 + 4
    assert attention.step_time(((4, 24),), 0, 0) == 5 + 0.25 * (8 + 10 * 20) + 12 + 24
