"""Measure everything and leave summary.csv, manifest.json and the charts in a folder.

Run `python -m tests.benchmarks`, with `--quick` for a first look, and with the interpreters of the
peers (`--sched-sim PYTHON` and so on, see `tests.benchmarks.peers`) to run them too.
"""

import argparse
import csv
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

from sim.results import write_json
from tests.benchmarks.charts import draw
from tests.benchmarks.loop import HEADER, line, measure_all
from tests.benchmarks.measure import Measurement
from tests.benchmarks.peers import PeerTime, add_arguments, contenders, race, table
from tests.benchmarks.process import HEADER as PROCESS_HEADER
from tests.benchmarks.process import ProcessTime, console_script, measure_processes
from tests.benchmarks.summary import Row, growth_rows, loop_rows, peer_rows, process_rows
from tests.benchmarks.workloads import QUICK, REPOSITORY, WORKLOADS, Workload

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


def _manifest(commit: str | None, peers: Sequence[PeerTime], repeats: int) -> dict[str, Any]:
    return {
        "git_commit": commit,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "peers": {got.package: got.version for got in peers if got.package != "kvsim"},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system()},
        "repeats": repeats,
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


def main() -> None:
    """Measure, print and write; the table of targets comes last."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests, no real traces")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best [default: 3]")
    parser.add_argument("-o", "--output-dir", type=Path, metavar="DIR")
    add_arguments(parser)
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    usual = "kvsim-results/performance" if quick else "results/performance"
    folder: Path = arguments.output_dir or REPOSITORY / usual
    folder.mkdir(parents=True, exist_ok=True)
    commit = _git_commit()

    measurements = list(_loops(QUICK if quick else WORKLOADS, arguments.repeats))
    processes = list(_processes(arguments.repeats))
    entered = contenders(arguments)
    peers = race(entered, 2_000 if quick else 20_000, repeats=arguments.repeats)
    print(table(peers))
    rows = [
        *loop_rows(measurements),
        *growth_rows(measurements),
        *process_rows(processes),
        *peer_rows(peers),
    ]
    _write(rows, folder / "summary.csv")
    write_json(folder / "manifest.json", _manifest(commit, peers, arguments.repeats))
    draw(folder / "summary.csv", folder)
    print(_targets(rows))


if __name__ == "__main__":
    main()
