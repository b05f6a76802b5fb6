"""Prefix keys: in bulk as one by one."""

from hypothesis import given
from hypothesis import strategies as st

from sim.request import Request


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 50), st.data())
def test_keys_in_bulk_equal_keys_one_by_one(
    lengths: list[int], num_outputs: int, data: st.DataObject
) -> None:
    ends = [sum(lengths[: position + 1]) for position in range(len(lengths))]
    nodes = [7 * position + 3 for position in range(len(lengths))]
    request = Request(
        0, "r", 0, ends[-1], num_outputs, segment_nodes=nodes, segment_ends=ends, output_node=99
    )
    size = data.draw(st.integers(1, 20))
    end = data.draw(st.integers(0, (ends[-1] + num_outputs) // size))
    first = data.draw(st.integers(0, end))
    expected = [request.prefix_key((block + 1) * size) for block in range(first, end)]
    assert request.prefix_keys(size, first, end) == expected
