"""One cell of an experiment in ``results``, made again and held to what is committed."""

import csv
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

from sim.cli import main
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "results"
Row = Mapping[str, str]
Changes = dict[str, tuple[str, str | None]]
"""Old and new value, by column."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Answer the rows of the CSV file *path*."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def same(old: str, new: str) -> bool:
    """Answer whether two values of a CSV file are one, numbers to the nine digits they have."""
    try:
        return math.isclose(float(old), float(new), rel_tol=1e-8)
    except ValueError:
        return old == new


def changes(committed: Row, now: Row) -> Changes:
    """Answer the columns of *committed* that are others *now*: old and new value."""
    return {
        column: (old, now.get(column))
        for column, old in committed.items()
        if column not in now or not same(old, now[column])
    }


def run_cell(name: str, cell: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Run *cell* of the experiment in folder *name* as the sweep does; answer its row."""
    spec = tomllib.loads((RESULTS / name / "spec.toml").read_text())
    swept = spec.get("grid", {}) | {n: v for group in spec.get("zip", []) for n, v in group.items()}
    assert all(value in swept[setting] for setting, value in cell.items())
    assert set(cell) == set(swept)
    path = folder / name / "spec.toml"
    path.parent.mkdir(parents=True)
    (folder / "traces").symlink_to(RESULTS / "traces")
    for workload in (RESULTS / name).glob("workload*"):
        (path.parent / workload.name).symlink_to(workload)
    lines = [f"{setting} = {_toml(value)}" for setting, value in spec["fixed"].items()]
    grid = [f"{setting} = [{_toml(value)}]" for setting, value in cell.items()]
    find = [f"{key} = {_toml(value)}" for key, value in spec.get("find", {}).items()]
    tables = ["[fixed]", *lines, "[grid]", *grid, *(["[find]", *find] if find else [])]
    path.write_text("\n".join(tables))
    assert main(["sweep", str(path), "-o", str(folder / "out"), "--jobs", "1"]) == 0
    (row,) = read_rows(folder / "out" / "summary.csv")
    return row


def changes_of_cell(name: str, cell: Mapping[str, object], folder: Path) -> Changes:
    """Run *cell* of the experiment *name* in *folder*; answer what is not as committed."""
    now = run_cell(name, cell, folder)
    committed = [
        row
        for row in read_rows(RESULTS / name / "summary.csv")
        if all(same(row[setting], str(value)) for setting, value in cell.items())
    ]
    assert len(committed) == 1
    return changes(committed[0], now)


def _toml(value: object) -> str:
    return "inf" if value == math.inf else json.dumps(value)
