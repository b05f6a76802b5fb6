"""The ring of buckets against a plain walk over the steps."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from sim.allocators.ring import DecodeRing
from sim.request import Request


class Ring(NamedTuple):
    """A ring, and (block, table) of every block taken, in order, by walking."""

    ring: DecodeRing
    taken: list[tuple[int, int]]


@st.composite
def rings(draw: st.DrawFn, *, step: int, num_steps: int) -> Ring:
    """Answer a ring of a few requests, and who takes a block when: (step, request)."""
    size = draw(st.integers(1, 20))
    computed = draw(st.lists(st.integers(0, 60), max_size=8))
    ring = DecodeRing(size)
    for order, tokens in enumerate(computed):
        request = Request(order, str(order), 0, 1, 1)
        request.order, request.offset = order, tokens - step
        ring.join([request], {request: [order]})
    taken = [
        (at, order)
        for at in range(step, step + num_steps)
        for order, tokens in enumerate(computed)
        if (tokens + at - step) % size == 0
    ]
    return Ring(ring, taken)


@given(st.data(), st.integers(0, 100), st.integers(1, 70))
def test_needs_are_those_of_single_steps(data: st.DataObject, step: int, num_steps: int) -> None:
    ring, taken = data.draw(rings(step=step, num_steps=num_steps))
    tables, num_blocks, *moments = ring.needs(step, num_steps)
    assert num_blocks == len(taken)
    owners = [tables[place % len(tables)][0] for place in range(len(taken))]
    assert owners == [order for _, order in taken]
    offsets = [at - step for at, _ in taken]
    assert moments == [sum(offsets), sum(j * (j - 1) // 2 for j in offsets)]
    for num in {0, len(taken) // 2, len(taken)}:
        first = offsets[:num]
        expected = (sum(first), sum(j * (j - 1) // 2 for j in first))
        assert ring.moments_of_first(step, num) == expected


@given(st.data(), st.integers(0, 100), st.integers(1, 70), st.integers(0, 40))
def test_steps_within_are_the_most_that_fit(
    data: st.DataObject, step: int, num_steps: int, num_blocks: int
) -> None:
    ring, taken = data.draw(rings(step=step, num_steps=num_steps))
    fitting = ring.steps_within(step, num_steps, num_blocks)
    assert sum(at < step + fitting for at, _ in taken) <= num_blocks
    assert fitting == num_steps or sum(at <= step + fitting for at, _ in taken) > num_blocks
