"""Segments of a request, and what they name."""

from hypothesis import given
from hypothesis import strategies as st

from sim.request import Request


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 50))
def test_segments_name_every_token_as_its_prefix_key_does(
    lengths: list[int], num_outputs: int
) -> None:
    ends = [sum(lengths[: position + 1]) for position in range(len(lengths))]
    nodes = [7 * position + 3 for position in range(len(lengths))]
    request = Request(0, "r", 0, ends[-1], num_outputs, nodes, ends, 99)
    keys: list[int] = []
    for node, end in request.segments():
        keys += [node << 32 | offset for offset in range(1, end - len(keys) + 1)]
    assert keys == [request.prefix_key(n + 1) for n in range(ends[-1] + num_outputs)]
