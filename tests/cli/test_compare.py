"""What ``kvsim compare`` promises: every allocator on one trace, a table, files, figures."""

import csv
import json
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim.commands.compare import COMPARED
from tests.cli.conftest import Kvsim
from tests.conftest import REPOSITORY

FLAGS = (
    "--num-gpu-blocks-override",
    "41",
    "--max-model-len",
    "200",
    "--step-time",
    "constant:0.01",
)
FIGURES = ("running.png", "running.svg", "slots.png", "slots.svg")


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "compare.json").read_bytes())
    return rows


def _table_rows(text: str, names: tuple[str, ...] = COMPARED) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    return [words for words in lines if words and words[0] in names]


def _assert_image(path: Path) -> None:
    data = path.read_bytes()
    if path.suffix == ".svg":
        assert ET.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"
        return
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 500
    assert height > 300
    assert data.endswith(b"IEND\xaeB`\x82")


def test_the_default_needs_nothing(
    kvsim: Kvsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object) -> None:
        raise AssertionError("compare opens a connection")

    monkeypatch.setattr("socket.socket.connect", offline)
    monkeypatch.chdir(tmp_path)
    done = kvsim("compare")
    assert done.code == 0
    prose = ("timing", "KV pool: ")
    tables = [line for line in done.out.splitlines() if not line.startswith(prose)]
    assert max(map(len, tables)) <= 100
    assert [row[0] for row in _table_rows(done.out)] == [*COMPARED, *COMPARED]
    assert [path.name for path in tmp_path.iterdir()] == ["kvsim-results"]
    rows = _rows(tmp_path / "kvsim-results")
    assert [row["allocator"] for row in rows] == list(COMPARED)
    assert {row["completed"] for row in rows} == {1000}
    factors = {row["allocator"]: row["running_factor"] for row in rows}
    assert factors["reserve-max"] == 1
    assert factors["paged"] > factors["reserve-oracle"] > factors["reserve-pow2"] > 1
    for name in FIGURES:
        _assert_image(tmp_path / "kvsim-results" / name)


def test_files(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kvsim("compare", "--trace", busy_trace, *FLAGS, "-o", out)
    assert done.code == 0
    names = {"compare.json", "compare.csv", *FIGURES, *COMPARED}
    assert {path.name for path in out.iterdir()} == names
    assert (
        done.err
        == f"wrote {out}: "
        + ", ".join(["compare.json", "compare.csv", *FIGURES, *(f"{name}/" for name in COMPARED)])
        + "\n"
    )
    for name in COMPARED:
        files = {path.name for path in (out / name).iterdir()}
        assert files == {"manifest.json", "requests.parquet", "steps.parquet", "summary.json"}
    for name in FIGURES:
        _assert_image(out / name)


def test_an_allocator_alone_leaves_the_same_files(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    kvsim("compare", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "all")
    for name in COMPARED:
        kvsim("run", "--trace", busy_trace, *FLAGS, "--allocator", name, "-o", tmp_path / name)
        for path in (tmp_path / name).iterdir():
            assert path.read_bytes() == (tmp_path / "all" / name / path.name).read_bytes()


def test_rows_are_summaries_with_factors(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    kvsim("compare", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "out")
    rows = _rows(tmp_path / "out")
    base = rows[0]
    assert base["allocator"] == "reserve-max"
    for row in rows:
        path = tmp_path / "out" / row["allocator"] / "summary.json"
        summary = json.loads(path.read_bytes())
        assert {name: row[name] for name in summary} == summary
        assert row["baseline"] == "reserve-max"
        key = "mean_num_requests_running"
        assert row["running_factor"] == pytest.approx(row[key] / base[key])
        key = "output_throughput"
        assert row["throughput_factor"] == pytest.approx(row[key] / base[key])


def test_csv_has_a_tidy_row_an_allocator(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    flags = (
        "--num-gpu-blocks-override",
        "41",
        "--max-model-len",
        "60",
        "--step-time",
        "constant:1",
    )
    kvsim("compare", "--trace", busy_trace, *flags, "-o", tmp_path / "out")
    with (tmp_path / "out" / "compare.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for row, text in zip(_rows(tmp_path / "out"), table, strict=True):
        refused = row.pop("refused")
        assert refused == {"prompt_too_long": int(text.pop("refused_prompt_too_long"))}
        assert row.pop("step_time_s") == {}, "of a constant"
        assert text.pop("timing") == "; ".join(row.pop("timing"))
        assert set(text) == set(row)
        for name, value in row.items():
            if isinstance(value, int | float):
                assert float(text[name]) == value, name
            else:
                assert text[name] == (value or ""), name


def test_json_is_the_file(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    done = kvsim("compare", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "out", "--json")
    assert done.out == (tmp_path / "out" / "compare.json").read_text()


def test_equal_bytes_in_another_process(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    flags = ["compare", "--trace", str(busy_trace), *FLAGS, "-o"]
    kvsim(*flags, tmp_path / "a")
    code = "import sys; from sim.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *flags, str(tmp_path / "b")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    made = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(made) == 6 + 4 * len(COMPARED)
    for path in made:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path


def test_a_list_and_its_order(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    names = ("prefix", "paged")
    flags = ("--allocator", "prefix, paged", "--trace", busy_trace, *FLAGS)
    done = kvsim("compare", *flags, "-o", tmp_path / "out")
    assert [row[0] for row in _table_rows(done.out)] == [*names, *names]
    assert "factors are against prefix" in done.out
    assert [row["baseline"] for row in _rows(tmp_path / "out")] == ["prefix", "prefix"]


def test_the_best_of_a_column_is_marked(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    done = kvsim("compare", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "out")
    rows = _rows(tmp_path / "out")
    means = {row["allocator"]: row["mean_num_requests_running"] for row in rows}
    shown = {row[0]: row[1] for row in _table_rows(done.out)[: len(COMPARED)]}
    for name, mean in means.items():
        assert shown[name] == f"{mean:.1f}" + "*" * (mean == max(means.values()))


def test_the_lists_settings_may_come_from_a_file(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('allocator = "contiguous,paged"\nreservation = "oracle"\nplacement = "buddy"')
    flags = ("--config", config, "--trace", busy_trace, "-o", tmp_path / "out", *FLAGS)
    done = kvsim("compare", *flags, "--num-gpu-blocks-override", "65")
    assert (done.code, done.notes) == (0, [])
    labels = [row["allocator"] for row in _rows(tmp_path / "out")]
    assert labels == ["reserve-oracle-buddy", "paged"]


def test_a_file_made_for_run_serves_compare(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text('{"reservation": "pow2", "enable_prefix_caching": false}')
    flags = ("--config", config, "--trace", busy_trace, "-o", tmp_path / "out", *FLAGS)
    done = kvsim("compare", *flags)
    assert done.code == 0
    assert [("reservation" in note, "no effect" in note) for note in done.notes] == [
        (False, True),
        (True, True),
    ]


def test_what_does_not_fit_is_skipped_with_the_reason(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    """A buddy pool of 40 blocks has no extent of 1024 slots, which 600 tokens need."""
    flags = ("--max-model-len", "600", "--placement", "buddy", "--trace", busy_trace)
    done = kvsim("compare", *flags, "-o", tmp_path / "out", *FLAGS[:2], *FLAGS[4:])
    assert done.code == 1
    assert [row[0] for row in _table_rows(done.out)] == ["paged", "prefix"] * 2
    skipped = [line for line in done.err.splitlines() if line.startswith("skipped ")]
    assert [line.partition(":")[0] for line in skipped] == [
        "skipped reserve-max-buddy",
        "skipped reserve-pow2-buddy",
        "skipped reserve-oracle-buddy",
    ]
    assert all("needs 1024 contiguous slots, the pool has 512" in line for line in skipped)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "compare.json", "compare.csv", *FIGURES, "paged", "prefix"
    }  # fmt: skip


def test_nothing_fits(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    flags = ("--num-gpu-blocks-override", "3", "--trace", busy_trace, "-o", tmp_path / "out")
    done = kvsim("compare", *flags)
    assert done.code == 1
    for name in COMPARED:
        assert f"skipped {name}: max_model_len 131072 needs" in done.refusal
    assert not (tmp_path / "out").exists()


def test_nobody_is_served(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    flags = ("--max-model-len", "4", "--trace", busy_trace, "-o", tmp_path / "out")
    done = kvsim("compare", *flags)
    assert done.code == 0
    assert done.notes == ["note: no figures, because no request was served"]
    assert {row["failed"] for row in _rows(tmp_path / "out")} == {12}


def test_figures_show_this_run_not_an_earlier_one_in_the_other_format(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    flags = ("compare", "--allocator", "paged", "--trace", busy_trace, *FLAGS, "-o")
    kvsim(*flags, tmp_path / "new", "--max-num-seqs", "2", "--format", "csv")
    kvsim(*flags, tmp_path / "out")
    kvsim(*flags, tmp_path / "out", "--max-num-seqs", "2", "--format", "csv")
    for name in FIGURES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "new" / name).read_bytes()


def test_save_steps(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    flags = ("--allocator", "paged", "--trace", busy_trace, *FLAGS, "--format", "csv")
    kvsim("compare", *flags, "-o", tmp_path / "out", "--save-steps")
    with (tmp_path / "out" / "paged" / "steps.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert [row["step"] for row in steps] == [str(step) for step in range(len(steps))]


def test_single_step_reaches_every_allocator(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    flags = ("--trace", busy_trace, "--allocator", "paged,prefix", "--single-step")
    kvsim("compare", *flags, "--max-model-len", "512", "-o", tmp_path)
    for name in ("paged", "prefix"):
        steps = pd.read_parquet(tmp_path / name / "steps.parquet")
        assert steps["num_steps"].max() == 1


def test_a_run_shorter_than_a_picosecond_has_no_figures(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"arrival_time": 0, "input_length": 10, "output_len": 5}\n')
    done = kvsim(
        "compare", "--trace", trace, "--step-time", "constant:1e-16", "-o", tmp_path / "out"
    )
    assert done.code == 0
    assert any("no figures" in note for note in done.notes)
    assert not (tmp_path / "out" / "running.png").exists()


def test_nobody_is_best_where_all_print_alike(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"arrival_time": 0, "input_length": 10, "output_len": 5}\n')
    flags = ("--trace", trace, "--allocator", "reserve-max,paged", "-o", tmp_path / "out")
    text = kvsim("compare", *flags, "--step-time", "constant:1", "--max-model-len", "64").out
    for line in text.splitlines():
        if line.startswith(("reserve-max", "paged")) and "/" not in line:
            assert "1.0*" not in line
    assert "*" not in text.partition("Throughput and latency")[2]
