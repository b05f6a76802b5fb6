"""A finished run as a series of samples, in the text format that Prometheus backfills from."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest

from sim.allocators.base import MemoryStats
from sim.errors import FileError
from sim.files import atomic
from sim.simulation import RunResult
from sim.watch.families import Families, Timed
from sim.watch.names import bounds
from sim.watch.observer import Observer
from workloads.errors import plain
from workloads.record import PS_PER_S

MAX_SAMPLES = 20_000
"""Of one series: a file of 700 MB."""

_END = b"# EOF\n"


class _One:
    """A collector of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def write_openmetrics(
    path: Path, result: RunResult, stats: MemoryStats, interval: float, epoch: float
) -> None:
    """Write a sample every *interval* simulated seconds from the first arrival on, and the last.

    Args:
        path: the file, whole or not at all.
        result: of a run that is over.
        stats: the pool after it.
        interval: seconds, at least 0.001: Prometheus counts milliseconds.
        epoch: Unix time of the trace's time zero.

    Raises:
        FileError: more than `MAX_SAMPLES` samples; it cannot be written.
    """
    recorder = result.recorder
    seconds = (recorder.now_ps - recorder.start_ps) / PS_PER_S
    if seconds / interval > MAX_SAMPLES:
        raise FileError(
            f"--openmetrics {plain(str(path))}: --openmetrics-interval {interval:g} makes more "
            f"than {MAX_SAMPLES:,} samples of {seconds:,.0f} simulated seconds; "
            f"expected at least {seconds / MAX_SAMPLES:.2g}"
        )
    families = Families.of(result)
    observer = Observer(recorder, bounds(families.max_model_len))
    observer.finish(stats)
    step_ps = round(interval * PS_PER_S)
    times = [*range(recorder.start_ps, recorder.now_ps, step_ps), recorder.now_ps]
    taken = (observer.sample(time) for time in times)
    # Of two within a millisecond, which Prometheus cannot tell apart, the last.
    samples: Timed = list({round(epoch + sample.seconds, 3): sample for sample in taken}.items())
    with atomic(path) as temporary, temporary.open("wb") as file:
        for family in families.show(samples):
            text: bytes = generate_latest(_One(family), ALLOWUTF8)  # type: ignore[no-untyped-call]
            file.write(text.removesuffix(_END))
        file.write(_END)
