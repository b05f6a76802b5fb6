"""What ``kvsim run`` promises: its files, its report, and that they agree."""

import csv
import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.cli import main
from sim.files import write_json
from sim.result_tables import expand
from tests.cli.conftest import Kvsim
from tests.conftest import REPOSITORY

SMALL = ("--num-gpu-blocks-override", "21", "--max-model-len", "200", "--max-num-seqs", "6")
FLAGS = (*SMALL, "--step-time", "linear:0.01,1e-4,1e-6")
CASES = REPOSITORY / "tests" / "lockstep" / "cases"


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _without_leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    done = kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "a" / "b")
    assert (done.code, done.err) == (0, "")
    names = ["manifest.json", "requests.parquet", "steps.parquet", "summary.json"]
    assert _without_leftovers(tmp_path / "a" / "b") == names


def test_no_folder_no_files(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kvsim("run", "--trace", busy_trace, *FLAGS).code == 0
    assert _without_leftovers(tmp_path) == ["busy.jsonl"]


def test_files_of_csv_take_the_place_of_parquet(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kvsim("run", "--trace", busy_trace, *FLAGS, "-o", out)
    kvsim("run", "--trace", busy_trace, *FLAGS, "-o", out, "--format", "csv")
    names = ["manifest.json", "requests.csv", "steps.csv", "summary.json"]
    assert _without_leftovers(out) == names


def test_tables_have_the_columns_of_vllm_lockstep_cases(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path, "--save-steps")
    for expected, table in (("finished.csv", "requests"), ("steps.csv", "steps")):
        with (CASES / "case_1001" / expected).open(newline="") as file:
            columns = next(csv.reader(file))
        assert set(columns) <= set(pq.read_schema(tmp_path / f"{table}.parquet").names)


@pytest.mark.parametrize("save_steps", [False, True])
def test_parquet_and_csv_hold_equal_data(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, save_steps: bool
) -> None:
    flags = [*FLAGS, *(["--save-steps"] if save_steps else [])]
    kvsim("run", "--trace", busy_trace, *flags, "-o", tmp_path / "p")
    kvsim("run", "--trace", busy_trace, *flags, "-o", tmp_path / "c", "--format", "csv")
    for table in ("requests", "steps"):
        parquet = pd.read_parquet(tmp_path / "p" / f"{table}.parquet")
        text = pd.read_csv(
            tmp_path / "c" / f"{table}.csv",
            dtype=parquet.dtypes.to_dict(),
            keep_default_na=False,
            na_values={"refused": [""]},
        )
        # The CSV is exact; older pandas reads its last digit loosely, and what is missing as NaN.
        missing = parquet.isna()
        assert missing.equals(text.isna())
        pd.testing.assert_frame_equal(
            parquet.mask(missing, np.nan), text.mask(missing, np.nan), rtol=1e-14, atol=0
        )


def test_json_is_the_summary_file(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    done = kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path, "--json")
    assert done.out == (tmp_path / "summary.json").read_text()
    assert json.loads(done.out)["completed"] == 12


def test_json_of_a_run_that_serves_nobody_has_nulls(kvsim: Kvsim, busy_trace: Path) -> None:
    done = kvsim("run", "--trace", busy_trace, "--max-model-len", "4", "--json")
    summary = json.loads(done.out)
    assert (summary["completed"], summary["failed"]) == (0, 12)
    assert summary["refused"] == {"prompt_too_long": 12}
    assert summary["mean_ttft_ms"] is None
    assert (
        "Refused (prompt_too_long):               12 "
        in kvsim("run", "--trace", busy_trace, "--max-model-len", "4").out
    )


LATENCIES = (
    ("---------------Time to First Token----------------", "TTFT", "ttft"),
    ("-----Time per Output Token (excl. 1st token)------", "TPOT", "tpot"),
    ("---------------Inter-token Latency----------------", "ITL", "itl"),
    ("----------------End-to-end Latency----------------", "E2EL", "e2el"),
)


def test_report_has_the_lines_of_vllm_in_its_order(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    done = kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path)
    summary = _json(tmp_path / "summary.json")
    expected = [
        "============ Simulated Serving Result ============",
        f"{'Successful requests:':<40} {summary['completed']:<10}",
        f"{'Failed requests:':<40} {summary['failed']:<10}",
        f"{'Benchmark duration (s):':<40} {summary['duration']:<10.2f}",
        f"{'Total input tokens:':<40} {summary['total_input_tokens']:<10}",
        f"{'Total generated tokens:':<40} {summary['total_output_tokens']:<10}",
        f"{'Request throughput (req/s):':<40} {summary['request_throughput']:<10.2f}",
        f"{'Output token throughput (tok/s):':<40} {summary['output_throughput']:<10.2f}",
        f"{'Peak output token throughput (tok/s):':<40} "
        f"{summary['max_output_tokens_per_s']:<10.2f}",
        f"{'Peak concurrent requests:':<40} {summary['max_concurrent_requests']:<10.2f}",
        f"{'Total token throughput (tok/s):':<40} {summary['total_token_throughput']:<10.2f}",
    ]
    for title, short, key in LATENCIES:
        expected.append(title)
        for word in ("Mean", "Median", "P99"):
            value = summary[f"{word.lower()}_{key}_ms"]
            expected.append(f"{f'{word} {short} (ms):':<40} {value:<10.2f}")
    lines = done.out.splitlines()
    start = lines.index(expected[0])
    assert lines[start : start + len(expected)] == expected


def test_report_ends_with_the_kv_section(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    done = kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path)
    summary = _json(tmp_path / "summary.json")
    lines = done.out.splitlines()
    section = lines[lines.index("==================== KV Cache ====================") :]
    assert f"{'Allocator:':<40} {'prefix':<10}" in section
    assert f"{'KV cache size (tokens):':<40} {320:<10}" in section
    assert f"{'Preemptions:':<40} {summary['num_preemptions']:<10}" in section
    assert f"{'Recomputed tokens:':<40} {summary['recomputed_tokens']:<10}" in section
    for label, key, scale in (
        ("Mean KV cache usage (%):", "mean_kv_cache_usage_perc", 100),
        ("Peak KV cache usage (%):", "max_kv_cache_usage_perc", 100),
        ("Live slots (% of pool):", "kv_live_pct", 1),
        ("Reserved slots (% of pool):", "kv_reserved_pct", 1),
        ("Internal fragmentation (% of pool):", "kv_internal_pct", 1),
        ("External fragmentation (% of pool):", "kv_external_pct", 1),
        ("Cached slots (% of pool):", "kv_cached_pct", 1),
        ("Prefix cache hit rate (%):", "prefix_cache_hit_rate", 100),
    ):
        assert f"{label:<40} {scale * summary[key]:<10.2f}" in section
    assert section[-1] == "=" * 50


def test_report_starts_with_provenance_and_pool(kvsim: Kvsim, busy_trace: Path) -> None:
    first = kvsim("run", "--trace", busy_trace, *FLAGS).out.splitlines()[:3]
    assert first[0].startswith("timing: step assumed (linear, ")
    assert first[1] == "KV pool: 21 blocks given by --num-gpu-blocks-override"
    assert first[2].startswith("GPU KV cache size: ")
    assert "Maximum concurrency for 200 tokens per request: " in first[2]


SUMMED = (
    "num_steps",
    "num_scheduled_reqs",
    "num_scheduled_tokens",
    "num_prefill_tokens",
    "num_decode_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preempted_cache_queries",
    "preempted_cache_hits",
    "num_admitted",
    "num_resumed",
    "num_preempted",
    "num_finished",
    "num_refusals",
    "recomputed_tokens",
)


@pytest.mark.parametrize("allocator", ["prefix", "paged", "reserve-max", "reserve-pow2"])
def test_run_rows_expand_to_step_rows(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, allocator: str
) -> None:
    flags = ("--trace", busy_trace, *FLAGS, "--allocator", allocator)
    kvsim("run", *flags, "-o", tmp_path / "runs")
    kvsim("run", *flags, "-o", tmp_path / "steps", "--save-steps")
    runs = pd.read_parquet(tmp_path / "runs" / "steps.parquet")
    steps = pd.read_parquet(tmp_path / "steps" / "steps.parquet")
    summary = _json(tmp_path / "runs" / "summary.json")
    assert (steps["num_steps"] == 1).all()
    assert len(runs) < len(steps) == summary["num_steps"]
    assert runs["num_refusals"].sum() == summary["allocation_refusals"]
    for run in runs[runs["num_steps"] > 0].to_dict("records"):
        inside = steps[(steps["step"] >= run["step"])].head(int(run["num_steps"]))
        assert inside["step"].iloc[0] == run["step"]
        for name in SUMMED:
            assert inside[name].sum() == run[name], name
        assert inside["time"].iloc[0] == run["time"]
        assert inside["duration"].sum() == pytest.approx(run["duration"], abs=1e-9)
        assert set(inside["running"]) == {run["running"]}
        assert inside["waiting"].iloc[0] == run["waiting"]
        assert inside["used_blocks"].iloc[-1] == run["used_blocks"]
        for state in ("live", "reserved", "internal", "external", "cached", "free"):
            name = f"kv_{state}_slots"
            mean = np.average(inside[name], weights=inside["duration"])
            assert mean == pytest.approx(run[name], abs=1e-9)
    for name in ("requests.parquet", "manifest.json"):
        assert (tmp_path / "runs" / name).read_bytes() == (tmp_path / "steps" / name).read_bytes()
    for name, value in _json(tmp_path / "steps" / "summary.json").items():
        close = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert summary[name] == close, name


@pytest.mark.parametrize("step_time", ["linear:0.01,1e-4,1e-6", "constant:0.02"])
def test_run_rows_expand_on_demand(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, step_time: str
) -> None:
    flags = ("--trace", busy_trace, *SMALL, "--step-time", step_time)
    kvsim("run", *flags, "-o", tmp_path / "runs")
    kvsim("run", *flags, "-o", tmp_path / "steps", "--save-steps")
    runs = pa.parquet.read_table(tmp_path / "runs" / "steps.parquet")
    steps = pd.read_parquet(tmp_path / "steps" / "steps.parquet")
    got = expand(runs).to_pandas()
    assert len(got) == len(steps) > len(runs)
    for name in got.columns:
        assert got[name].to_numpy() == pytest.approx(steps[name].to_numpy(), abs=1e-9), name
    assert expand(runs.slice(0, 0)).num_rows == 0


def test_run_rows_join_end_to_end(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path)
    rows = pd.read_parquet(tmp_path / "steps.parquet")
    ends = (rows["time"] + rows["duration"]).to_numpy()[:-1]
    assert rows["time"].to_numpy()[1:] == pytest.approx(ends, abs=1e-9)
    duration = _json(tmp_path / "summary.json")["duration"]
    assert rows["duration"].sum() == pytest.approx(duration, abs=1e-9)


def test_block_tables(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    flags = ("-o", tmp_path, "--save-block-tables", "--save-steps")
    kvsim("run", "--trace", busy_trace, *FLAGS, *flags)
    lines = [
        json.loads(line) for line in (tmp_path / "block_tables.jsonl").read_text().splitlines()
    ]
    steps = pd.read_parquet(tmp_path / "steps.parquet")
    assert [line["step"] for line in lines] == steps["step"].tolist()
    for line, scheduled in zip(lines, steps["scheduled"], strict=True):
        assert list(line["blocks"]) == [part.rpartition(":")[0] for part in scheduled.split(";")]
        assert all(0 < block < 21 for blocks in line["blocks"].values() for block in blocks)


def test_manifest(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    kvsim("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "out", "--seed", "7")
    manifest = _json(tmp_path / "out" / "manifest.json")
    assert manifest["trace"]["sha256"] == hashlib.sha256(busy_trace.read_bytes()).hexdigest()
    assert manifest["trace"]["format"] == "native"
    assert manifest["trace"]["num_requests"] == 12
    assert manifest["seeds"] == {"seed": 7}
    assert manifest["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"python", "simpy", "numpy", "pyarrow", "msgspec"} <= manifest["versions"].keys()
    assert [source["provenance"] for source in manifest["timing"]["sources"]] == ["assumed"]
    assert manifest["kv_pool"]["num_gpu_blocks"] == 21
    config = manifest["config"]
    assert config["trace"] == str(busy_trace)
    assert config["allocator"] == "prefix"
    assert (config["max_num_seqs"], config["max_num_batched_tokens"]) == (6, 2048)
    assert "output_dir" not in config


def test_manifest_of_the_shipped_workload_names_no_place(kvsim: Kvsim, tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "8", "--step-time", "constant:0.001")
    kvsim("run", *flags, "-o", tmp_path, "--format", "csv")
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert str(REPOSITORY) not in text
    assert str(tmp_path) not in text
    assert _json(tmp_path / "manifest.json")["trace"]["name"] == "conversation.jsonl"


def test_a_relative_path_stays_relative(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kvsim("run", "--trace", busy_trace.name, *FLAGS, "-o", "out")
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()


@pytest.mark.parametrize("allocator", ["prefix", "paged", "reserve-pow2"])
def test_the_config_of_a_manifest_repeats_the_run(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, allocator: str
) -> None:
    flags = ("--trace", busy_trace, *FLAGS, "--allocator", allocator)
    assert kvsim("run", *flags, "-o", tmp_path / "a").code == 0
    config = tmp_path / "config.json"
    config.write_text(json.dumps(_json(tmp_path / "a" / "manifest.json")["config"]))
    assert kvsim("run", "--config", config, "-o", tmp_path / "b").code == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("file_format", ["parquet", "csv"])
def test_same_configuration_same_bytes_in_another_process(
    busy_trace: Path, tmp_path: Path, file_format: str
) -> None:
    flags = ["run", "--trace", str(busy_trace), *FLAGS, "--format", file_format, "--save-steps"]
    flags += ["--save-block-tables"]
    assert main([*flags, "-o", str(tmp_path / "a")]) == 0
    code = "import sys; from sim.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *flags, "-o", str(tmp_path / "b")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(_without_leftovers(tmp_path / "a")) == 5
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("nth", range(4))
def test_a_full_disk_leaves_old_files_whole(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Where the write of the *nth* file fails half-way, what stood there stands."""
    names = ["requests.parquet", "steps.parquet", "summary.json", "manifest.json"]
    out = tmp_path / "out"
    kvsim("run", "--trace", busy_trace, *FLAGS, "-o", out)
    old = {name: (out / name).read_bytes() for name in names}
    flags = ("run", "--trace", busy_trace, *SMALL, "--step-time", "constant:0.5")
    kvsim(*flags, "-o", tmp_path / "new")
    new = {name: (tmp_path / "new" / name).read_bytes() for name in names}

    real_json = msgspec.json.format

    class FailingWriter(pa.parquet.ParquetWriter):  # type: ignore[misc]  # has no types
        def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
            super().__init__(file, schema)
            self.file = file

        def write_table(self, table: pa.Table) -> None:
            if names[nth].partition(".")[0] in Path(self.file.name).name:
                self.file.write(b"half")
                raise FULL
            super().write_table(table)

    written = iter(names[2:])

    def failing_json(data: bytes, indent: int) -> bytes:
        if next(written, None) == names[nth]:
            raise FULL
        return real_json(data, indent=indent)

    monkeypatch.setattr(pa.parquet, "ParquetWriter", FailingWriter)
    monkeypatch.setattr(msgspec.json, "format", failing_json)
    done = kvsim(*flags, "-o", out)
    monkeypatch.undo()
    assert done.code == 1
    assert str(out / names[nth]) in done.refusal
    assert "No space left on device" in done.refusal
    assert _without_leftovers(out) == sorted(names)
    for position, name in enumerate(names):
        assert (out / name).read_bytes() == (new if position < nth else old)[name], name


def test_block_tables_of_an_interrupted_run_are_not_left(
    busy_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.engine.Scheduler.update_from_output", interrupted)
    arguments = ["run", "--trace", str(busy_trace), *FLAGS, "-o", str(tmp_path / "out")]
    assert main([*arguments, "--save-block-tables"]) == 130
    assert _without_leftovers(tmp_path / "out") == []


def test_files_have_the_mode_that_the_user_asks_for(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_json(tmp_path / "ours.json", {})
    assert (tmp_path / "ours.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def _piped(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


KVSIM = f'{sys.executable} -c "import sys; from sim.cli import main; sys.exit(main())"'


def test_a_closed_pipe_is_no_error(busy_trace: Path) -> None:
    done = _piped(f"{KVSIM} run --trace {busy_trace} {' '.join(FLAGS)} | true")
    assert done.stderr == ""


def test_standard_error_may_be_closed(kvsim: Kvsim, busy_trace: Path) -> None:
    run = f"run --trace {busy_trace} {' '.join(FLAGS)}"
    done = _piped(f"{KVSIM} {run} --live 2>&-")
    assert (done.returncode, done.stdout) == (0, kvsim(*run.split()).out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_on_a_full_disk(busy_trace: Path) -> None:
    done = _piped(f"{KVSIM} run --trace {busy_trace} {' '.join(FLAGS)} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "kvsim: standard output: No space left on device\n"


def test_version(kvsim: Kvsim) -> None:
    assert kvsim("--version").out.startswith("kvsim, version ")


def test_block_tables_of_an_earlier_run_do_not_stay(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    flags = ("--trace", busy_trace, *FLAGS, "-o", tmp_path)
    kvsim("run", *flags, "--save-block-tables")
    assert (tmp_path / "block_tables.jsonl").exists()
    kvsim("run", *flags)
    assert not (tmp_path / "block_tables.jsonl").exists()


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_a_huge_block_costs_nothing(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, allocator: str
) -> None:
    size = ("--block-size", "2147483647", "--num-gpu-blocks-override", "9")
    flags = ("--max-model-len", "512", "--step-time", "constant:1", "--allocator", allocator)
    assert kvsim("run", "--trace", busy_trace, *size, *flags).code == 0


def test_termination_leaves_no_temporary_file(busy_trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ["run", "--trace", str(busy_trace), "-o", str(folder), "--save-block-tables"]
    arguments += ["--num-gpu-blocks-override", "64", "--max-model-len", "512"]
    code = (
        "import os, signal, sys\n"
        "from sim import cli, simulation\n"
        "run = simulation.Simulation.run\n"
        "def stopped(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return run(*arguments)\n"
        "simulation.Simulation.run = stopped\n"
        f"sys.exit(cli.main({arguments!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "kvsim: interrupted"
    assert not list(folder.iterdir())


SLIDING = {
    "model_type": "mistral",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "sliding_window": 128,
}


def test_a_model_by_the_path_of_its_configuration(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    """Four layers of 2 heads of 64: 2,048 bytes a token; the window is noted where it binds."""
    (tmp_path / "config.json").write_text(json.dumps(SLIDING))
    flags = ("--kv-cache-memory-bytes", str(2048 * 16 * 40), "--step-time", "constant:0.01")
    out = tmp_path / "out"
    for longest, notes, tokens in ((128, 0, 640), (200, 1, 615)):
        done = kvsim("run", "--trace", busy_trace, "--model", tmp_path, *flags,
                     "--max-model-len", str(longest), "-o", out)  # fmt: skip
        assert done.code == 0, done.err
        assert f"GPU KV cache size: {tokens} tokens" in done.out
        windows = [note for note in done.notes if "windows are not modelled" in note]
        assert len(windows) == notes
    assert _json(out / "manifest.json")["config"]["model"] == str(tmp_path)
