"""``kvsim report``: a page of a run or a comparison, and what it refuses."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from sim.columns import SLOT_STATES
from tests.cli.conftest import Kvsim
from tests.conftest import REPOSITORY

SMALL = (
    "--num-gpu-blocks-override", "20", "--max-model-len", "128", "--max-num-seqs", "8",
    "--step-time", "constant:0.05",
)  # fmt: skip


def _data(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    data: dict[str, Any] = msgspec.json.decode(found[1])
    return data


def _without_charts(page: Path) -> str:
    """Answer the page without what matplotlib draws, a little different in each version."""
    return re.sub(r'src="data:[^"]*"', "", page.read_text())


@pytest.fixture
def compared(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    flags = ("--allocator", "reserve-max,paged,prefix", "--trace", busy_trace, *SMALL)
    assert kvsim("compare", *flags, "-o", folder).code == 0
    return folder


@pytest.fixture
def ran(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    assert kvsim("run", "--trace", busy_trace, *SMALL, "-o", folder).code == 0
    return folder


@pytest.mark.parametrize("allocator", ["contiguous", "paged", "prefix"])
def test_every_frame_is_a_row_of_the_step_table(
    kvsim: Kvsim, tmp_path: Path, allocator: str
) -> None:
    """Of a run with more steps than frames, where requests come while many wait for memory."""
    trace = tmp_path / "overloaded.jsonl"
    trace.write_text(
        "".join(
            f'{{"arrival_time": {0.13 * row}, "prompt": [["s{row % 2}", 32], '
            f'["u{row}", {1 + 7 * row % 40}]], "output_len": {1 + 17 * row % 40}}}\n'
            for row in range(150)
        )
    )
    flags = ("--trace", trace, *SMALL, "--allocator", allocator, "--save-steps", "-o", tmp_path)
    assert kvsim("run", *flags).code == 0
    assert kvsim("report", tmp_path).code == 0
    data = _data(tmp_path / "report.html")
    (run,) = data["runs"]
    steps = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert len(steps) > len(data["times"]) == 300
    assert (sum(run["preemptions"]) > 0) == (allocator != "contiguous")
    busy = [frame for frame, running in enumerate(run["running"]) if running]
    assert len(busy) > 200
    assert {run["waiting"][frame] for frame in range(300) if frame not in busy} == {0}
    for frame in busy:
        row = steps[run["step"][frame]]
        for ours, theirs in [
            ("running", "running"),
            ("waiting", "waiting"),
            *((state, f"kv_{state}_slots") for state in SLOT_STATES),
        ]:
            assert run[ours][frame] == row[theirs], (frame, ours)
        assert bool(run["why"][frame]) == (row["waiting"] > 0)


def test_a_comparison(kvsim: Kvsim, compared: Path) -> None:
    outcome = kvsim("report", compared)
    assert outcome.code == 0
    assert outcome.out == ""
    page = compared / "report.html"
    assert outcome.err.startswith(f"wrote {page}: ")
    data = _data(page)
    assert [run["label"] for run in data["runs"]] == ["reserve-max", "paged", "prefix"]
    for run in data["runs"]:
        folder = compared / run["label"]
        summary = msgspec.json.decode((folder / "summary.json").read_bytes())
        assert run["refusals"][-1] == summary["allocation_refusals"]
        assert run["preemptions"][-1] == summary["num_preemptions"]
        assert run["queries"][-1] == summary["prefix_cache_queries"]
        assert run["hits"][-1] == summary["prefix_cache_hits"]
        # Every step has a frame; rows of one step have the numbers of that step.
        steps = pq.read_table(folder / "steps.parquet").to_pylist()
        single = {row["step"]: row for row in steps if row["num_steps"] == 1}
        assert len(single) > 10
        for frame, step in enumerate(run["step"]):
            if step in single and run["running"][frame]:
                row = single[step]
                assert run["waiting"][frame] == row["waiting"]
                for state in SLOT_STATES:
                    assert run[state][frame] == row[f"kv_{state}_slots"]
    text = page.read_text()
    for value in ("running mean", "TTFT ms p99"):
        assert f'<th scope="col">{value}</th>' in text
    assert text.count('<img alt="') == text.count('src="data:image/png;base64,') == 2


def test_a_run_and_where_the_page_goes(kvsim: Kvsim, ran: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert kvsim("report", ran, "-o", page).code == 0
    first = page.read_bytes()
    assert kvsim("report", ran, "-o", page).code == 0
    assert page.read_bytes() == first
    assert not (ran / "report.html").exists()
    assert [run["label"] for run in _data(page)["runs"]] == ["prefix"]


def test_request_names_are_data(kvsim: Kvsim, tmp_path: Path) -> None:
    name = "</script><script>document.title='taken'</script>"
    trace = tmp_path / "trace.jsonl"
    line = {"request_id": name, "arrival_time": 0, "input_length": 20, "output_len": 5}
    trace.write_bytes(msgspec.json.encode(line))
    assert kvsim("run", "--trace", trace, *SMALL, "-o", tmp_path / "out").code == 0
    assert kvsim("report", tmp_path / "out").code == 0
    page = tmp_path / "out" / "report.html"
    assert _data(page)["requests"] == [name]
    assert page.read_text().count("<script") == 2


def test_a_trace_that_moved(kvsim: Kvsim, ran: Path, busy_trace: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.jsonl"
    busy_trace.rename(moved)
    assert "--trace FILE says where the trace of" in kvsim("report", ran).refusal
    assert kvsim("report", ran, "--trace", moved).code == 0
    moved.write_text(moved.read_text().replace('"output_len": 1}', '"output_len": 2}'))
    refusal = kvsim("report", ran, "--trace", moved).refusal
    assert f"{moved} is not the trace of {ran / 'manifest.json'}, or has changed: sha256" in refusal


def _set(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = msgspec.json.decode(path.read_bytes())
        path.write_bytes(msgspec.json.encode(content | values))

    return change


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("manifest.json", Path.unlink, "manifest.json: No such file or directory; expected"),
        ("summary.json", Path.unlink, "summary.json is missing: the folder is half-written"),
        ("manifest.json", lambda path: path.write_text("{"), "manifest.json: Input data was trunc"),
        ("manifest.json", _set(config=3), "no object 'config'; expected the manifest of a kvsim"),
        (
            "manifest.json",
            _set(kvsim={"version": "0.0.1"}),
            "written by version '0.0.1', this is '0.1.0': run it again with this version",
        ),
        (
            "manifest.json",
            _set(config={"block_sise": 3}),
            "key 'block_sise' is unknown; did you me",
        ),
        (
            "manifest.json",
            _set(kv_pool={}),
            "kv_pool.num_gpu_blocks is None, but repeating the run",
        ),
        ("summary.json", _set(num_preemptions=77), "num_preemptions is 77, but repeating the run"),
        ("summary.json", _set(num_steps="many"), "has no number 'num_steps'"),
        ("steps.parquet", Path.unlink, "neither steps.parquet nor steps.csv is there"),
    ],
)
def test_a_folder_that_is_not_as_it_was(
    kvsim: Kvsim, ran: Path, file: str, change: Callable[[Path], None], expected: str
) -> None:
    change(ran / file)
    outcome = kvsim("report", ran)
    assert outcome.code in {1, 2}
    assert expected in outcome.refusal
    assert not (ran / "report.html").exists()


def test_a_comparison_without_one_of_its_runs(kvsim: Kvsim, compared: Path) -> None:
    shutil.rmtree(compared / "paged")
    assert "for want of their folders: paged" in kvsim("report", compared).refusal


def test_other_folders(kvsim: Kvsim, tmp_path: Path) -> None:
    assert "expected a folder that kvsim run -o or kvsim compare wrote" in kvsim("report").refusal
    (tmp_path / "empty").mkdir()
    assert "is empty" in kvsim("report", tmp_path / "empty").refusal
    assert "No such file" in kvsim("report", tmp_path / "none").refusal
    sweep = REPOSITORY / "results" / "block_size"
    assert "expected a folder that kvsim run -o or" in kvsim("report", sweep).refusal


def test_outputs_that_cannot_be_written(kvsim: Kvsim, ran: Path, tmp_path: Path) -> None:
    refusal = kvsim("report", ran, "-o", tmp_path / "page.pdf").refusal
    assert "expected a name ending in .html or .htm" in refusal
    refusal = kvsim("report", ran, "-o", tmp_path / "none" / "page.html").refusal
    assert "No such file or directory; expected a file in a writable folder" in refusal


def test_the_trace_is_not_written_over(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.html"
    shutil.copy(busy_trace, trace)
    before = trace.read_bytes()
    assert kvsim("run", "--trace", trace, *SMALL, "-o", tmp_path / "out").code == 0
    for moved in ((), ("--trace", trace)):
        outcome = kvsim("report", tmp_path / "out", *moved, "-o", trace)
        assert outcome.code == 2
        assert "is the trace: expected another file" in outcome.err
    assert trace.read_bytes() == before


def test_flags_without_effect(kvsim: Kvsim, tmp_path: Path) -> None:
    flags = ("--step-time", "constant:0.05", "-o", tmp_path / "out")
    assert kvsim("run", *flags).code == 0
    refusal = kvsim("report", tmp_path / "out", "--trace", "x.jsonl").refusal
    assert "--trace x.jsonl has no effect" in refusal


def test_the_example_of_the_block_table(kvsim: Kvsim, tmp_path: Path) -> None:
    """C4: 35 tokens on blocks 7, 3, 9; block 12 comes with the 49th token, not with the 36th."""
    example = REPOSITORY / "results" / "block_map"
    command = re.search(r"kvsim run (--trace .*) -o", (example / "README.md").read_text())
    assert command is not None
    words = command[1].replace("results/block_map", str(example)).split()
    assert kvsim("run", *words, "-o", tmp_path).code == 0
    assert kvsim("report", tmp_path).code == 0
    made = _data(tmp_path / "report.html")
    kept = example / "block_table.html"
    assert _without_charts(kept) == _without_charts(tmp_path / "report.html"), "make it again"
    (run,) = made["runs"]
    (place,) = (n for n, name in enumerate(made["requests"]) if name == "the 35 tokens")
    ((_, _, first, held, computed, runs),) = (t for t in run["tenancies"] if t[0] == place)
    blocks = [run["first"] + at for at in runs[::3]]
    assert blocks == [7, 3, 9, 12]
    num_computed = [sum(computed[: n + 1]) for n in range(len(computed))]
    num_held = [sum(held[: n + 1]) for n in range(len(held))]
    assert num_computed == list(range(35, 35 + len(computed)))
    assert num_held == [-(-tokens // 16) for tokens in num_computed]
    assert run["step"][first + num_held.index(4)] == 17
    assert num_computed[num_held.index(4)] == 49
