"""What every command does: read flags and trace, run with a progress bar, print."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sim.config import LoadConfig
from sim.errors import ConfigError
from sim.options import settings
from sim.settings import FLAG_RANK, Given, read_config_file

if TYPE_CHECKING:  # `kvsim capacity` runs nothing, and reads a trace only if it is given one
    from sim.metrics import Recorder
    from sim.simulation import RunResult, Simulation
    from workloads.record import Trace


def given_by(values: dict[str, Any], own: Collection[str] = ()) -> dict[str, Given]:
    """Answer what the user gave, of the *values* of all flags; a flag wins over ``--config``.

    *own* are the flags that only this command has.

    Raises:
        ConfigError: the configuration file cannot be used.
    """
    config = values["config"]
    given = read_config_file(config, own) if config is not None else {}
    for name in (*(setting.name for setting in settings()), *own):
        value = values.get(name)
        if value is not None:
            flag = name.replace("_", "-")
            given[name] = Given(value, FLAG_RANK, f"--no-{flag}" if value is False else f"--{flag}")
    return given


def without_effect(given: Given, why: str, notes: list[str]) -> None:
    """Refuse a setting that changes nothing if a flag gave it; add *why* to *notes* if a file did.

    Raises:
        ConfigError: see above.
    """
    if given.rank == FLAG_RANK:
        raise ConfigError(why)
    notes.append(why)


def is_on(value: object) -> bool:
    """Answer whether a setting that is off by default is not; a port may be 0."""
    return value is not None and value is not False


def say(text: str) -> None:
    """Print a line for the user, who may have sent standard output elsewhere."""
    click.echo(text, err=True)


def print_json(value: object) -> None:
    """Print *value* as a result."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def load_trace(load: LoadConfig, notes: list[str]) -> "Trace":
    """Read the trace, with the arrivals asked for; say on stderr what the user should know."""
    from sim.arrivals import arriving  # noqa: PLC0415  # see above

    return arriving(load_recorded(load, notes), load)


def load_recorded(load: LoadConfig, notes: list[str]) -> "Trace":
    """Read the trace as recorded, and say on stderr what the user should know before the run."""
    from sim.arrivals import recorded  # noqa: PLC0415  # see above

    trace = recorded(load)
    for note in dict.fromkeys([*notes, *(f"{trace.name}: {note}" for note in trace.notes)]):
        say(f"note: {note}")
    return trace


def simulate(simulation: "Simulation") -> "RunResult":
    """Run *simulation*, with a progress bar if it takes long."""
    result = simulation.result
    with progress(result.trace, result.config.label, result.recorder) as update:
        return simulation.run(update)


@contextmanager
def progress(trace: "Trace", label: str, recorder: "Recorder") -> Iterator[Callable[[], None]]:
    """Lend a callback that shows on stderr how many requests are done, once a run takes long."""
    wait = 1.0 if sys.stderr.isatty() else 10.0
    start = time.time()
    bar: Any = None

    def update() -> None:
        nonlocal bar
        if bar is None:
            if time.time() - start < wait:
                return
            from tqdm import tqdm  # noqa: PLC0415  # a short run shows no bar and need not wait

            bar = tqdm(
                total=len(trace),
                desc=label,
                unit=" req",
                file=sys.stderr,
                delay=wait,
                mininterval=wait / 2,
            )
            # As if it had been there all the time: its rate is that of the whole run.
            bar.start_t = bar.last_print_t = start
        if recorder.num_done > bar.n:
            bar.update(recorder.num_done - bar.n)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def progress_of_cells(total: int, done: int) -> Iterator[Callable[[bool], None]]:
    """Lend a callback, told whether the cell failed, that shows on stderr how many are done.

    *done* of *total* were before; the rate and the time left are of those that come.
    """
    from tqdm import tqdm  # noqa: PLC0415  # as above

    interval = 0.5 if sys.stderr.isatty() else 10.0
    failed = 0
    with tqdm(
        total=total,
        initial=done,
        desc="sweep",
        unit=" cell",
        file=sys.stderr,
        mininterval=interval,
        maxinterval=interval,
        smoothing=0,
    ) as bar:

        def update(has_failed: bool) -> None:
            nonlocal failed
            failed += has_failed
            if failed:
                bar.set_postfix_str(f"{failed} failed", refresh=False)
            bar.update()

        yield update
