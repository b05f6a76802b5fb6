"""What it costs to look at a run: whole commands in turn, with and without.

Run `python -m tests.benchmarks.watching`. The endpoint is scraped every second, the board is drawn
on a terminal that nobody sees. Each line has the median of the ratios of its pairs.
"""

import argparse
import contextlib
import os
import pty
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.peers import write_trace
from tests.benchmarks.process import console_script
from tests.benchmarks.workloads import pool

WATCHING = {
    "nothing": [],
    "--metrics-port, scraped every second": ["--metrics-port", "0", "--metrics-linger", "0"],
    "--live": ["--live"],
    "--openmetrics, 15 s": ["--openmetrics", "series"],
}


def _drain(terminal: int) -> None:
    """Read what the command says, and scrape what it serves until it ends."""
    said = b""
    over = threading.Event()

    def scrape(address: str) -> None:
        while not over.wait(1):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address, timeout=10).read()

    with contextlib.suppress(OSError):  # the command has closed its side
        while part := os.read(terminal, 65536):
            said += part
            address = re.search(rb"served at (http\S+)", said)
            if address is not None:
                said = b""
                threading.Thread(target=scrape, args=(address[1].decode(),), daemon=True).start()
    over.set()


class Cost(NamedTuple):
    """Seconds of one command: by the clock, and of processors."""

    wall: float
    cpu: float


def cost(command: Sequence[str | Path], folder: str) -> Cost:
    """Answer what *command* costs in *folder*, with a terminal on its stderr."""
    ours, theirs = pty.openpty()
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        _drain(ours)
        os.close(ours)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(time.perf_counter() - start, usage.ru_utime + usage.ru_stime)


def main() -> None:
    """Print the median seconds of each, and its ratios to watching nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'':<40}{'wall s':>10}{'cpu s':>10}{'wall':>8}{'cpu':>8}")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        write_trace(trace, arguments.requests, prompt=512, output=128)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in pool(12_001).items()]
        run: list[str | Path] = [console_script(), "run", "--trace", trace, *flags]
        for name, more in WATCHING.items():
            pairs = [
                (cost(run, folder), cost([*run, *more], folder)) for _ in range(arguments.pairs)
            ]
            seconds = [statistics.median(b[place] for _, b in pairs) for place in (0, 1)]
            ratios = [statistics.median(b[place] / a[place] for a, b in pairs) for place in (0, 1)]
            print(
                f"{name:<40}{seconds[0]:>10.2f}{seconds[1]:>10.2f}"
                f"{ratios[0]:>8.3f}{ratios[1]:>8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
