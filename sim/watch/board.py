"""The board of a run in the terminal: where it is, where the KV slots are, how both came about."""

from collections.abc import Sequence

from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from sim.allocators.values import MemoryStats
from sim.columns import SLOT_STATES
from sim.metrics import Recorder
from sim.watch.observer import Observer, Sample
from workloads.record import PS_PER_S

BINS = 60
"""Equal parts of simulated time that a history has at most; at least half as many, once it has."""

_LABEL_WIDTH, _FIGURE_WIDTH, _LEGEND_WIDTH = 18, 11, 30
_SPARKS = "▁▂▃▄▅▆▇█"
_SLOTS = {
    "live": ("█", "green"),
    "reserved": ("▓", "yellow"),
    "internal": ("▒", "red"),
    "external": ("x", "magenta"),
    "cached": ("░", "cyan"),
    "free": ("·", "bright_black"),
}
"""How a slot of each state is drawn: told apart without colour too."""


class History:
    """Samples at equal distances of simulated time, ever farther apart, so that they stay few."""

    def __init__(self, recorder: Recorder) -> None:
        self._observer = Observer(recorder)
        self._start_ps = recorder.start_ps
        self._width_ps = PS_PER_S // 1000
        self.samples: list[Sample] = [self._observer.sample(self._start_ps)]

    def finish(self, stats: MemoryStats) -> None:
        """Take in that the run is over and left *stats* behind."""
        self._observer.finish(stats)

    def advance(self, time_ps: int) -> Sample:
        """Add what is missing up to *time_ps*; answer the sample there."""
        while (time_ps - self._start_ps) // self._width_ps > BINS:
            self._width_ps *= 2
            self.samples = self.samples[::2]
        first = self._start_ps + len(self.samples) * self._width_ps
        for time in range(first, time_ps + 1, self._width_ps):
            self.samples.append(self._observer.sample(time))
        return self._observer.sample(time_ps)

    def rates(self, part: str, whole: str | None = None) -> list[float | None]:
        """Answer what the counts *part* gained from each sample to the next.

        As a share of what *whole* gained, None where that is nothing.
        """
        values: list[float | None] = []
        for before, after in zip(self.samples, self.samples[1:], strict=False):
            gained = after.counts[part] - before.counts[part]
            of = 1 if whole is None else after.counts[whole] - before.counts[whole]
            values.append(gained / of if of else None)
        return values


def sparkline(values: Sequence[float | None], top: float) -> str:
    """Answer *values*, 0 to *top*, a character each; a space where there is none."""
    last = len(_SPARKS) - 1
    return "".join(
        " " if value is None else _SPARKS[min(last, int(value / top * len(_SPARKS)))]
        for value in values
    )


class Board:
    """What is shown of one run.

    Args:
        label: the run's name.
        num_requests: of the trace.
        recorder: of the run.
    """

    def __init__(self, label: str, num_requests: int, recorder: Recorder) -> None:
        self._label, self._num_requests, self._recorder = label, num_requests, recorder
        self._history = History(recorder)

    def finish(self, stats: MemoryStats) -> None:
        """Show what the run left, *stats* in the pool, at its end."""
        self._history.finish(stats)

    def show(self, time_ps: int, wall_s: float, width: int) -> Table:
        """Answer the board at *time_ps*, *wall_s* seconds after the start, *width* columns wide."""
        width -= len("^C")  # which the terminal puts behind it
        history = self._history
        now = history.advance(time_ps)
        counts = now.counts
        simulated = (time_ps - self._recorder.start_ps) / PS_PER_S
        table = Table.grid(padding=(0, 2))
        table.width = max(1, width)
        table.add_column(width=_LABEL_WIDTH, no_wrap=True)
        table.add_column(width=_FIGURE_WIDTH, justify="right", no_wrap=True)
        rest = max(10, width - _LABEL_WIDTH - _FIGURE_WIDTH - 4)
        room = min(BINS, rest)
        table.add_column(width=rest, no_wrap=True)  # what has no room is cut: as many lines
        speed = simulated / wall_s if wall_s else 0.0
        rate = counts["generation_tokens"] / simulated if simulated else 0.0
        table.add_row(
            Text(self._label, style="bold"),
            f"{self._recorder.num_done / self._num_requests:.0%}",
            f"{self._recorder.num_done:,} of {self._num_requests:,} requests",
        )
        pace = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
        table.add_row("simulated", f"{simulated:,.1f} s", f"at {pace}x, {rate:,.0f} output tok/s")
        table.add_row(
            "requests",
            f"{now.running:,}",
            f"running, {now.waiting:,} waiting, {counts['num_preempted']:,} preemptions",
        )
        table.add_row("KV slots", f"{now.usage:.0%}", _bar(now, room))
        if room >= _LEGEND_WIDTH:
            table.add_row("", "", _legend(now))
        usages = [sample.usage for sample in history.samples][-room:]
        table.add_row("KV usage", f"{now.usage:.0%}", sparkline(usages, 1))
        refusals = history.rates("num_refusals")[-room:]
        most = max((value for value in refusals if value), default=1)
        shown = [value or None for value in refusals]
        table.add_row("failed allocations", f"{counts['num_refusals']:,}", sparkline(shown, most))
        queries, hits = counts["prefix_cache_queries"], counts["prefix_cache_hits"]
        rates = history.rates("prefix_cache_hits", "prefix_cache_queries")[-room:]
        rate_text = f"{hits / queries:.0%}" if queries else "-"
        table.add_row("prefix hit rate", rate_text, sparkline(rates, 1))
        return table


def _bar(sample: Sample, width: int) -> Text:
    """Answer the pool as *width* characters, each of the state that its middle lies in."""
    bar, start, total = Text(), 0.0, sum(sample.slots.values())
    for state in SLOT_STATES:
        end = start + sample.slots[state] * width / total
        letter, style = _SLOTS[state]
        bar.append(letter * (round(end) - round(start)), style)
        start = end
    return bar


def _legend(sample: Sample) -> Columns:
    total, shown = sum(sample.slots.values()), Columns(padding=(0, 1))
    for state in SLOT_STATES:
        letter, style = _SLOTS[state]
        text = Text.assemble((letter, style), f" {state} {sample.slots[state] / total:.0%}")
        shown.add_renderable(text)
    return shown
