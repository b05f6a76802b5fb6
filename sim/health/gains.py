"""What the simulator says that each change would bring: the same load, run again."""

from itertools import islice

from sim.errors import ConfigError
from sim.health.checks import Report
from sim.health.subjects import Subject
from sim.what_if import Outcome, compared, outcome_of, what_if
from workloads.build import build_trace
from workloads.editing import records_of
from workloads.errors import TraceError
from workloads.record import Trace

MOST_REQUESTS = 10_000
"""Of a load that a change is simulated on: a run of more takes minutes where prompts are long, and
every change is another run."""

FIGURES = (
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "mean_num_requests_running",
    "users_held",
    "num_preemptions",
    "prefix_cache_hit_rate",
    "steps_overrun_pct",
)
"""Of `sim.what_if.Outcome`: what a change may move."""

LEAST = 0.01
"""A figure that moves by less than a hundredth is left out."""


def add_gains(report: Report, subject: Subject) -> None:
    """Give every finding of *report* that names settings what they bring; or say why not."""
    findings = [finding for finding in report.findings if finding.settings]
    if not findings:
        return
    if subject.config is None or subject.trace is None:
        for finding in findings:
            finding.unknown_gain = subject.unknown_gain
        return
    config, trace = subject.config, _first(subject.trace)
    part = None if trace is subject.trace else len(trace)
    known: dict[str, Outcome] = {}
    try:
        before = (
            what_if(config, trace)
            if subject.summary is None or part is not None
            else outcome_of(subject.summary, config)
        )
    except (ConfigError, TraceError) as error:
        for finding in findings:
            finding.unknown_gain = f"not simulated: {error}"
        return
    for finding in findings:
        if before.output_throughput is None:
            finding.unknown_gain = "nobody is served without it"
            continue
        key = repr(sorted(finding.settings.items()))
        try:
            if key not in known:
                known[key] = what_if(config, trace, finding.settings)
        except (ConfigError, TraceError) as error:
            finding.unknown_gain = f"not simulated: {error}"
            continue
        finding.gain, finding.gain_requests = _moved(before, known[key]), part
        timings = (before.timing_provenance, known[key].timing_provenance)
        finding.timing = ", then ".join(dict.fromkeys(timings))


def _first(trace: Trace) -> Trace:
    """Answer the part of *trace* that changes are simulated on: its first requests."""
    if len(trace) <= MOST_REQUESTS:
        return trace
    records = islice(records_of(trace), MOST_REQUESTS)
    return build_trace(records, name=trace.name, trace_format=trace.trace_format, notes=trace.notes)


def _moved(before: Outcome, after: Outcome) -> dict[str, tuple[float, float]]:
    """Answer the figures that differ, before and after."""
    changes = compared(before, after)
    return {
        name: (change.before, change.after)
        for name in FIGURES
        if (change := changes[name]).before is not None
        and change.after is not None
        and abs(change.after - change.before) > LEAST * abs(change.before)
    }
