"""The folder of a sweep: whole cells or none, one writer, and never two sweeps in one place."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from sim.errors import ConfigError, FileError
from sim.sweep.cells import Plan, make_plan
from sim.sweep.folder import SweepFolder
from sim.sweep.spec import read_spec
from sim.sweep.work import failure

SPEC = """
[fixed]
max_model_len = 4096
[grid]
block_size = [16, 32]
"""
FILES = {
    "summary.json": b'{"refused": {}, "step_time_s": {}, "timing": ["t"]}',
    "steps.parquet": b"s",
}


@pytest.fixture
def made(tmp_path: Path) -> tuple[SweepFolder, Plan]:
    return _made(tmp_path, SPEC)


def _made(tmp_path: Path, text: str) -> tuple[SweepFolder, Plan]:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    spec = read_spec(str(path))
    plan = make_plan(spec)
    return SweepFolder(str(tmp_path / "out"), spec, plan), plan


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_failure_is_replaced_by_a_result(made: tuple[SweepFolder, Plan]) -> None:
    folder, plan = made
    first, second = plan.cells
    with folder.opened():
        folder.save(first, failure(first, "no\nroom"))
        assert folder.failed() == {first.name: "no room"}
        folder.write_summary()
        assert (folder.path / "summary.csv").read_text() == '"cell","block_size","seed"\n'
        folder.save(first, FILES)
        folder.save(second, failure(second, "no room"))
        folder.write_summary()
    assert folder.finished().keys() == {first.name}
    assert _names(folder.path) == {
        ".sweep.lock",
        "sweep.json",
        "summary.csv",
        "summary.parquet",
        f"cells/{first.name}/summary.json",
        f"cells/{first.name}/steps.parquet",
        f"cells/{second.name}/error.json",
    }
    record = json.loads((folder.path / "sweep.json").read_text())
    assert record["failed"] == [
        {"cell": second.name, "block_size": 32, "seed": 0, "error": "no room"}
    ]
    assert record["swept"] == ["block_size"]
    assert (folder.path / "summary.csv").read_text().splitlines() == [
        '"cell","block_size","seed","timing"',
        f'"{first.name}",16,0,"t"',
    ]


@pytest.mark.parametrize("full_at", ["write_bytes", "mkdir", "rename"])
def test_a_full_disk_loses_nothing(
    made: tuple[SweepFolder, Plan], monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    folder, plan = made
    first, second = plan.cells
    with folder.opened():
        folder.save(first, FILES)
        before = _names(folder.path)

        def fails(path: Path, *arguments: Any, **more: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, full_at, fails)
            with pytest.raises(FileError, match=r"No space left on device; what has finished is"):
                folder.save(second, FILES)
        assert _names(folder.path) == before
        assert list((folder.path / "cells").iterdir()) == [folder.path / "cells" / first.name]
        folder.save(second, FILES)
        assert folder.finished().keys() == {first.name, second.name}


def test_leftovers_of_the_dead_go(made: tuple[SweepFolder, Plan]) -> None:
    folder, plan = made
    with folder.opened():
        folder.save(plan.cells[0], FILES)
    half = folder.path / "cells" / f".{plan.cells[1].name}.new"
    half.mkdir()
    (half / "steps.parquet").write_text("half")
    (folder.path / ".summary.csv.0123456789ab").write_text("half")
    with folder.opened():
        assert folder.finished().keys() == {plan.cells[0].name}
    assert not half.exists()
    assert not (folder.path / ".summary.csv.0123456789ab").exists()


def test_a_damaged_cell_is_not_finished(made: tuple[SweepFolder, Plan]) -> None:
    folder, plan = made
    cell = plan.cells[0]
    with folder.opened():
        folder.save(cell, FILES)
        for foreign in ("{", "{}"):
            (folder.path / "cells" / cell.name / "summary.json").write_text(foreign)
            assert not folder.finished()
        folder.save(cell, FILES)
        assert folder.finished().keys() == {cell.name}


def test_two_at_once(made: tuple[SweepFolder, Plan], tmp_path: Path) -> None:
    folder, _ = made
    other, _ = _made(tmp_path, SPEC)
    with folder.opened(), pytest.raises(FileError, match="another kvsim sweep is writing there"):
        _open(other)
    _open(other)
    assert (other.path / "sweep.json").exists()


def _open(folder: SweepFolder) -> None:
    with folder.opened():
        pass


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SPEC.replace("32", "32, 48"), r"grid\] block_size was \[16, 32\], is \[16, 32, 48\]"),
        (SPEC.replace("4096", "2048"), r"fixed\] max_model_len was 4096, is 2048"),
        (SPEC + "seed = [1]", r"\[grid\] seed was None, is \[1\]"),
        (SPEC + "[[exclude]]\nblock_size = 16", r"exclude was \[\], is \[\{'block_size': \[16\]\}"),
        (SPEC + "[find]\ngoodput = 'ttft:5'", r"find\] goodput was None, is 'ttft:5'"),
    ],
)
def test_another_spec_is_refused(
    made: tuple[SweepFolder, Plan], tmp_path: Path, text: str, why: str
) -> None:
    folder, plan = made
    with folder.opened():
        folder.save(plan.cells[0], FILES)
    before = _names(folder.path)
    other, _ = _made(tmp_path, text)
    with pytest.raises(ConfigError, match=why) as refusal:
        _open(other)
    assert str(refusal.value).endswith(f"expected the same sweep, or another: -o {folder.path}-2")
    assert _names(folder.path) == before


def test_comments_and_order_of_tables_are_no_change(
    made: tuple[SweepFolder, Plan], tmp_path: Path
) -> None:
    folder, _ = made
    _open(folder)
    _open(_made(tmp_path, SPEC.replace("[grid]", "# as before\n[grid]"))[0])
    assert (folder.path / "sweep.json").exists()


def test_another_trace_under_the_same_name(tmp_path: Path) -> None:
    line = '{"arrival_time": 0, "input_length": 9, "output_len": 3}\n'
    text = SPEC.replace("[grid]", 'trace = "t.jsonl"\n[grid]')
    (tmp_path / "t.jsonl").write_text(line)
    _open(_made(tmp_path, text)[0])
    (tmp_path / "t.jsonl").write_text(2 * line)
    with pytest.raises(ConfigError, match=r"is of another sweep: file t.jsonl was '[0-9a-f]{64}'"):
        _open(_made(tmp_path, text)[0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kvsim_sweep": 0}, r"was written by another version \(format 0\)"),
        ({"versions": {"kvsim": "0.0.1"}}, r"version of kvsim was '0.0.1', is '"),
        ({"versions": 7}, "is of another sweep"),
    ],
)
def test_another_version(made: tuple[SweepFolder, Plan], change: dict[str, Any], why: str) -> None:
    folder, _ = made
    _open(folder)
    path = folder.path / "sweep.json"
    record = json.loads(path.read_text())
    for name, value in change.items():
        record[name] = record[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=why):
        _open(folder)


@pytest.fixture(params=["cells/", "summary.csv", "sweep.json"])
def foreign(made: tuple[SweepFolder, Plan], request: pytest.FixtureRequest) -> SweepFolder:
    path = made[0].path / request.param
    path.parent.mkdir()
    if request.param.endswith("/"):
        path.mkdir()
    else:
        path.write_text("[]")
    return made[0]


def test_somebody_elses_folder(foreign: SweepFolder) -> None:
    with pytest.raises(ConfigError, match=r"no sweep wrote"):
        _open(foreign)
