"""The chapter's claims, put to the test: ``python results/regenerate.py claims``, or ``c05``.

A claim is a folder here, ``c05``: ``claim.py`` with a `Claim` called ``CLAIM``, its numbers in
``summary.csv``, ``figure.png``. Numbers come from ``spec.toml`` (``kvsim sweep``), from a function,
or from another experiment. Figure and verdict are functions of the summary alone, and README.md
here is made of them: no verdict outlives its numbers. To add a claim, add its folder; traces
beside its spec are called ``workload*``.
"""

import importlib
import posixpath
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from claims.chapter import CHAPTER
from experiment import RESULTS, run_sweep, save, write_summary
from sim.files import atomic
from sim.plots.results import read_frame
from sim.plots.style import drawing

HERE = Path(__file__).parent
README = HERE / "README.md"
OUTCOMES = ("holds", "holds when", "does not hold")


class Verdict(NamedTuple):
    """What the numbers say of a claim.

    Attributes:
        outcome: begins with one of `OUTCOMES`, which conditions or exceptions may follow.
        number: what was found.
        advice: what to set in a deployment.
    """

    outcome: str
    number: str
    advice: str


class Claim(NamedTuple):
    """A claim and its experiment.

    Attributes:
        draw: answers the figure of the summary; its title is the message, with the number. None
            where *figure* is another experiment's.
        judge: answers the verdict on the summary.
        make: answers the summary where no sweep does: a closed form, a few runs.
        of: name of the experiment in ``results`` whose summary it is.
        cell: of a sweep, the value of each setting in ``[grid]`` and ``[[zip]]`` for the cell that
            tests run again: a quick one.
        figure: file in its folder.
    """

    draw: Callable[[pd.DataFrame], Figure] | None
    judge: Callable[[pd.DataFrame], Verdict]
    make: Callable[[], pd.DataFrame] | None = None
    of: str | None = None
    cell: Mapping[str, Any] | None = None
    figure: str = "figure.png"


def found() -> dict[str, Claim]:
    """Answer the claims that have a folder, by its name, in their order."""
    names = [f"c{number:02}" for number in CHAPTER]
    return {
        name: importlib.import_module(f"claims.{name}.claim").CLAIM
        for name in names
        if (HERE / name / "claim.py").exists()
    }


def summary_of(name: str, claim: Claim) -> pd.DataFrame:
    """Answer the committed summary that *claim*, in folder *name*, is judged by."""
    return read_frame(RESULTS / claim.of if claim.of else HERE / name, "summary")[1]


def one(frame: pd.DataFrame, **where: Any) -> "pd.Series[Any]":
    """Answer the one row of *frame* that has the values *where*."""
    rows = frame
    for column, value in where.items():
        rows = rows[rows[column] == value]
    assert len(rows) == 1, f"{len(rows)} rows have {where}"
    return rows.iloc[0]


def regenerate(names: Iterable[str] = (), *, figures: bool) -> None:
    """Make the claims *names*, or all; *figures*: only draw and judge. Write README.md."""
    claims = found()
    for name in names or claims:
        claim, folder = claims[name], HERE / name
        if not figures and claim.make:
            write_summary(claim.make(), folder)
        elif not figures and not claim.of:
            run_sweep(folder)
        if claim.draw:
            with drawing():
                save(claim.draw(summary_of(name, claim)), folder / claim.figure)
    with atomic(README) as temporary:
        temporary.write_text(render())


def render() -> str:
    """Answer README.md: a row a claim, those that have no experiment yet too."""
    claims = found()
    lines = [
        "# What the chapter claims, and what the numbers say",
        "",
        "| | claim | verdict | number | what to set |",
        "|---|---|---|---|---|",
    ]
    for number, text in CHAPTER.items():
        name = f"c{number:02}"
        if name not in claims:
            lines.append(f"| C{number} | {text} | open | | |")
            continue
        claim = claims[name]
        frame = summary_of(name, claim)
        outcome, found_number, advice = claim.judge(frame)
        assert outcome.startswith(OUTCOMES), outcome
        head = next(each for each in reversed(OUTCOMES) if outcome.startswith(each))
        figure = posixpath.normpath(f"{name}/{claim.figure}")
        lines.append(
            f"| [C{number}]({name}/claim.py) | {text} | **{head}**{outcome.removeprefix(head)} "
            f"| {found_number}{_times(frame)} [figure]({figure}) | {advice} |"
        )
    return "\n".join([*lines, "", _FOOT])


_FOOT = """\
Each C links to how it was made and what is assumed; its folder has the numbers (`summary.csv`).
Verdicts, numbers and figures are computed: `python results/regenerate.py claims` runs, draws and
judges again (`c05` one of them), and `tests/golden/test_claims.py` fails with old and new value
where one changes. What times rest on stands behind each number: *fitted* is a roofline fitted to
measured kernels, *assumed* what no open measurement covers, like the cost of small blocks.
"""


def _times(frame: pd.DataFrame) -> str:
    """Answer what the times of the runs in *frame* rest on; nothing if there are none."""
    if "timing_provenance" not in frame.columns:
        return "."
    words = ", ".join(map(str, frame["timing_provenance"])).split(", ")
    return f" (times {', '.join(dict.fromkeys(words))})."
