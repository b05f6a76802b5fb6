"""How fast the loop is: requests a second from the first arrival to the last row kept.

Run `python -m tests.benchmarks.loop [NAME ...]`; a name is part of a workload's. Each line is one
process of its own (`tests.benchmarks.measure`), the best of its repeats.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator

from tests.benchmarks.measure import Measurement, measure, prepared
from tests.benchmarks.workloads import QUICK, WORKLOADS, Workload

HEADER = (
    f"{'workload':<24}{'allocator':<16}{'requests':>10}{'seconds':>9}{'requests/s':>12}"
    f"{'steps':>11}{'peak MiB':>10}"
)


def line(got: Measurement) -> str:
    """Answer the line of one measurement, under `HEADER`."""
    return (
        f"{got.workload:<24}{got.allocator:<16}{got.requests:>10,}{got.seconds:>9.3f}"
        f"{got.requests_per_s:>12,.0f}{got.steps:>11,}{got.peak_rss_mib:>10,.0f}"
    )


def measure_all(workloads: Iterable[Workload], repeats: int) -> Iterator[Measurement]:
    """Measure each workload with each of its allocators, saying on stderr what is left out."""
    for workload in workloads:
        if not workload.is_here:
            print(f"{workload.name}: left out, needs {workload.file}", file=sys.stderr)
            continue
        with prepared(workload) as (file, seconds):
            print(f"{workload.name}: trace made in {seconds:.2f} s", file=sys.stderr)
            for allocator in workload.allocators:
                yield measure(workload, allocator, repeats, file)


def main() -> None:
    """Print one line a workload and allocator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of workload names [default: all]")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best [default: 3]")
    parser.add_argument("--quick", action="store_true", help="fewer requests, no real traces")
    arguments = parser.parse_args()
    names = arguments.names or [""]
    workloads = QUICK if arguments.quick else WORKLOADS
    chosen = [w for w in workloads if any(name in w.name for name in names)]
    print(HEADER)
    for got in measure_all(chosen, arguments.repeats):
        print(line(got), flush=True)


if __name__ == "__main__":
    main()
