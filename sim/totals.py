"""Step rows added up: integrals over time, counts, and the gaps between tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workloads.record import PS_PER_S, IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Totals:
    """Integrals and counts over a whole run, from its step rows; times in picoseconds.

    The counts without a description are sums of the step rows' columns of that name.

    Attributes:
        slot_time: slots in each of `sim.metrics.SLOT_STATES`, integrated over time.
        running_time: running requests, integrated over time.
        waiting_time: time that requests spent in the queue, first wait and later ones.
        duration_ps: from the first arrival to the end of the last step.
        inter_token_ps: distinct gaps between a token and the next of its request, and how many.
        tokens_in_second: tokens sampled in each second since the first served request arrived.
    """

    num_steps: int
    duration_ps: int
    slot_time: dict[str, float]
    running_time: float
    waiting_time: int
    max_running: int
    max_held_slots: int
    inter_token_ps: tuple[FloatArray, IntArray]
    tokens_in_second: IntArray
    num_admitted: int
    num_resumed: int
    num_preempted: int
    num_finished: int
    num_refusals: int
    recomputed_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preempted_cache_queries: int
    preempted_cache_hits: int


COUNTS = (
    "num_admitted",
    "num_resumed",
    "num_preempted",
    "num_finished",
    "num_refusals",
    "recomputed_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preempted_cache_queries",
    "preempted_cache_hits",
)
"""Counter columns of the step rows; the fields of `Totals` with these names are their sums."""


def add_up(
    rows: Mapping[str, IntArray],
    slots: Mapping[str, FloatArray],
    *,
    extra_gaps: Mapping[int, int],
    first_served_ps: int,
    duration_ps: int,
    waiting_time: int,
) -> Totals:
    """Answer the totals of a run.

    Args:
        rows: integer columns of the step rows (`sim.metrics`), times in picoseconds.
        slots: time-weighted slots of each row, by state.
        extra_gaps: gaps between tokens (ps) that are no step's duration, and how many: preemptions.
        first_served_ps: arrival of the first request served.
        duration_ps: from the first arrival to the end of the last step.
        waiting_time: see `Totals`.
    """
    duration = rows["duration_ps"].astype(np.float64)
    ends, gaps, weights, sampled = _expand(rows)
    extra = sorted(extra_gaps.items())
    gaps = np.concatenate([gaps, np.array([gap for gap, _ in extra], dtype=np.float64)])
    weights = np.concatenate([weights, np.array([n for _, n in extra], dtype=np.int64)])
    seconds = ((ends - first_served_ps) // PS_PER_S).astype(np.int64)
    return Totals(
        num_steps=int(rows["num_steps"].sum()),
        duration_ps=duration_ps,
        slot_time={state: float(values @ duration) for state, values in slots.items()},
        running_time=float(rows["running"] @ duration),
        waiting_time=waiting_time,
        max_running=int(rows["running"].max(initial=0)),
        max_held_slots=int(rows["held_slots"].max(initial=0)),
        inter_token_ps=(gaps[weights > 0], weights[weights > 0]),
        tokens_in_second=np.bincount(seconds, weights=sampled).astype(np.int64),
        **{name: int(rows[name].sum()) for name in COUNTS},
    )


def _expand(
    rows: Mapping[str, IntArray],
) -> tuple[FloatArray, FloatArray, IntArray, FloatArray]:
    """Answer, for every single step, its end and duration (ps), decodes, and tokens sampled.

    Inside a run durations grow linearly from ``first_step_ps`` to the known sum.
    """
    num_steps = rows["num_steps"]
    position = np.arange(num_steps.sum()) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)
    first = rows["first_step_ps"].astype(np.float64)
    rest = rows["duration_ps"] - num_steps * first
    increment = np.repeat(2 * rest / np.maximum(num_steps * (num_steps - 1), 1), num_steps)
    first = np.repeat(first, num_steps)
    before = position + 1
    ends = np.repeat(rows["start_ps"], num_steps) + before * first
    ends += increment * (before * (before - 1) // 2)
    decodes = np.repeat(rows["num_decodes"], num_steps)
    sampled = decodes + np.repeat(rows["num_sampled_prefills"], num_steps)
    return ends, first + increment * position, decodes, sampled.astype(np.float64)
