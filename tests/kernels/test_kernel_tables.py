"""From a journal to tables and figures, without a GPU: the records are made up."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels import bench, charts, grid, journal, summary, tables
from sim.config import TimingConfig
from sim.errors import ConfigError, FileError
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing import Deployment, kernel_step_time
from sim.timing.base import StepBatch
from sim.timing.table_file import load
from tests.conftest import REPOSITORY

HEADER: dict[str, Any] = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "driver": "580.1",
    "code": "0123",
    "date": "2026-01-02",
    "num_sms": 132,
}
PENALTY = {0: 1.0, 1: 2.0, 8: 1.3, 16: 1.05}
"""Of made-up decodes: time over that of contiguous memory."""

Us = Callable[[grid.Case], float]


def _us(case: grid.Case) -> float:
    """Answer times that an H200 could have: 4.2 TB/s, and more for small blocks."""
    tokens = case.batch * (case.context + 1)
    return 8 + tokens * 4096 / 4.2e6 * PENALTY.get(case.block_size, 1.0)


def _records(cases: list[grid.Case], us: Us = _us) -> list[dict[str, Any]]:
    copy = [{"copy_bytes_per_s": 4.3e12, "clocks.sm": "1980 MHz"}]
    return copy + [
        {
            "key": case.key,
            "row": case.row(),
            "us": us(case),
            "spread_us": 1.0,
            "how": "graph",
            "cold": True,
        }
        for case in cases
    ]


DECODES = list(grid.decodes(grid.TRITON, grid.LLAMA_8B, (16, 0, 1, 8)))


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        (grid.CPU, grid.CPU),
    ],
)
def test_names_of_drivers(device: str, gpu: str) -> None:
    assert tables.gpu_name(device) == gpu


@pytest.mark.parametrize(
    "device", ["NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "Voodoo"]
)
def test_no_name_is_guessed(device: str) -> None:
    with pytest.raises(ConfigError, match=r"not in sim/data/gpus\.toml: expected an entry there"):
        tables.gpu_name(device)


def test_a_table_prices_runs(tmp_path: Path) -> None:
    written = tables.write(tmp_path, HEADER, _records(DECODES), DECODES, None)
    assert [path.name for path in written.paths] == ["H200.parquet"]
    assert not written.notes
    table = load(written.paths[0])
    info = table.info
    assert (info.gpu, info.provenance, info.l2_policy) == ("H200", "measured", "cold")
    assert info.versions["triton"] == "3.6.0"
    assert any("4.300 TB/s" in note and "clocks.sm 1980 MHz" in note for note in info.notes)
    model, timing = get_model("meta-llama/Llama-3.1-8B"), str(written.paths[0])
    times = {}
    for block_size in (16, 0, 1):
        deployment = Deployment(model, get_gpu("H200"), block_size=block_size, max_num_seqs=64)
        step_time = kernel_step_time(TimingConfig(timing_table=timing), deployment)
        assert step_time.sources[0].provenance == "measured"
        times[block_size] = step_time.step_time(StepBatch(64, 64 * 8192, ()))
    # One layer's attention by hand, 32 of them, in ticks of 0.1 fs.
    attention = {
        size: _us(DECODES[0]._replace(block_size=size, batch=64, context=8191)) for size in times
    }
    for size in (16, 1):
        expected = 32 * (attention[size] - attention[0]) * 1e10
        assert times[size] - times[0] == pytest.approx(expected, rel=1e-9)


def test_other_kernels_are_in_another_table(tmp_path: Path) -> None:
    others = [
        *grid.decodes(grid.SDPA, grid.LLAMA_8B, (0,)),
        *grid.decodes("flashinfer", grid.LLAMA_8B, (16,)),
        *grid.samplers((1, 8)),
    ]
    written = tables.write(tmp_path, HEADER, _records(DECODES + others), DECODES + others, None)
    assert [path.name for path in written.paths] == ["H200.parquet", "H200-others.parquet"]
    main, other = map(load, written.paths)
    assert main.distinct("kernel") == [(grid.TRITON,)]
    assert len(main) + len(other) == len(DECODES) + len(others)


def test_a_batch_without_all_its_contexts_is_left_out(tmp_path: Path) -> None:
    cut = DECODES[: len(DECODES) // 2 + 2]
    written = tables.write(tmp_path, HEADER, _records(cut), DECODES, None)
    rows = load(written.paths[0])
    incomplete = [case for case in cut if case.group == cut[-1].group]
    assert len(rows) == len(cut) - len(incomplete)
    assert written.notes == [
        f"{len(incomplete)} measured calls left out: they belong to batches of which not all "
        "contexts are measured yet"
    ]


def test_calls_that_count_launches_are_left_out(tmp_path: Path) -> None:
    records = _records(DECODES)
    records[5]["how"] = "events"
    written = tables.write(tmp_path, HEADER, records, DECODES, None)
    assert len(load(written.paths[0])) == len(DECODES) - 1
    assert "1 measured calls left out: they were not captured" in written.notes[0]


def test_impossible_times_make_no_table(tmp_path: Path) -> None:
    records = _records(DECODES, lambda case: _us(case) / 3)
    with pytest.raises(ConfigError, match=r"is not written.*these times cannot be right"):
        tables.write(tmp_path, HEADER, records, DECODES, None)
    assert not list(tmp_path.iterdir())


def test_a_gpu_is_not_called_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the driver says 'NVIDIA H200', which is H200"):
        tables.write(tmp_path, HEADER, _records(DECODES), DECODES, "H100")
    nameless = HEADER | {"gpu": "NVIDIA H200 NVL"}
    with pytest.raises(ConfigError, match="expected an entry there, or --gpu NAME"):
        tables.write(tmp_path, nameless, _records(DECODES), DECODES, None)
    assert not list(tmp_path.iterdir())
    (written,) = tables.write(tmp_path, nameless, _records(DECODES), DECODES, "H200").paths
    assert written.name == "H200.parquet"


def test_a_gpu_without_a_name_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    bench._check_name(None, HEADER | {"gpu": "NVIDIA A10"})
    assert "note: no table will be written yet: the GPU 'NVIDIA A10'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the driver says"):
        bench._check_name("H100", HEADER)


def test_equal_journals_equal_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        for path in tables.write(folder, HEADER, _records(DECODES), DECODES, None).paths:
            contents.append((path.read_bytes(), path.with_suffix(".json").read_bytes()))
    assert contents[0] == contents[1]


def test_the_summary_says_what_block_sizes_cost() -> None:
    skip: list[dict[str, Any]] = [
        {"key": "x", "row": {}, "skip": "out of memory"},
        {"key": "y", "skip": "out of memory"},
    ]
    text = summary.describe(HEADER, [*_records(DECODES), *skip])
    assert text.startswith(f"NVIDIA H200: {len(DECODES)} calls measured\ncopy bandwidth 4,300 GB/s")
    assert "KV above 1 GB" in text
    assert "kvsim_triton, contiguous: 4,1" in text
    assert "96% of the copy bandwidth" in text
    assert "block_size 1 takes 1.98" in text
    assert text.endswith("not measured: 2 x out of memory: x, ...")


def test_control_characters_of_a_journal_stay_there() -> None:
    skip = {"key": "x\x1b[2J", "skip": "\x1b]0;title\x07\nnot measured"}
    text = summary.describe(HEADER | {"gpu": "\x1b[31mH200"}, [skip])
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) == 2


def test_charts(tmp_path: Path) -> None:
    paths = charts.draw(tmp_path, HEADER, _records(DECODES), 4.8e12)
    assert [path.name for path in paths] == ["bandwidth.png", "block_size.png"]
    before = [path.read_bytes() for path in paths]
    assert all(data.startswith(b"\x89PNG") and len(data) > 10_000 for data in before)
    charts.draw(tmp_path, HEADER, _records(DECODES), 4.8e12)
    assert [path.read_bytes() for path in paths] == before
    assert charts.draw(tmp_path, HEADER, [], None) == []


# ---- the journal


def _open(folder: Path, **changed: Any) -> journal.Journal:
    return journal.Journal(folder, HEADER | changed)


def test_what_was_measured_stays(tmp_path: Path) -> None:
    with _open(tmp_path) as first:
        first.append({"copy_bytes_per_s": 1.0})
    path = tmp_path / journal.NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "torn')  # killed while writing
    assert journal.read(tmp_path)[1] == [{"copy_bytes_per_s": 1.0}]
    with _open(tmp_path, date="another day") as second:
        assert second.records == [{"copy_bytes_per_s": 1.0}]
        second.append({"copy_bytes_per_s": 2.0})
    assert path.read_bytes() == whole + b'{"copy_bytes_per_s": 2.0}\n'


def test_killed_before_the_first_line(tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_bytes(b'{"format": "kv')
    with _open(tmp_path) as opened:
        opened.append({"copy_bytes_per_s": 1.0})
    assert journal.read(tmp_path)[0]["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpu": "NVIDIA H100"}, "with gpu 'NVIDIA H200', and now it is 'NVIDIA H100'"),
        ({"device": "cpu"}, "with device 'cuda', and now it is 'cpu'"),
        ({"versions": {"torch": "2.12.0"}}, "with versions {'torch': '2.11.0'"),
        ({"driver": "590"}, "with driver '580.1'"),
        ({"code": "4567"}, "with code other kernels, and now it is these"),
    ],
)
def test_nothing_is_merged(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    _open(tmp_path).__exit__(None, None, None)
    before = (tmp_path / journal.NAME).read_bytes()
    with pytest.raises(FileError) as refusal:
        _open(tmp_path, **changed)
    assert words in str(refusal.value)
    assert str(refusal.value).endswith("they are not merged; expected another folder")
    assert (tmp_path / journal.NAME).read_bytes() == before


def test_a_full_disk_is_one_refusal(tmp_path: Path) -> None:
    """By a limit on the size of files, which fails as a disk does that is full."""
    code = (
        "import pathlib, resource, sys; from kernels import journal\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"with journal.Journal(pathlib.Path(sys.argv[1]), {HEADER!r}) as opened:\n"
        "    while True: opened.append({'copy_bytes_per_s': 1.0})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1].endswith("cannot be written: File too large; expected room")
    assert "OSError" not in done.stderr
    with _open(tmp_path) as opened:  # what was torn is cut off
        assert len(opened.records) > 50


def test_two_at_once(tmp_path: Path) -> None:
    with _open(tmp_path), pytest.raises(FileError, match="is being measured by another process"):
        _open(tmp_path)


MEASURED = b'{"key": "x", "us": 1, "spread_us": 0, "how": "graph", "cold": true, "row":'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no json\n", "line 1: not JSON"),
        (b"[1]\n", "line 1: [1]; expected an object"),
        (b"{}\n", "line 1: no header of a journal"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b"\xff\xfe\n", "line 1: not JSON"),
        (b"HEADER\nno json\n", "line 2: not JSON"),
        (b'HEADER\n{"key": 3, "skip": "x"}\n', "line 2: key key: 3; expected text"),
        (b'HEADER\n{"key": "x"}\n', "line 2: not all of a record"),
        (b'HEADER\n{"skip": "x"}\n', "line 2: not all of a record"),
        (b'HEADER\n{"key": "x", "us": "1"}\n', "line 2: key us: '1'; expected microseconds"),
        (b'HEADER\n{"key": "x", "us": NaN}\n', "line 2: key us: nan; expected microseconds"),
        (b'HEADER\n{"us": 1%b}\n' % (b"0" * 400), "line 2: key us: 1000"),
        (b'HEADER\n{"key": "x", "us": 1, "row": {}}\n', "line 2: not all of a record"),
        (b'HEADER\n{"copy_bytes_per_s": 0}\n', "key copy_bytes_per_s: 0; expected bytes a second"),
        (b'HEADER\n{"copy_bytes_per_s": 1%b}\n' % (b"0" * 400), "line 2: key copy_bytes_per_s"),
        (b'HEADER\nMEASURED {"batch": 1%b}}\n' % (b"0" * 30), "line 2: key row: 'batch': 1000"),
        (b'HEADER\n{"tile": [-1, 0, 0, 0], "for": ""}\n', "line 2: key tile: [-1, 0, 0, 0]; exp"),
        (b'NUM_GPUS "abc"}\n', "line 1: key num_gpus: 'abc'; expected a whole number above 0"),
        (b"NUM_GPUS null}\n", "line 1: key num_gpus: None"),
        (b'NUM_GPUS 1, "version": 2}\n', "line 1: key version: 2; expected 1"),
        (b'NUM_GPUS 1, "device": "tpu"}\n', "line 1: key device: 'tpu'; expected cuda or cpu"),
        (b'HEADER\nMEASURED {"op": 3}}\n', "line 2: key row: 'op': 3 cannot be"),
        (b'HEADER\nMEASURED {"shape": 3}}\n', "line 2: key row: 'shape': 3 cannot be"),
        (
            b'HEADER\nMEASURED {"op": "decode_attention", "kernel": "x"}}\n',
            "line 2: key row: not all that identifies a call",
        ),
        (b'HEADER\n{"tile": [1, 2, 3], "for": ""}\n', "line 2: key tile: [1, 2, 3]; expected four"),
    ],
)
def test_what_is_no_journal(tmp_path: Path, content: bytes, words: str) -> None:
    _open(tmp_path).__exit__(None, None, None)
    path = tmp_path / journal.NAME
    header = path.read_bytes().strip()
    content = content.replace(b"HEADER", header).replace(b"MEASURED", MEASURED)
    content = content.replace(b"NUM_GPUS", header[:-1] + b', "num_gpus":')
    path.write_bytes(content)
    with pytest.raises(FileError) as refusal:
        _open(tmp_path)
    assert words in str(refusal.value)
    assert path.read_bytes() == content


def test_tables_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "H200.parquet").write_bytes(b"theirs")
    with pytest.raises(FileError, match=r"has tables and no .*: they would be overwritten"):
        _open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["H200.parquet"]


def test_a_cpus_times_never_take_the_name_of_a_gpu(tmp_path: Path) -> None:
    cases = grid.cpu_grid()[:4]
    header = HEADER | {"device": "cpu", "gpu": grid.CPU}
    written = tables.write(tmp_path, header, _records(cases), cases, "H200")
    assert [path.name for path in written.paths] == ["CPU.parquet"]
    assert load(written.paths[0]).info.provenance == "assumed"


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="expected a writable folder"):
        _open(tmp_path / "file")
    (tmp_path / "folder" / journal.NAME).mkdir(parents=True)
    with pytest.raises(FileError, match="is no journal"):
        _open(tmp_path / "folder")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / journal.NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="is a link"):
        _open(tmp_path / "links")
    assert not (tmp_path / "elsewhere").exists()
