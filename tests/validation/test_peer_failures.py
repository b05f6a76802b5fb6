"""Failures that users reported of other simulators and servers do not happen here.

Hangs, silent fallbacks, preemption that inflates the throughput, flags without effect.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from sim.cli import main
from sim.options import settings
from sim.timing.table_file import save
from tests.checked import Row, plain_run, replay, requests_of, steps_of
from tests.strategies import (
    PAGED,
    PREFIX,
    VARIANTS,
    Variant,
    make_config,
    make_trace,
    random_trace,
    smallest_pool,
)
from tests.timing_tables import chunks, decodes, layers, table
from workloads.record import Segment

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)


def _flags(variant: Variant) -> list[str]:
    return [
        part
        for name, value in variant.settings.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]


def _write_trace(path: Path, lengths: list[tuple[int, int]]) -> Path:
    lines = [{"arrival_time": 0, "input_length": p, "output_len": o} for p, o in lengths]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


@every_variant
def test_a_pool_too_small_for_one_request(
    variant: Variant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused at the start with both numbers and a remedy: no hang, no made-up pool."""
    least = smallest_pool(variant, 16, 1000)
    trace = _write_trace(tmp_path / "trace.jsonl", [(10, 10)])
    arguments = ["run", "--trace", str(trace), *_flags(variant), "--max-model-len", "1000"]
    arguments += ["--output-dir", str(tmp_path / "out")]
    assert main([*arguments, "--num-gpu-blocks-override", str(least - 1)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvsim: max_model_len 1000 needs ")
    assert captured.err.count("\n") == 1
    assert "lower --max-model-len to at most" in captured.err
    assert not (tmp_path / "out" / "summary.json").exists()
    assert main([*arguments, "--num-gpu-blocks-override", str(least)]) == 0


def test_compare_says_whom_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _write_trace(tmp_path / "trace.jsonl", [(10, 10)])
    arguments = ["compare", "--trace", str(trace), "--num-gpu-blocks-override", "64"]
    arguments += ["--placement", "buddy", "--output-dir", str(tmp_path / "out")]
    assert main([*arguments, "--max-model-len", "1000"]) == 1
    captured = capsys.readouterr()
    for name in ("reserve-max-buddy", "reserve-pow2-buddy", "reserve-oracle-buddy"):
        assert f"skipped {name}: max_model_len 1000 needs 1024 contiguous slots" in captured.err
        assert name not in captured.out
    rows = msgspec.json.decode((tmp_path / "out" / "compare.json").read_bytes())
    assert [row["allocator"] for row in rows] == ["paged", "prefix"]
    assert main([*arguments, "--max-model-len", "2000"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("needs") == 5


@every_variant
def test_one_request_that_can_never_fit(variant: Variant) -> None:
    """It is refused when it arrives, and does not stand in the way of the rest."""
    config = make_config(
        variant,
        max_model_len=100,
        num_gpu_blocks_override=smallest_pool(variant, 16, 100),
        max_num_seqs=4,
    )
    trace = make_trace((0, 20, 30), (0, 100, 1), (0, 99, 50), (0, 5000, 3), (1, 30, 5))
    result = replay(config, trace)
    rows = requests_of(result)
    assert [row["refused"] is None for row in rows] == [True, False, True, False, True]
    assert {row["refused"] for row in rows if row["refused"]} == {"prompt_too_long"}
    assert [row["num_output_tokens"] for row in rows] == [30, None, 1, None, 5]
    assert "r1" not in "".join(row["scheduled"] for row in steps_of(result))


def test_only_refused_requests_end_at_once(tmp_path: Path) -> None:
    trace = _write_trace(tmp_path / "trace.jsonl", [(500, 10), (600, 10)])
    arguments = ["run", "--trace", str(trace), "--max-model-len", "100", "--json"]
    assert main([*arguments, "--output-dir", str(tmp_path)]) == 0
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert (summary["completed"], summary["failed"], summary["num_steps"]) == (0, 2, 0)
    assert summary["output_throughput"] is None


def _scheduled(row: Row) -> dict[str, int]:
    pairs = (entry.rpartition(":") for entry in row["scheduled"].split(";") if entry)
    return {name: int(tokens) for name, _, tokens in pairs}


def test_preemption_does_not_inflate_the_throughput() -> None:
    """What is computed again is counted as that, and a token that was sampled is sampled once."""
    config = make_config(
        PAGED,
        block_size=8,
        max_model_len=320,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=100,
    )
    trace = random_trace(seed=11, num_requests=60)
    result = plain_run(config, trace)
    assert result.recorder.totals.num_preempted > 5
    computed: Counter[str] = Counter()
    most: Counter[str] = Counter()
    total_lost = 0
    for row in steps_of(result):
        again = 0
        for name in row["preempted"].split(";") if row["preempted"] else ():
            total_lost += computed[name]
            computed[name] = 0
        for name, tokens in _scheduled(row).items():
            before = computed[name]
            computed[name] = before + tokens
            again += max(0, min(computed[name], most[name]) - before)
            most[name] = max(most[name], computed[name])
        assert row["recomputed_tokens"] == again, row["step"]
    prompts, outputs = trace.num_prompt_tokens, trace.num_output_tokens
    for name, prompt, output in zip(trace.request_ids, prompts, outputs, strict=True):
        assert computed[name] == most[name] == prompt + output - 1
    assert result.recorder.totals.recomputed_tokens == total_lost > 0
    assert sum(row["num_output_tokens"] for row in requests_of(result)) == outputs.sum()
    assert result.recorder.totals.tokens_in_second.sum() == outputs.sum()
    assert result.recorder.totals.inter_token.count == outputs.sum() - len(trace)


def test_prefix_caching_under_preemption_does_not_inflate_the_throughput() -> None:
    """Computed + found = needed + lost; `replay` counts what is recomputed step by step."""
    config = make_config(
        PREFIX,
        block_size=8,
        max_model_len=320,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=100,
    )
    trace = random_trace(seed=11, num_requests=60)
    result = replay(config, trace)
    rows, totals = steps_of(result), result.recorder.totals
    assert totals.num_preempted > 5
    assert totals.preempted_cache_hits > 0
    assert totals.recomputed_tokens > 0
    outputs = trace.num_output_tokens
    needed = int((trace.num_prompt_tokens + outputs - 1).sum())
    scheduled = sum(row["num_scheduled_tokens"] for row in rows)
    found = totals.prefix_cache_hits + totals.preempted_cache_hits
    # First-time work is what nobody had computed for this request before; the rest is again.
    assert scheduled - totals.recomputed_tokens + totals.prefix_cache_hits <= needed
    assert scheduled + found >= needed
    assert sum(row["num_cached_tokens"] for row in requests_of(result)) == totals.prefix_cache_hits
    assert sum(row["num_output_tokens"] for row in requests_of(result)) == outputs.sum()
    assert totals.tokens_in_second.sum() == outputs.sum()
    assert totals.inter_token.count == outputs.sum() - len(trace)


# ---- No setting without effect -------------------------------------------------------------------

Files = dict[str, bytes]


class Effect(NamedTuple):
    """Two command lines that differ in one setting, and what must differ between their results.

    Attributes:
        common: given both times.
        without, with_: given the first and the second time.
        differs: parts of the results that must differ: ``steps`` and ``requests`` (without the
            names of files), a key of the summary or the manifest, ``stdout`` or ``files``.
    """

    common: str
    without: str
    with_: str
    differs: tuple[str, ...]


class Refused(NamedTuple):
    """A command line in which a setting cannot apply: exit code, and what stderr says."""

    arguments: str
    code: int
    said: str


POOL = "--max-model-len 128 --num-gpu-blocks-override 20 --step-time constant:0.001"
CARD = "--max-model-len 128 --step-time constant:0.001"
KERNELS = "--max-model-len 128 --num-gpu-blocks-override 20 --gpu A100-40"

SETTINGS: dict[str, list[Effect | Refused]] = {
    "trace": [
        Effect(POOL, "--trace {chats}", "--trace {other}", ("steps", "trace")),
        Refused("--trace missing.jsonl", 1, "missing.jsonl: no such file"),
    ],
    "trace_format": [
        Refused("--trace {chats} --trace-format mooncake", 1, "this line looks like native"),
        Refused("--trace-format nativ", 2, "did you mean"),
    ],
    "seed": [Effect(POOL, "", "--seed 5", ("seeds",)), Refused("--seed -1", 2, "--seed: expected")],
    "model": [
        Effect(CARD, "", "--model Qwen3-8B", ("kv_pool", "model_id", "kv_cache_slots")),
        Effect(f"{POOL} --step-time roofline", "", "--model Qwen3-8B", ("steps", "duration")),
        Refused("--model qwen", 2, "--model 'qwen' is unknown"),
    ],
    "gpu": [
        Effect(CARD, "", "--gpu H100", ("kv_pool", "gpu", "kv_cache_slots")),
        Effect(f"{POOL} --step-time roofline", "", "--gpu H100", ("steps", "duration")),
        Refused("--gpu H1000", 2, "--gpu 'H1000' is unknown"),
    ],
    "max_model_len": [
        Effect(POOL, "", "--max-model-len 64", ("requests", "num_clipped_requests", "refused")),
        Refused("--max-model-len 1M", 2, "--max-model-len 1048576 is beyond"),
    ],
    "allocator": [
        Effect(POOL, "--allocator prefix", "--allocator paged", ("steps", "allocator")),
        Effect(POOL, "--allocator paged", "--allocator reserve-max", ("steps", "allocator")),
        Refused("--allocator page", 2, "did you mean 'paged'"),
    ],
    "reservation": [
        Effect(
            f"{POOL} --allocator contiguous",
            "",
            "--reservation oracle",
            ("steps", "allocator", "kv_internal_pct"),
        ),
        Refused("--allocator paged --reservation pow2", 2, "--reservation pow2 contradicts"),
        Refused("--allocator reserve-max --reservation pow2", 2, "--reservation pow2 contradicts"),
        Refused("compare --reservation pow2", 2, "--reservation pow2"),
        Refused("compare --allocator paged,prefix --reservation pow2", 2, "--reservation pow2"),
    ],
    "placement": [
        Effect(
            f"{POOL} --allocator reserve-oracle",
            "",
            "--placement buddy",
            ("steps", "allocator", "kv_external_pct"),
        ),
        Refused("--allocator paged --placement buddy", 2, "--placement buddy contradicts"),
        Refused("--placement buddy", 2, "--placement buddy has no effect on allocator prefix"),
        Refused("compare --allocator paged,prefix --placement buddy", 2, "--placement buddy"),
    ],
    "block_size": [
        Effect(POOL, "", "--block-size 32", ("steps", "block_size", "kv_cache_slots")),
        Effect(f"{CARD} --allocator reserve-max", "", "--block-size 32", ("steps", "kv_pool")),
        Refused("--block-size 0", 2, "--block-size: expected"),
    ],
    "gpu_memory_utilization": [
        Effect(CARD, "", "--gpu-memory-utilization 0.8", ("kv_pool", "kv_cache_slots")),
        Refused(f"{POOL} --gpu-memory-utilization 0.8", 0, "0.8 has no effect"),
        Refused("--gpu-memory-utilization 1.5", 2, "--gpu-memory-utilization: expected"),
        Refused("--gpu-memory-utilization 0.01", 1, "weights do not fit"),
    ],
    "vllm_version": [
        Effect(CARD, "", "--vllm-version 0.19", ("kv_pool", "kv_cache_slots")),
        Refused(f"{POOL} --vllm-version 0.19", 0, "0.19 has no effect"),
        Refused("--vllm-version 0.2", 2, "--vllm-version: unknown value"),
    ],
    "gpu_memory_gib": [
        Effect(CARD, "", "--gpu-memory-gib 60", ("kv_pool", "kv_cache_slots")),
        Refused("--gpu-memory-gib 0", 2, "--gpu-memory-gib: expected"),
        Refused("--gpu-memory-gib 16", 1, "weights do not fit"),
    ],
    "kv_cache_memory_bytes": [
        Effect(CARD, "", "--kv-cache-memory-bytes 1G", ("kv_pool", "kv_cache_slots")),
        Refused(f"{POOL} --kv-cache-memory-bytes 1G", 0, "1G has no effect"),
        Refused("--kv-cache-memory-bytes 1T", 1, "does not fit"),
    ],
    "num_gpu_blocks_override": [
        Effect(POOL, "", "--num-gpu-blocks-override 50", ("steps", "kv_pool", "num_gpu_blocks")),
        Refused("--num-gpu-blocks-override 1", 2, "--num-gpu-blocks-override 1"),
    ],
    "enable_prefix_caching": [
        Effect(POOL, "", "--no-enable-prefix-caching", ("steps", "allocator")),
        Refused("--allocator paged --enable-prefix-caching", 2, "contradicts --allocator paged"),
        Refused("--allocator reserve-max --enable-prefix-caching", 2, "contradicts"),
        Refused("--allocator prefix --no-enable-prefix-caching", 2, "contradicts"),
    ],
    "max_num_seqs": [
        Effect(POOL, "", "--max-num-seqs 2", ("steps", "max_num_requests_running")),
        Refused("--max-num-seqs 0", 2, "--max-num-seqs: expected"),
    ],
    "max_num_batched_tokens": [
        Effect(f"{POOL} --max-num-seqs 8", "", "--max-num-batched-tokens 16", ("steps",)),
        Refused("--max-num-batched-tokens 8 --max-num-seqs 9", 2, "less than --max-num-seqs 9"),
    ],
    "enable_chunked_prefill": [
        Effect(
            f"{POOL} --max-num-seqs 8 --max-num-batched-tokens 130",
            "",
            "--no-enable-chunked-prefill",
            ("steps", "requests"),
        ),
        Refused(
            "--no-enable-chunked-prefill --max-model-len 4096 --max-num-batched-tokens 4000",
            2,
            "without chunked prefill a whole prompt must fit",
        ),
    ],
    "long_prefill_token_threshold": [
        Effect(POOL, "", "--long-prefill-token-threshold 8", ("steps",)),
        Effect(
            f"{POOL} --no-enable-chunked-prefill",
            "",
            "--long-prefill-token-threshold 8",
            ("steps",),
        ),
        Refused("--long-prefill-token-threshold -1", 2, "--long-prefill-token-threshold: expected"),
    ],
    "scheduler_reserve_full_isl": [
        Effect(
            f"{POOL} --max-num-seqs 8 --max-num-batched-tokens 40",
            "",
            "--no-scheduler-reserve-full-isl",
            ("steps", "num_preemptions"),
        ),
        Refused(
            f"{POOL} --allocator reserve-max --no-scheduler-reserve-full-isl",
            0,
            "--no-scheduler-reserve-full-isl has no effect",
        ),
    ],
    "watermark": [
        Effect(POOL, "", "--watermark 0.5", ("steps", "mean_num_requests_running")),
        Effect(f"{POOL} --allocator reserve-max", "", "--watermark 0.5", ("steps",)),
        Refused("--watermark 1", 2, "--watermark: expected"),
    ],
    "async_scheduling": [
        Effect(POOL, "", "--async-scheduling", ("steps", "requests")),
        Effect(f"{POOL} --allocator reserve-max", "", "--async-scheduling", ("steps",)),
        Effect(POOL, "--async-scheduling", "--no-async-scheduling", ("steps", "duration")),
    ],
    "batching": [
        Effect(POOL, "", "--batching static", ("steps", "requests", "duration")),
        Effect(f"{POOL} --allocator reserve-max", "", "--batching static", ("steps",)),
        Refused("--batching dynamic", 2, "--batching: unknown value"),
        Refused("--batching static --async-scheduling", 2, "contradicts --async-scheduling"),
    ],
    "step_time": [
        Effect(POOL, "", "--step-time constant:0.5", ("steps", "duration", "timing")),
        Effect(POOL, "", "--step-time linear:0.5,0.001,0", ("steps", "timing")),
        Refused("--step-time fast", 2, "--step-time 'fast' is unknown"),
    ],
    "tensor_parallel_size": [
        Effect(CARD, "", "--tensor-parallel-size 2", ("num_gpu_blocks", "kv_pool")),
        Effect(f"{KERNELS} --gpu H100", "", "--tensor-parallel-size 2", ("duration", "steps")),
        Refused(f"{POOL} --tensor-parallel-size 3", 2, "32 attention heads that cannot be shared"),
    ],
    "request_rate": [
        Effect(f"{POOL} --trace {{spread}}", "", "--request-rate 50", ("requests", "duration")),
        Effect(f"{POOL} --trace {{spread}}", "", "--request-rate inf", ("requests",)),
        Refused(f"{POOL} --request-rate 0", 2, "--request-rate: expected"),
    ],
    "closed_loop": [
        Effect(f"{POOL} --trace {{turns}}", "", "--closed-loop", ("requests", "duration")),
        Effect(
            f"{POOL} --trace {{turns}} --allocator reserve-max", "", "--closed-loop", ("steps",)
        ),
        Refused(f"{POOL} --closed-loop", 2, "has no sessions of several turns"),
    ],
    "max_concurrency": [
        Effect(POOL, "", "--max-concurrency 1", ("requests", "mean_num_requests_running")),
        Effect(f"{POOL} --allocator reserve-max", "", "--max-concurrency 1", ("steps",)),
        Refused(f"{POOL} --max-concurrency 0", 2, "--max-concurrency: expected"),
    ],
    "goodput": [
        Effect(POOL, "", "--goodput ttft:5", ("config",)),
        Refused(f"{POOL} --goodput ttfb:5", 2, "did you mean 'ttft'"),
    ],
    "pipeline_parallel_size": [
        Refused(f"{POOL} --pipeline-parallel-size 2", 2, "runs have one stage; expected 1"),
    ],
    "dtype": [
        Effect(CARD, "", "--dtype float32 --step-time constant:1", ("num_gpu_blocks", "kv_pool")),
        Refused(f"{CARD} --dtype float32 --step-time roofline", 2, "kernels are priced in 16 bits"),
        Refused("--dtype bf16", 2, "did you mean 'bfloat16'"),
    ],
    "quantization": [
        Effect(CARD, "", "--quantization fp8", ("num_gpu_blocks", "kv_pool")),
        Refused(f"{POOL} --quantization awq", 2, "--quantization: unknown value 'awq'"),
    ],
    "kv_cache_dtype": [
        Effect(CARD, "", "--kv-cache-dtype fp8", ("num_gpu_blocks", "kv_pool")),
        Effect(f"{KERNELS} --gpu H100", "", "--kv-cache-dtype fp8", ("duration", "steps")),
        Refused("--kv-cache-dtype fp4", 2, "did you mean 'fp8'"),
    ],
    "enable_expert_parallel": [
        Effect(
            f"{POOL} --model Qwen3-30B-A3B --gpu H100 -tp 2 --step-time roofline",
            "",
            "--enable-expert-parallel",
            ("duration",),
        ),
        Refused(f"{POOL} --enable-expert-parallel", 0, "Llama-3.1-8B has no experts"),
        Refused(
            f"{POOL} --model Qwen3-30B-A3B --enable-expert-parallel", 0, "no effect on one GPU"
        ),
    ],
    "timing_table": [
        Effect(KERNELS, "", "--timing-table {table}", ("steps", "timing")),
        Refused("--timing-table {table} --step-time constant:1", 2, "has no effect on --step-time"),
        Refused("--timing-table {table} --gpu H100", 2, "expected --gpu A100-40"),
        Refused("--timing-table nowhere.parquet", 1, "nowhere.parquet: no such file"),
    ],
    "timing_fallback": [
        Effect(
            f"{KERNELS} --timing-table {{table}}",
            "",
            "--timing-fallback roofline",
            ("config",),
        ),
        Refused(
            f"{KERNELS} --timing-table {{small}} --timing-fallback error",
            1,
            "--timing-fallback roofline prices such steps",
        ),
        Refused(f"{KERNELS} --timing-fallback roofline", 0, "no effect without --timing-table"),
    ],
    "host_overhead": [
        Effect(KERNELS, "", "--host-overhead 0.01", ("steps", "duration", "timing")),
        Refused(f"{POOL} --host-overhead 0.01", 0, "--host-overhead 0.01 has no effect"),
        Refused("--host-overhead -1", 2, "--host-overhead: expected"),
    ],
    "enforce_eager": [
        Effect(KERNELS, "", "--enforce-eager", ("steps", "duration")),
        Refused(f"{POOL} --enforce-eager", 0, "--enforce-eager has no effect"),
    ],
    "output_dir": [
        Refused("--output-dir /dev/null/here", 1, "expected a folder that can be made"),
    ],
    "format": [
        Effect(POOL, "", "--format csv", ("files",)),
        Refused("--format json", 2, "unknown value 'json'"),
        Refused("--format csv", 2, "--output-dir"),
    ],
    "save_steps": [
        Effect(POOL, "", "--save-steps", ("steps",)),
        Refused("--save-steps", 2, "add --output-dir"),
    ],
    "save_block_tables": [
        Effect(POOL, "", "--save-block-tables", ("files",)),
        Refused("--save-block-tables", 2, "add --output-dir"),
        Refused(
            "--save-block-tables --allocator reserve-max --output-dir {out}", 2, "has no blocks"
        ),
        Refused("compare --save-block-tables", 2, "is for kvsim run"),
    ],
    "single_step": [Effect(POOL, "", "--single-step", ("steps",))],
    "json": [Effect(POOL, "", "--json", ("stdout",))],
    "live": [Refused("--no-live --speed 60x", 2, "has no effect without --live")],
    "speed": [
        Refused("--speed 60x", 2, "has no effect without --live or --metrics-port"),
        Refused("--live --speed 0x", 2, "--speed: expected"),
    ],
    "metrics_port": [
        Refused(f"{POOL} --metrics-port 0 --metrics-linger 0", 0, "served at http://127.0.0.1:"),
        Refused("--metrics-port 65536", 2, "--metrics-port: expected"),
        Refused("compare --metrics-port 0", 2, "is for kvsim run"),
    ],
    "metrics_host": [
        Refused(
            f"{POOL} --metrics-port 0 --metrics-linger 0 --metrics-host localhost",
            0,
            "served at http://localhost:",
        ),
        Refused("--metrics-host ::1", 2, "has no effect without --metrics-port"),
    ],
    "metrics_linger": [
        Refused(f"{POOL} --metrics-port 0 --metrics-linger 0.01", 0, "for 0.01 s or until Ctrl-C"),
        Refused("--metrics-linger inf", 2, "has no effect without --metrics-port"),
    ],
    "openmetrics": [
        Refused("--openmetrics {out}/file", 1, "expected a file in a writable folder"),
        Refused("compare --openmetrics file", 2, "is for kvsim run"),
    ],
    "openmetrics_interval": [
        Refused("--openmetrics-interval 1", 2, "has no effect without --openmetrics"),
        Refused("--openmetrics file --openmetrics-interval 0", 2, "--openmetrics-interval: expect"),
    ],
    "openmetrics_epoch": [
        Refused("--openmetrics-epoch 1", 2, "has no effect without --openmetrics"),
    ],
}
"""Every setting: where it shows, and what is said where it cannot apply."""


def test_every_setting_has_an_entry() -> None:
    assert sorted(SETTINGS) == sorted(setting.name for setting in settings())
    for name, entries in SETTINGS.items():
        flags = (f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}")
        for entry in entries:
            text = entry.with_ if isinstance(entry, Effect) else entry.arguments
            assert any(flag in text.split() for flag in flags), name


def _entries(kind: type) -> list[Any]:
    return [
        pytest.param(entry, id=f"{name}-{number}")
        for name, entries in SETTINGS.items()
        for number, entry in enumerate(entries)
        if isinstance(entry, kind)
    ]


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Answer three traces that put pressure on 19 blocks, and two timing tables, by name."""
    folder = tmp_path_factory.mktemp("workloads")
    paths = {}
    for name, salt, gap in (("chats", 0, 0), ("other", 1, 0), ("spread", 0, 0.01)):
        lines = []
        for row in range(10):
            prompt: list[Segment] = [("system", 32), (f"u{row}", 5 + (7 * row + salt) % 50)]
            if row == 9:
                prompt.append(("long", 30))
            lines.append({"arrival_time": gap * row, "prompt": prompt, "output_len": 10 + 5 * row})
        paths[name] = str(folder / f"{name}.jsonl")
        Path(paths[name]).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    paths["turns"] = str(folder / "turns.jsonl")
    turns = [
        {"arrival_time": 0.01 * i, "input_length": 9, "output_len": 20, "session_id": "s"}
        for i in range(4)
    ]
    Path(paths["turns"]).write_bytes(b"".join(msgspec.json.encode(t) + b"\n" for t in turns))
    for name, batches in (("table", (1, 16)), ("small", (1, 2))):
        paths[name] = str(folder / f"{name}.parquet")
        save(table(decodes(batches=batches), chunks(), layers()), paths[name])
    return paths


@pytest.fixture(scope="module")
def run_once(
    workloads: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """Lend a function that runs a command line (each once) and answers its results by part."""
    seen: dict[str, tuple[int, dict[str, Any]]] = {}

    def run(text: str) -> tuple[int, dict[str, Any]]:
        if text not in seen:
            folder = tmp_path_factory.mktemp("run")
            arguments = text.format(**workloads).split()
            if "--trace" not in arguments:
                arguments += ["--trace", workloads["chats"]]
            code = main(["run", *arguments, "--output-dir", str(folder)])
            results: dict[str, Any] = {"files": sorted(path.name for path in folder.iterdir())}
            for path in folder.iterdir():
                if path.stem in {"steps", "requests"}:
                    results[path.stem] = path.read_bytes()
                elif path.suffix == ".json":
                    results |= msgspec.json.decode(path.read_bytes())
            seen[text] = code, results
        return seen[text]

    return run


@pytest.mark.parametrize("effect", _entries(Effect))
def test_a_setting_changes_what_it_should(
    effect: Effect,
    run_once: Callable[[str], tuple[int, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    results, printed = [], []
    for text in (effect.without, effect.with_):
        # A flag that is given again replaces the first.
        code, result = run_once(f"{effect.common} {text}".strip())
        assert code == 0
        results.append(result)
        printed.append(capsys.readouterr().out)
    for part in effect.differs:
        if part == "stdout":
            assert printed[0] != printed[1]
            msgspec.json.decode(printed[1])
        else:
            assert results[0][part] != results[1][part], part


@pytest.mark.parametrize("refused", _entries(Refused))
def test_a_setting_that_cannot_apply_is_answered(
    refused: Refused,
    workloads: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = refused.arguments.format(out=tmp_path / "out", **workloads).split()
    command = arguments.pop(0) if arguments[0] == "compare" else "run"
    if "--trace" not in arguments and "--trace-format" not in arguments:
        arguments += ["--trace", workloads["chats"]]
    assert main([command, *arguments]) == refused.code
    assert refused.said in capsys.readouterr().err
    assert not (tmp_path / "kvsim-results").exists()


def test_a_flag_that_overrules_the_file_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _write_trace(tmp_path / "trace.jsonl", [(10, 10)])
    config = tmp_path / "config.toml"
    config.write_text('allocator = "contiguous"\nreservation = "pow2"\nplacement = "buddy"\n')
    arguments = ["run", "--config", str(config), "--trace", str(trace), "--max-model-len", "64"]
    assert main([*arguments, "--allocator", "paged"]) == 0
    said = capsys.readouterr().err
    for name in ("reservation", "placement"):
        assert f"key '{name}' (" in said
    assert said.count("has no effect: --allocator paged wins") == 2
