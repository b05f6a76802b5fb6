"""The frames of a run as the page reads them: lists of whole numbers, small, seen at any frame."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from sim.block_map.camera import COLUMNS, MapCamera, Tenancy


def film(camera: MapCamera, frames: Sequence[int]) -> dict[str, Any]:
    """Answer what *camera* saw in *frames*, numbers of its frames in rising order.

    ``reservations`` says that a request holds one piece from its admission on, instead of blocks.
    ``tenancies`` are lists of (row of the trace, tokens written at its end, first frame, changes of
    places held, changes of tokens written, `progressions` of the places). ``changes`` has for each
    frame the places that are cached now and were not, or were and are not, as (gap, length) pairs;
    ``unusable`` has (start, length) pairs.
    """
    memory = camera.memory
    rows = [camera.rows[frame] for frame in frames]
    return {
        "unit": memory.unit,
        "first": memory.first,
        "places": memory.num_places,
        "reservations": all(isinstance(tenancy.places, range) for tenancy in camera.tenancies),
        **{name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)},
        "why": [camera.why[frame] for frame in frames],
        "tenancies": [
            seen
            for tenancy in camera.tenancies
            if (seen := _tenancy(tenancy, frames, memory.first)) is not None
        ],
        "changes": _toggles([camera.cached[frame] - memory.first for frame in frames]),
        "unusable": [
            [number for piece in camera.unusable[frame] for number in (piece.start, len(piece))]
            for frame in frames
        ],
    }


def _tenancy(tenancy: Tenancy, frames: Sequence[int], first_place: int) -> list[Any] | None:
    start = bisect_left(frames, tenancy.first)
    end = bisect_left(frames, tenancy.first + len(tenancy.held))
    if start == end:
        return None
    held = [tenancy.held[frame - tenancy.first] for frame in frames[start:end]]
    computed = [tenancy.computed[frame - tenancy.first] for frame in frames[start:end]]
    request = tenancy.request
    return [
        request.index,
        request.final_num_computed_tokens,
        start,
        _changes(held),
        _changes(computed),
        progressions(tenancy.places[: max(held)], first_place),
    ]


def _changes(values: Sequence[int]) -> list[int]:
    return [values[0], *(later - earlier for earlier, later in pairwise(values))]


def progressions(values: Sequence[int], base: int = 0) -> list[int]:
    """Answer (start - *base*, step, length) of arithmetic progressions that make up *values*.

    Tables are made of them: neighbours taken at once, blocks given back in reverse, and blocks that
    a stable batch takes in turn.
    """
    if isinstance(values, range):
        return [values.start - base, values.step, len(values)] if values else []
    answer: list[int] = []
    place, num = 0, len(values)
    while place < num:
        start, end = values[place], place + 1
        step = values[end] - start if end < num else 0
        while end < num and values[end] - values[end - 1] == step:
            end += 1
        if end - place == 2:  # any two are a progression: the second may begin a longer one
            end, step = place + 1, 0
        answer += (start - base, step, end - place)
        place = end
    return answer


def _toggles(sets: Sequence[Any]) -> list[list[int]]:
    """Answer how each of *sets* (rising arrays) differs from the one before it."""
    answer: list[list[int]] = []
    before = np.empty(0, dtype=np.int64)
    for after in sets:
        changed = np.setxor1d(before, after, assume_unique=True)
        before = after
        runs = np.split(changed, np.flatnonzero(np.diff(changed) != 1) + 1)
        flat, end = [], 0
        for run in runs if len(changed) else ():
            flat += [int(run[0]) - end, len(run)]
            end = int(run[-1]) + 1
        answer.append(flat)
    return answer
