"""What the check list found, in words."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from sim.health.checks import CHECKS, Report
from sim.health.facts import Finding
from sim.options import as_flags

WIDTH = 100

_WATCHED = "a run, --metrics, or --log with statistics"

FROM = {
    "longest": "--trace",
    "mean_len": "--trace",
    "possible_hit_rate": "--trace",
    "shared_prefixes": "--trace",
    "series": _WATCHED,
    "num_preemptions": _WATCHED,
    "hit_rate": _WATCHED,
    "hit_series": "statistics over time",
    "num_compared": "--trace with what is in the prompts",
    "block_size": "--block-size",
    "kernel_block_size": "--block-size",
    "max_model_len": "--max-model-len",
    "enable_prefix_caching": "--enable-prefix-caching",
}
"""Where facts that are missing come from; all others from --model, --gpu and their settings."""

UNITS = {
    "output_throughput": ("output", "tok/s", 1.0),
    "median_ttft_ms": ("median TTFT", "ms", 1.0),
    "p99_ttft_ms": ("p99 TTFT", "ms", 1.0),
    "median_tpot_ms": ("median TPOT", "ms", 1.0),
    "mean_num_requests_running": ("running", "", 1.0),
    "users_held": ("users held", "", 1.0),
    "num_preemptions": ("preemptions", "", 1.0),
    "prefix_cache_hit_rate": ("hit rate", "%", 100.0),
    "steps_overrun_pct": ("steps overrun", "%", 1.0),
}
"""Of the figures of a gain: name, unit and factor in words."""


def report_text(report: Report) -> str:
    """Answer what *report* says: findings, what is in order, what could not be checked."""
    named = report.name == report.source
    lines = [report.name if named else f"{report.name} ({report.source})"]
    for finding in report.findings:
        lines += _finding(finding)
    if not report.findings:
        lines.append("nothing found")
    if report.passed:
        lines += _wrapped("in order", "; ".join(CHECKS[name].question for name in report.passed))
    if report.unknown:
        lines += _wrapped(
            "not checked", f"{len(report.unknown)} more, for want of {'; '.join(_wanted(report))}"
        )
    return "\n".join(lines)


def _finding(finding: Finding) -> Iterator[str]:
    yield from _wrapped(finding.severity, f"{finding.check}: {finding.figure}")
    yield from _wrapped("", f"why: {finding.reason}")
    yield from _wrapped("", f"change: {finding.change}")
    if finding.gain is not None:
        moved = ", ".join(gain_words(finding.gain)) or "nothing moves by 1 %"
        given = " ".join(as_flags(finding.settings))
        part = f" on the first {finding.gain_requests:,} requests" if finding.gain_requests else ""
        yield from _wrapped("", f"simulated with {given}{part} (times {finding.timing}): {moved}")
    elif finding.unknown_gain is not None:
        yield from _wrapped("", f"gain: {finding.unknown_gain}")


def gain_words(gain: dict[str, tuple[float, float]]) -> Iterator[str]:
    """Yield each figure that moves, before and after, in words."""
    for name, values in gain.items():
        words, unit, factor = UNITS[name]
        before, after = (_number(value * factor) for value in values)
        change = f" ({100 * (values[1] / values[0] - 1):+.0f} %)" if values[0] else ""
        yield f"{words} {before} -> {after}{f' {unit}' if unit else ''}{change}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _wanted(report: Report) -> Iterable[str]:
    """Answer what checks need that could not be made, what most of them need first."""
    refused = any(finding.check == "starts" for finding in report.findings)
    otherwise = "a server that starts" if refused else "--model and --gpu"
    needs = [FROM.get(field, otherwise) for fields in report.unknown.values() for field in fields]
    return (need for need, _ in Counter(needs).most_common())


def _wrapped(label: str, text: str) -> list[str]:
    margin = " " * 13
    return textwrap.wrap(
        # Texts quote files, which may hold what a terminal obeys.
        "".join(letter if letter.isprintable() else "?" for letter in text),
        WIDTH,
        initial_indent=f"{label:<13}",
        subsequent_indent=margin,
        break_on_hyphens=False,
        break_long_words=False,
    )
