"""A check list for a server: facts of it from any source, and what they say is wrong."""

from sim.health.checks import CHECKS, Check, Report, go_through
from sim.health.facts import SEVERITIES, Facts, Finding, Severity

__all__ = [
    "CHECKS",
    "SEVERITIES",
    "Check",
    "Facts",
    "Finding",
    "Report",
    "Severity",
    "go_through",
]
