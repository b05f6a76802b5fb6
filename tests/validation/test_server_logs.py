"""The start-up logs of real servers: what each is known to say must be read from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.reconcile import reconcile_log
from sim.server_log import ServerLog, Startup, explain, read_server_log
from sim.server_log.records import Said, Word
from sim.settings import FLAG_RANK, Given

LOGS = [
    "01_llama31-8b_rtx3090",
    "04_r1-distill-qwen14b_2x4090",
    "07_unknown_v1_format_change",
    "10_gpt-oss-120b_h100_refused",
    "13_fp8kv_shrinking_available",
    "16_gemma3-4b_h200_sglang",
    "19_llama7b_a100-80_trtllm",
    "22_qwen35-hybrid_spark_v0181",
    "25_qwen3-coder-30b_pp2_uneven",
    "28_mha7b_h200_v021_lmcache",
    "31_glm53-flash_one-line_v029",
    "34_qwen25-omni-3b_h100_negative",
    "37_intel-arc_reserved_wrapped",
    "40_stat_lines_isl_growth",
    "43_v0_063_swap",
    "46_dflash_waste60",
]
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}


def _value(said: Said | Word | None) -> Any:
    return None if said is None else said.value


def _each(said: list[Said]) -> float | None:
    return said[0].value if said else None


def _of_refusals(startup: Startup, name: str) -> Any:
    return next((getattr(r, name) for r in startup.refusals if getattr(r, name)), None)


def _statistics(startup: Startup) -> list[dict[str, Any]]:
    return [
        {
            "running": row.running,
            **({"waiting": row.waiting} if row.swapped is None else {}),
            **({"swapped": row.swapped, "pending": row.waiting} if row.swapped is not None else {}),
            "kv": pytest.approx(row.kv_usage_pct),
        }
        for row in startup.statistics
    ]


def read_field(startup: Startup, name: str) -> Any:
    """Answer what *startup* says of a field of the expected files."""
    reads: dict[str, Any] = {
        "weights_gib": _value(startup.weights_gib),
        "weights_gb": _value(startup.weights_gib),
        "total_gib": _each(startup.total_gib),
        "peak_torch_gib": _each(startup.torch_peak_gib),
        "activation_gib": _each(startup.activation_gib),
        "non_torch_gib": _each(startup.non_torch_gib),
        "cudagraph_gib": _each(startup.graph_gib),
        "kv_gib": _value(startup.kv_cache_gib),
        "kv_gib_nondriver": next((s.value for s in startup.kv_gib if s.worker), None),
        "kv_bytes": (_value(startup.kv_cache_gib) or 0) * 2**30,
        "k_gb": _each(startup.k_gib),
        "v_gb": _each(startup.v_gib),
        "avail_after_gb": _each(startup.left_gib),
        "free_at_start_gib": _each(startup.free_gib),
        "gpu_blocks": _value(startup.num_gpu_blocks),
        "num_blocks": _value(startup.num_gpu_blocks),
        "cpu_blocks": _each(startup.cpu_blocks),
        "tokens": _value(startup.kv_cache_tokens),
        "concurrency": _each(startup.concurrency),
        "max_model_len": _value(startup.max_model_len),
        "gpu_memory_utilization": _value(startup.gpu_memory_utilization),
        "needed_gib": _of_refusals(startup, "needed_gib"),
        "est_max_len": _of_refusals(startup, "estimated_max_model_len"),
        "refused": startup.refused,
        "reason": "no available memory" if startup.refusals[:1] else None,
        "padding_waste_pct": [said.value for said in startup.padding_pct],
        "stats": _statistics(startup),
    }
    return reads[name]


def _load(shared: Path, name: str) -> tuple[ServerLog, dict[str, Any]]:
    folder = shared / "published" / "server_logs"
    if not folder.is_dir():
        pytest.skip(f"needs the server logs in {folder}")
    expected = json.loads((folder / f"{name}.expected.json").read_text(encoding="utf-8"))
    return read_server_log(folder / f"{name}.log"), expected


@pytest.mark.parametrize("name", LOGS)
def test_what_the_log_says_is_read(shared: Path, name: str) -> None:
    log, expected = _load(shared, name)
    assert log.engine == ENGINES[expected["engine"]]
    reported = expected["reported"]
    runs = reported.get("runs", [reported])
    assert len(log.startups) == len(runs)
    for startup, run in zip(log.startups, runs, strict=True):
        for field, value in run.items():
            approximate = isinstance(value, float)
            found = read_field(startup, field)
            assert found == (pytest.approx(value, abs=1e-9) if approximate else value), field
        if run.get("reason"):
            assert startup.refusals[0].kind == "no_memory"


SAID_FLAGS = {
    "max_model_len": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_utilization",
}
NOT_IN_THE_LOG = {
    ("04_r1-distill-qwen14b_2x4090", "gpu_memory_utilization"),
    ("10_gpt-oss-120b_h100_refused", "gpu_memory_utilization"),
    ("34_qwen25-omni-3b_h100_negative", "gpu_memory_utilization"),
}


@pytest.mark.parametrize("name", LOGS)
def test_flags_that_the_log_tells_are_read(shared: Path, name: str) -> None:
    log, expected = _load(shared, name)
    for flag, value in expected["flags"].items():
        found = log.startups[-1].setting(flag)
        if flag in SAID_FLAGS and (name, flag) not in NOT_IN_THE_LOG:
            assert read_field(log.startups[-1], flag) == value
        elif found is not None:
            assert found.value == value
    model = log.model
    if model is not None:
        assert model.value.removeprefix("./") == expected["model"]


ANSWERS = {
    "01_llama31-8b_rtx3090": ["= 3.81 GiB, as printed", "a longer max_model_len leaves less pool"],
    "04_r1-distill-qwen14b_2x4090": ["need not be the least", "5,096 blocks", "per GPU"],
    "07_unknown_v1_format_change": ["= 16 tokens a block"],
    "10_gpt-oss-120b_h100_refused": ["2.83 GiB missing", "ends within a message"],
    "13_fp8kv_shrinking_available": [
        "max_model_len goes from 100,000 to 221,000 and the cache from 10.55 to 5.59 GiB",
        "max_num_batched_tokens",
    ],
    "16_gemma3-4b_h200_sglang": ["8.13 GB (line 1) are GiB", "139,252 bytes a token"],
    "19_llama7b_a100-80_trtllm": ["64.75 GiB or 69.5 GB", "= 524,288 bytes a token"],
    "22_qwen35-hybrid_spark_v0181": ["= 685,507 tokens, but 188,640", "69.0 blocks a request"],
    "25_qwen3-coder-30b_pp2_uneven": ["16 of 48 layers take 8.00 GiB", "104,202 tokens"],
    "28_mha7b_h200_v021_lmcache": ["14 x 16,384 = 229,376 tokens, as 229,344 within rounding"],
    "31_glm53-flash_one-line_v029": ["are concurrency x max_model_len, as since vLLM 0.21"],
    "34_qwen25-omni-3b_h100_negative": ["2.77 GiB less", "lowering it makes it worse"],
    "37_intel-arc_reserved_wrapped": ["replaces gpu_memory_utilization", "31.16 GiB were free"],
    "40_stat_lines_isl_growth": ["pool of about 2,073,483 tokens"],
    "43_v0_063_swap": ["pool of about 290,833 tokens", "V0 counts a group of sequences as one"],
    "46_dflash_waste60": ["which then has 79.1 to 79.5 GiB", "may waste 60 %", "11.40 GiB"],
}


@pytest.mark.parametrize("name", LOGS)
def test_the_question_of_the_log_is_answered(shared: Path, name: str) -> None:
    log, _ = _load(shared, name)
    findings = explain(log)
    assert all("\n" not in line for line in findings)
    for answer in ANSWERS[name]:
        assert any(answer in line for line in findings), (answer, findings)


def test_the_worker_that_was_not_printed_binds(shared: Path) -> None:
    log, _ = _load(shared, "04_r1-distill-qwen14b_2x4090")
    assert "take 7.46 GiB, less than the 8.69" in " ".join(explain(log, bytes_per_token=98304))


@pytest.mark.parametrize(
    "model", [None, "Llama-3.1-8B", "gpt-oss-120b", "Qwen3-Next-80B-A3B-Instruct"]
)
@pytest.mark.parametrize("name", LOGS)
def test_every_log_can_be_reconciled(shared: Path, name: str, model: str | None) -> None:
    """With any model and card: what the log says stays, and nothing is raised."""
    log, _ = _load(shared, name)
    flags = {} if model is None else {"model": model, "gpu": "H100"}
    given = {key: Given(value, FLAG_RANK, f"--{key}") for key, value in flags.items()}
    starts, findings = reconcile_log(log, given, name)
    assert len(starts) == len(log.startups)
    assert findings
    for startup, start in zip(log.startups, starts, strict=True):
        if (kv := startup.kv_cache_gib) is not None:
            lines = [line for line in start["lines"] if line["what"] == "KV cache, GiB"]
            assert [(line["said"], line["line"]) for line in lines] == [(kv.value, kv.line)]


def test_the_refusal_of_gpt_oss_is_computed(shared: Path) -> None:
    log, _ = _load(shared, "10_gpt-oss-120b_h100_refused")
    flags = {"model": "gpt-oss-120b", "max_num_batched_tokens": 1024}
    given = {key: Given(value, FLAG_RANK, f"--{key}") for key, value in flags.items()}
    (start,), _ = reconcile_log(log, given, "log")
    (needed,) = [line for line in start["lines"] if line["what"] == "a longest request, GiB"]
    assert (needed["said"], round(needed["ours"], 2)) == (4.54, 4.54)
