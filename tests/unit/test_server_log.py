"""Server logs of our own making, one for every wording and every way a log is mangled."""

import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import ConfigError, FileError
from sim.server_log import ServerLog, Startup, explain, parse_server_log, read_server_log
from sim.server_log.lines import MAX_LINE, clean
from sim.server_log.records import FIGURES, Said, Word
from sim.server_log.settings_text import commanded, stated
from sim.server_log.wording import GPUS, WORDINGS, number

V1 = """\
INFO 05-01 10:00:00 [api_server.py:1839] vLLM API server version 0.19.0
INFO 05-01 10:00:00 [utils.py:233] non-default args: {'model_tag': 'org/a-7b', \
'max_model_len': 8192, 'gpu_memory_utilization': 0.95, 'lora': [Path(name='x', n=1)], 'port': 80}
INFO 05-01 10:00:01 [core.py:93] Initializing a V1 LLM engine (v0.19.0) with config: \
model='org/a-7b', speculative_config=None, dtype=torch.bfloat16, max_seq_len=8192, \
tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, kv_cache_dtype=auto
INFO 05-01 10:00:20 [gpu_model_runner.py:4879] Model loading took 14.99 GiB memory and 3.6 seconds
DEBUG 05-01 10:00:30 [gpu_worker.py:300] Initial free memory: 78.66 GiB; Requested memory: 0.95 \
(util), 75.23 GiB
DEBUG 05-01 10:00:31 [gpu_worker.py:301] Memory profiling takes 17.96 seconds. Total non KV cache \
memory: 17.12GiB; torch peak memory increase: 1.89GiB; non-torch forward increase memory: \
0.25GiB; weights memory: 14.99GiB.
INFO 05-01 10:00:32 [gpu_worker.py:298] Available KV cache memory: 58.11 GiB
INFO 05-01 10:00:32 [kv_cache_utils.py:1087] GPU KV cache size: 476,016 tokens
INFO 05-01 10:00:32 [kv_cache_utils.py:1091] Maximum concurrency for 8,192 tokens per request: \
58.11x
INFO 05-01 10:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 8 secs, took 0.91 GiB
DEBUG 05-01 10:00:41 [gpu_worker.py:400] Free memory on device (78.66/79.19 GiB) on startup. \
Desired GPU memory utilization is (0.95, 75.23 GiB). Actual usage is 14.99 GiB for weight, 1.89 \
GiB for peak activation, 0.25 GiB for non-torch memory, and 0.91 GiB for CUDAGraph memory. \
Replace gpu_memory_utilization config with `--kv-cache-memory=61` (57.04 GiB) to fit.
"""
V0 = """\
INFO 12-13 19:54:10 llm_engine.py:249] Initializing an LLM engine (v0.6.5) with config: \
model='org/a-8b', tokenizer='x', max_seq_len=8192, tensor_parallel_size=1
INFO 12-13 19:54:15 model_runner.py:1115] Loading model weights took 14.9600 GB
INFO 12-13 19:54:18 worker.py:243] Memory profiling takes 0.75 seconds
INFO 12-13 19:54:18 worker.py:243] the current vLLM instance can use total_gpu_memory (79.22GiB) x \
gpu_memory_utilization (0.90) = 71.29GiB
INFO 12-13 19:54:18 worker.py:243] model weights take 14.96GiB; non_torch_memory takes 1.79GiB; \
PyTorch activation peak memory takes 1.26GiB; the rest of the memory reserved for KV Cache is \
53.29GiB.
INFO 12-13 19:54:18 gpu_executor.py:76] # GPU blocks: 27285, # CPU blocks: 2048
INFO 12-13 19:54:18 gpu_executor.py:80] Maximum concurrency for 8192 tokens per request: 53.29x
"""
V0_TABLE = """\
INFO 12-13 19:54:18 worker.py:243] Memory profiling results:
INFO 12-13 19:54:18 worker.py:243] duration     0.75 seconds
INFO 12-13 19:54:18 worker.py:243] total_gpu_memory     79.22GiB
INFO 12-13 19:54:18 worker.py:243] the current vLLM instance can use    71.29GiB
INFO 12-13 19:54:18 worker.py:243] model weights take   14.96GiB
INFO 12-13 19:54:18 worker.py:243] non_torch_memory     1.79GiB
INFO 12-13 19:54:18 worker.py:243] PyTorch activation peak memory       1.26GiB
INFO 12-13 19:54:18 worker.py:243] available_kv_cache_memory    53.29GiB
"""


def _log(text: str) -> ServerLog:
    return parse_server_log(enumerate(text.splitlines(), 1))


def _only(text: str) -> Startup:
    (startup,) = _log(text).startups
    return startup


def _values(said: Iterable[Said]) -> list[float]:
    return [each.value for each in said]


def _file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "server.log"
    path.write_bytes(data)
    return path


def test_every_pattern_names_fields() -> None:
    named = {name for known in WORDINGS for name in known.pattern.groupindex}
    assert named - {"padding_layers", "max_model_len"} <= set(FIGURES)


def test_v1_wording() -> None:
    log = _log(V1)
    startup = log.startups[0]
    assert len(log.startups) == 1
    assert log.engine == "vllm"
    assert log.version is not None
    assert log.version.value == "0.19.0"
    assert log.model is not None
    assert log.model == Word("org/a-7b", 2)
    assert startup.weights_gib == Said(14.99, 4, "", "GiB")
    assert startup.kv_cache_gib == Said(58.11, 7, "", "GiB")
    assert startup.kv_cache_tokens == Said(476016, 8, "", "")
    assert _values(startup.concurrency) == [58.11]
    assert _values(startup.total_gib) == [79.19]
    assert _values(startup.requested_gib)[0] == 75.23
    assert _values(startup.activation_gib) == [1.89]
    assert _values(startup.graph_taken_gib) == [0.91]
    assert startup.settings["gpu_memory_utilization"] == (0.95, 2)
    assert startup.settings["port"] == (80, 2)
    assert startup.tensor_parallel_size == Word(1, 3)
    assert startup.max_model_len is not None
    assert startup.max_model_len.value == 8192
    findings = explain(log)
    assert "75.23 requested - 17.12 all but the cache = 58.11 GiB, as printed: 58.11" in findings[0]
    assert "58.11 x 8,192 = 476,037 tokens, as 476,016 within rounding (lines 8, 9)" in findings


def test_v0_wording() -> None:
    startup = _only(V0)
    assert startup.version == Word("0.6.5", 1)
    assert startup.weights_gib == Said(14.96, 2, "", "GB")
    assert startup.num_gpu_blocks == Said(27285, 6, "", "")
    assert _values(startup.cpu_blocks) == [2048]
    assert startup.kv_cache_gib == Said(53.29, 5, "", "GiB")
    findings = " ".join(explain(_log(V0)))
    assert (
        "71.29 requested - 14.96 weights - 1.26 activation peak - 1.79 non-torch = 53.28"
        in findings
    )
    assert "are GiB: the engine divides by 2**30" in findings


def test_v0_as_a_table() -> None:
    startup = _only(V0_TABLE)
    assert _values(startup.total_gib) == [79.22]
    assert _values(startup.kv_gib) == [53.29]
    assert "= 53.28 GiB, as printed" in explain(_log(V0_TABLE))[0]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("# GPU blocks: 2048, # CPU blocks: 512", "gpu_blocks", 2048),
        ("INFO executor_base.py:113] # cuda blocks: 190100, # CPU blocks: 0", "gpu_blocks", 190100),
        ("Model loading took 6.0160 GB and 533.851791 seconds", "load_gib", 6.016),
        ("Memory after: model weights take 512.00MiB", "profile_gib", 0.5),
        ("GPU KV cache size: 7,228,559 tokens,", "tokens", 7228559),
        ("reserved 4.25 GiB memory for KV Cache as specified by x", "reserved_gib", 4.25),
        (
            "Actual usage is 39.98 GiB for consumed memory (weights + non-torch),",
            "consumed_gib",
            39.98,
        ),
        ("total consumed (from mem_get_info): 61.49GiB; weights", "consumed_gib", 61.49),
        ("Actual usage: 27.54 GiB for weights, 0.26 GiB for peak activation", "profile_gib", 27.54),
        ("0.47 GiB for NPU graph memory. Current", "graph_taken_gib", 0.47),
        ("Overriding num_gpu_blocks=9 with num_gpu_blocks_override=7", "override_blocks", 7),
        ("max_total_num_tokens=2086558, chunked_prefill_size=8192", "tokens", 2086558),
        ("[TP0] KV Cache is allocated. #tokens: 60000, KV size: 0.13 GB", "kv_gib", 0.13),
        ("[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 631", "gpu_blocks", 631),
        (
            "[MemUsageChange] Allocated 78.30 GiB for max tokens in paged KV cache (3731744).",
            "tokens",
            3731744,
        ),
        ("Setting attention block size to 1056 tokens to ensure that", "block_size", 1056),
    ],
)
def test_wordings(line: str, field: str, value: float) -> None:
    assert _values(getattr(_only(line), field)) == [value]


def test_advice_is_no_setting() -> None:
    startup = _only(
        "INFO [gpu_worker.py:1] The current --gpu-memory-utilization=0.9000 is equivalent to "
        "--gpu-memory-utilization=0.8981 without CUDA graph memory profiling. Increase "
        "--gpu-memory-utilization to 0.9019. CUDA graph memory profiling is enabled (default since "
        "v0.21.0)."
    )
    assert startup.settings == {}
    assert startup.version is None
    assert startup.gpu_memory_utilization is not None
    assert startup.gpu_memory_utilization.value == 0.9


PREFIXES = [
    "",
    "INFO 05-01 10:00:32 [gpu_worker.py:298] ",
    "(EngineCore_DP0 pid=12) INFO 05-01 10:00:32 [gpu_worker.py:298] ",
    "(EngineCore pid=1) (Worker_TP0 pid=2) INFO 05-01 10:00:32 [gpu_worker.py:298] ",
    "(RayWorkerWrapper pid=7, ip=10.0.0.1) INFO 05-01 10:00:32 [gpu_worker.py:298] ",
    "2026-05-01T10:00:32.976518836Z (EngineCore_DP0 pid=469) INFO ",
    "2026-05-01 22:45:53.672 | (EngineCore pid=187) INFO 05-01 20:45:53 ",
    "May  1 10:00:32 host vllm[12]: ",
    "vllm-1  | (EngineCore pid=187) INFO 05-01 20:45:53 ",
    "[pod/vllm-0/server] INFO ",
    "288:(Worker_TP0 pid=3089) INFO ",
    "> ",
    "# INFO ",
    '{"log":"INFO 05-01 [x.py:1] ',
    "\u2502 INFO 03-21 20:15:45 [worker.py:267] ",
    "vLLM STDOUT: INFO 05-05 15:24:32 ",
    "[INFO ] PyProcess - W-210-model-stdout: #033[1;36m(VllmWorkerProcess pid=240)#033[0;0m INFO ",
    "\x1b[1;36m(EngineCore_DP0 pid=279)\x1b[0;0m INFO 12-02 15:47:51 [core.py:93] ",
    "[1;36m(EngineCore_DP0 pid=279)[0;0m INFO 12-02 15:47:51 [core.py:93] ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_prefix(prefix: str) -> None:
    lines = (
        "Available KV cache memory: 10.55 GiB",
        "GPU KV cache size: 230,528 tokens",
        "Maximum concurrency for 100,000 tokens per request: 2.31x",
    )
    startup = _only("\n".join(prefix + line for line in lines))
    assert _values(startup.kv_gib) == [10.55]
    assert startup.kv_cache_tokens is not None
    assert startup.kv_cache_tokens[:2] == (230528, 2)
    assert _values(startup.concurrency) == [2.31]


def test_colours_within_a_figure() -> None:
    line = "GPU KV cache size: \x1b[32;1m2,042,016\x1b[0m tokens\x1b]8;;http://x\x07"
    assert clean(line) == "GPU KV cache size: 2,042,016 tokens"


REFUSED = (
    "(EngineCore pid=416) ValueError: To serve at least one request with the model's max seq len "
    "(100000), (4.26 GiB KV cache is needed, which is larger than the available KV cache memory "
    "(4.25 GiB). Based on the available memory, the estimated maximum model length is 99700. Try"
)


@given(st.integers(min_value=24, max_value=300))
def test_wrapped_by_a_terminal(width: int) -> None:
    lines = [REFUSED[i : i + width] for i in range(0, len(REFUSED), width)]
    if len(lines) > 12:
        return
    (refusal,) = _only("\n".join(["(EngineCore pid=416) ERROR x", *lines])).refusals
    assert (refusal.needed_gib, refusal.available_gib) == (4.26, 4.25)
    assert (refusal.max_model_len, refusal.estimated_max_model_len) == (100000, 99700)


def test_wrapped_between_words_and_indented() -> None:
    startup = _only(
        "INFO ... Memory profiling takes 6.4 seconds. Total non KV cache\n"
        "         memory: 17.73GiB;\n"
        "         torch peak memory increase: 1.87GiB; weights memory: 14.99GiB.\n"
        "INFO ... Available KV cache memory: 55.05 GiB\n"
    )
    assert _values(startup.non_kv_gib) == [17.73]
    assert startup.activation_gib == [(1.87, 3, "", "GiB")]
    assert startup.kv_gib == [(55.05, 4, "", "GiB")]


def test_wrapped_without_prefix() -> None:
    startup = _only("Available KV cache memory: 10.55\n GiB\nGPU KV cache si\nze: 230,528 tokens")
    assert _values(startup.kv_gib) == [10.55]
    assert _values(startup.tokens) == [230528]


@pytest.mark.parametrize("end", range(100, len(V1), 97))
def test_cut_anywhere(end: int) -> None:
    cut = _log(V1[:end])
    whole = _log(V1).startups[0]
    for name in FIGURES:
        said = getattr(cut.startups[0], name)
        assert said == getattr(whole, name)[: len(said)] or name in {"concurrency", "tokens"}
    explain(cut)


def test_several_workers_the_least_is_the_pool() -> None:
    text = "\n".join(
        f"(Worker_TP{rank} pid={rank}) INFO [gpu_worker.py:1] Available KV cache memory: {gib} GiB"
        for rank, gib in enumerate((8.69, 7.46, 8.1))
    )
    log = _log(text + "\nGPU KV cache size: 81,536 tokens\nGPU KV cache size: 95,008 tokens")
    assert log.startups[0].kv_cache_gib == Said(7.46, 2, "Worker_TP1", "GiB")
    assert log.startups[0].kv_cache_tokens == Said(81536, 4, "", "")
    findings = " ".join(explain(log))
    assert "3 workers have 7.46 to 8.69 GiB" in findings
    assert "81,536 to 95,008 tokens, a line per worker: the pool is the smallest" in findings


def test_data_parallel_engines_have_a_pool_each() -> None:
    lines = ["(APIServer pid=1) INFO non-default args: {'model': 'm/x', 'data_parallel_size': 2}"]
    for text in ("Available KV cache memory: {} GiB", "GPU KV cache size: {}0,016 tokens"):
        lines += [
            f"(EngineCore_DP{rank} pid={rank}) INFO {text.format(rank + 1)}" for rank in (0, 1)
        ]
    log = _log("\n".join(lines))
    assert [start.name for start in log.startups] == ["", "DP1"]
    assert [start.kv_cache_tokens and start.kv_cache_tokens.value for start in log.startups] == [
        10016,
        20016,
    ]
    assert all(start.data_parallel_size == Word(2, 1) for start in log.startups)


def test_two_servers_of_one_compose_file() -> None:
    lines = [
        f"{name} | INFO Available KV cache memory: {gib} GiB"
        for name, gib in (("a-1", 1.0), ("b-1", 2.0), ("a-1", 3.0))
    ]
    log = _log("\n".join(lines))
    assert [(start.name, _values(start.kv_gib)) for start in log.startups] == [
        ("a-1", [1.0, 3.0]),
        ("b-1", [2.0]),
    ]


def test_a_crash_loop_is_several_starts() -> None:
    start = V1 + "ValueError: No available memory for the cache blocks. Try\n"
    log = _log(start * 3)
    assert len(log.startups) == 3
    assert [start.kv_cache_gib and start.kv_cache_gib.line for start in log.startups] == [7, 19, 31]
    many = _log(start * 100)
    assert len(many.startups) == 64
    assert many.forgotten == 36


def test_another_longest_request_is_another_start() -> None:
    lines = [
        f"GPU KV cache size: {tokens} tokens\nMaximum concurrency for {length} tokens per "
        f"request: {x}x"
        for tokens, length, x in (("1,600", "160", "10.00"), ("1,280", "128", "10.00"))
    ]
    log = _log("\n".join(lines))
    assert [_values(start.tokens) for start in log.startups] == [[1600], [1280]]


def test_refusals() -> None:
    first = _log(REFUSED + "\n" + REFUSED)  # logged, then raised
    assert len(first.startups[0].refusals) == 1
    text = " ".join(explain(first))
    assert "0.01 GiB missing (10 MiB)" in text
    assert "max_model_len 99,700 fits, as the server estimates" in text

    busy = _log(
        "ValueError: Free memory on device cuda:0 (59.32/79.15 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 71.24 GiB). Decrease GPU memory utilization"
    )
    assert busy.startups[0].refusals[0].kind == "free_memory"
    assert "at most gpu_memory_utilization 0.749 fits" in explain(busy)[0]

    torch = _log(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 23.58 GiB of which 512.00 MiB is free."
    )
    refusal = torch.startups[0].refusals[0]
    assert (refusal.kind, refusal.available_gib) == ("out_of_memory", 0.5)

    heads = _log(
        "vllm serve x -tp 4\nValueError: Total number of attention heads (14) must be divisible by "
        "tensor parallel size (4)."
    )
    assert heads.startups[0].refusals[0].kind == "other"
    assert "must be divisible" in explain(heads)[0]


def test_a_later_bad_request_is_no_refusal() -> None:
    assert not _only(V1 + "ValueError: This model's maximum context length is 8192\n").refused


def test_utilization_that_would_fit() -> None:
    budget = "total_gpu_memory (80.00GiB) x gpu_memory_utilization (0.80) = 64.00GiB\n"
    log = _log(budget + REFUSED.replace("4.26", "12.25"))
    assert "gpu_memory_utilization 0.9 instead of 0.8 of 80 GiB would fit" in " ".join(explain(log))


def test_identities_that_fail_show_both_numbers() -> None:
    text = V0.replace("53.29GiB.", "50.00GiB.").replace("27285", "20000")
    findings = " ".join(explain(_log(text)))
    assert "= 53.28 GiB, but 50 is printed (line 5): 3.28 GiB less" in findings
    assert "53.29 x 8,192 = 436,552 tokens, but 320,000 are printed" in findings


def test_graphs_are_taken_off_when_that_closes_the_sum() -> None:
    text = V0.replace("53.29GiB.", "52.28GiB.") + "\n"
    graphs = "Estimated CUDA graph memory: 1.00 GiB total\n"
    assert "- 1 CUDA graphs, estimated = 52.28 GiB, as printed" in " ".join(
        explain(_log(graphs + text))
    )


def test_groups_of_a_hybrid_model() -> None:
    log = _log(
        "Setting attention block size to 64 tokens to\n"
        "(100 blocks available)\nGPU KV cache size: 1,600 tokens"
    )
    assert "while a block has 64: the layers are in 4 groups" in explain(log)[0]


def test_statistics() -> None:
    vllm = _only(
        "INFO 01-31 23:59:55 [loggers.py:1] Engine 001: Avg prompt throughput: 10.5 tokens/s, Avg "
        "generation throughput: 1.0 tokens/s, Running: 3 reqs, Waiting: 4 reqs, GPU KV cache "
        "usage: 19.3%, Prefix cache hit rate: 7.5%\nGPU KV cache usage: 3"
    )
    assert vllm.name == "DP1"
    row = vllm.statistics[0]
    assert (row.running, row.waiting, row.kv_usage_pct, row.hit_rate_pct) == (3, 4, 19.3, 7.5)
    assert row.prompt_tokens_per_s == 10.5
    sglang = _only(
        "[2025-06-26 02:16:20 TP0] Decode batch. #running-req: 1, #token: 2102, token usage: 0.51, "
        "cuda graph: True, gen throughput (token/s): 93.51, #queue-req: 2"
    )
    assert sglang.engine == "sglang"
    assert (sglang.statistics[0].waiting, sglang.statistics[0].kv_usage_pct) == (2, 51.0)


def test_statistics_are_thinned() -> None:
    line = "Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"
    startup = _only("\n".join(line.format(n) for n in range(20_000)))
    running = [row.running for row in startup.statistics]
    assert len(running) <= 4096
    assert running[:3] == [0, running[1], 2 * running[1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "VLLM_X=16,32 vllm serve ./a/b --gpu-memory-utilization 0.9 -tp 2 --enforce-eager",
            {
                "VLLM_X": "16,32",
                "model": "./a/b",
                "gpu_memory_utilization": 0.9,
                "tensor_parallel_size": 2,
                "enforce_eager": True,
            },
        ),
        (
            "# --kv-cache-dtype fp8 --max-model-len 100k",
            {"kv_cache_dtype": "fp8", "max_model_len": 100000},
        ),
        ("  --max-model-len=4K \\", {"max_model_len": 4096}),
        ("      --tensor-parallel-size 4", {"tensor_parallel_size": 4}),
        ("INFO 05-01 [x.py:1] use --max-model-len 5 to", {}),
        ("  --max-model-len MAX_MODEL_LEN", {}),
        ("---- a line ----", {}),
    ],
)
def test_commands(text: str, expected: dict[str, object]) -> None:
    assert commanded(text) == expected


def test_stated_settings() -> None:
    text = "args: Namespace(model='a, b', x=C(y=1, z=[1, 2]), tensor_parallel_size=2, cut='of"
    assert stated(text) == (
        {"model": "a, b", "x": "C(y=1, z=[1, 2])", "tensor_parallel_size": 2},
        False,
    )
    assert stated("non-default args: {'a': {'model': 'nested'}, 'b': None}") == (
        {"a": "{'model': 'nested'}", "b": None},
        True,
    )
    server = _only(
        "[t] server_args=ServerArgs(model_path='m', tp_size=8, mem_fraction_static=0.88)\n"
        "KV Cache is allocated. #tokens: 10, K size: 1.00 GB, V size: 1.00 GB"
    )
    assert server.model == Word("m", 1)
    assert server.tensor_parallel_size == Word(8, 1)
    assert server.kv_cache_gib is not None
    assert server.kv_cache_gib.value == 2.0


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("|   0  NVIDIA H100 80GB HBM3          On  | 00000000", "NVIDIA H100 80GB HBM3"),
        ("GPU 0: NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("0: NVIDIA RTX PRO 6000 Blackwell | x", "NVIDIA RTX PRO 6000 Blackwell"),
        ("E=128,N=768,device_name=NVIDIA_A100-SXM4-80GB.json", "NVIDIA_A100-SXM4-80GB"),
        ("Your device 'Tesla T4' (with compute capability", "Tesla T4"),
        ("NVIDIA-SMI 535.10 Driver Version: 535", None),
        ("NVIDIA Release 25.01 (build 134983853)", None),
    ],
)  # fmt: skip
def test_cards(text: str, card: str | None) -> None:
    found = next((m for words in GPUS if (m := words.search(text))), None)
    assert (found[1] if found else None) == card


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("1_234.5", 1234.5),
        ("512 MiB", 0.5),
        ("-2.77 GiB", -2.77),
        ("24.0GB", 24.0),
    ],
)
def test_numbers(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_files(tmp_path: Path, encoding: str, newline: str) -> None:
    text = ("caf\u00e9\n" + V1).replace("\n", newline)
    log = read_server_log(_file(tmp_path, text.encode(encoding)))
    assert log.startups[0].kv_cache_tokens is not None
    assert log.startups[0].kv_cache_tokens[:2] == (476016, 9)


def test_a_progress_bar_is_of_one_line(tmp_path: Path) -> None:
    data = b"Loading:  0%\rLoading: 50%\rGPU KV cache size: 160 tokens\n\xff\xfe\x00\n"
    log = read_server_log(_file(tmp_path, data))
    assert log.startups[0].tokens == [(160, 1, "", "")]
    assert log.num_lines == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: expected the start-up log of a vLLM server"),
        (b"\n\n", "has 2 lines, none of a server"),
        (bytes(range(256)) * 64, "none of a server: expected"),
        (b"hello\nworld\n", "has 2 lines, none of a server"),
        (b"\x1f\x8b\x08\x00rest", "is compressed (gzip): expected text; unpack it first"),
    ],
)
def test_what_is_no_log(tmp_path: Path, data: bytes, message: str) -> None:
    path = _file(tmp_path, data)
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        read_server_log(path)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"--from-log {path}")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read: No such file"):
        read_server_log(tmp_path / "none.log")
    with pytest.raises(FileError, match="cannot be read: Is a directory"):
        read_server_log(tmp_path)
    with pytest.raises(FileError, match="cannot be read"):
        read_server_log("a\0b")


def test_a_line_without_end_is_skipped(tmp_path: Path) -> None:
    data = b"x" * (5 * MAX_LINE) + b"\nGPU KV cache size: 160 tokens"
    log = read_server_log(_file(tmp_path, data))
    assert log.startups[0].tokens == [(160, 2, "", "")]


@given(st.binary(max_size=2000))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    lines = enumerate(data.decode("utf-8", "replace").split("\n"), 1)
    with contextlib.suppress(ConfigError):
        explain(parse_server_log(lines))


_PIECES = st.sampled_from(
    [*V1.splitlines(), *V0.splitlines(), REFUSED, "", "\r", "-tp -", "(", "{"]
)


@given(st.lists(st.tuples(_PIECES, st.integers(0, 400)), max_size=12))
def test_any_pieces_are_explained(pieces: list[tuple[str, int]]) -> None:
    text = "\n".join(piece[:end] for piece, end in pieces)
    try:
        findings = explain(_log(text))
    except ConfigError:
        return
    assert all(line and "\n" not in line for line in findings)


def test_long_logs_are_read_fast(tmp_path: Path) -> None:
    access = b'(APIServer pid=1) INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    path = _file(tmp_path, V1.encode() + access * 100_000)
    began = time.perf_counter()
    log = read_server_log(path)
    assert log.num_lines == 100_011
    assert time.perf_counter() - began < 10  # 0.6 s where it was written


def test_a_card_without_memory_is_no_figure() -> None:
    """A mangled line: nothing is computed with it."""
    lines = (
        "INFO total_gpu_memory=0GiB gpu_memory_utilization=0.90 vllm",
        "INFO Available KV cache memory: -2.77 GiB",
        "ValueError: No available memory for the cache blocks.",
    )
    found = explain(parse_server_log(enumerate(lines, 1)))
    assert any("2.77 GiB less than weights" in line for line in found)


def test_two_starts_whose_length_is_a_word() -> None:
    starts = [
        f"vllm serve org/a-7b --max-model-len {length}\nINFO Available KV cache memory: {kv} GiB\n"
        "INFO GPU KV cache size: 31,216 tokens"
        for length, kv in (("auto", 3.81), ("9000", 2.89))
    ]
    log = parse_server_log(enumerate("\n".join(starts).splitlines(), 1))
    assert [start.max_model_len and start.max_model_len.value for start in log.startups] == [
        "auto",
        9000,
    ]
    assert not any("goes from" in line for line in explain(log))
