"""Sweeps that are killed: nothing is lost, nothing done twice, and the bytes are the same."""

import csv
import json
import os
import signal
from pathlib import Path

import pandas as pd
import pytest

from sim.sweep.local import MAX_TRIES
from tests.cli.conftest import Kvsim
from tests.sweeps import (
    NUM_CELLS,
    contents,
    descendants,
    finished,
    is_alive,
    start,
    wait_for,
    write_spec,
)

WORKERS = ("spawn_main",)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spec(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def whole(spec: Path) -> dict[str, bytes]:
    """What a sweep leaves that nobody disturbs, one cell after the other."""
    out = spec.parent / "whole"
    process = start(spec, out, "--jobs", "1")
    _, err = process.communicate()
    assert process.returncode == 0, err
    return contents(out)


def test_cells_are_those_of_kvsim_run(spec: Path, whole: dict[str, bytes], kvsim: Kvsim) -> None:
    """A cell's files are those of one run, whose flags its manifest has."""
    rows = list(csv.DictReader(whole["summary.csv"].decode().splitlines()))
    assert len(rows) == NUM_CELLS
    assert list(rows[0])[:5] == ["cell", "allocator", "max_num_seqs", "watermark", "seed"]
    table = pd.read_parquet(spec.parent / "whole" / "summary.parquet")
    assert table["output_throughput"].tolist() == [float(r["output_throughput"]) for r in rows]
    out, config = spec.parent / "single", spec.parent / "config.json"
    cell = f"cells/{rows[7]['cell']}/"
    manifest = json.loads(whole[cell + "manifest.json"])
    manifest["config"]["trace"] = str(spec.parent / "trace.jsonl")
    config.write_text(json.dumps(manifest["config"]))
    assert kvsim("run", "--config", config, "-o", out).code == 0
    for name in ("summary.json", "requests.parquet", "steps.parquet"):
        assert (out / name).read_bytes() == whole[cell + name]


def test_driver_killed(spec: Path, whole: dict[str, bytes]) -> None:
    out = spec.parent / "driver"
    process = start(spec, out, "--jobs", "2")
    wait_for(lambda: len(finished(out)) >= 3, process)
    workers = descendants(process.pid, WORKERS)
    assert len(workers) == 2
    process.kill()
    process.communicate()  # ends when the workers have: they hold its pipes
    assert not any(map(is_alive, workers))
    before = finished(out)
    assert 3 <= len(before) < NUM_CELLS
    _finish(spec, out, whole, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(spec: Path, whole: dict[str, bytes], number: signal.Signals) -> None:
    out = spec.parent / number.name
    process = start(spec, out, "--jobs", "2")
    wait_for(lambda: len(finished(out)) >= 3, process)
    workers = descendants(process.pid, WORKERS)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        os.kill(process.pid, number)
    stdout, err = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    assert not any(map(is_alive, workers))
    before = finished(out)
    lines = err.replace("\r", "\n").splitlines()
    count = f"{len(before)} of {NUM_CELLS} cells have finished"
    assert lines[-2].startswith(count), err
    assert lines[-1] == "kvsim: interrupted"
    assert "Traceback" not in err
    assert (out / "summary.csv").read_text().count("\n") == 1 + len(before)
    _finish(spec, out, whole, before)


def test_worker_killed(spec: Path, whole: dict[str, bytes]) -> None:
    out = spec.parent / "worker"
    process = start(spec, out, "--jobs", "2")
    wait_for(lambda: len(finished(out)) >= 2, process)
    for worker in descendants(process.pid, WORKERS):
        os.kill(worker, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert contents(out) == whole


def test_a_cell_that_kills_its_workers(spec: Path) -> None:
    """It fails; the cells beside it do not."""
    out = spec.parent / "poison"
    process = start(spec, out, "--jobs", "1")
    for _ in range(MAX_TRIES):
        wait_for(lambda: descendants(process.pid, WORKERS), process)
        for worker in descendants(process.pid, WORKERS):
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda worker=worker: not is_alive(worker), process)  # type: ignore[misc]
    _, err = process.communicate()
    assert process.returncode == 1
    assert len(finished(out)) == NUM_CELLS - 1
    assert f"its process died {MAX_TRIES} times" in err.splitlines()[-1]


def _finish(spec: Path, out: Path, whole: dict[str, bytes], before: dict[str, int]) -> None:
    """Go on with a sweep: what was there stays as it is, and in the end nothing is missing."""
    process = start(spec, out, "--jobs", "2")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert finished(out).items() >= before.items()
    assert contents(out) == whole


FAILING = """
[fixed]
max_model_len = 2048
num_gpu_blocks_override = 300
[grid]
block_size = [4, 8]
"""


def test_a_cell_that_fails(tmp_path: Path, kvsim: Kvsim) -> None:
    path, out = tmp_path / "spec.toml", tmp_path / "out"
    path.write_text(FAILING)
    for _ in range(2):  # again and again, until something is changed
        outcome = kvsim("sweep", path, "-o", out, "--jobs", "1")
        assert (outcome.code, outcome.out) == (1, "")
        (failed,) = json.loads((out / "sweep.json").read_text())["failed"]
        assert failed["block_size"] == 4
        assert outcome.err.splitlines()[-1] == (
            f"failed {failed['cell']} (block_size=4, seed=0): {failed['error']}"
        )
        assert "max_model_len 2048 needs 512 blocks of 4 tokens" in failed["error"]
        assert len(finished(out)) == 1
    listed = kvsim("sweep", path, "-o", out, "--dry-run")
    assert [line.split()[1:] for line in listed.out.splitlines()[2:]] == [
        ["4", "0", "failed"],
        ["8", "0", "finished"],
    ]
    assert listed.err.splitlines()[-1] == "2 cells, 1 to do"


def test_find(tmp_path: Path, kvsim: Kvsim) -> None:
    """The rate found meets the goal in a run of its own, and the one above it does not."""
    spec = write_spec(tmp_path, num_requests=150)
    spec.write_text(
        '[fixed]\ntrace = "trace.jsonl"\nmax_model_len = 2048\n'
        "[grid]\nmax_num_seqs = [2, 8]\n"
        '[find]\ngoodput = "ttft:400 tpot:40"\nshare = 0.9\ntolerance = 0.02\n'
    )
    out = tmp_path / "out"
    assert kvsim("sweep", spec, "-o", out, "--jobs", "1").code == 0
    table = pd.read_parquet(out / "summary.parquet")
    assert table["found_request_rate"].is_monotonic_increasing
    for row in table.to_dict("records"):
        low, high = row["found_request_rate"], row["found_failing_request_rate"]
        assert low < high <= 1.02 * low
        met = {}
        for rate in (low, high):
            outcome = kvsim(
                *("run", "--trace", tmp_path / "trace.jsonl", "--max-model-len", "2048", "--json"),
                *("--max-num-seqs", str(row["max_num_seqs"]), "--request-rate", repr(rate)),
                *("--goodput", "ttft:400 tpot:40"),
            )
            met[rate] = json.loads(outcome.out)["slo_attainment"]
        assert met[low] >= 0.9 > met[high]
        assert row["slo_attainment"] == met[low]
        tried = json.loads((out / "cells" / row["cell"] / "search.json").read_text())
        assert len(tried) == row["found_num_runs"]
        assert {low, high} <= {each["request_rate"] for each in tried}


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        ((), 2, "--output-dir is missing: expected the folder for the results, -o DIR"),
        (("-o", "x", "--jobs", "0"), 2, "--jobs: expected a whole number, 1 to 1024, got '0'"),
        (("-o", "x", "--executor", "rey"), 2, "unknown value 'rey'; did you mean 'ray'?"),
        (("-o", "x", "--executor", "ray", "--jobs", "2"), 2, "--jobs has no effect on --executor"),
        (("-o", "x", "--address", "h:1"), 2, "--address is for --executor ray"),
        (
            (
                "-o",
                "/dev/null/x",
            ),
            1,
            "--output-dir /dev/null/x: Not a directory",
        ),
    ],
)
def test_usage(tmp_path: Path, kvsim: Kvsim, flags: tuple[str, ...], code: int, why: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(FAILING)
    outcome = kvsim("sweep", path, *flags)
    assert outcome.code == code
    assert why in outcome.refusal


def test_no_spec(kvsim: Kvsim, tmp_path: Path) -> None:
    assert "a spec is missing: kvsim sweep SPEC.toml -o DIR" in kvsim("sweep").refusal
    outcome = kvsim("sweep", tmp_path / "none.toml", "--dry-run")
    assert outcome.code == 1
    assert "none.toml: No such file or directory" in outcome.refusal
