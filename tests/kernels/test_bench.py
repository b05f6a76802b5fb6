"""``python -m kernels.bench`` on a CPU: what it writes, and what it survives."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import bench, grid, journal
from sim.timing.table_file import load
from tests.conftest import REPOSITORY
from tests.kernels.conftest import NEEDS_TORCH

HELP = [sys.executable, "-m", "kernels.bench", "--help"]
COMMAND = [sys.executable, "-m", "kernels.bench", "--device", "cpu", "--out"]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason=NEEDS_TORCH)


@pytest.fixture
def few(torch: Any, monkeypatch: pytest.MonkeyPatch) -> list[grid.Case]:
    """Six cases instead of all."""
    heads = grid.Heads(4, 2, 64)
    kinds = {"dtype": "float32", "kv_dtype": "float32"}
    cases = [
        *grid.decodes(grid.PYTORCH, heads, (16, 0), batches=(2,), contexts=(31, 63), **kinds),
        *grid.products([(64, 32)], (1, 8), dtype="float32"),
    ]
    monkeypatch.setattr(bench, "cpu_grid", lambda: cases)
    return cases


def _records(folder: Path) -> list[dict[str, Any]]:
    return journal.read(folder)[1]


def _run(folder: Path, *more: str) -> int:
    return bench.main(["--device", "cpu", "--out", str(folder), *more])


def test_help_needs_no_torch() -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv = {HELP[2:]!r}; "
    code += "from kernels.bench import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "--budget-s" in done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ["--budget-s", "-1"],
        ["--budget-s", "nan"],
        ["--budget-s", "1e7"],
        ["--devise", "cpu"],
        ["--device", "tpu"],
        ["--device", "cpu", "--gpu", "H200"],
        ["--seed", "99999999999999999999"],
        [],
    ],
)
def test_usage(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)] if flags else []
    with pytest.raises(SystemExit) as stop:
        bench.main([*out, *flags])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_whole_pipeline(torch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "--plot") == 0
    cases = grid.cpu_grid()
    rows = [record for record in _records(tmp_path) if "us" in record]
    assert [record["key"] for record in rows] == [case.key for case in cases]
    assert all(record["error"] < 1e-3 for record in rows)
    table = load(tmp_path / "CPU.parquet")
    assert len(table) == len([case for case in cases if case.op != "sampler"])
    assert table.info.provenance == "assumed"
    assert table.info.notes[0].startswith("PyTorch on a CPU, to test the program")
    for name in ("bandwidth.png", "block_size.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert "block_size 256 takes" in captured.out
    assert "use it" not in captured.out
    assert "wrote " in captured.err


def test_a_cpus_table_prices_nothing(few: list[grid.Case], tmp_path: Path) -> None:
    from sim.cli import main  # noqa: PLC0415  # after the fixture, which may skip

    assert _run(tmp_path) == 0
    assert main(["run", "--timing-table", str(tmp_path / "CPU.parquet")]) == 2
    assert main(["tables", "check", str(tmp_path / "CPU.parquet")]) == 1


def test_the_same_command_again_measures_nothing(few: list[grid.Case], tmp_path: Path) -> None:
    assert _run(tmp_path) == 0
    before = (tmp_path / journal.NAME).read_bytes()
    table = (tmp_path / "CPU.parquet").read_bytes()
    assert _run(tmp_path) == 0
    assert (tmp_path / journal.NAME).read_bytes() == before
    assert (tmp_path / "CPU.parquet").read_bytes() == table


def test_kill_9_keeps_what_was_measured(torch: Any, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, str(tmp_path)], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    ) as p:
        path = tmp_path / journal.NAME
        while p.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 6):
            time.sleep(0.02)
        p.kill()
    before = path.read_bytes()
    assert 6 <= before.count(b"\n") < len(grid.cpu_grid())
    assert not (tmp_path / "CPU.parquet").exists()
    assert _run(tmp_path) == 0
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    keys = [record["key"] for record in _records(tmp_path) if "key" in record]
    assert sorted(keys) == sorted(case.key for case in grid.cpu_grid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_writes_the_table(torch: Any, tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [*COMMAND, str(tmp_path)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        path = tmp_path / journal.NAME
        while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 9):
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == bench.INTERRUPTED, err
    assert "interrupted; what was measured stays" in err
    assert "Traceback" not in err
    assert "calls are left: the same command again goes on" in out
    assert len(load(tmp_path / "CPU.parquet")) >= 4


def _failing(monkeypatch: pytest.MonkeyPatch, key: str, error: BaseException) -> list[str]:
    """Make the case *key* fail; answer the keys that are made."""
    from kernels.attention_calls import AttentionCalls  # noqa: PLC0415  # needs PyTorch

    whole, made = AttentionCalls.make, []

    def make(self: AttentionCalls, case: grid.Case) -> Any:
        made.append(case.key)
        if case.key == key:
            raise error
        return whole(self, case)

    monkeypatch.setattr(AttentionCalls, "make", make)
    return made


def test_out_of_memory_goes_on(
    few: list[grid.Case],
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        made = _failing(patch, few[1].key, torch.OutOfMemoryError("CUDA out of memory"))
        assert _run(tmp_path) == 0
    assert made.count(few[1].key) == 2  # once more without what others hold
    assert f"not measured: 1 x out of memory: {few[1].key}" in capsys.readouterr().out
    assert sum("us" in record for record in _records(tmp_path)) == len(few) - 1
    assert _run(tmp_path) == 0  # with room, it is measured
    assert sum("us" in record for record in _records(tmp_path)) == len(few)
    assert "not measured" not in capsys.readouterr().out


def test_a_kernel_that_fails_is_listed(
    few: list[grid.Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        _failing(patch, few[0].key, RuntimeError("no kernel image\nfor this device"))
        assert _run(tmp_path) == 0
    assert "1 x RuntimeError: no kernel image: op=decode" in capsys.readouterr().out
    assert _run(tmp_path) == 0  # the next run, on a machine that is mended, tries it again
    assert sum("us" in record for record in _records(tmp_path)) == len(few)


def test_a_machine_that_runs_nothing_stops_early(
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from kernels.attention_calls import AttentionCalls  # noqa: PLC0415  # needs PyTorch
    from kernels.measure import MAX_ALIKE  # noqa: PLC0415

    with monkeypatch.context() as patch:

        def make(*_: object) -> None:
            raise RuntimeError("Failed to find C compiler")

        patch.setattr(AttentionCalls, "make", make)
        assert _run(tmp_path) == 1
    assert f"first {MAX_ALIKE} calls fail alike, RuntimeError: Failed to" in capsys.readouterr().err
    assert len(_records(tmp_path)) == 1 + MAX_ALIKE
    assert _run(tmp_path, "--budget-s", "0") == 1
    assert "nothing was measured" in capsys.readouterr().err
    assert _run(tmp_path) == 0
    assert sum("us" in record for record in _records(tmp_path)) == len(grid.cpu_grid())


def test_a_shape_that_does_not_fit_is_listed(
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = {"dtype": "float32", "kv_dtype": "float32"}
    heads = grid.Heads(4, 2, 64)
    large = [*grid.decodes(grid.PYTORCH, heads, (16, 0), batches=(2,), contexts=(8191,), **kinds)]
    monkeypatch.setattr(bench, "cpu_grid", lambda: large)
    assert _run(tmp_path) == 1
    assert "2 x needs 0.0156 GiB of KV cache, there is room for 0.00781" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(
    few: list[grid.Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from kernels import attention_calls  # noqa: PLC0415  # needs PyTorch
    from kernels.reference import attention  # noqa: PLC0415

    monkeypatch.setattr(attention_calls, "attention", lambda *args: 1.01 * attention(*args))
    assert _run(tmp_path) == 1
    captured = capsys.readouterr()
    assert "4 calls gave wrong results" in captured.err
    assert "wrong: relative error 0.0099" in captured.out
    assert sum("us" in record for record in _records(tmp_path)) == 2


def test_a_budget_stops_in_time(
    few: list[grid.Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "--budget-s", "0.001") == 1
    captured = capsys.readouterr()
    assert "6 of 6 calls are left" in captured.out
    assert "nothing was measured" in captured.err
    assert not (tmp_path / "CPU.parquet").exists()
    assert _run(tmp_path) == 0
    assert _run(tmp_path, "--budget-s", "0", "--plot") == 0
    assert (tmp_path / "block_size.png").exists()


def _refusal(capsys: pytest.CaptureFixture[str], code: int) -> str:
    captured = capsys.readouterr()
    lines: list[str] = captured.err.splitlines()
    assert code == 1
    assert len(lines) == 1, captured.err
    assert captured.out == ""
    return lines[0]


def test_budget_0_needs_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = bench.main(["--out", str(tmp_path / "none"), "--budget-s", "0"])
    assert "has no measurements; expected a journal" in _refusal(capsys, code)


def test_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code = bench.main(["--out", str(tmp_path)])
    assert "PyTorch is not installed: expected pip install" in _refusal(capsys, code)


@pytest.mark.parametrize(
    "place",
    ["session.open_device", "session.header", "measure.AttentionCalls", "measure.copy_bandwidth"],
)
def test_a_gpu_that_cannot_be_used(
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    monkeypatch.setattr(f"kernels.{place}", fail)
    assert _run(tmp_path) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the device cannot be used: OutOfMemoryError: CUDA out of memory.; expected" in last


def test_without_kvsims_packages_a_later_step_is_named(
    few: list[grid.Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "kernels.tables", raising=False)
        patch.delattr(sys.modules["kernels"], "tables", raising=False)
        patch.setitem(sys.modules, "sim.timing.table", None)
        assert _run(tmp_path, "--plot") == 0
    err = capsys.readouterr().err
    assert "note: no table was written: " in err
    assert "--budget-s 0 --plot makes it of what was measured, and the charts" in err
    assert not list(tmp_path.glob("*.p*"))
    assert _run(tmp_path, "--budget-s", "0", "--plot") == 0
    assert list(tmp_path.glob("*.parquet"))


def test_no_gpu(
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = bench.main(["--out", str(tmp_path / "new")])
    assert "no GPU: PyTorch " in _refusal(capsys, code)
    assert not (tmp_path / "new").exists()


def test_no_triton(
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    code = bench.main(["--out", str(tmp_path / "new")])
    assert "no Triton: expected pip install triton, or --device cpu" in _refusal(capsys, code)


def test_an_interpreter_is_not_timed(
    torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paged = pytest.importorskip("kernels.paged_attention", reason=NEEDS_TORCH)
    monkeypatch.setattr(paged, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    code = bench.main(["--out", str(tmp_path / "new")])
    assert "TRITON_INTERPRET is set, and would time an interpreter" in _refusal(capsys, code)


def test_a_folder_of_another_gpu(
    few: list[grid.Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path) == 0
    path = tmp_path / journal.NAME
    header, _, rest = path.read_bytes().partition(b"\n")
    changed = json.dumps(json.loads(header) | {"gpu": "NVIDIA H100"}).encode() + b"\n" + rest
    path.write_bytes(changed)
    capsys.readouterr()
    assert "with gpu 'NVIDIA H100', and now it is 'CPU'" in _refusal(capsys, _run(tmp_path))
    assert path.read_bytes() == changed


def test_a_tile_that_stops_the_gpu_is_left_out(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a made-up GPU that the second tile stops until the program starts anew."""
    from kernels import measure  # noqa: PLC0415  # needs PyTorch
    from kernels.calls import Calls  # noqa: PLC0415
    from kernels.clock import Timing  # noqa: PLC0415

    (case,) = grid.decodes(grid.TRITON, grid.LLAMA_8B, (16,), batches=(64,), contexts=(8191,))
    tried: list[tuple[int, ...]] = []
    dead = False

    def make(self: Any, _: grid.Case) -> Calls:
        nonlocal dead
        tile = self.tiles.get("16 128 bfloat16 bfloat16")
        tried.append(tile)
        dead = len(tried) == 2
        if dead:
            raise RuntimeError("an illegal memory access was encountered")
        return Calls([lambda: None], lambda: 0.0, 1.0, cold=True)

    def synchronize() -> None:
        if dead:
            raise RuntimeError("an illegal memory access was encountered")

    pool = SimpleNamespace(key=torch.zeros(1, dtype=torch.bfloat16))
    monkeypatch.setattr("kernels.measure.AttentionCalls.make", make)
    monkeypatch.setattr("kernels.measure.AttentionCalls.pool", lambda *_: pool)
    monkeypatch.setattr(measure, "time_calls", lambda *_: Timing(1.0, 0.0, "graph"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    header: dict[str, Any] = dict.fromkeys(journal.SAME, "") | {
        "device": "cuda",
        "versions": {},
    }

    def run() -> list[dict[str, Any]]:
        with journal.Journal(tmp_path, header) as opened:
            bench = measure.Bench(torch.device("cpu"), opened, 0, measure.Clock(0.0, None))
            bench._is_gpu = True
            opened.append({"copy_bytes_per_s": 1.0})
            bench.run([case], SimpleNamespace(update=lambda _: None))
            return opened.records

    with pytest.raises(measure.DeadGpuError, match="stopped working in tile"):
        run()
    assert [record for record in _records(tmp_path) if "key" in record] == []
    first, deadly = tried
    records = run()
    assert deadly not in tried[2:]
    assert first in tried[2:]
    assert [record["key"] for record in records if "us" in record] == [case.key]


def test_no_two_tokens_of_a_pool_are_alike(torch: Any) -> None:
    from kernels.calls import fill_random  # noqa: PLC0415  # needs PyTorch

    pool = torch.empty(20_000, 8, 128)
    fill_random(pool, torch.Generator().manual_seed(0))
    assert not torch.equal(pool[0], pool[16_384])  # 16 Mi elements on
    fill_random(torch.empty(0, 8, 128), torch.Generator())  # a GPU without room


# ---- what a GPU would run, in the interpreter


def test_calls_of_our_kernels(torch: Any) -> None:
    pytest.importorskip("triton", reason=NEEDS_TORCH)
    from kernels.attention_calls import AttentionCalls  # noqa: PLC0415  # needs PyTorch

    torch.set_num_threads(1)
    maker, heads = AttentionCalls(torch.device("cpu"), 0, 1024), grid.Heads(8, 2, 64)
    decodes: Any = {"batches": (2,), "contexts": (63,)}
    cases = [
        *grid.decodes(grid.TRITON, heads, (16, 0, 1), **decodes),
        *grid.decodes(grid.TRITON, heads, (16,), kv_dtype="fp8", **decodes),
        *grid.decodes(grid.ORDERED, heads, (16,), **decodes),
        *grid.decodes(grid.SDPA, heads, (0,), **decodes),
        *grid.decodes(grid.TRITON, grid.Heads(16, 1, 576), (16, 0), **decodes),
        *grid.prefills(grid.TRITON, heads, (16, 0), chunks=(16,), histories=(48,)),
        *grid.prefills(grid.TRITON, heads, (8,), chunks=(16,), histories=(48,), kv_dtype="fp8"),
    ]
    for case in cases:
        calls = maker.make(case)
        assert calls.error() <= calls.tolerance, case.key
    maker.tiles["16 64 bfloat16 bfloat16"] = (16, 32, 4, 2)
    assert maker.make(cases[0]).error() <= 1e-2


def test_all_reduces(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import collectives  # noqa: PLC0415  # needs PyTorch

    times = collectives.all_reduce_times(2, "cpu", [1024, 4096])
    assert list(times) == [1024, 4096]
    assert all(timing.us > 0 and timing.how == "wall" for timing in times.values())
    monkeypatch.setattr(collectives, "LIMIT_S", 0.01)
    with pytest.raises(RuntimeError, match="all-reduce over 2 took more than"):
        collectives.all_reduce_times(2, "cpu", [1024])


def test_static_facts(torch: Any) -> None:
    """A decode compiled for Hopper: nothing spilled, every copy from memory 16 bytes wide."""
    pytest.importorskip("triton", reason=NEEDS_TORCH)
    code = "from kernels import facts; print(list(facts.compiled(facts.VARIANTS[1], 90)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    if "not at hand" in done.stderr:
        pytest.skip("Triton's cuobjdump is not at hand")
    registers, stack, shared, wide, narrow = json.loads(done.stdout)
    assert 0 < registers <= 128
    assert stack == narrow == 0
    assert shared <= 99 * 1024
    assert wide > 0
