"""Looking at runs while they go: ``--live``, ``--metrics-port``, ``--speed``, ``--openmetrics``."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sim.commands.common import is_on, progress, say, without_effect
from sim.config import OutputConfig
from sim.errors import ConfigError
from sim.files import check_output_file
from sim.results import RUN_FILES
from sim.settings import Given, Resolved
from workloads.errors import plain

if TYPE_CHECKING:  # who only runs pays for none of it
    from sim.simulation import RunResult, Simulation
    from sim.watch.endpoint import Endpoint

REFRESH_S = 0.5
"""Seconds from one board to the next."""

NEEDS = {
    "speed": ("live", "metrics_port"),
    "metrics_host": ("metrics_port",),
    "metrics_linger": ("metrics_port",),
    "openmetrics_interval": ("openmetrics",),
    "openmetrics_epoch": ("openmetrics",),
}
"""Settings that have an effect only beside one of others."""

Look = Callable[[], None]


def check_needs(given: Mapping[str, Given], resolved: Resolved) -> None:
    """Refuse or note what has no effect for want of another setting.

    Raises:
        ConfigError: a flag has none.
    """
    output = resolved.output
    for name, needed in NEEDS.items():
        if name in given and not any(is_on(getattr(output, n)) for n in needed):
            flags = " or ".join(f"--{n.replace('_', '-')}" for n in needed)
            why = f"{given[name].shown} has no effect without {flags}"
            without_effect(given[name], why, resolved.notes)


def check_series(output: OutputConfig, read: Mapping[str, object]) -> None:
    """Refuse a file for the series that cannot be written, or would replace another of the run.

    *read* are values by the flags that gave them; those that name a file are read.

    Raises:
        ConfigError, FileError: see above.
    """
    if output.openmetrics is None:
        return
    path = Path(output.openmetrics)
    shown = f"--openmetrics {plain(str(path))}"
    folder = None if output.output_dir is None else Path(output.output_dir)
    if folder is not None and path.parent.resolve() == folder.resolve():
        if path.stem in RUN_FILES:
            raise ConfigError(f"{shown} is a result file of the run: expected another name")
        if not folder.exists():
            return  # it will be made
    check_output_file(path, (), "--openmetrics")
    for flag, value in read.items():
        name = value if isinstance(value, str) else ""
        # Not of pathlib, which raises for a text that is no path.
        if os.path.isfile(name) and path.exists() and path.samefile(name):  # noqa: PTH113
            raise ConfigError(f"{shown} is what {flag} reads: expected another file")


@contextmanager
def watched(output: OutputConfig) -> Iterator["Watch"]:
    """Lend what looks at the runs of a command, the port already listened on.

    Raises:
        FileError: the port cannot be had.
    """
    if output.metrics_port is None:
        yield Watch(output)
        return
    from sim.watch.endpoint import Endpoint, served  # noqa: PLC0415  # see above

    endpoint = Endpoint()
    with served(endpoint, output.metrics_host, output.metrics_port) as address:
        say(f"note: metrics are served at {address}")
        yield Watch(output, endpoint, address)


class Watch:
    """What looks at the runs of a command, as *output* says; *endpoint* is served at *address*."""

    def __init__(
        self, output: OutputConfig, endpoint: "Endpoint | None" = None, address: str = ""
    ) -> None:
        self._output, self._endpoint, self._address = output, endpoint, address

    def simulate(self, simulation: "Simulation", block_tables: TextIO | None = None) -> "RunResult":
        """Run *simulation*, and show how far it is."""
        result, endpoint = simulation.result, self._endpoint
        clock, ahead_s = self._clock(simulation)
        wake = threading.Event() if endpoint is None else endpoint.wake
        with self._progress(simulation, clock) as show:

            def look() -> None:
                show()
                if endpoint is not None and endpoint.asked:
                    endpoint.answer(clock())

            def keep_pace() -> None:
                look()
                while (left := ahead_s()) > 0:
                    wake.wait(min(left, REFRESH_S))
                    wake.clear()
                    look()

            if endpoint is not None:
                endpoint.attach(result)
            on_step = keep_pace if self._output.speed else show if endpoint is None else look
            simulation.run(on_step, block_tables)
            if endpoint is not None:
                endpoint.finish(simulation.allocator.stats())
        return result

    def write(self, simulation: "Simulation") -> None:
        """Write the series of *simulation*, which has run, if that is wanted.

        Raises:
            FileError: it cannot be written.
        """
        output = self._output
        if output.openmetrics is None:
            return
        from sim.watch.openmetrics import write_openmetrics  # noqa: PLC0415  # see above

        write_openmetrics(
            Path(output.openmetrics),
            simulation.result,
            simulation.allocator.stats(),
            output.openmetrics_interval,
            output.openmetrics_epoch,
        )

    def linger(self) -> None:
        """Let the last metrics be scraped; an interruption ends that, and nothing is lost by it."""
        seconds = self._output.metrics_linger
        if self._endpoint is None or not seconds:
            return
        left = None if seconds == "inf" else seconds
        until = "" if left is None else f"for {left:g} s or "
        say(f"note: the last metrics stay at {self._address} {until}until Ctrl-C")
        with suppress(KeyboardInterrupt):
            threading.Event().wait(left)

    def _clock(self, simulation: "Simulation") -> tuple[Callable[[], int], Callable[[], float]]:
        """Answer what tells the simulated time (ps), and how far ahead of it the run is (s)."""
        recorder, speed = simulation.result.recorder, self._output.speed
        if speed is None:
            return lambda: recorder.now_ps, lambda: 0.0
        from sim.watch.pace import Pace  # noqa: PLC0415  # see above

        pace = Pace(recorder, speed)
        return pace.time_ps, pace.ahead_s

    def _progress(
        self, simulation: "Simulation", clock: Callable[[], int]
    ) -> AbstractContextManager[Look]:
        can_draw = sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}
        can_draw = can_draw and sys.stderr.encoding.lower().startswith("utf")
        if self._output.live and can_draw:
            return _board(simulation, clock)
        result = simulation.result
        return progress(result.trace, result.config.label, result.recorder)


@contextmanager
def _board(simulation: "Simulation", clock: Callable[[], int]) -> Iterator[Look]:
    """Lend a callback that shows the board on stderr, as it is at the time that *clock* tells."""
    start = due = time.monotonic()
    from rich.console import Console  # noqa: PLC0415  # only who looks pays for it
    from rich.live import Live  # noqa: PLC0415

    from sim.watch.board import Board  # noqa: PLC0415

    result = simulation.result
    console = Console(stderr=True)
    board = Board(result.config.label, len(result.trace), result.recorder)
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:

        def show(time_ps: int) -> None:
            wall_s = time.monotonic() - start
            live.update(board.show(time_ps, wall_s, console.width), refresh=True)

        def update() -> None:
            nonlocal due
            if time.monotonic() >= due:
                show(clock())
                due = time.monotonic() + REFRESH_S

        yield update
        board.finish(simulation.allocator.stats())
        show(result.recorder.now_ps)
