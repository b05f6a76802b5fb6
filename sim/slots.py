"""Where the slots of the pool are, from step rows: on average over a row, and at its end."""

import numpy as np

from sim.columns import SLOT_STATES, Columns, FloatArray

_COLUMNS = tuple(f"kv_{state}_slots" for state in SLOT_STATES)


def mean_slots(rows: Columns, capacity: int) -> Columns:
    """Answer the slots in each of `SLOT_STATES`, averaged over the time of each row.

    *rows* have the slots at the end of a run. What was taken in step j of it was not held before;
    every step writes one token a decoding request.
    """
    live, held, internal, cached, external = _at_end(rows)
    n = rows["num_steps"].astype(np.float64)
    first, increment = rows["first_step_ps"], rows["increment_ps"]
    pairs = n * (n - 1) / 2
    total = first * n + increment * pairs
    # The sum over steps j of j times the time of step j.
    first_moment = first * pairs + increment * pairs * (2 * n - 1) / 3
    later = np.divide(first_moment, total, out=np.zeros(len(n)), where=n > 1)
    live -= np.where(n > 1, rows["num_decodes"] * (n - 1 - later), 0)
    held -= rows["held_taken"]
    internal -= rows["internal_taken"]
    cached += rows["cached_taken"]
    return _split([live, held, internal, cached, external], capacity)


def end_slots(rows: Columns, capacity: int) -> Columns:
    """Answer the slots in each of `SLOT_STATES` in the last step of each row."""
    return _split(_at_end(rows), capacity)


def _at_end(rows: Columns) -> list[FloatArray]:
    names = ("live", "held_slots", "internal", "cached", "external")
    return [rows[name].astype(np.float64) for name in names]


def _split(slots: list[FloatArray], capacity: int) -> Columns:
    live, held, internal, cached, external = slots
    values = (
        live,
        held - live - internal,
        internal,
        external,
        cached,
        capacity - held - cached - external,
    )
    return dict(zip(_COLUMNS, values, strict=True))
