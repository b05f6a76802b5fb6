"""Where a workload comes from: a trace that was recorded, or a specification to draw one from."""

from pathlib import Path

from workloads.formats import is_spec
from workloads.readers import read_trace
from workloads.record import Trace


def read_workload(path: str | Path, trace_format: str | None = None, seed: int = 0) -> Trace:
    """Answer the trace in the file *path*, or, if it is a specification, one drawn by *seed*.

    Raises:
        TraceError: one line that names the file, the line or key, and what was expected.
    """
    if is_spec(path, trace_format):
        from workloads.generators import generate  # noqa: PLC0415  # who replays draws nothing

        return generate(path, seed)
    return read_trace(path, trace_format)
