"""The tables of a run, one row a request and one a run of steps, from what its recorder kept."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sim import arrow
from sim.columns import SLOT_STATES, Columns
from sim.metrics import Recorder
from sim.request import UNSET
from sim.totals import COUNTS
from workloads.record import PS_PER_S


def request_table(recorder: Recorder) -> pa.Table:
    """Answer one row a request, in arrival order; times in seconds, empty where not reached."""
    trace, refused = recorder.trace, recorder.refused
    table: dict[str, Any] = {
        "request_id": arrow.strings(trace.request_ids),
        "refused": arrow.strings([refused.get(index) for index in range(len(trace))]),
        "arrival_time": recorder.arrival_ps / PS_PER_S,
        "num_prompt_tokens": trace.num_prompt_tokens,
    }
    for name, values in recorder.request_columns().items():
        missing = values == UNSET
        if name.endswith("_ps"):
            table[f"{name.removesuffix('_ps')}_time"] = arrow.array(values / PS_PER_S, missing)
        else:
            table[name] = arrow.array(values, missing)
    return arrow.table(table)


def step_tables(recorder: Recorder) -> Iterator[pa.Table]:
    """Answer the step rows, a part at a time; with *save_steps* one a step, and who was in it.

    ``running``, ``waiting`` and ``used_blocks`` hold right after scheduling (``used_blocks`` of the
    last step, ``waiting`` of the first); counts are those of the whole run; ``kv_<state>_slots``
    are time-weighted. A row without steps is idle time. Under asynchronous scheduling a step is the
    call that decides it, while the one before it runs: who finishes in it had the last token then.
    """
    block_size, first = recorder.block_size, 0
    for rows in recorder.step_chunks():
        table = _step_columns(rows, block_size)
        if recorder.save_steps:
            busy = rows["num_steps"] > 0
            table = {name: values[busy] for name, values in table.items()}
            end = first + int(busy.sum())
            held_after = np.array(recorder.held_after[first:end], dtype=np.int64)
            table["used_blocks_after"] = -(-held_after // block_size)
            columns = ("preempted", "admitted", "resumed", "finished", "scheduled")
            names = recorder.names[first:end]
            for place, name in enumerate(columns):
                table[name] = arrow.strings([row[place] for row in names])
            first = end
        yield arrow.table(table)


def step_table(recorder: Recorder) -> pa.Table:
    """Answer `step_tables` in one piece."""
    return pa.concat_tables(step_tables(recorder))


def _step_columns(rows: Columns, block_size: int) -> dict[str, Any]:
    """Answer the columns of the step table that need no names."""
    wide = {
        name: column.astype(np.int64) for name, column in rows.items() if column.dtype.kind == "i"
    }
    num_steps, num_decodes = wide["num_steps"], wide["num_decodes"]
    prefill_tokens = wide["num_prefill_tokens"]
    decode_tokens = num_decodes * num_steps + wide["num_late_decodes"]
    return {
        "step": wide["step"],
        "num_steps": num_steps,
        "time": wide["start_ps"] / PS_PER_S,
        "duration": wide["duration_ps"] / PS_PER_S,
        "first_step_duration": rows["first_step_ps"] / PS_PER_S,
        "running": wide["running"],
        "waiting": wide["waiting"],
        "num_scheduled_reqs": num_decodes * num_steps + wide["num_prefills"],
        "num_scheduled_tokens": decode_tokens + prefill_tokens,
        "num_prefill_tokens": prefill_tokens,
        "num_decode_tokens": decode_tokens,
        "used_blocks": -(-wide["held_slots"] // block_size),
        **{name: wide[name] for name in COUNTS},
        **{f"kv_{state}_slots": rows[f"kv_{state}_slots"] for state in SLOT_STATES},
    }


def expand(steps: pa.Table) -> pa.Table:
    """Answer one row a step of *steps*, rows of a step table: when it ran, and what it computed.

    As long as there are steps, so select rows first. Idle time has no step. Columns: ``step``,
    ``time`` and ``duration`` (seconds), ``running``, ``num_scheduled_reqs``,
    ``num_scheduled_tokens``, ``num_prefill_tokens``, ``num_decode_tokens``.
    """

    def column(name: str) -> npt.NDArray[Any]:
        return np.repeat(steps[name].to_numpy(), num_steps)

    num_steps = steps["num_steps"].to_numpy()
    n = column("num_steps")
    place = np.arange(len(n)) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)
    first = column("first_step_duration")
    # The steps of a run last longer by the same amount each, and all of them are known.
    increment = 2 * (column("duration") - n * first) / np.maximum(n * (n - 1), 1)
    table: dict[str, Any] = {
        "step": column("step") + place,
        "time": column("time") + place * first + increment * (place * (place - 1) // 2),
        "duration": first + place * increment,
        "running": column("running"),
    }
    for name in ("reqs", "tokens"):
        table[f"num_scheduled_{name}"] = column(f"num_scheduled_{name}") // n
    for name in ("prefill", "decode"):
        table[f"num_{name}_tokens"] = column(f"num_{name}_tokens") // n
    return arrow.table(table)
