"""``kvsim tables``: lists, shows, imports and checks; what it refuses, it leaves nothing of."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.commands.tables import TABLE_COMMANDS
from sim.flag_params import TABLES
from sim.timing.importers import IMPORTERS
from sim.timing.importers.native import read_native
from sim.timing.roofline import fitted_gpu_names
from sim.timing.table import make_table
from sim.timing.table_file import load, save, sidecar
from sim.timing_plots import draw_table, write
from tests.cli.conftest import Kvsim
from tests.tiny_table import INFO, decode, gemm, tiny_rows, tiny_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    save(tiny_table(), folder / "tiny.parquet")
    return folder / "tiny.parquet"


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def test_every_command_has_flags_and_every_importer_is_in_the_help() -> None:
    assert list(TABLE_COMMANDS) == list(TABLES)
    assert all(name in TABLES["import"][0] for name in IMPORTERS)


# ---- list


def test_list(kvsim: Kvsim, table: Path) -> None:
    (table.parent / "requests.parquet").write_bytes(b"not ours, no JSON beside it")
    done = kvsim("tables", "list", table.parent)
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in fitted_gpu_names())
    assert "tiny.parquet" in done.out
    assert "made up for tests" in done.out
    assert "decode_attention 9" in done.out
    assert "2026-01-02" in done.out
    assert max(map(len, done.out.splitlines())) <= 130


def test_list_as_json(kvsim: Kvsim, table: Path) -> None:
    done = kvsim("tables", "list", table.parent, "--json")
    listed = json.loads(done.out)
    assert [fit["gpu"] for fit in listed["fits"]] == fitted_gpu_names()
    assert {fit["provenance"] for fit in listed["fits"]} == {"fitted"}
    (row,) = listed["tables"]
    assert row["path"] == str(table)
    assert row["rows"] == {"decode_attention": 9, "gemm": 15, "prefill_attention": 3}
    assert (row["gpu"], row["provenance"], row["num_rows"]) == ("H200", "assumed", 27)


def test_list_goes_on_after_a_bad_table(kvsim: Kvsim, table: Path) -> None:
    bad = table.with_name("bad.parquet")
    bad.write_bytes(table.read_bytes()[:100])
    sidecar(bad).write_bytes(sidecar(table).read_bytes())
    done = kvsim("tables", "list", table.parent)
    assert done.code == 0
    assert len(done.notes) == 1
    assert f"left out: {bad}: " in done.notes[0]
    assert "tiny.parquet" in done.out


def test_pipes_in_a_folder_are_left_out(kvsim: Kvsim, table: Path) -> None:
    os.mkfifo(table.with_name("a.parquet"))
    os.mkfifo(table.with_name("a.json"))
    os.mkfifo(table.with_name("b.parquet"))
    table.with_name("b.json").write_bytes(sidecar(table).read_bytes())
    done = kvsim("tables", "list", table.parent)
    assert len(done.notes) == 1
    assert "b.parquet: no regular file" in done.notes[0]


def test_list_without_a_folder_and_of_none(
    kvsim: Kvsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.setattr("sim.timing.table_file.SHIPPED", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    assert "shipped and in the current folder: none found" in kvsim("tables", "list").out
    save(tiny_table(), tmp_path / "here.parquet")
    save(tiny_table(), tmp_path / "d" / "below.parquet")
    done = kvsim("tables", "list")
    assert "Tables (--timing-table), shipped and in the current folder\n" in done.out
    assert "here.parquet" in done.out
    assert "below.parquet" not in done.out
    done = kvsim("tables", "list", tmp_path / "none")
    assert (done.code, "is no folder" in done.refusal) == (1, True)


# ---- show


def test_show(kvsim: Kvsim, table: Path) -> None:
    done = kvsim("tables", "show", table)
    assert (done.code, done.err) == (0, "")
    for part in ("assumed", "made up for tests, ", "32/8/128 page 16", "n 6144 k 4096", "1-2,048"):
        assert part.rstrip(", ") in done.out
    assert "nobody measured this" in done.out


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_chart_is_drawn_the_same_twice(
    kvsim: Kvsim, table: Path, tmp_path: Path, suffix: str
) -> None:
    for name in ("a", "b"):
        done = kvsim("tables", "show", table, "-o", tmp_path / f"{name}{suffix}")
        assert done.code == 0
    content = (tmp_path / f"a{suffix}").read_bytes()
    assert content == (tmp_path / f"b{suffix}").read_bytes()
    assert len(content) > 10_000
    assert {path.name for path in tmp_path.iterdir()} == {"tables", f"a{suffix}", f"b{suffix}"}


def test_a_chart_of_a_gpu_without_a_fit_says_so(kvsim: Kvsim, table: Path, tmp_path: Path) -> None:
    info = _json(sidecar(table)) | {"gpu": "L40S"}
    sidecar(table).write_text(json.dumps(info))
    done = kvsim("tables", "show", table, "-o", tmp_path / "a.png", "--heads", "32/8/128")
    if "L40S" not in fitted_gpu_names():
        assert "no roofline is drawn" in done.notes[0]
    assert done.code == 0


@pytest.mark.filterwarnings("error")
def test_a_chart_of_extremes_and_of_what_looks_like_mathematics(tmp_path: Path) -> None:
    most = 2**31 - 1
    rows = [
        *(
            decode(b, c, t, kernel=r"$\x^{")
            for b in (1, most)
            for c, t in ((0, 1e-6), (most, 1e12))
        ),
        *(gemm(m, most, most, 1e12) | {"kernel": r"$\bad$"} for m in (1, most)),
    ]
    info = msgspec.structs.replace(INFO, source="核 $^$")
    figure, _ = draw_table(make_table(info, rows, ""))
    write(figure, tmp_path / "a.png")


def test_a_fit(kvsim: Kvsim, tmp_path: Path) -> None:
    done = kvsim("tables", "show", "--gpu", "h200_sxm")
    assert done.out.startswith("H200\n")
    assert "decode_attention" in done.out
    chart = tmp_path / "fit.svg"
    flags = ("--model", "Qwen3-8B", "-tp", "2", "-o", chart)
    assert kvsim("tables", "show", "--gpu", "H200", *flags).code == 0
    assert chart.stat().st_size > 10_000


# ---- import


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The tiny table as CSV, last row first."""
    path = tmp_path / "rows.csv"
    listed = tiny_rows()[::-1]
    names = list(dict.fromkeys(name for row in listed for name in row))
    lines = [",".join(str(row.get(name, "")) for name in names) for row in listed]
    path.write_text("\n".join([",".join(names), *lines]))
    table = tiny_table()
    save(table, tmp_path / "gone.parquet")
    (tmp_path / "gone.json").rename(tmp_path / "rows.json")
    (tmp_path / "gone.parquet").unlink()
    return path


def test_import_of_our_own_format(kvsim: Kvsim, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    done = kvsim("tables", "import", "native", rows, "-o", out)
    assert done.code == 0
    assert done.out.startswith("27 rows, H200, assumed: made up for tests, made-up 1.0\n")
    assert done.out.endswith(f"use it: kvsim run --gpu H200 --timing-table {out}\n")
    assert done.notes == ["note: nobody measured this"]
    assert len(load(out)) == len(read_native(rows)) == 27
    assert kvsim("tables", "check", out).code == 0
    odd = tmp_path / os.fsdecode(b"\xff\x1b.parquet")
    done = kvsim("tables", "import", "native", rows, "-o", odd)
    assert (done.code, r"\udcff\x1b.parquet' and " in done.err) == (0, True)
    for name in ("show", "check", "list"):
        done = kvsim("tables", name, tmp_path if name == "list" else odd)
        assert (done.code, "\x1b" in done.out) == (0, False)
    before = out.read_bytes()
    assert kvsim("tables", "import", "native", out, "-o", out).code == 0  # itself, again
    assert out.read_bytes() == before


def test_import_of_a_profile(kvsim: Kvsim, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "meta.yaml").write_text("hardware: A100\nmodel: Llama-3.1-8B\nvariant: bf16\n")
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text(f"{header}\n0,0,1,16,9\n0,0,1,64,12\n")
    (folder / "dense.csv").write_text("layer,tokens,time_us\nact_fn,1,2\n")
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\nsampler,1,2\n")
    arguments = ("tables", "import", "llmservingsim", folder, "-o", tmp_path / "out.parquet")
    done = kvsim(*arguments)
    assert done.code == 2
    assert "--gpu 'A100' is ambiguous; expected one of A100-40, A100-80, " in done.refusal
    done = kvsim(*arguments, "--gpu", "a100-80gb")
    assert done.code == 0
    assert "--gpu A100-80 --model meta-llama/Llama-3.1-8B --timing-table" in done.out
    (folder / "dense.csv").write_text("layer,tokens,time_us\nact_fn,1,-2\n")
    before = (tmp_path / "out.parquet").read_bytes()
    done = kvsim(*arguments, "--gpu", "a100-80gb")
    assert done.code == 1
    assert "dense.csv, line 2, time_us: expected 1e-06 to 1e+12 microseconds" in done.refusal
    assert (tmp_path / "out.parquet").read_bytes() == before


def test_an_importer_whose_package_is_missing(
    kvsim: Kvsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(source: str) -> None:
        raise ModuleNotFoundError(name="some_package.part")

    monkeypatch.setattr("sim.timing.importers.native.read_native", read)
    done = kvsim("tables", "import", "native", "x", "-o", tmp_path / "out.parquet")
    assert done.code == 1
    assert "x: needs some-package, which is not installed: pip install some-pack" in done.refusal
    gone = IMPORTERS["native"]._replace(function="gone.read")
    monkeypatch.setitem(IMPORTERS, "native", gone)
    done = kvsim("tables", "import", "native", "x", "-o", tmp_path / "out.parquet")
    assert (done.code, "importer gone needs " in done.refusal) == (1, True)
    assert list(tmp_path.iterdir()) == []


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([], 2, ["a command is missing; choices: check, import, list, show"]),
        (["lst"], 2, ["unknown command 'lst'; did you mean 'list'?"]),
        (["show"], 2, ["expected a table", "--gpu H200", "got neither"]),
        (["show", "T", "--gpu", "H200"], 2, ["got both"]),
        (["show", "T", "--model", "Qwen3-8B"], 2, ["--model has no effect on kvsim tables show o"]),
        (["show", "T", "--heads", "32/8/128"], 2, ["--heads has no effect", "without -o FILE.png"]),
        (["show", "--gpu", "H200", "--kernel", "x"], 2, ["--kernel has no effect"]),
        (["show", "--gpu", "H200", "-tp", "2"], 2, ["--tensor-parallel-size has no effect"]),
        (["show", "--gpu", "H2000"], 2, ["--gpu 'H2000' is unknown; did you mean 'H200'?"]),
        (["show", "--gpu", "A100"], 2, ["--gpu 'A100' is ambiguous; expected one of A100-40, A1"]),
        (["show", "--gpu", "H200", "--model", "x", "-o", "a.png"], 2, ["--model 'x' is unknown"]),
        (["show", "--gpu", "H200", "-tp", "0", "-o", "a.png"], 2, ["--tensor-parallel-size: exp"]),
        (
            ["show", "--gpu", "H200", "-tp", "64", "-o", "a.svg"],
            2,
            ["64: meta-llama/Llama-3.1-8B h"],
        ),
        (
            ["show", "--gpu", "H200", "-tp", "3", "-o", "a.svg"],
            2,
            ["--tensor-parallel-size 3: met"],
        ),
        (["show", "T", "-o", "a.jpg"], 2, ["--output a.jpg: expected a name ending in .png or .s"]),
        (["show", "T", "-o", "a"], 2, ["--output a: expected a name ending in .png or .svg"]),
        (["show", "T", "-o", "d.png"], 2, ["--output d.png is a folder; expected the name of a"]),
        (["show", "T", "-o", "no/a.png"], 1, ["--output no/a.png: No such file or directory; exp"]),
        (["show", "T", "-o", "a.png", "--heads", "32/8"], 2, ["--heads '32/8'", "'32/8/128'?"]),
        (["show", "T", "-o", "a.png", "--kernel", "made"], 2, ["--kernel 'made'", "'made_up'?"]),
        (["show", "nope.parquet"], 1, ["nope.parquet: no such file; expected a Parquet file"]),
        (["show", "tables/tinny.parquet"], 1, ["no such file; did you mean 'tiny.parquet'?"]),
        (["show", "tables"], 2, ["tables is a folder", "kvsim tables import llmservingsim tables"]),
        (["import"], 2, ["expected NAME SOURCE -o OUT.parquet", "llmservingsim: a profile folder"]),
        (["import", "native", "x.csv"], 2, ["expected NAME SOURCE -o OUT.parquet"]),
        (["import", "nativ", "x", "-o", "a.parquet"], 2, ["'nativ' is unknown; did you mean 'nat"]),
        (
            ["import", "native", "x", "-o", "a.csv"],
            2,
            ["--output a.csv: expected a name ending in"],
        ),
        (["import", "native", "x", "-o", "d.parquet"], 2, ["d.parquet is a folder"]),
        (["import", "native", "x", "-o", "j.parquet"], 2, ["JSON file j.json is a folder"]),
        (["import", "native", "x", "-o", "o.parquet"], 1, ["o.json is there and belongs to no ti"]),
        (["import", "native", "x", "-o", "no/a.parquet"], 1, ["no/a.parquet: No such file"]),
        (["import", "native", "x", "-o", "a.parquet", "--gpu", "H200"], 2, ["--gpu has no effect"]),
        (["import", "native", "x.csv", "-o", "a.parquet"], 1, ["x.json: No such file"]),
        (["import", "native", "x.txt", "-o", "a.parquet"], 2, ["ending in .parquet or .csv"]),
        (["import", "llmservingsim", "x", "-o", "a.parquet"], 1, ["x/meta.yaml: No such file"]),
        (
            ["import", "llmservingsim", "x", "-o", "a.parquet", "--gpu", "A100"],
            2,
            ["--gpu 'A100' is ambiguous; expected one of A100-40, A100-80, A100-80-PCIe"],
        ),
        (
            ["import", "llmservingsim", "x", "-o", "a.parquet", "--backend", "vllm"],
            2,
            ["--backend has no effect on kvsim tables import llmservingsim"],
        ),
        (
            ["import", "llmservingsim", "x", "-o", "a.parquet", "-tp", "two"],
            2,
            ["--tensor-parallel-size: expected a whole number"],
        ),
        (["check"], 2, ["kvsim tables check: expected one or more tables"]),
        (["check", "--al"], 2, ["No such option", "--al"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(
    kvsim: Kvsim,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("d.png", "d.parquet", "j.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "o.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    given = ["tables/tiny.parquet" if argument == "T" else argument for argument in arguments]
    done = kvsim("tables", *given)
    for part in parts:
        assert part in done.refusal
    assert done.code == code
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(kvsim: Kvsim, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(0o500)
    done = kvsim("tables", "import", "native", rows, "-o", folder / "out.parquet")
    assert (done.code, "Permission denied" in done.refusal) == (1, True)


def test_check_says_a_line_a_table(kvsim: Kvsim, table: Path) -> None:
    bad = table.with_name("bad.parquet")
    bad.write_bytes(table.read_bytes())
    info = _json(sidecar(table)) | {"gpu": "h200_sxm"}
    sidecar(bad).write_text(json.dumps(info))
    done = kvsim("tables", "check", table, bad, table.with_name("none.parquet"))
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        f"ok: {table}: 27 rows, H200, assumed",
        f"bad: {sidecar(bad)}: key gpu: 'h200_sxm'; expected 'H200'",
        f"bad: {table.with_name('none.parquet')}: no such file; expected a Parquet file",
    ]
    assert kvsim("tables", "check", table).code == 0


# ---- a run with a table

SMALL = ("--gpu", "H200", "--max-model-len", "200", "--max-num-seqs", "6", "--enforce-eager")


def test_the_manifest_has_the_table_and_no_place(
    kvsim: Kvsim, busy_trace: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(busy_trace.parent)
    flags = ("--trace", busy_trace.name, *SMALL, "--timing-fallback", "roofline")
    done = kvsim("run", *flags, "--timing-table", table, "-o", "a")
    assert done.code == 0
    assert "assumed (H200, made up for tests, made-up 1.0" in done.out
    manifest = _json(tmp_path / "a" / "manifest.json")
    assert manifest["config"]["timing_table"] == "tiny.parquet"
    assert manifest["timing"]["table"] == {
        "name": "tiny.parquet",
        "sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
        "info": _json(sidecar(table)),
    }
    assert str(tmp_path) not in (tmp_path / "a" / "manifest.json").read_text()
    # Where the table lies, or with the flag that says where, the manifest repeats the run.
    (tmp_path / "config.json").write_text(json.dumps(manifest["config"]))
    assert kvsim("run", "--config", "config.json", "--timing-table", table, "-o", "b").code == 0
    for path in (table, sidecar(table)):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert kvsim("run", "--config", "config.json", "-o", "c").code == 0
    for path in (tmp_path / "a").iterdir():
        for other in ("b", "c"):
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes(), path.name


def test_the_manifest_of_a_run_without_a_table(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    kvsim("run", "--trace", busy_trace, *SMALL, "-o", tmp_path / "out")
    manifest = _json(tmp_path / "out" / "manifest.json")
    assert manifest["config"]["timing_table"] is None
    assert manifest["timing"]["table"] is None


def test_a_run_refuses_what_is_no_table(kvsim: Kvsim, table: Path) -> None:
    done = kvsim("run", *SMALL, "--timing-table", table.parent)
    assert done.code == 2
    assert f"--timing-table {table.parent} is a folder" in done.refusal
    table.write_bytes(table.read_bytes()[:500])
    done = kvsim("run", *SMALL, "--timing-table", table)
    assert (done.code, "expected a Parquet file" in done.refusal) == (1, True)
