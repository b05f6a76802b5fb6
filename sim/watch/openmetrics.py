"""A finished run as a series of samples, in the text format that Prometheus backfills from."""

from array import array
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.utils import floatToGoString

from sim.allocators.values import MemoryStats
from sim.errors import FileError
from sim.files import atomic
from sim.simulation import RunResult
from sim.watch.families import Families
from sim.watch.names import bounds
from sim.watch.observer import Observer
from workloads.errors import plain
from workloads.record import PS_PER_S

MAX_SAMPLES = 20_000
"""Of one series: a file of 750 MB, 55 MB in memory."""

_END = "# EOF\n"


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
    series: dict[float, array[float]] = {}
    for time_ps in [*range(recorder.start_ps, recorder.now_ps, step_ps), recorder.now_ps]:
        sample = observer.sample(time_ps)
        shown = list(families.show(sample))
        # Of two within a millisecond, which Prometheus cannot tell apart, the last.
        series[round(epoch + sample.seconds, 3)] = array(
            "d", (value.value for family in shown for value in family.samples)
        )
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        place = 0
        for family in shown:
            head, metrics = _layout(family)
            file.write(head)
            for metric in metrics:
                part = slice(place, place + len(metric))
                place = part.stop
                for time, values in series.items():
                    written = map(floatToGoString, values[part])
                    file.writelines(
                        f"{name} {value} {time}\n"
                        for name, value in zip(metric, written, strict=True)
                    )
        file.write(_END)


def _layout(family: Metric) -> tuple[str, list[list[str]]]:
    """Answer what comes before *family*, and the names with labels that each metric of it has.

    A point of a histogram is its buckets, count and sum together.
    """
    text = generate_latest(_One(family), ALLOWUTF8).decode()  # type: ignore[no-untyped-call]
    lines = text.removesuffix(_END).split("\n")[:-1]
    names = [line.rsplit(" ", 1)[0] for line in lines[-len(family.samples) :]]
    head = "".join(f"{line}\n" for line in lines[: -len(family.samples)])
    return head, [names] if family.type == "histogram" else [[name] for name in names]
