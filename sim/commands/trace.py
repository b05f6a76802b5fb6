"""``kvsim trace``: inspect, convert, sample and fit request traces."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from sim.commands.common import print_json, say
from sim.errors import ConfigError
from sim.files import atomic, check_output_file
from sim.options import settings
from sim.settings import FLAG_RANK, Given, convert
from workloads.editing import native_lines, sample
from workloads.errors import plain, quote
from workloads.record import Trace
from workloads.sources import read_workload

DEFAULT_BLOCK_SIZE = 16


def _inspect(values: dict[str, Any]) -> int:
    """Say what is in a trace, and draw it if a file is named."""
    from sim.trace_report import draw_trace, inspection_report  # noqa: PLC0415  # only who asks
    from workloads.inspection import inspect  # noqa: PLC0415  # as above

    path = None if values["output"] is None else _output(values, (".png", ".svg"))
    block_size = _setting(values, "block_size", DEFAULT_BLOCK_SIZE)
    trace = _source(values, say_notes=False)
    found = inspect(trace, block_size)
    if path is not None:
        from sim.plots.style import drawing, write  # noqa: PLC0415  # only who draws

        with drawing():
            write(draw_trace(trace, found), path)
        say(f"wrote {plain(str(path))}")
    if values["json"]:
        print_json(found)
    else:
        click.echo(inspection_report(found))
    return 0


def _convert(values: dict[str, Any]) -> int:
    """Write a trace, or what a specification describes, in our own format."""
    path = _output(values, (".jsonl",))
    trace = _source(values)
    _write(path, native_lines(trace))
    say(f"wrote {plain(str(path))}: {len(trace):,} requests")
    return 0


def _sample(values: dict[str, Any]) -> int:
    """Write a part of a trace in our own format; sessions stay whole."""
    path = _output(values, (".jsonl",))
    start, end = _number(values, "start", 0.0), _number(values, "end", None)
    every, rate = _number(values, "every", 1.0), _setting(values, "request_rate", None)
    assert start is not None
    assert every is not None
    if every != int(every) or every < 1:
        raise ConfigError(f"--every: expected a whole number from 1, got {quote(values['every'])}")
    if end is not None and end <= start:
        raise ConfigError(f"--end {end:g} is not after --start {start:g}: expected a later time")
    whole = _source(values)
    part = sample(
        whole,
        start=start,
        end=end,
        every=int(every),
        request_rate=None if rate is None else float(rate),
    )
    _write(path, native_lines(part))
    say(f"wrote {plain(str(path))}: {len(part):,} of {len(whole):,} requests")
    return 0


def _fit(values: dict[str, Any]) -> int:
    """Write a specification that imitates a trace, and print how well it does."""
    from workloads.fit import compare, fit  # noqa: PLC0415  # only who fits pays for it
    from workloads.spec_text import to_toml  # noqa: PLC0415

    path = _output(values, (".toml",))
    trace = _source(values)
    workload = fit(trace)
    _write(path, [to_toml(workload, f"Imitates {trace.name}, by kvsim trace fit.").encode()])
    seed = _setting(values, "seed", 0)
    imitation = read_workload(path, seed=seed)
    click.echo(compare(trace, imitation, seed))
    say(f"wrote {plain(str(path))}")
    return 0


TRACE_COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "inspect": _inspect,
    "convert": _convert,
    "sample": _sample,
    "fit": _fit,
}
"""The commands of ``kvsim trace``: each answers the exit code."""


def _source(values: dict[str, Any], *, say_notes: bool = True) -> Trace:
    """Read the trace that is asked for; say what the user should know of it."""
    if values["source"] is None:
        raise ConfigError("a trace is missing: expected a file, or a specification (.toml)")
    trace_format = _setting(values, "trace_format", None)
    trace = read_workload(values["source"], trace_format, _setting(values, "seed", 0))
    for note in trace.notes if say_notes else ():
        say(f"note: {trace.name}: {note}")
    return trace


def _output(values: dict[str, Any], suffixes: tuple[str, ...]) -> Path:
    if values["output"] is None:
        raise ConfigError(f"--output is missing: expected a file to write, -o FILE{suffixes[0]}")
    path = Path(values["output"])
    check_output_file(path, suffixes, "--output")
    source = Path(values["source"] or "")
    if path.exists() and source.exists() and path.samefile(source):
        raise ConfigError(f"--output {plain(str(path))} is what is read: expected another file")
    return path


def _write(path: Path, lines: Iterable[bytes]) -> None:
    with atomic(path) as temporary, temporary.open("wb") as file:
        file.writelines(lines)


def _setting(values: dict[str, Any], name: str, default: Any) -> Any:
    """Answer the value of the flag of a setting, checked as in a run."""
    if values.get(name) is None:
        return default
    setting = next(each for each in settings() if each.name == name)
    return convert(setting, Given(values[name], FLAG_RANK, setting.flag))


def _number(values: dict[str, Any], name: str, default: float | None) -> float | None:
    text = values[name]
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"--{name}: expected a number from 0, got {quote(text)}")
    return number
