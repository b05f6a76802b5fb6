"""One small cell of every experiment is what `results/` says, and its traces are as made.

A change here is explained in CHANGELOG.md, and the experiments are made again
(`python results/regenerate.py`).
"""

import csv
import json
import math
import runpy
import tomllib
from pathlib import Path

import pytest

from sim.cli import main
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "results"
CELLS: dict[str, dict[str, object]] = {
    "block_size": {
        "step_time": "roofline",
        "trace": "../traces/fixed.jsonl",
        "block_size": 128,
        "allocator": "paged",
    },
    "utilization": {"gpu_memory_utilization": 0.9, "allocator": "prefix"},
    "block_size_x_utilization": {
        "block_size": 256,
        "gpu_memory_utilization": 0.8,
        "allocator": "paged",
    },
    "request_rate": {"request_rate": 1.5, "allocator": "paged"},
}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _same(old: str, new: str) -> bool:
    try:
        return math.isclose(float(old), float(new), rel_tol=1e-8)  # of nine digits
    except ValueError:
        return old == new


def _one_cell(name: str, cell: dict[str, object], folder: Path) -> dict[str, str]:
    """Run *cell* of experiment *name* as the sweep does; answer its row."""
    spec = tomllib.loads((RESULTS / name / "spec.toml").read_text())
    assert all(value in spec["grid"][setting] for setting, value in cell.items())
    assert set(cell) == set(spec["grid"])
    path = folder / name / "spec.toml"
    path.parent.mkdir()
    (folder / "traces").symlink_to(RESULTS / "traces")
    lines = [f"{setting} = {_toml(value)}" for setting, value in spec["fixed"].items()]
    grid = [f"{setting} = [{_toml(value)}]" for setting, value in cell.items()]
    path.write_text("\n".join(["[fixed]", *lines, "[grid]", *grid]))
    assert main(["sweep", str(path), "-o", str(folder / "out"), "--jobs", "1"]) == 0
    (row,) = _rows(folder / "out" / "summary.csv")
    return row


def _toml(value: object) -> str:
    return "inf" if value == math.inf else json.dumps(value)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_the_experiment_is_the_committed_one(name: str, tmp_path: Path) -> None:
    now = _one_cell(name, CELLS[name], tmp_path)
    committed = [
        row
        for row in _rows(RESULTS / name / "summary.csv")
        if all(_same(row[setting], str(value)) for setting, value in CELLS[name].items())
    ]
    assert len(committed) == 1
    changed = {
        column: (old, now.get(column))
        for column, old in committed[0].items()
        if column not in now or not _same(old, now[column])
    }
    assert not changed, f"{name}: (committed, now)"


def test_the_experiments_are_those_with_a_spec() -> None:
    assert set(CELLS) == {path.parent.name for path in RESULTS.glob("*/spec.toml")}


def test_committed_traces_are_as_made() -> None:
    made = runpy.run_path(str(RESULTS / "make_traces.py"))
    assert {path.name for path in (RESULTS / "traces").iterdir()} == set(made["TRACES"])
    for name in made["TRACES"]:
        assert (RESULTS / "traces" / name).read_text() == made["make"](name), name
