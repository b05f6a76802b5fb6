"""What was measured, beside what it should be: a row a measurement, and a row a further target."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.benchmarks import workloads as w
from tests.benchmarks.measure import Measurement
from tests.benchmarks.peers import PeerTime, ratio
from tests.benchmarks.process import RUN, ProcessTime

RATE, SECONDS, MEMORY, RATIO = "requests/s", "s", "MiB", "x"
VLLM_RATE, VLLM_PRESSED_RATE = 385, 350
"""Requests a second of vLLM's own scheduler on the same workload, without and with preemptions."""


class Row(NamedTuple):
    """One line of summary.csv; *target* is what *measured*, in *unit*, is held against."""

    benchmark: str
    workload: str
    allocator: str = ""
    requests: int | None = None
    tokens: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    requests_per_s: float | None = None
    peak_rss_mib: float | None = None
    measured: float | None = None
    unit: str = ""
    target: str = ""
    met: str = ""


class Target(NamedTuple):
    """A bound: at least it for a rate, at most it for anything else."""

    workload: str
    requests: int | None
    allocators: tuple[str, ...]
    unit: str
    bound: float


LOOP_TARGETS = (
    Target(w.AT_ONCE, 20_000, (w.PAGED, w.RESERVE), RATE, 150_000),
    Target(w.AT_ONCE, 20_000, (w.PREFIX,), RATE, 80_000),
    Target(w.SHARED_PREFIX, 20_000, (w.PREFIX,), RATE, 35_000),
    Target(w.UNPRESSED, 1_000, (w.PAGED, w.PREFIX), RATE, 300 * VLLM_RATE),
    Target(w.PRESSED, 1_000, (w.PAGED, w.PREFIX), RATE, 100 * VLLM_PRESSED_RATE),
    Target(w.AZURE, None, w.ALL, SECONDS, 0.5),
    Target(w.MOONCAKE, None, (w.PREFIX,), SECONDS, 3),
    Target(w.AZURE_LIKE, 1_000_000, (w.PAGED,), SECONDS, 12),
    Target(w.AZURE_LIKE, 1_000_000, (w.PREFIX,), SECONDS, 20),
    Target(w.AZURE_LIKE, 1_000_000, (w.PAGED, w.PREFIX), MEMORY, 1024),
)
TENFOLD = "time(10 N) / time(N)"
MAX_GROWTH_TENFOLD = 10.5  # to 1,000,000 requests
MAX_GROWTH_DOUBLED_OUTPUT = 1.2  # of 20,000 requests
MIN_TIMES_AISIMULATE = 8  # 20,000 requests
MAX_PROCESS_S = 0.6


def _held(row: Row, measured: float | None, unit: str, bound: float, *, least: bool) -> Row:
    """Answer *row* with *measured* held against *bound*."""
    if measured is None:
        met = "not measured"
    else:
        met = "met" if (measured >= bound if least else measured <= bound) else "missed"
    sign = ">=" if least else "<="
    return row._replace(measured=measured, unit=unit, target=f"{sign} {bound:,g}", met=met)


def loop_rows(measurements: Iterable[Measurement]) -> Iterator[Row]:
    """Answer each measurement, once for each of its targets and at least once."""
    for got in measurements:
        row = Row(
            "loop",
            got.workload,
            got.allocator,
            got.requests,
            got.prompt_tokens + got.output_tokens,
            got.output_tokens,
            got.seconds,
            got.requests_per_s,
            got.peak_rss_mib,
        )
        values = {RATE: got.requests_per_s, SECONDS: got.seconds, MEMORY: got.peak_rss_mib}
        held = [
            _held(row, values[target.unit], target.unit, target.bound, least=target.unit == RATE)
            for target in LOOP_TARGETS
            if target.workload == got.workload
            and target.requests in {None, got.requests}
            and got.allocator in target.allocators
        ]
        yield from held or [row._replace(measured=got.requests_per_s, unit=RATE)]


def missing_rows(measurements: Sequence[Measurement]) -> Iterator[Row]:
    """Answer the targets that nothing was measured for."""
    done = {(got.workload, got.allocator, got.requests) for got in measurements}
    whole = {(workload, allocator, None) for workload, allocator, _ in done}
    for target in LOOP_TARGETS:
        for allocator in target.allocators:
            if (target.workload, allocator, target.requests) not in done | whole:
                row = Row("loop", target.workload, allocator, target.requests)
                yield _held(row, None, target.unit, target.bound, least=target.unit == RATE)
    for allocator in (w.PAGED, w.PREFIX):
        if (w.AZURE_LIKE, allocator, 1_000_000) not in done:
            row = Row(TENFOLD, w.AZURE_LIKE, allocator, 1_000_000)
            yield _held(row, None, RATIO, MAX_GROWTH_TENFOLD, least=False)


def growth_rows(measurements: Sequence[Measurement]) -> Iterator[Row]:
    """Answer how time grows with ten times the requests, and with twice the output."""
    lengths = {w.roomy(length): length for length in w.OUTPUT_LENGTHS}
    for allocator in (w.PAGED, w.PREFIX):
        mine = [got for got in measurements if got.allocator == allocator]
        for one, more in pairwise(got for got in mine if got.workload == w.AZURE_LIKE):
            row = Row(TENFOLD, w.AZURE_LIKE, allocator, more.requests)
            growth, full = more.seconds / one.seconds, more.requests == 1_000_000
            yield _at_most(row, growth, MAX_GROWTH_TENFOLD if full else None)
        for one, more in pairwise(got for got in mine if got.workload in lengths):
            pair = f"512/{lengths[one.workload]} to 512/{lengths[more.workload]}"
            row = Row("time with output doubled", pair, allocator, more.requests)
            growth, full = more.seconds / one.seconds, more.requests == 20_000
            yield _at_most(row, growth, MAX_GROWTH_DOUBLED_OUTPUT if full else None)


def _at_most(row: Row, growth: float, bound: float | None) -> Row:
    """Answer *row* with *growth* held against *bound*, if it has one."""
    if bound is None:
        return row._replace(measured=growth, unit=RATIO)
    return _held(row, growth, RATIO, bound, least=False)


def process_rows(times: Iterable[ProcessTime]) -> Iterator[Row]:
    """Answer the fastest run of each command."""
    for got in times:
        seconds = min(got.seconds)
        row = Row("process", got.command, seconds=seconds, measured=seconds, unit=SECONDS)
        if got.command == RUN:
            row = _held(row, seconds, SECONDS, MAX_PROCESS_S, least=False)
        yield row


def peer_rows(times: Sequence[PeerTime]) -> Iterator[Row]:
    """Answer each contender's rate, then how many times each peer's rate kvsim's is."""
    for got in times:
        row = Row("peers", w.AT_ONCE, got.name, got.requests, seconds=got.seconds)
        rate = got.requests_per_s
        yield row._replace(requests_per_s=rate, measured=rate, unit=RATE)
    peers = {got.name for got in times if got.package != "kvsim"}
    for peer in sorted(peers | {"aisimulate"}):
        row = Row(f"kvsim paged / {peer}", w.AT_ONCE, requests=times[0].requests)
        times_as_fast = ratio(times, peer)
        if peer == "aisimulate" and times[0].requests == 20_000:
            yield _held(row, times_as_fast, RATIO, MIN_TIMES_AISIMULATE, least=True)
        else:
            yield row._replace(measured=times_as_fast, unit=RATIO)
