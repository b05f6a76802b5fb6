"""How long whole commands take, from starting the process to its end.

Run `python -m tests.benchmarks.process`. The console script measured is that of this interpreter's
environment, or `--kvsim PATH`. A first, uncounted run leaves the byte code compiled, in a folder of
the benchmark's own: an environment that keeps Python from writing any would be measured instead.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.peers import write_trace
from tests.benchmarks.workloads import pool

HELP, RUN, COMPARE = "kvsim --help", "kvsim run, 2,000 requests", "kvsim compare"
NUM_REQUESTS = 2_000


class ProcessTime(NamedTuple):
    """Seconds of each run of one command."""

    command: str
    seconds: Sequence[float]

    def __str__(self) -> str:
        middle = statistics.median(self.seconds)
        return f"{self.command:<28}{min(self.seconds):>8.3f}{middle:>8.3f}{len(self.seconds):>6}"


HEADER = f"{'command':<28}{'min s':>8}{'median':>8}{'runs':>6}"


def _commands(folder: Path) -> dict[str, list[str]]:
    trace = folder / "trace.jsonl"
    write_trace(trace, NUM_REQUESTS, prompt=512, output=128)
    flags: list[str] = []
    for name, value in pool(12_001).items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    run = ["run", "--trace", str(trace), "--allocator", "paged", *flags]
    return {
        HELP: ["--help"],
        RUN: [*run, "-o", str(folder / "run")],
        COMPARE: ["compare", "-o", str(folder / "compare")],
    }


def measure_processes(kvsim: Path, repeats: int) -> Iterator[ProcessTime]:
    """Time each command *repeats* times, every result file written."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for name, arguments in _commands(Path(folder)).items():
            command = [str(kvsim), *arguments]
            seconds = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, env=environment)
                seconds.append(time.perf_counter() - start)
            yield ProcessTime(name, seconds[1:])


def console_script() -> Path:
    """Answer the kvsim of this interpreter's environment."""
    return Path(sys.executable).with_name("kvsim")


def main() -> None:
    """Print the fastest and the median time of each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvsim", type=Path, default=console_script(), metavar="PATH")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(HEADER)
    for got in measure_processes(arguments.kvsim, arguments.repeats):
        print(got, flush=True)


if __name__ == "__main__":
    main()
