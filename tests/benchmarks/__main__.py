"""Measure everything and leave summary.csv, manifest.json and the charts in a folder.

Run `python -m tests.benchmarks`, with `--quick` for a first look, and with the interpreters of the
peers (`--sched-sim PYTHON` and so on, see `tests.benchmarks.peers`) to run them too.
"""

import argparse
import csv
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

import sim.engine
from sim.files import write_json
from tests.benchmarks.charts import draw
from tests.benchmarks.loop import HEADER, line, measure_all
from tests.benchmarks.measure import Measurement
from tests.benchmarks.peers import PeerTime, add_arguments, contenders, race, table
from tests.benchmarks.process import HEADER as PROCESS_HEADER
from tests.benchmarks.process import ProcessTime, console_script, measure_processes
from tests.benchmarks.summary import (
    Row,
    growth_rows,
    loop_rows,
    missing_rows,
    peer_rows,
    process_rows,
)
from tests.benchmarks.workloads import QUICK, REPOSITORY, WORKLOADS, Workload

_IS_COMPILED = not str(sim.engine.__file__).endswith(".py")
"""Whether the loop is that of the compiled build (`setup.py`)."""

PACKAGES = ("kvsim", "numpy", "pandas", "pyarrow", "simpy", "msgspec", "matplotlib")


def _loops(workloads: Sequence[Workload], repeats: int) -> Iterator[Measurement]:
    print(HEADER)
    for got in measure_all(workloads, repeats):
        print(line(got), flush=True)
        yield got


def _processes(repeats: int) -> Iterator[ProcessTime]:
    print(PROCESS_HEADER)
    for got in measure_processes(console_script(), repeats):
        print(got, flush=True)
        yield got


def _cpu() -> str:
    """Answer the model of the processor, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return models[0] if models else platform.processor()


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _git_commit() -> str | None:
    """Answer the commit measured, marked if the code differs from it; None without git."""
    changed = _git("status", "--porcelain", "--", "sim", "workloads", "tests/benchmarks")
    commit = _git("rev-parse", "HEAD")
    return commit + ("-dirty" if changed else "") if commit else None


def _setting() -> dict[str, Any]:
    """Answer what is measured and where, as it is before the start."""
    return {
        "git_commit": _git_commit(),
        "compiled": _IS_COMPILED,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "load_average": round(os.getloadavg()[0], 1),
        },
    }


def _write(rows: Sequence[Row], file: Path) -> None:
    with file.open("w", newline="") as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in rows:
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])


def _targets(rows: Sequence[Row]) -> str:
    """Answer the rows that have a target as a table."""
    shown = [
        (row.benchmark, row.workload, row.allocator, row.measured, row.unit, row.target, row.met)
        for row in rows
        if row.target
    ]
    headers = ("benchmark", "workload", "allocator", "measured", "unit", "target", "")
    return tabulate(shown, headers, "simple", floatfmt=",.4g", missingval="-")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests, no real traces")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best [default: 3]")
    parser.add_argument(
        "--max-requests",
        type=int,
        default=sys.maxsize,
        metavar="N",
        help="leave larger workloads out",
    )
    parser.add_argument("-o", "--output-dir", type=Path, metavar="DIR")
    add_arguments(parser)
    return parser.parse_args()


def _race(arguments: argparse.Namespace) -> list[PeerTime]:
    num_requests = 2_000 if arguments.quick else 20_000
    times = race(contenders(arguments), num_requests, repeats=arguments.repeats)
    print(table(times))
    return times


def main() -> None:
    """Measure, print and write; the table of targets comes last."""
    arguments = _parse()
    usual = "kvsim-results/performance" if arguments.quick else "results/performance"
    usual += "/compiled" if _IS_COMPILED else ""
    folder: Path = arguments.output_dir or REPOSITORY / usual
    folder.mkdir(parents=True, exist_ok=True)
    setting = _setting() | {"repeats": arguments.repeats}

    workloads = [
        workload
        for workload in (QUICK if arguments.quick else WORKLOADS)
        if workload.num_requests <= arguments.max_requests
    ]
    measurements = list(_loops(workloads, 1 if arguments.quick else arguments.repeats))
    processes = list(_processes(arguments.repeats))
    peers = _race(arguments)
    rows = [
        *loop_rows(measurements),
        *missing_rows(measurements),
        *growth_rows(measurements),
        *process_rows(processes),
        *peer_rows(peers),
    ]
    _write(rows, folder / "summary.csv")
    versions = {got.package: got.version for got in peers if got.package != "kvsim"}
    write_json(folder / "manifest.json", {**setting, "peers": versions})
    draw(folder / "summary.csv", folder)
    print(_targets(rows))


if __name__ == "__main__":
    main()
