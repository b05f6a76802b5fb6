r"""The words of each engine and version, as patterns; where they were taken from.

vLLM V0 (0.2-0.8): ``worker/worker.py``, ``worker/model_runner.py``, ``executor/executor_base.py``.
V1 (0.8-0.33): ``v1/worker/gpu_worker.py``, ``v1/core/kv_cache_utils.py``,
``v1/metrics/loggers.py``, ``utils/mem_utils.py``. SGLang: ``model_executor/model_runner.py``,
``mem_cache/memory_pool.py``, ``managers/scheduler.py``. TensorRT-LLM: ``kvCacheManager.cpp``.

In a pattern, ``<name:kind>`` is a figure for that field of `Startup`, and a space is any number of
spaces, none included: a terminal breaks lines within words, and editors between them.
"""

import re
from typing import Literal, NamedTuple

from sim.server_log.records import Engine, RefusalKind

COUNT = r"(?<!\d)\d{1,18}(?:[,_'\u2009\u00a0\u202f]\d{3})*(?!\d)"
NUMBER = r"(?<!\d)-?\d{1,18}(?:,\d{3})*(?:\.\d{1,18})?"
UNITS = {
    "GiB": 1.0, "GB": 1.0, "MiB": 2.0**-10, "MB": 2.0**-10, "TiB": 2.0**10, "TB": 2.0**10,
    "KiB": 2.0**-20, "KB": 2.0**-20, "bytes": 2.0**-30,
}  # fmt: skip
"""GiB in each unit; the engines divide by powers of two where they print GB or MB, too."""

_KINDS = {
    "count": f"(?P<@>{COUNT})",
    "number": f"(?P<@>{NUMBER})",
    "gib": rf"(?P<@>{NUMBER}\s*(?:{'|'.join(UNITS)}))",
}


def pattern(text: str) -> re.Pattern[str]:
    """Answer the pattern of *text*; see the module."""
    expanded = re.sub(r"<(\w+):(\w+)>", lambda m: _KINDS[m[2]].replace("@", m[1]), text)
    return re.compile(expanded.replace(" ", r"\s*"))


def number(text: str) -> float:
    """Answer the number at the start of *text*, GiB if a unit follows."""
    digits = re.match(r"-?[\d,_'\u2009\u00a0\u202f]*(?:\.\d+)?", text)
    assert digits is not None
    value = float(re.sub(r"[,_'\u2009\u00a0\u202f]", "", digits[0]))
    return value * UNITS.get(text[digits.end() :].strip(), 1.0)


class Wording(NamedTuple):
    """A message.

    Attributes:
        pattern: with the fields of `Startup` as its groups.
        late: printed after the pool is sized, so that it never begins another start.
        pool: it tells that the pool has been sized.
    """

    pattern: re.Pattern[str]
    late: bool = False
    pool: bool = False


_EARLY = (
    r"Loading (?:model )?weights took <load_gib:gib>",
    r"Model loading took <load_gib:gib>",
    r"Load weight end\..*?mem usage= <load_gib:gib>",
    r"total_gpu_memory[ =:(]+<total_gib:gib>",
    r"gpu_memory_utilization[ =:(]+<utilization:number> \)? = <requested_gib:gib>",
    r"the current vLLM instance can use <requested_gib:gib>",
    r"model weights take <profile_gib:gib>",
    r"weights memory: <profile_gib:gib>",
    r"non_torch_memory(?: takes)?[ =:]*<non_torch_gib:gib>",
    r"non-torch forward increase memory: <non_torch_gib:gib>",
    r"PyTorch activation peak memory(?: takes)? <activation_gib:gib>",
    r"torch peak memory increase: <activation_gib:gib>",
    r"peak_torch_memory[ =:]*<torch_peak_gib:gib>",
    r"total consumed \(from mem_get_info\): <consumed_gib:gib>",
    r"Total non KV cache memory: <non_kv_gib:gib>",
    r"(?:Memory profiling results:.*?|^)\bgpu_memory_utilization[ =:]+<utilization:number>",
    r"Initial free memory:? <free_gib:gib>",
    r"Requested memory: <utilization:number> \(util\), <requested_gib:gib>",
    r"Available KV cache memory: <kv_gib:gib>",
    r"available_kv_cache_memory[ =:]*<kv_gib:gib>",
    r"reserved for KV Cache is <kv_gib:gib>",
    r"\bkv_cache_size[ =:]*<kv_gib:gib>",
    r"reserved <reserved_gib:gib> memory for KV Cache as specified",
    r"Estimated CUDA graph memory: <graph_gib:gib>",
    r"Add <padding_layers:count> padding layers, may waste at most <padding_pct:number>%",
    r"Setting attention block size to <block_size:count> tokens",
    r"Chunked prefill is enabled with max_num_batched_tokens= <batched_tokens:count>",
    r"Using max model len <max_model_len:count>",
)
_POOL = (
    r"(?:GPU|cuda|rocm|xpu|XPU|hpu|HPU|npu|NPU|musa|neuron) blocks: <gpu_blocks:count>",
    r"# ?(?:CPU|cpu) blocks: <cpu_blocks:count>",
    r"\( <gpu_blocks:count> blocks available\)",
    r"\bnum_gpu_blocks(?: is|=|:) <gpu_blocks:count>(?! with)",
    r"with num_gpu_blocks_override= <override_blocks:count>",
    r"GPU KV cache size: <tokens:count> tokens",
    r"Maximum concurrency for <request_tokens:count> tokens per request: <concurrency:number>x",
    r"by the cp_world_size <context_parallel:count>",
    r"KV Cache is allocated\..*?#tokens: <tokens:count>",
    r"\bK size: <k_gib:gib>, V size: <v_gib:gib>",
    r"\bKV size: <kv_gib:gib>",
    r"max_total_num_tokens= <tokens:count>",
    r"Allocate <kv_gib:gib> for k/v cache",
    r"Using <tokens:count> tokens in paged KV cache",
    r"Allocated <kv_gib:gib> for max tokens in paged KV cache \(<tokens:count>\)",
    r"Number of blocks in KV cache primary pool: <gpu_blocks:count>",
    r"primary blocks[=:] <gpu_blocks:count>",
    r"(?:tokens per block[=:]|Number of tokens per block:) <block_size:count>",
)
_LATE = (
    r"Graph capturing finished in .*?took <graph_taken_gib:gib>",
    r"Desired GPU memory utilization is \( <utilization:number>, <requested_gib:gib>\)",
    r"Free memory on device[^()]{0,40}\( <free_gib:number>/ <total_gib:gib>\) on startup\.",
    r"Actual usage(?: is|:) <profile_gib:gib> for weights?",
    r"Actual usage(?: is|:) <consumed_gib:gib> for consumed",
    r"<activation_gib:gib> for peak activation",
    r"<non_torch_gib:gib> for non-torch memory",
    r"<graph_taken_gib:gib> for (?:CUDA|NPU) ?[Gg]raph",
    r"graph pool memory: <graph_taken_gib:gib> \(actual\), <graph_gib:gib> \(estimated\)",
    r"Current kv cache memory in use is <kv_gib:gib>",
    r"--kv-cache-memory=-?\d+` \( <suggested_gib:gib>\) to fit",
    r"Memory pool end\. avail mem= <left_gib:gib>",
    r"increase --gpu-memory-utilization from <utilization:number> to",
    r"The current --gpu-memory-utilization= <utilization:number> is equivalent to "
    r"--gpu-memory-utilization= <utilization_without_graphs:number>",
)
WORDINGS = (
    *(Wording(pattern(text)) for text in _EARLY),
    *(Wording(pattern(text), late=True, pool=True) for text in _POOL),
    *(Wording(pattern(text), late=True) for text in _LATE),
)

ENGINES: tuple[tuple[Engine, re.Pattern[str]], ...] = (
    ("trtllm", re.compile(r"TensorRT-LLM\]|TRT-LLM\]|trtllm|k/v cache|paged (?:KV|kv) cache")),
    ("sglang", re.compile(r"sglang|KV Cache is allocated|max_total_num_tokens=|ServerArgs\(")),
    (
        "vllm",
        re.compile(
            r"vllm|vLLM|LLM engine|(?:GPU|cuda) blocks:|KV cache (?:size|memory)|EngineCore"
            r"|CUDA graph memory|Maximum concurrency|Memory profiling|KV cache usage|"
            r"gpu_memory_utilization|model weights take|max seq len"
        ),
    ),
)

VERSIONS = (
    re.compile(r"LLM engine \(v?(\d+\.\d+[\w.+-]*)\)"),
    re.compile(r"(?:vLLM|SGLang) (?:API server )?version:? v?(\d+\.\d+[\w.+-]*)"),
    re.compile(r"\b(?:vllm|sglang|tensorrt[-_]llm)==v?(\d+\.\d+[\w.+-]*)"),
    re.compile(r"TensorRT-LLM version:? v?(\d+\.\d+[\w.+-]*)"),
    re.compile(r"[\u2580-\u259f] +version +v?(\d+\.\d+[\w.+-]*)"),
)
"""Versions said of this server; advice ("In v0.19, ...", "default since v0.21.0") is not."""

BOUNDS = (
    (re.compile(r"GPU KV cache size: *[\d,]+ tokens, *Maximum concurrency"), "0.28 or later"),
    (re.compile(r"CUDA graph memory profiling is enabled \(default since"), "0.21 or later"),
    (re.compile(r"In v0\.\d+, CUDA graph memory profiling will be enabled"), "before 0.21"),
    # Since stages are judged on their own layers, the check is called with their groups.
    (re.compile(r"\bcheck_enough_kv_cache_memory\(vllm_config"), "before 0.21"),
    (re.compile(r"GPU KV cache size:"), "0.7.3 or later, V1"),
    (re.compile(r"blocks: \d+, # ?CPU blocks:|peak_torch_memory|, Swapped: \d+ reqs"), "V0"),
)
"""What the wording alone tells of vLLM's version."""

MODELS = (
    re.compile(r"with config: model='([^']+)'"),
    re.compile(r"Starting to load model (\S+?)\.\.\."),
    re.compile(r"[\u2580-\u259f] +model +(\S+)"),
)
GPUS = (
    re.compile(r"device_name=([\w-]+)"),
    re.compile(
        r"((?:NVIDIA(?: (?:GeForce|RTX|GTX|Quadro|TITAN|Tesla|PRO|Jetson|DGX))*"
        r" (?:[A-Z]{1,3}\d[\w-]*|\d{4}\w*)|Tesla [A-Z]\d+[\w-]*|AMD Instinct MI\d+\w*"
        r"|AMD Radeon(?: \w+)?(?: \w+)? \w*\d\w*"
        r"|Intel\(R\) (?:Arc|Data Center GPU)[()\w ]*? \w*\d\w*)"
        r"(?: (?:PCIe|SXM\d?|HBM\w+|NVL|Ti|SUPER|D|Ada|Generation|Blackwell|Server|Workstation"
        r"|Edition|Laptop|GPU|Max-Q|\d+GB)\b)*)"
    ),
)
PREEMPTION = re.compile(r"is preempted by PreemptionMode\.(\w+) mode because")
PLATFORM = re.compile(r"Automatically detected platform (\w+)")

REFUSALS: dict[RefusalKind | Literal["pool_tokens"], re.Pattern[str]] = {
    "max_model_len": pattern(
        r"To serve at least one request with the model(?:'s|s's) max seq len \(<length:count>\),"
        r" \( <needed:gib> KV cache is needed, which is larger than the available KV cache memory"
        r" \( <available:gib>\)(?:.*?estimated maximum model length is <estimate:count>)?"
    ),
    "pool_tokens": pattern(
        r"The model's max seq len \(<length:count>\) is larger than the maximum number of tokens"
        r" that can be stored in KV cache \(<pool:count>\)"
    ),
    "no_memory": pattern(
        r"No available memory for the cache blocks|Not enough memory\. Please try to increase"
        r" --mem-fraction-static"
    ),
    "free_memory": pattern(
        r"Free memory on device[^()]{0,40}\( <available:number>/ <total:gib>\) on startup is less"
        r" than desired GPU memory utilization \( <utilization:number>, <needed:gib>\)"
    ),
    "out_of_memory": pattern(
        r"(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate <needed:gib>"
        r"(?:.*?total capacity of <total:gib> of which <available:gib> is free)?"
    ),
}
OTHER_REFUSAL = re.compile(
    r"\b(?:ValueError: |Value error, |AssertionError: (?=Error in memory))(.{10,300})"
)

INTERESTING = re.compile(
    r"Gi?B|MiB|blocks|bytes|tokens|reqs|max_|#running|Value ?[Ee]rror|out of mem"
    r"|No avail|Not enough|args|onfig|ersion|serve|--[a-z]|device_name|NVIDIA|Tesla|Instinct"
    r"|Arc|platform|load model|utilization|model  |padding"
)
"""What no line that is of use lacks: the rest is dropped unread."""

STATISTICS = pattern(r"Running: <running:count> reqs.*?KV cache usage: <usage:number>%")
STATISTICS_PARTS = {
    "waiting": pattern(r"(?:Waiting|Pending): <x:count> reqs"),
    "swapped": pattern(r"Swapped: <x:count> reqs"),
    "preempted": pattern(r"Preemptions: <x:count>"),
    "hit": pattern(r"Prefix cache hit rate:(?: GPU:)? <x:number>%"),
    "prompt": pattern(r"prompt throughput: <x:number> tokens/s"),
    "generation": pattern(r"generation throughput: <x:number> tokens/s"),
}
SGLANG_STATISTICS = pattern(
    r"Decode batch.*?#running-req: <running:count>,.*?token usage: <usage:number>"
)
SGLANG_PARTS = {
    "waiting": pattern(r"#queue-req: <x:count>"),
    "generation": pattern(r"gen throughput \(token/s\): <x:number>"),
}
