"""``kvsim check``: the check list, on a configuration, a run, a log or a scrape of metrics."""

from typing import Any

import click
import msgspec

from sim.commands.common import given_by, print_json, say, simulate
from sim.errors import ConfigError
from sim.health import SEVERITIES, go_through
from sim.health.subjects import Subject, of_flags, of_folder, of_log, of_metrics
from sim.settings import Given
from workloads.errors import did_you_mean, plain

OWN = ("log", "metrics", "fail_on", "gains")
"""Flags that only this command has."""

MANY = 2000
"""Requests of a load whose runs take so long that the user should know why."""

NEVER = "never"
"""Value of ``--fail-on`` with which no finding fails."""


def check(values: dict[str, Any]) -> int:
    """Go through the check list as the *values* of all flags say; answer the exit code.

    1 if a finding is as grave as ``--fail-on``, else 0.

    Raises:
        ConfigError, TraceError: what cannot be read or used.
    """
    given = given_by(values, OWN)
    own = {name: given.pop(name).value for name in OWN if name in given}
    as_json = given.pop("json", None)
    fail_on = str(own.get("fail_on", "error"))
    choices = (*SEVERITIES, NEVER)
    if fail_on not in choices:
        raise ConfigError(f"--fail-on: unknown value {fail_on!r}; {did_you_mean(fail_on, choices)}")
    reports = []
    for subject in _subjects(values["folder"], own, given):
        for note in subject.notes:
            say(f"note: {note}")
        report = go_through(subject.facts)
        if own.get("gains", True):
            from sim.health.gains import add_gains  # noqa: PLC0415  # only who asks runs anything

            if subject.trace is not None and len(subject.trace) > MANY:
                say("note: simulating what each change brings; --no-gains leaves that out")
            add_gains(report, subject)
        reports.append(report)
    if as_json is not None and as_json.value:
        print_json([msgspec.to_builtins(report) for report in reports])
    else:
        from sim.health.report import report_text  # noqa: PLC0415  # only who reads it

        click.echo("\n\n".join(report_text(report) for report in reports))
    limit = choices.index(fail_on)
    grave = [report for report in reports if report.worst in choices[: limit + 1]]
    return int(fail_on != NEVER and bool(grave))


def _subjects(folder: str | None, own: dict[str, Any], given: dict[str, Given]) -> list[Subject]:
    """Answer what is to be checked: one source, or what flags say."""
    sources = {"DIR": folder, "--log": own.get("log"), "--metrics": own.get("metrics")}
    named = {name: value for name, value in sources.items() if value is not None}
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are given: expected one of them")
    if not named and not given:
        raise ConfigError(
            "nothing to check: expected DIR, --log FILE, --metrics FILE, --config FILE or flags"
        )
    for name, value in named.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name} {plain(str(value))}: expected a path")
        if name == "DIR":
            return of_folder(value, given)
        return of_log(value, given) if name == "--log" else of_metrics(value, given)
    return of_flags(given, simulate)
