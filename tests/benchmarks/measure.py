"""Measure one workload in processes of its own, so that its peak memory is its own.

One process makes the trace and leaves it in a file; another, which never held what making it took,
loads and runs it. Time is that of `Simulation.run`: from the first arrival to the last row of the
request and run records. Reading the trace, importing and writing result files are left out.
"""

import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.settings import FLAG_RANK, Given, resolve
from sim.simulation import Simulation
from tests.benchmarks.workloads import REPOSITORY, WORKLOADS, Workload
from workloads.record import Trace

LEAST_S, ENOUGH_S = 10.0, 60.0
"""A workload is repeated for at least so many seconds, since processors are lent and taken away for
moments, and not again once the repeats before took so many. Asked for one repeat, it runs once."""


class Measurement(NamedTuple):
    """One workload and allocator: the best time of its repeats, the memory of the first."""

    workload: str
    allocator: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    seconds: float
    peak_rss_mib: float

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


def run_once(workload: Workload, trace: Trace, allocator: str) -> tuple[float, int]:
    """Answer seconds and steps of one run."""
    values = {**workload.settings, "allocator": allocator}
    given = {name: Given(value, FLAG_RANK, name) for name, value in values.items()}
    simulation = Simulation(resolve(given).run, trace)
    gc.collect()
    start = time.perf_counter()
    result = simulation.run()
    seconds = time.perf_counter() - start
    assert result.recorder.num_done == len(trace)
    return seconds, result.recorder.num_steps


def peak_rss_mib() -> float:
    """Answer the peak resident memory of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory, held until exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _find(name: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.name == name)


def _make(name: str, num_requests: int, file: Path) -> float:
    """Leave the trace in *file* and answer how many seconds making it took."""
    start = time.perf_counter()
    trace = _find(name).make_trace(num_requests)
    seconds = time.perf_counter() - start
    columns = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    np.savez(file, **columns)
    return seconds


def _load(file: Path) -> Trace:
    """Answer the trace that `_make` left in *file*."""
    with np.load(file) as columns:
        arrays = {name: columns[name] for name in columns if columns[name].dtype == np.int64}
        return Trace(
            request_ids=columns["request_ids"].tolist(),
            name=str(columns["name"]),
            trace_format=str(columns["trace_format"]),
            sha256="",
            **arrays,
        )


def _run(name: str, allocator: str, repeats: int, file: Path) -> Measurement:
    trace = _load(file)
    workload = _find(name)
    start = time.perf_counter()
    seconds, steps = run_once(workload, trace, allocator)
    peak = peak_rss_mib()
    times = [seconds]
    while repeats > 1:
        if time.perf_counter() - start > (ENOUGH_S if len(times) < repeats else LEAST_S):
            break
        times.append(run_once(workload, trace, allocator)[0])
    return Measurement(
        name,
        allocator,
        len(trace),
        int(trace.num_prompt_tokens.sum()),
        int(trace.num_output_tokens.sum()),
        steps,
        min(times),
        peak,
    )


def _child(*arguments: str | int | Path) -> Any:
    """Answer what this module prints for *arguments* in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.measure", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


@contextmanager
def prepared(workload: Workload) -> Iterator[tuple[Path, float]]:
    """Lend a file with the trace of *workload*, and the seconds that making it took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.npz"
        yield file, _child("make", workload.name, workload.num_requests, file)


def measure(workload: Workload, allocator: str, repeats: int, file: Path) -> Measurement:
    """Run the trace in *file* up to *repeats* times in one fresh process; answer the best."""
    return Measurement(*_child("run", workload.name, allocator, repeats, file))


def main() -> None:
    """Do the child's part, as `_child` asked."""
    what, name, third, *rest = sys.argv[1:]
    answer: object
    if what == "make":
        answer = _make(name, int(third), Path(rest[0]))
    else:
        answer = _run(name, third, int(rest[0]), Path(rest[1]))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
