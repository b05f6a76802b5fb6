"""What `kvsim check` says of servers whose trouble is known: it names the right cause.

The logs of `published/server_logs` with what each is known to say, and the cases of
`published/user_reports.md` that concern running servers, made small here so that they are tested
without the folder. Each case lists its findings, notes included, by the name of the check.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sim.health import Finding, go_through
from sim.health.subjects import Subject, of_flags, of_log, of_metrics
from sim.settings import FLAG_RANK, Given


def _given(flags: dict[str, Any]) -> dict[str, Given]:
    return {name: Given(value, FLAG_RANK, f"--{name}") for name, value in flags.items()}


def _findings(subjects: list[Subject]) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for subject in subjects:
        found |= {each.check: each for each in go_through(subject.facts).findings}
    return found


class Case(NamedTuple):
    """A log or report, and what has to be found.

    Attributes:
        checks: of every finding, and no other.
        says: words that the findings have among them: cause and remedy.
        flags: what the log does not say, as its owner would add it.
    """

    checks: set[str]
    says: tuple[str, ...] = ()
    flags: dict[str, Any] = {}  # noqa: RUF012  # not written to


LOGS = {
    "01_llama31-8b_rtx3090": Case(
        {"profile", "few_fit"},
        ("2.07 GiB, the pool 3.81 GiB", "a longer max_model_len leaves less pool"),
    ),
    "04_r1-distill-qwen14b_2x4090": Case(
        {"starts", "workers"}, ("--max-model-len 81536", "every figure is per GPU")
    ),
    "07_unknown_v1_format_change": Case(set()),
    "10_gpt-oss-120b_h100_refused": Case({"starts"}, ("2.83 GiB missing",)),
    "13_fp8kv_shrinking_available": Case(
        {"starts", "profile"}, ("--max-model-len 122080", "cap max_num_batched_tokens")
    ),
    "16_gemma3-4b_h200_sglang": Case(
        {"layers_whole"}, ("windows whole sequences",), {"model": "google/gemma-3-4b-it"}
    ),
    "19_llama7b_a100-80_trtllm": Case(
        {"free_share", "heavy_token"},
        ("by default 90 %", "kv_cache_free_gpu_memory_fraction", "524,288 bytes"),
    ),
    "22_qwen35-hybrid_spark_v0181": Case(
        {"tokens_shown"}, ("685,507", "compare concurrency or blocks")
    ),
    "25_qwen3-coder-30b_pp2_uneven": Case(
        {"starts"}, ("16 of 48 layers take 8.00 GiB", "104,202 tokens fit")
    ),
    "28_mha7b_h200_v021_lmcache": Case({"heavy_token"}, ("every head keeps its own K and V",)),
    "31_glm53-flash_one-line_v029": Case(
        {"few_fit"}, ("1.94 requests of max_model_len 1,000,000",)
    ),
    "34_qwen25-omni-3b_h100_negative": Case(
        {"starts"}, ("2.77 GiB less", "a higher --gpu-memory-utilization", "makes it worse")
    ),
    "37_intel-arc_reserved_wrapped": Case(
        {"starts"}, ("10 MiB", "a higher --kv-cache-memory-bytes")
    ),
    "40_stat_lines_isl_growth": Case(
        {"budget", "hit_rate"}, ("about 52 fit, 100 are there", "--scheduler-reserve-full-isl")
    ),
    "43_v0_063_swap": Case(
        {"budget", "preemptions"}, ("preempted by SWAP", "a larger --swap-space")
    ),
    "46_dflash_waste60": Case(
        {"graphs", "hybrid_blocks"}, ("6.24 GiB, the cache has 5.16 GiB", "up to 60 %")
    ),
}


def _check(case: Case, found: dict[str, Finding]) -> None:
    assert set(found) == case.checks
    text = " | ".join(f"{each.figure}; {each.reason}; {each.change}" for each in found.values())
    for words in case.says:
        assert words in text, (words, text)


@pytest.mark.parametrize("name", LOGS)
def test_the_log_of_a_server(shared: Path, name: str) -> None:
    path = shared / "published" / "server_logs" / f"{name}.log"
    if not path.exists():
        pytest.skip(f"needs the server logs in {path.parent}")
    case = LOGS[name]
    _check(case, _findings(of_log(str(path), _given(case.flags))))


def _stat(line: int, rest: str) -> str:
    return (
        f"INFO 03-17 03:58:{10 * line:02} [loggers.py:259] Engine 000: Avg prompt throughput: "
        f"900.0 tokens/s, Avg generation throughput: 80.0 tokens/s, {rest}\n"
    )


def _stats(rows: list[tuple[int, int, float, float]], more: str = "") -> str:
    return "".join(
        _stat(
            line % 6,
            f"Running: {running} reqs, Waiting: {waiting} reqs, {more}GPU KV cache usage: "
            f"{usage}%, Prefix cache hit rate: {hits}%",
        )
        for line, (running, waiting, usage, hits) in enumerate(rows)
    )


TP2 = """\
(Worker_TP0 pid=1) INFO 02-11 19:20:47 [gpu_worker.py:298] Available KV cache memory: 8.69 GiB
(Worker_TP1 pid=2) INFO 02-11 19:20:47 [gpu_worker.py:298] Available KV cache memory: 7.46 GiB
(EngineCore_0 pid=3) INFO 02-11 19:20:48 [kv_cache_utils.py:864] GPU KV cache size: 81,472 tokens
"""
OLD_LINE = """\
INFO 03-08 05:04:29 [core.py:101] Initializing a V1 LLM engine (v0.20.0) with config: model='m'
INFO 03-08 05:04:29 [gpu_worker.py:456] Available KV cache memory: 50.10 GiB
INFO 03-08 05:04:29 [kv_cache_utils.py:1314] GPU KV cache size: 55,104 tokens
INFO 03-08 05:04:29 [kv_cache_utils.py:1319] Maximum concurrency for 131,072 tokens per request: \
4.01x
"""
STAGES = """\
VLLM_PP_LAYER_PARTITION=16,32 vllm serve m --pipeline-parallel-size 2
(EngineCore_DP0 pid=1) ValueError: To serve at least one request with the models's max seq len \
(262144), (24.0 GiB KV cache is needed, which is larger than the available KV cache memory \
(3.18 GiB). Based on the available memory, the estimated maximum model length is 34736.
"""
NOT_FREE = """\
ValueError: Free memory on device (59.32/79.15 GiB) on startup is less than desired GPU memory \
utilization (0.9, 71.24 GiB). Decrease GPU memory utilization or reduce GPU memory used by other \
processes.
"""
NEGATIVE = """\
INFO 12-24 11:54:23 [gpu_worker.py:298] Available KV cache memory: -2.77 GiB
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when \
initializing the engine.
"""
GRAPHS = """\
INFO 06-23 22:47:28 [gpu_model_runner.py:6042] Estimated CUDA graph memory: 3.60 GiB total
INFO 06-23 22:47:28 [gpu_worker.py:440] Available KV cache memory: 6.87 GiB
INFO 06-23 22:47:28 [kv_cache_utils.py:1710] GPU KV cache size: 93,792 tokens
"""
TWICE = """\
INFO 09-21 10:00:00 [gpu_worker.py:563] Available KV cache memory: 43.31 GiB
INFO 09-21 10:00:00 [gpu_worker.py:741] CUDA graph pool memory: 63.99 GiB (actual), 57.45 GiB \
(estimated), difference: 6.54 GiB (10.2%).
INFO 09-21 10:00:00 [gpu_worker.py:804] Free memory on device (175.96/178.35 GiB) on startup. \
Desired GPU memory utilization is (0.92, 164.08 GiB). Actual usage is 58.44 GiB for consumed \
memory (weights + non-torch), 62.33 GiB for peak activation, and 63.99 GiB for CUDAGraph memory. \
Replace gpu_memory_utilization config with `--kv-cache-memory=-22366042194` (-20.83 GiB) to fit \
into requested memory, or `--kv-cache-memory=-9770990632` (-9.1 GiB) to fully utilize gpu memory. \
Current kv cache memory in use is 43.31 GiB.
"""
ADVISED = """\
INFO 08-17 02:57:58 [gpu_worker.py:741] CUDA graph pool memory: 0.71 GiB (actual), 1.55 GiB \
(estimated), difference: 0.84 GiB (119.3%).
INFO 08-17 02:57:58 [gpu_worker.py:804] Free memory on device (79.99/80.0 GiB) on startup. Desired \
GPU memory utilization is (0.92, 73.6 GiB). Actual usage is 51.66 GiB for consumed memory (weights \
+ non-torch), 0.85 GiB for peak activation, and 0.71 GiB for CUDAGraph memory. Replace \
gpu_memory_utilization config with `--kv-cache-memory=21717984215` (20.23 GiB) to fit into \
requested memory. Current kv cache memory in use is 19.54 GiB.
"""
DOUBLED = ADVISED.replace("0.85 GiB for peak", "2.4 GiB for peak").replace("20.23 GiB", "18.69 GiB")
DOUBLED += """\
INFO 08-17 02:57:58 [gpu_worker.py:578] CUDA graph memory profiling is enabled (default since \
v0.21.0). The current --gpu-memory-utilization=0.9200 is equivalent to \
--gpu-memory-utilization=0.9006 without CUDA graph memory profiling.
"""
SHRUNK = """\
# --max-model-len 7000
Available KV cache memory: 3.81 GiB
GPU KV cache size: 31,216 tokens
[kv_cache_utils.py:868] Maximum concurrency for 7,000 tokens per request: 4.46x
# --max-model-len 10000
Available KV cache memory: 2.89 GiB
GPU KV cache size: 23,664 tokens
[kv_cache_utils.py:868] Maximum concurrency for 10,000 tokens per request: 2.37x
"""
TIGHT = """\
INFO 04-02 10:00:00 [utils.py:233] non-default args: {'gpu_memory_utilization': 0.98}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity \
of 23.55 GiB of which 0.31 GiB is free.
"""

WRITTEN = {
    # C09: ten times the tokens after an upgrade.
    "C09": (OLD_LINE, Case({"tokens_shown"}, ("525,599", "the memory is the same"))),
    "C13": (STAGES, Case({"starts"}, ("16 of 48 layers take 8.00 GiB",))),
    "C14": (TP2, Case({"workers"}, ("7.46 to 8.69 GiB", "7.46 GiB of Worker_TP1"))),
    # C16: the share that others hold, and too small a share: lower the first, raise the second.
    "C16 not free": (NOT_FREE, Case({"starts"}, ("gpu_memory_utilization 0.749 fits",))),
    "C16 negative": (NEGATIVE, Case({"starts"}, ("lowering it makes it worse",))),
    "C16 too tight": (TIGHT, Case({"starts", "margin"}, ("leaves 2.0 % of the card",))),
    "C17": (GRAPHS, Case({"graphs"}, ("without them it would have 10.47 GiB",))),
    # The graphs are twice in the advice; the figures are those of vllm-project/vllm#57936.
    "C18": (
        TWICE,
        Case({"graphs", "suggestion"}, ("-20.83 GiB", "counted once, it is 36.62 GiB")),
    ),
    "C18, less than there is": (DOUBLED, Case({"suggestion"}, ("counted once, it is 20.24 GiB",))),
    "C18, advised as it should be": (ADVISED, Case(set())),
    "C19": (SHRUNK, Case({"profile"}, ("goes from 7,000 to 10,000", "max_num_batched_tokens"))),
    "C24 storm": (
        _stats([(40, 5, 97.0, 5.0)] * 6, more="Preemptions: 9, "),
        Case({"preemptions", "budget"}, ("54 preemptions",)),
    ),
    # A regression as it is seen in a log: the template of the prompts changed.
    "hit rate lost": (
        _stats([(20, 0, 60.0, 90.0)] * 8 + [(24, 0, 70.0, 11.0)] * 6),
        Case({"hit_rate_kept"}, ("from 90 to 11 % at line 9", "byte by byte")),
    ),
    "seats": (
        _stats([(64, 30, 40.0, 50.0)] * 6),
        Case({"seats"}, ("64 requests run throughout and 30 wait", "--max-num-seqs 144")),
    ),
    "idle": (_stats([(0, 0, 0.0, 0.0)] * 6), Case(set())),
    "healthy": (_stats([(30, 0, 70.0, 60.0)] * 6), Case(set())),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_log_written_small(tmp_path: Path, name: str) -> None:
    text, case = WRITTEN[name]
    path = tmp_path / "server.log"
    path.write_text(text)
    _check(case, _findings(of_log(str(path), {})))


# ---- Configurations, with a load -----------------------------------------------------------------

CONSTANT = {"step_time": "constant:0.01"}


def _flags_found(tmp_path: Path, trace: str, flags: dict[str, Any]) -> dict[str, Finding]:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace)
    given = _given({"trace": str(path), "enable_prefix_caching": False, **CONSTANT, **flags})
    return _findings(of_flags(given, lambda simulation: simulation.run()))


def test_c22_a_model_that_no_card_here_holds() -> None:
    given = _given({"model": "DeepSeek-V3", "gpu": "H100", "tensor_parallel_size": 2})
    found = _findings(of_flags(given, lambda simulation: simulation.run()))
    assert found["starts"].severity == "error"
    assert "weights" in found["starts"].reason


def test_c24_a_pool_that_preempts(tmp_path: Path) -> None:
    """Four requests of 64 and 64 tokens on 16 blocks of 16: two preemptions, in vLLM and here."""
    line = '{"arrival_time": 0, "input_length": 64, "output_len": 64}\n'
    flags = {"max_model_len": 256, "num_gpu_blocks_override": 17}
    found = _flags_found(tmp_path, 4 * line, flags)["preemptions"]
    assert found.severity == "error"
    assert found.figure.startswith("2 preemptions, 0.50 a request")


def test_c26_a_prompt_that_comes_twice_hits_what_it_can(tmp_path: Path) -> None:
    """48 of 64 tokens: the last is always computed. No finding, though it is 37.5 % of all."""
    ids = list(range(64))
    lines = "".join(
        f'{{"arrival_time": {10 * row}, "prompt_token_ids": {ids}, "output_len": 4}}\n'
        for row in range(2)
    )
    flags = {
        "max_model_len": 256,
        "num_gpu_blocks_override": 65,
        "enable_prefix_caching": True,
    }
    found = _flags_found(tmp_path, lines, flags)
    assert not {"hit_rate", "hit_rate_kept", "identical", "caching_on"} & set(found)


def test_c34_requests_that_cannot_be_served(tmp_path: Path) -> None:
    lines = '{"arrival_time": 0, "input_length": 120, "output_len": 50}\n'
    flags = {"max_model_len": 128, "num_gpu_blocks_override": 65}
    assert _flags_found(tmp_path, lines, flags)["lengths"].severity == "warning"
    lines += '{"arrival_time": 0, "input_length": 128, "output_len": 5}\n'
    found = _flags_found(tmp_path, lines, flags)["lengths"]
    assert found.severity == "error"
    assert found.figure == "1 requests refused and 1 outputs cut at max_model_len 128"


@pytest.mark.parametrize(
    ("block_size", "checks"), [(8, {"kernel_blocks"}), (16, set()), (32, {"tails"})]
)
def test_c35_block_sizes(tmp_path: Path, block_size: int, checks: set[str]) -> None:
    """17 tokens: blocks of 8 fail on a GPU, blocks of 32 are half empty."""
    line = '{"arrival_time": 0, "input_length": 17, "output_len": 1}\n'
    flags = {"max_model_len": 256, "num_gpu_blocks_override": 129, "block_size": block_size}
    found = _flags_found(tmp_path, 32 * line, flags)
    assert {"kernel_blocks", "tails"} & set(found) == checks


# ---- Metrics -------------------------------------------------------------------------------------


def test_c29_hit_rates_are_of_tokens(tmp_path: Path) -> None:
    """One request of 17 tokens with 16 cached, one of 1,600 with none: 1.0 %, not 50 %."""
    path = tmp_path / "metrics.txt"
    path.write_text(
        "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"
        "vllm:prefix_cache_queries_total 1617\nvllm:prefix_cache_hits_total 16\n"
    )
    (subject,) = of_metrics(str(path), {})
    assert subject.facts.hit_rate == 16 / 1617
