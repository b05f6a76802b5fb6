"""C19: does the check list find the mistakes that it is for, and leave a sound server alone?

One chat service (sound.toml; Llama-3.1-8B on an A100 of 40 GB), once as it should be and once with
each mistake, through `kvsim check`'s own code. What a change brings is simulated on the same load.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from sim.health import CHECKS, go_through
from sim.health.gains import add_gains
from sim.health.report import gain_words
from sim.health.subjects import of_flags
from sim.plots.axis import new_figure
from sim.plots.titles import put_title
from sim.settings import FILE_RANK, Given

HERE = Path(__file__).parent
SOUND = "sound"
SETTINGS: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "A100-40",
    "max_model_len": 4096,
    "trace": "sound.toml",
}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    SOUND: ({}, ""),
    "utilization 0.97": ({"gpu_memory_utilization": 0.97}, "margin"),
    "prefix caching off": ({"enable_prefix_caching": False}, "caching_on"),
    "time of day in front": ({"trace": "perturbed.toml"}, "hit_rate_kept"),
    "blocks of 512": ({"block_size": 512}, "block_and_prefix"),
    "max_model_len 1,024": ({"max_model_len": 1024}, "lengths"),
    "reserve-max of 16,384": ({"max_model_len": 16384, "allocator": "reserve-max"}, "lengths"),
    "a pool of 1 GB": ({"kv_cache_memory_bytes": 10**9}, "budget"),
    "max_num_seqs 16": ({"max_num_seqs": 16}, "seats"),
}
"""Settings of each, and the check that it is for."""

SHOWN = ("p99_ttft_ms", "median_ttft_ms", "users_held")
"""Figures of a gain, of which the first that moves is shown."""


def make() -> pd.DataFrame:
    """Answer a row a finding, notes left out; of a mistake without any, one without a check."""
    rows: list[dict[str, Any]] = []
    for mistake, (settings, _) in MISTAKES.items():
        values = SETTINGS | settings
        values["trace"] = str(HERE / values["trace"])
        given = {name: Given(value, FILE_RANK, name) for name, value in values.items()}
        (subject,) = of_flags(given, lambda simulation: simulation.run())
        report = go_through(subject.facts)
        report.findings = [each for each in report.findings if each.severity != "info"]
        add_gains(report, subject)
        assert subject.summary is not None, "all of them start"
        timing = subject.summary["timing_provenance"]
        rows += [
            {
                "mistake": mistake,
                "check": finding.check,
                "severity": finding.severity,
                "figure": finding.figure,
                "gain": _gain(finding.gain or {}),
                "timing_provenance": finding.timing or timing,
            }
            for finding in report.findings
        ] or [{"mistake": mistake, "timing_provenance": timing}]
    columns = ["mistake", "check", "severity", "figure", "gain", "timing_provenance"]
    return pd.DataFrame(rows, columns=columns)


def _gain(gain: dict[str, tuple[float, float]]) -> str | None:
    """Answer what a change brings, in words; None where nothing was simulated or moves."""
    shown = next(({name: gain[name]} for name in SHOWN if name in gain), {})
    return next(gain_words(shown), None)


def _found(frame: pd.DataFrame, mistake: str) -> list[str]:
    return list(frame[frame["mistake"] == mistake]["check"].dropna())


def _count(frame: pd.DataFrame) -> tuple[int, int]:
    """Answer how many mistakes are found by the check that is for them, and how many there are."""
    wanted = [(mistake, check) for mistake, (_, check) in MISTAKES.items() if check]
    return sum(check in _found(frame, mistake) for mistake, check in wanted), len(wanted)


def judge(frame: pd.DataFrame) -> Verdict:
    """Compare what was found with what each mistake is for."""
    found, wanted = _count(frame)
    alarms = _found(frame, SOUND)
    outcome = "holds" if found == wanted and not alarms else "holds when one looks for more"
    if not found:
        outcome = "does not hold"
    caching, seats = (
        one(frame, mistake=mistake, check=MISTAKES[mistake][1])["gain"]
        for mistake in ("prefix caching off", "max_num_seqs 16")
    )
    return Verdict(
        outcome,
        f"{found} of {wanted} mistakes are found by the check that is for them, "
        f"{len(alarms)} warnings on the sound server; putting it right: caching on, "
        f"{caching}; enough seats, {seats}",
        "`kvsim check --trace FILE --gpu GPU` before going live, with `--fail-on warning` in CI",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw which check finds which mistake, and what the change brings."""
    checks = [name for name in CHECKS if name in set(frame["check"].dropna())]
    figure = new_figure(10, 5.2)
    axes = figure.subplots()
    mistakes = list(MISTAKES)
    for row, mistake in enumerate(mistakes):
        texts = []
        for _, finding in frame[frame["mistake"] == mistake].dropna(subset=["check"]).iterrows():
            is_error = finding["severity"] == "error"
            axes.plot(
                checks.index(finding["check"]),
                row,
                marker="X" if is_error else "o",
                color="#D55E00" if is_error else "#0072B2",
                markersize=11,
                linestyle="",
            )
            if MISTAKES[mistake][1] == finding["check"] and isinstance(finding["gain"], str):
                texts.append(finding["gain"])
        text = "; ".join(texts) or ("nothing found" if mistake == SOUND else "")
        axes.text(len(checks) - 0.4, row, text, va="center")
    axes.set_xticks(range(len(checks)), checks, rotation=35, ha="right")
    axes.set_yticks(range(len(mistakes)), mistakes)
    axes.set_xlim(-0.6, len(checks) + 4.2)
    axes.set_ylim(len(mistakes) - 0.4, -0.6)
    axes.hlines(range(len(mistakes)), -0.6, len(checks) - 0.6, color="0.9", zorder=0)
    axes.vlines(range(len(checks)), -0.6, len(mistakes) - 0.4, color="0.9", zorder=0)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    found, wanted = _count(frame)
    put_title(
        figure,
        f"{found} of {wanted} mistakes are found by the check that is for them; warnings on the "
        f"sound server: {len(_found(frame, SOUND))}",
        "X error, o warning; right: what the change brings, simulated on the same load",
    )
    return figure


CLAIM = Claim(draw, judge, make=make)
