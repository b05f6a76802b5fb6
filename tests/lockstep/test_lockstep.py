"""kvsim decides what the real vLLM 0.33.0 scheduler decided, step by step and block by block.

The expected files are what vLLM's own Scheduler, KVCacheManager and BlockPool did on these
workloads (`cases/README.md`). A few small cases are committed; the rest are read where present.
"""

import csv
import gzip
import json
import os
from itertools import zip_longest
from pathlib import Path

import pytest

from sim.cli import main

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("KVSIM_SHARED", HERE.parents[2] / "shared")) / "vllm_lockstep"
COMMITTED = sorted(path for path in (HERE / "cases").iterdir() if path.is_dir())
OTHERS = sorted(path for path in (SHARED.iterdir() if SHARED.is_dir() else ()) if path.is_dir())
CACHE_COUNTS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preempted_cache_queries",
    "preempted_cache_hits",
)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _block_tables(path: Path) -> list[object]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def _assert_equal(expected: list[dict[str, str]], got: list[dict[str, str]], what: str) -> None:
    nothing: dict[str, str] = {}
    for number, (want, have) in enumerate(zip_longest(expected, got, fillvalue=nothing)):
        for name, value in want.items():
            at = f"{what} row {number}, {name}"
            assert name in have, at
            if not value and name in {"time", "first_token_time", "finish_time"}:
                continue  # the asynchronous cases have no times
            if name == "time" or name.endswith("_time"):
                assert float(have[name]) == pytest.approx(float(value), abs=1e-9), at
            else:
                assert have[name] == value, at
    assert len(got) == len(expected)


def _as_reported(steps: list[dict[str, str]]) -> list[dict[str, str]]:
    """Answer *steps* with the cache counts where vLLM's asynchronous engine reports them.

    With the outputs of the step before: those of rows 0 and 1 add up in row 1.
    """
    first, second, *rest = steps
    sums = {name: str(int(first[name]) + int(second[name])) for name in CACHE_COUNTS}
    return [first | dict.fromkeys(CACHE_COUNTS, ""), second | sums, *rest]


def _replay(case: Path, folder: Path) -> None:
    arguments = ["run", "--config", str(case / "config.json")]
    arguments += ["--trace", str(case / "requests.jsonl"), "--output-dir", str(folder)]
    arguments += ["--save-steps", "--save-block-tables", "--format", "csv"]
    assert main(arguments) == 0
    steps = _rows(folder / "steps.csv")
    if json.loads((case / "config.json").read_text()).get("async_scheduling"):
        steps = _as_reported(steps)
    _assert_equal(_rows(case / "steps.csv"), steps, "steps.csv")
    _assert_equal(_rows(case / "finished.csv"), _rows(folder / "requests.csv"), "finished.csv")
    tables = case / "block_tables.jsonl.gz"
    if tables.exists():
        expected, got = _block_tables(tables), _block_tables(folder / "block_tables.jsonl")
        for number, (want, have) in enumerate(zip_longest(expected, got)):
            assert have == want, f"block tables of row {number}"


@pytest.mark.parametrize("case", COMMITTED, ids=lambda case: case.name)
def test_committed_case(case: Path, tmp_path: Path) -> None:
    _replay(case, tmp_path)


@pytest.mark.skipif(not OTHERS, reason="the full set of lockstep cases is not at hand")
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_every_case(case: Path, tmp_path: Path) -> None:
    _replay(case, tmp_path)
