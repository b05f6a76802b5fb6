"""The claims of `results/claims` are what their numbers say, and the numbers are made again.

Closed forms in full, one cell of every sweep; `-m slow` runs the sweeps in full. A change here is
explained in CHANGELOG.md, and the claims are made again (`python results/regenerate.py claims`).
"""

import csv
import io
from pathlib import Path

import pandas as pd
import pytest

import claims
import experiment
from tests.experiments import RESULTS, Changes, changes, changes_of_cell, read_rows

CLAIMS = claims.found()
MADE = [name for name, claim in CLAIMS.items() if claim.make]
SWEPT = [name for name, claim in CLAIMS.items() if claim.cell is not None]


def _changed(name: str, frame: pd.DataFrame) -> dict[int, Changes]:
    """Answer the rows of the summary of claim *name* in which *frame* differs, and how."""
    now = list(csv.DictReader(io.StringIO(experiment.csv_text(frame))))
    committed = read_rows(claims.HERE / name / "summary.csv")
    rows = enumerate(zip(committed, now, strict=True))
    return {row: found for row, (old, new) in rows if (found := changes(old, new))}


@pytest.mark.parametrize("name", MADE)
def test_the_numbers_are_made_again(name: str) -> None:
    make = CLAIMS[name].make
    assert make is not None
    changed = _changed(name, make())
    assert not changed, f"{name}: (committed, now) by row"


@pytest.mark.parametrize("name", SWEPT)
def test_a_cell_of_the_sweep_is_the_committed_one(name: str, tmp_path: Path) -> None:
    cell = CLAIMS[name].cell
    assert cell is not None
    changed = changes_of_cell(f"claims/{name}", cell, tmp_path)
    assert not changed, f"{name}: (committed, now)"


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEPT)
def test_the_whole_sweep_is_the_committed_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "SWEEPS", tmp_path)
    frame, _ = experiment.swept(claims.HERE / name)
    changed = _changed(name, frame)
    assert not changed, f"{name}: (committed, now) by row"


def test_verdicts_are_those_of_the_numbers() -> None:
    committed = claims.README.read_text().splitlines()
    assert committed == claims.render().splitlines(), (
        "python results/regenerate.py claims --figures"
    )


def test_every_claim_has_one_source_of_numbers_and_a_figure() -> None:
    for name, claim in CLAIMS.items():
        folder = claims.HERE / name
        sources = [claim.make is not None, claim.of is not None, claim.cell is not None]
        assert sum(sources) == 1, name
        assert (folder / "spec.toml").exists() == (claim.cell is not None), name
        assert (folder / claim.figure).exists(), name
        assert claim.of is None or (RESULTS / claim.of / "summary.csv").exists(), name
