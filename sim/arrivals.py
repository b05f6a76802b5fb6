"""What arrives in a run: the trace or specification that it names, at the rate that it asks for."""

import dataclasses
from pathlib import Path

from sim.config import LoadConfig
from workloads.arrivals import at_request_rate
from workloads.errors import plain
from workloads.readers import read_trace
from workloads.record import Trace
from workloads.samples import CONVERSATION
from workloads.sources import read_workload


def recorded(load: LoadConfig, path: str | Path | None = None) -> Trace:
    """Answer the trace of *load* as recorded, called by the name there; *path* is where it lies.

    Raises:
        TraceError: it cannot be used.
    """
    if load.trace is None:
        # Its name without the place of installation: results do not depend on that.
        return dataclasses.replace(read_trace(CONVERSATION), name=CONVERSATION.name)
    trace = read_workload(load.trace if path is None else path, load.trace_format, seed=load.seed)
    return trace if path is None else dataclasses.replace(trace, name=plain(load.trace))


def arriving(trace: Trace, load: LoadConfig) -> Trace:
    """Answer *trace*, as recorded, with the arrival times that *load* asks for.

    Raises:
        TraceError: they cannot be had.
    """
    return trace if load.request_rate is None else at_request_rate(trace, float(load.request_rate))
