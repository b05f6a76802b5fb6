"""``kvsim plot``: any folder of results becomes charts; what is none becomes one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main
from tests.cli.conftest import Kvsim
from tests.conftest import REPOSITORY

SAMPLE = str(REPOSITORY / "workloads" / "samples" / "conversation.jsonl")
FLAGS = ("--trace", SAMPLE, "--step-time", "constant:0.05", "--num-gpu-blocks-override", "2000")
EXPECTED = "expected a folder of kvsim run -o, kvsim compare or kvsim sweep"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plot") / "compared"
    names = ("--allocator", "reserve-max,paged,prefix", "--max-model-len", "8192")
    assert main(["compare", *FLAGS, *names, "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def swept(compared: Path, tmp_path: Path) -> Path:
    """A sweep of two sizes of block, as the result files have it."""
    rows = pd.read_csv(compared / "compare.csv")
    sizes = [rows.assign(cell=rows["allocator"] + str(n), block_size=n) for n in (8, 16)]
    folder = tmp_path / "swept"
    folder.mkdir()
    pd.concat(sizes).assign(seed=0).to_parquet(folder / "summary.parquet")
    (folder / "sweep.json").write_text('{"swept": ["allocator", "block_size"], "version": 1}')
    return folder


def _charts(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix in {".png", ".svg"}}


def test_a_sweep(kvsim: Kvsim, swept: Path) -> None:
    done = kvsim("plot", swept, "--format", "svg")
    assert (done.code, done.out, done.notes) == (0, "", [])
    names = ("running", "throughput", "ttft", "tpot", "prefix_hits", "preemptions", "slots")
    files = [f"{name}.svg" for name in (*names, "pareto")]
    assert done.err == f"wrote {swept}: {', '.join(files)}\n"
    assert _charts(swept) == set(files)


def test_one_column_of_some_cells_elsewhere(kvsim: Kvsim, swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    where = ("--where", "allocator=paged", "--where", "block_size=16.0")
    done = kvsim("plot", swept, "--y", "num_steps, duration", *where, "-o", out, "--x", "seed")
    assert done.code == 0
    assert {path.name for path in out.iterdir()} == {
        "num_steps.png", "num_steps.svg", "duration.png", "duration.svg"
    }  # fmt: skip
    assert _charts(swept) == set()


def test_a_comparison_has_the_charts_of_compare_and_more(
    kvsim: Kvsim, compared: Path, tmp_path: Path
) -> None:
    done = kvsim("plot", compared, "-o", tmp_path, "--format", "png")
    assert done.code == 0
    assert {"running.png", "slots.png", "ttft.png", "pareto.png"} <= _charts(tmp_path)
    for name in ("running.png", "slots.png"):
        assert (tmp_path / name).read_bytes() == (compared / name).read_bytes()


def test_a_comparison_without_its_runs(kvsim: Kvsim, compared: Path, tmp_path: Path) -> None:
    shutil.copy(compared / "compare.csv", tmp_path)
    done = kvsim("plot", tmp_path, "--format", "svg", "--y", "output_throughput")
    assert done.code == 0
    assert _charts(tmp_path) == {"output_throughput.svg"}


def test_a_run(kvsim: Kvsim, compared: Path, tmp_path: Path) -> None:
    done = kvsim("plot", compared / "prefix", "-o", tmp_path, "--style", "ggplot")
    assert (done.code, done.notes) == (0, [])
    assert _charts(tmp_path) == {"series.png", "series.svg"}


def test_a_missing_column_is_a_note(kvsim: Kvsim, swept: Path) -> None:
    columns = ["cell", "allocator", "block_size", "output_throughput", "seed"]
    pd.read_parquet(swept / "summary.parquet")[columns].to_parquet(swept / "summary.parquet")
    done = kvsim("plot", swept, "--format", "svg")
    assert done.code == 0
    assert _charts(swept) == {"throughput.svg"}
    assert "note: no chart running: summary.parquet has no mean_num_requests_running" in done.notes


def test_a_column_may_have_any_name(kvsim: Kvsim, swept: Path) -> None:
    frame = pd.read_parquet(swept / "summary.parquet").assign(**{"../../up": 1.0})
    frame.to_parquet(swept / "summary.parquet")
    before = {path.name for path in swept.parent.iterdir()}
    assert kvsim("plot", swept, "--y", "../../up", "--format", "svg").code == 0
    assert _charts(swept) == {"______up.svg"}
    assert {path.name for path in swept.parent.iterdir()} == before


Spoil = Callable[[Path], object]


def _frame(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Spoil:
    def spoil(folder: Path) -> None:
        change(pd.read_parquet(folder / "summary.parquet")).to_parquet(folder / "summary.parquet")

    return spoil


def _truncate(folder: Path) -> None:
    data = (folder / "summary.parquet").read_bytes()
    (folder / "summary.parquet").write_bytes(data[: len(data) // 2])


SPOILT: dict[str, tuple[Spoil, str]] = {
    "unfinished": (
        lambda folder: (folder / "summary.parquet").unlink(),
        "the sweep has no summary.parquet or summary.csv yet; run kvsim sweep again",
    ),
    "truncated": (_truncate, "summary.parquet cannot be read: "),
    "empty": (_frame(lambda frame: frame[:0]), "summary.parquet has no row: nothing has finished"),
    "twice": (
        _frame(lambda frame: pd.concat([frame, frame[:1]])),
        "two rows for block_size 8, allocator reserve-max, seed 0; expected one a cell",
    ),
    "text": (
        _frame(lambda frame: frame.assign(output_throughput="many")),
        "column output_throughput: ",
    ),
    "no allocator": (
        _frame(lambda frame: frame.drop(columns="allocator")),
        "column allocator is missing",
    ),
    "nothing of ours": (
        _frame(lambda frame: frame[["cell", "allocator", "block_size", "seed"]]),
        "nothing to draw: no chart running: ",
    ),
    "no JSON": (
        lambda folder: (folder / "sweep.json").write_text("{"),
        "sweep.json: Input data was truncated",
    ),
    "another JSON": (
        lambda folder: (folder / "sweep.json").write_text('{"swept": 3}'),
        "sweep.json: key swept: expected a list of settings' names",
    ),
    "another setting": (
        lambda folder: (folder / "sweep.json").write_text('{"swept": ["gpu_count"]}'),
        "column gpu_count is missing",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_sweep(kvsim: Kvsim, swept: Path, name: str) -> None:
    spoil, expected = SPOILT[name]
    spoil(swept)
    done = kvsim("plot", swept)
    assert done.code == 1
    assert expected in done.refusal
    assert _charts(swept) == set()


@pytest.mark.parametrize("missing", ["steps.parquet", "summary.json"])
def test_half_a_run(kvsim: Kvsim, compared: Path, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "half"
    shutil.copytree(compared / "prefix", folder)
    (folder / missing).unlink()
    done = kvsim("plot", folder)
    assert done.code == 1
    assert missing.partition(".")[0] in done.refusal
    assert EXPECTED in done.refusal


def test_a_run_that_served_nobody(kvsim: Kvsim, compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "prefix", tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_bytes()) | {"kv_live_pct": None}
    path.write_text(json.dumps(summary))
    done = kvsim("plot", tmp_path / "run")
    assert done.code == 1
    assert "key kv_live_pct: None; expected the summary of a kvsim run" in done.refusal


def test_folders_that_are_none(kvsim: Kvsim, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, expected in {
        "": f"has no results; {EXPECTED}",
        "empty": f"is empty; {EXPECTED}",
        "file": f"Not a directory; {EXPECTED}",
        "none": f"No such file or directory; {EXPECTED}",
    }.items():
        done = kvsim("plot", tmp_path / name)
        assert (done.code, expected in done.refusal) == (1, True), done.err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--x", "blocksize"], "--x 'blocksize': not swept; did you mean 'block_size'?"),
        (["--y", "ttft_ms"], "--y 'ttft_ms': no column of numbers in summary.parquet; did you"),
        (["--y", "gpu"], "--y 'gpu': no column of numbers"),
        (["--y", "duration,"], "--y: expected names separated by commas, got 'duration,'"),
        (["--where", "block_size"], "--where 'block_size': expected NAME=VALUE; did you mean"),
        (["--where", "block_size=17"], "--where 'block_size=17': no such cell; "),
        (["--format", "pgn"], "--format: unknown format 'pgn'; did you mean 'png'?"),
        (["--style", "ggplot2"], "--style 'ggplot2' is neither a file nor a style"),
    ],
)
def test_wrong_usage(kvsim: Kvsim, swept: Path, flags: list[str], expected: str) -> None:
    done = kvsim("plot", swept, *flags)
    assert done.code == 2
    assert expected in done.refusal
    assert _charts(swept) == set()


def test_a_run_has_no_settings_to_choose(kvsim: Kvsim, compared: Path) -> None:
    done = kvsim("plot", compared / "paged", "--x", "block_size")
    assert (done.code, "--x is for a sweep or comparison" in done.refusal) == (2, True)


def test_a_folder_is_asked_for(kvsim: Kvsim) -> None:
    done = kvsim("plot")
    assert (done.code, done.refusal) == (2, f"kvsim: kvsim plot: {EXPECTED}; got none")
