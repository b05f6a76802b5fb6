"""Packed rows are the rows that were added."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.columns import Rows
from sim.result_tables import request_table, step_table
from tests.checked import plain_run
from tests.strategies import PAGED, PREFIX, make_config, make_trace, random_trace

int64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.lists(st.tuples(st.integers(-200, 200), int64), max_size=5), max_size=4))
def test_integers_come_back_whatever_their_width(parts: list[list[tuple[int, int]]]) -> None:
    rows = Rows(("small", "large"), "q")
    for part in parts:
        for row in part:
            rows.add(row)
        rows.pack()
    chunks = rows.chunks()
    assert len(chunks) == len(parts) + 1
    got = [
        pair
        for chunk in chunks
        for pair in zip(chunk["small"].tolist(), chunk["large"].tolist(), strict=True)
    ]
    assert got == [row for part in parts for row in part]


@given(st.lists(st.floats(allow_nan=False)))
def test_floats_come_back_exactly(values: list[float]) -> None:
    rows = Rows(("value",), "d")
    for value in values:
        rows.add([value])
    (chunk,) = rows.chunks()
    assert chunk["value"].tolist() == values
    assert chunk["value"].dtype.kind == "f"


@pytest.mark.parametrize(("low", "kind"), [(-128, np.int8), (-129, np.int16), (2**31, np.int64)])
def test_the_narrowest_type_is_taken(low: int, kind: type[Any]) -> None:
    rows = Rows(("value",), "q")
    rows.add([low])
    rows.add([5])
    assert rows.chunks()[0]["value"].dtype == kind


@pytest.mark.parametrize("chunk_rows", [1, 3, 10])
def test_tables_and_totals_do_not_depend_on_the_size_of_chunks(chunk_rows: int) -> None:
    config = make_config(PREFIX, block_size=8, max_model_len=320, num_gpu_blocks_override=64)
    trace = random_trace(seed=3, num_requests=30)
    whole = plain_run(config, trace).recorder
    with mock.patch("sim.metrics.CHUNK_ROWS", chunk_rows):
        parts = plain_run(config, trace).recorder
    assert len(list(parts.step_chunks())) > 5
    assert step_table(parts).equals(step_table(whole))
    assert request_table(parts).equals(request_table(whole))
    one, other = whole.totals, parts.totals
    assert one.num_preempted == other.num_preempted > 0
    assert one.inter_token == other.inter_token
    assert one.tokens_in_second.tolist() == other.tokens_in_second.tolist()
    assert one.slot_time == pytest.approx(other.slot_time)


@pytest.mark.parametrize("output", [1, 2, 3])
def test_every_full_chunk_is_packed(output: int) -> None:
    """Idle rows count, too: paced arrivals make one between any two requests."""
    config = make_config(PAGED, max_model_len=64, num_gpu_blocks_override=100)
    trace = make_trace(*((row * 0.01, 4, output) for row in range(50)))
    with mock.patch("sim.metrics.CHUNK_ROWS", 4):
        recorder = plain_run(config, trace).recorder
    sizes = [len(chunk["num_steps"]) for chunk in recorder.step_chunks()]
    assert sum(sizes) == 50 * (output + 1) - 1
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert sizes[-1] < 4
