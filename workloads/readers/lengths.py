"""CSV traces of lengths: what the prompts say is unknown, so nothing is shared.

Sources: https://github.com/Azure/AzurePublicDataset (``AzureLLMInferenceTrace_*.csv`` of 2023, 2024
and, with a column of images, 2025), https://github.com/HPMLL/BurstGPT, and
https://github.com/microsoft/vidur (``data/processed_traces``, Splitwise's among them).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from workloads.readers.jsonlines import Seconds
from workloads.readers.source import Source
from workloads.readers.table import read_columns
from workloads.readers.text import no_arrivals
from workloads.record import PS_PER_S, IntArray, Rows

_PS_PER_NS = PS_PER_S // 10**9

_TOO_LATE_S = 9_200_000
"""Stands for all that is later: a year is more than int64 picoseconds hold."""


def read_azure(source: Source) -> Iterator[Rows]:
    """Yield the requests; arrivals count from the earliest timestamp, to its 100 ns.

    Raises:
        TraceError: on another header, a wrong number of columns, or a value of another form.
    """
    lines, values = read_columns(
        source, {"TIMESTAMP": "time", "ContextTokens": "count", "GeneratedTokens": "count"}
    )
    if len(lines):
        ticks: IntArray = values["TIMESTAMP"] - values["TIMESTAMP"].min()
        arrivals = np.minimum(ticks, _TOO_LATE_S * 10**9) * _PS_PER_NS
        source.origin_ps = int(values["TIMESTAMP"].min()) * _PS_PER_NS
        yield Rows(lines, arrivals, values["ContextTokens"], values["GeneratedTokens"])


def _picoseconds(seconds: npt.NDArray[np.float64]) -> IntArray:
    """Answer times in ps; what is too late or early for a trace stays so."""
    seconds = np.clip(seconds, -_TOO_LATE_S, _TOO_LATE_S)
    ticks: IntArray = np.rint(seconds * PS_PER_S).astype(np.int64)
    return ticks


def read_burstgpt(source: Source) -> Iterator[Rows | str]:
    """Yield the requests; arrivals count from the earliest, failures (no response) are left out.

    Rows of a ``Session ID`` are its turns, and a turn follows its think time after the one before
    ended (``Elapsed time``). Whether a prompt repeats the turns before it is not known.

    Raises:
        TraceError: on another header, a wrong number of columns, or a value of another form.
    """
    lines, values = read_columns(
        source,
        {
            "Timestamp": "seconds",
            "Request tokens": "count or 0",
            "Response tokens": "count or 0",
            "Session ID": "text",
            "Elapsed time": "seconds",
        },
        optional=("Session ID", "Elapsed time"),
    )
    if not len(lines):
        return
    source.origin_ps = round(float(values["Timestamp"].min()) * PS_PER_S)
    prompts, outputs = values["Request tokens"], values["Response tokens"]
    good = np.flatnonzero((prompts > 0) & (outputs > 0))
    if len(good) < len(lines):
        yield f"{len(lines) - len(good)} requests without prompt or response tokens are left out"
    arrivals = _picoseconds(values["Timestamp"] - values["Timestamp"].min())[good]
    sessions = thinks = None
    if "Session ID" in values:
        sessions = [values["Session ID"][row] or None for row in good.tolist()]
    if sessions and "Elapsed time" in values:
        thinks = _think_times(sessions, arrivals, _picoseconds(values["Elapsed time"])[good])
    yield Rows(
        lines[good],
        arrivals,
        prompts[good],
        outputs[good],
        session_ids=sessions,
        think_ps=thinks,
    )


def _think_times(
    sessions: list[str | None], arrivals: IntArray, durations: IntArray
) -> list[int | None]:
    """Answer how long after the end of the turn before each request of a session arrived."""
    ends: dict[str, int] = {}
    thinks: list[int | None] = [None] * len(sessions)
    times = arrivals.tolist()
    for row in np.argsort(arrivals, kind="stable").tolist():
        session = sessions[row]
        if session is not None:
            if session in ends:
                thinks[row] = max(0, times[row] - ends[session])
            ends[session] = times[row] + int(durations[row])
    return thinks


def read_vidur(source: Source, *, gap: Seconds = 0.0) -> Iterator[Rows | str]:
    """Yield the requests; without a column ``arrived_at`` they come *gap* seconds apart.

    Raises:
        TraceError: on another header, a wrong number of columns, or a value of another form.
    """
    lines, values = read_columns(
        source,
        {"arrived_at": "seconds", "num_prefill_tokens": "whole", "num_decode_tokens": "whole"},
        optional=("arrived_at",),
    )
    if len(lines):
        if "arrived_at" not in values:
            yield no_arrivals(gap)
        seconds = values.get("arrived_at", np.arange(len(lines)) * gap)
        arrivals = _picoseconds(seconds)
        yield Rows(lines, arrivals, values["num_prefill_tokens"], values["num_decode_tokens"])
