"""``kvsim advise``: each step is what `kvsim run` says of it, and is kept by the rule."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sim.commands.advise import OF_VLLM
from sim.options import settings
from tests.cli.conftest import Kvsim

SLOS = ("--goodput", "ttft:500 tpot:50")
FIGURES = (
    "mean_num_requests_running", "max_num_requests_running", "output_throughput", "median_ttft_ms",
    "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "num_preemptions", "prefix_cache_hit_rate",
    "max_kv_cache_usage_perc",
)  # fmt: skip


def advise(kvsim: Kvsim, *arguments: str | Path) -> dict[str, Any]:
    done = kvsim("advise", "--json", *arguments)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Sixty requests, ten a second, that share half of their prompts."""
    path = tmp_path / "chats.jsonl"
    lines = [
        {
            "arrival_time": 0.1 * row,
            "prompt": [["system", 512], [f"u{row}", 400 + 17 * row % 300]],
            "output_len": 60 + 13 * row % 90,
        }
        for row in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def steps(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [step for step in answer["steps"] if step["step"] == name]


def test_the_shipped_workload_is_carried_in_the_end(kvsim: Kvsim) -> None:
    found = advise(kvsim, *SLOS)
    assert [step["step"] for step in found["steps"][:7]] == [
        "as given",
        "prefix caching",
        "utilization",
        "fp8 KV cache",
        "max_model_len",
        "max_num_seqs",
        "quantized weights",
    ]
    assert found["steps"][0]["outcome"]["slo_attainment"] < 0.01
    (length,) = steps(found, "max_model_len")
    assert length["verdict"] == "no gain"  # paging reserves nothing
    assert length["outcome"]["users_held_factor"] == 1
    (sharing,) = steps(found, "prefix caching")
    assert sharing["verdict"] == "kept"
    assert sharing["outcome"]["prefix_cache_hit_rate"] > 0.3
    assert [step["outcome"]["num_gpus"] for step in steps(found, "more cards")[:2]] == [2, 4]
    (back,) = steps(found, "no fp8 KV cache")  # which helped on one card
    assert back["verdict"] == "kept"
    assert back["outcome"]["slo_attainment"] >= 0.99
    assert found["changes"].keys() == {"enable_prefix_caching", "tensor_parallel_size"}
    assert "meet the SLOs: met" in found["result"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpu-memory-utilization", "0.5", *SLOS),
        ("--num-gpu-blocks-override", "400", "--max-num-seqs", "8", "--max-model-len", "2048"),
        ("--allocator", "reserve-oracle", "--gpu-memory-utilization", "0.55"),
        ("--model", "Qwen/Qwen3-14B", "--goodput", "ttft:100 tpot:30", "--request-rate", "30"),
    ],
    ids=str,
)
def test_the_command_line_gives_the_figures(
    kvsim: Kvsim, chats: Path, flags: tuple[str, ...]
) -> None:
    found = advise(kvsim, "--trace", chats, *flags)
    last = [s for s in found["steps"] if s["verdict"] in {"start", "kept"}][-1]["outcome"]
    assert found["replicas"] == 1
    command = shlex.split(found["commands"]["kvsim"])
    assert command[0] == "kvsim"
    summary = json.loads(kvsim(*command[1:], "--json").out)
    for name in FIGURES:
        assert last[name] == summary[name], name
    again = advise(kvsim, "--trace", chats, *flags)
    assert again == found


def test_steps_are_kept_by_the_rule(kvsim: Kvsim, chats: Path) -> None:
    """Without SLOs: 1 % of throughput, and of more cards as much as they cost."""
    small = ("--gpu-memory-utilization", "0.46", "--max-model-len", "2048")
    found = advise(kvsim, "--trace", chats, *small)
    verdicts = set()
    for step in found["steps"][1:]:
        if step["outcome"] is None:
            continue
        factor = step["outcome"]["output_throughput_factor"]
        needed = 1.98 if step["step"] == "more cards" else 1.01
        verdicts.add(step["verdict"])
        assert (step["verdict"] == "kept") == (factor >= needed), step["step"]
    assert {"kept", "no gain"} <= verdicts


def test_vllm_s_command_line(kvsim: Kvsim, chats: Path) -> None:
    flags = ("--trace", chats, "--block-size", "32", "--no-enable-chunked-prefill")
    found = advise(kvsim, *flags, "--max-model-len", "2048", "--max-num-batched-tokens", "4096")
    command = shlex.split(found["commands"]["vllm"])
    assert command[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    assert "--no-enable-chunked-prefill" in command
    assert command[command.index("--block-size") + 1] == "32"
    assert command[command.index("--max-num-batched-tokens") + 1] == "4096"
    assert not {"--trace", "--gpu", "--goodput", "--allocator"} & set(command)
    assert set(OF_VLLM) <= {setting.name for setting in settings()}


def test_static_batching_has_no_vllm_command(kvsim: Kvsim, chats: Path) -> None:
    commands = advise(kvsim, "--trace", chats, "--batching", "static")["commands"]
    assert "--batching static" in commands["kvsim"]
    assert commands["vllm"] is None


def test_replicas(kvsim: Kvsim, chats: Path) -> None:
    """Long prompts on cards without NVLink: two engines do better than one on both."""
    flags = ("--gpu", "L40S", "--request-rate", "40", "--goodput", "ttft:300 tpot:60")
    found = advise(kvsim, "--trace", chats, *flags)
    assert found["replicas"] > 1
    assert f"--data-parallel-size {found['replicas']}" in found["commands"]["vllm"]
    assert f"kvsim trace sample --every {found['replicas']}" in found["commands"]["kvsim"]
    assert f"--request-rate {40 / found['replicas']}" in found["commands"]["kvsim"]


def test_a_model_that_does_not_fit_gets_what_makes_it_fit(kvsim: Kvsim, chats: Path) -> None:
    """No remedy is enough alone; those that turn out not to be needed are taken back."""
    flags = ("--model", "meta-llama/Llama-3.1-70B", "--gpu", "H100", "--goodput", "ttft:5000")
    found = advise(kvsim, "--trace", chats, *flags)
    first = found["steps"][0]
    assert first["verdict"] == "cannot"
    assert "weights do not fit" in first["why"]
    assert [step["verdict"] for step in found["steps"][1:6]] == ["not enough"] * 5
    assert steps(found, "quantized weights")[0]["verdict"] == "kept"
    assert steps(found, "no max_model_len")[0]["verdict"] == "kept"
    assert not steps(found, "no prefix caching")  # it costs nothing
    assert found["changes"].keys() == {"enable_prefix_caching", "kv_cache_dtype", "quantization"}


def test_nothing_fits(kvsim: Kvsim, chats: Path) -> None:
    flags = ("--model", "meta-llama/Llama-3.1-405B", "--gpu-memory-gib", "20")
    done = kvsim("advise", "--json", "--trace", chats, *flags)
    assert done.code == 1
    found = json.loads(done.out)
    assert found["result"] == "nothing that was tried starts, on up to 8 cards"
    assert found["commands"] == {"kvsim": None, "vllm": None}


def test_steps_that_cannot_be_done_say_why(kvsim: Kvsim, chats: Path) -> None:
    pool = ("--num-gpu-blocks-override", "400", "--max-model-len", "2048")
    found = advise(
        kvsim, "--trace", chats, *pool, "--kv-cache-dtype", "fp8", "--allocator", "prefix"
    )
    assert steps(found, "prefix caching")[0]["why"] == "it is on"
    assert steps(found, "fp8 KV cache")[0]["why"] == "it is fp8"
    assert steps(found, "utilization")[0]["verdict"] == "cannot"
    assert "not by utilization" in steps(found, "utilization")[0]["why"]


def test_the_report(kvsim: Kvsim, chats: Path) -> None:
    done = kvsim("advise", "--trace", chats, *SLOS)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("60 requests of ")
    tables = lines[2 : next(n for n, line in enumerate(lines) if line.startswith("rule: ")) - 3]
    assert max(map(len, tables)) <= 100
    assert any(line.startswith("+ prefix caching") for line in lines)
    assert any(line.startswith("$ kvsim run ") for line in lines)
    assert any(line.startswith("$ vllm serve ") for line in lines)
    assert any("not modelled, measure it" in line for line in lines)
    assert any(line.startswith("- timing: ") and "fitted" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--goodput", "ttfp:5"), 2, "--goodput: unknown metric 'ttfp'; did you mean 'ttft'"),
        (("--allocator", "paged,prefix"), 2, "--allocator: unknown value 'paged,prefix'"),
        (("--trace", "missing.jsonl"), 1, "missing.jsonl: no such file"),
        (("--output-dir", "x"), 2, "--output-dir"),
        (("--gpu", "H1000"), 2, "--gpu 'H1000' is unknown"),
        (("--step-time", "constant:0"), 2, "--step-time"),
        (("surplus",), 2, "unexpected argument 'surplus'"),
    ],
)
def test_refusals(kvsim: Kvsim, flags: tuple[str, ...], code: int, words: str) -> None:
    done = kvsim("advise", *flags)
    assert done.code == code
    assert words in done.refusal
