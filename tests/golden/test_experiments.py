"""One small cell of every experiment is what `results/` says, and its traces are as made.

A change here is explained in CHANGELOG.md, and the experiments are made again
(`python results/regenerate.py`).
"""

import runpy
import sys
from pathlib import Path

import pytest

import regenerate
from tests.experiments import RESULTS, changes_of_cell

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


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_the_experiment_is_the_committed_one(name: str, tmp_path: Path) -> None:
    assert not changes_of_cell(name, CELLS[name], tmp_path), f"{name}: (committed, now)"


def test_the_experiments_are_those_with_a_spec() -> None:
    assert set(CELLS) == {path.parent.name for path in RESULTS.glob("*/spec.toml")}


def test_committed_traces_are_as_made() -> None:
    made = runpy.run_path(str(RESULTS / "make_traces.py"))
    assert {path.name for path in (RESULTS / "traces").iterdir()} == set(made["TRACES"])
    for name in made["TRACES"]:
        assert (RESULTS / "traces" / name).read_text() == made["make"](name), name


def test_nothing_is_made_where_a_name_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regenerate, "draw", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["regenerate.py", "--figures", "block_size", "c5"])
    with pytest.raises(SystemExit) as stopped:
        regenerate.main()
    assert stopped.value.code == 2
    assert "no experiment c5; expected block_size, " in capsys.readouterr().err
