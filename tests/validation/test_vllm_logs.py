"""The memory model against start-up logs of vLLM (``tests/data/vllm_logs.csv``).

Facts read off public logs; each row names its source. ``grade`` A has all that is needed, B lacks
or infers a part (0.11 printed no tokens). Models that are no presets are in ``log_models.toml``;
the full estimate of pipeline stages is skipped and says so. GiB were printed with two digits: half
of the last one is allowed everywhere.
"""

import csv
import tomllib
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest

from sim.hardware import GIB, get_gpu
from sim.hf_config import spec_of
from sim.kv_groups import cache_groups
from sim.kv_pool import KVPool, kv_cache_figures
from sim.kv_spec import kv_bytes_per_token, weight_bytes
from sim.memory import (
    RULES,
    VLLM_0_11,
    Engine,
    activation_bytes,
    graph_bytes,
    non_torch_bytes,
)
from sim.models import ModelSpec, get_model
from sim.pool_sizing import size_kv_pool, stages_of

LOGS = Path(__file__).parents[1] / "data" / "vllm_logs.csv"
Row = dict[str, str]
HALF_DIGIT = 0.005  # GiB

FITTED_ON = (
    "Qwen/Qwen2.5-7B-Instruct",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
    "codellama/CodeLlama-7b-hf",
    "google/gemma-2-2b-it",
    "ibm-granite/granite-3.1-2b-instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
)
"""Every other model of the 0.19 logs, in alphabetical order: the rest was held out."""

ALIASES = {
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "mistralai/Mistral-Small-3.1-24B",
}
"""Models of the logs under the name that has the same shapes here."""

SHAPES = {  # layers, hidden, MLP, vocabulary, gated: of models that the logs have and we may lack
    "codellama/CodeLlama-7b-hf": (32, 4096, 11_008, 32_016, True),
    "google/gemma-2-27b-it": (46, 4608, 36_864, 256_000, True),
    "google/gemma-2-2b-it": (26, 2304, 9_216, 256_000, True),
    "google/gemma-7b": (28, 3072, 24_576, 256_000, True),
    "ibm-granite/granite-3.1-2b-instruct": (40, 2048, 8_192, 49_155, True),
    "ibm-granite/granite-3.1-8b-instruct": (40, 4096, 12_800, 49_155, True),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 4096, 14_336, 128_256, True),
    "microsoft/phi-2": (32, 2560, 10_240, 51_200, False),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (40, 5120, 32_768, 131_072, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18_944, 152_064, True),
    "RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic": (80, 8192, 28_672, 128_256, True),
    "RedHatAI/Qwen2.5-7B-Instruct-fp8-dynamic": (28, 3584, 18_944, 152_064, True),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (32, 4096, 14_336, 128_256, True),
}


@cache
def _rows() -> tuple[Row, ...]:
    with LOGS.open(newline="") as file:
        return tuple(csv.DictReader(file))


def _id(row: Row) -> str:
    return (
        f"{row['source'].rpartition('/')[2].rpartition(': ')[2]}-{row['model'].rpartition('/')[2]}"
    )


def _rows_with(*columns: str) -> list[object]:
    return [pytest.param(row, id=_id(row)) for row in _rows() if all(row[c] for c in columns)]


@cache
def _log_models() -> dict[str, Any]:
    return tomllib.loads((LOGS.parent / "log_models.toml").read_text(encoding="utf-8"))


def _model(row: Row) -> ModelSpec:
    """Answer the row's model in the row's dtype, quantized as it was."""
    name = ALIASES.get(row["model"], row["model"])
    if row["quantization"] == "fp8":
        name += " --quantization fp8"
    name = name.replace("Llama-3.1-8B --", "Llama-3.1-8B-Instruct --")
    if name in _log_models():
        model = spec_of(_log_models()[name], name=name, where=name, source="")
    else:
        model = get_model(name)
    if model.kv_layout is not None:
        layout = msgspec.structs.replace(model.kv_layout, auto_dtype=row["dtype"])
        model = msgspec.structs.replace(model, kv_layout=layout)
    return msgspec.structs.replace(model, dtype=row["dtype"])


def _shape(row: Row) -> ModelSpec:
    """Answer a model with what of the row's activation follows from, whether we have it or not."""
    layers, hidden, intermediate, vocabulary, gated = SHAPES[row["model"]]
    return msgspec.structs.replace(
        get_model("Llama-3.1-8B"),
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        gated_mlp=gated,
        dtype=row["dtype"],
    )


def _engine(row: Row) -> Engine:
    version = ".".join(row["vllm_version"].split(".")[:2])
    return Engine(
        max_num_seqs=int(row["max_num_seqs"]),
        max_num_batched_tokens=int(row["max_num_batched_tokens"]),
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        rules=RULES.get(version, VLLM_0_11),
    )


def _pool(row: Row, kv_cache_memory_bytes: int | None = None) -> KVPool:
    """Answer the pool of the row's card, or of given bytes, on one of its stages."""
    model, engine = _model(row), _engine(row)
    gpu = get_gpu(row["gpu"], float(row["gpu_total_gib"]))
    return size_kv_pool(
        model,
        gpu if kv_cache_memory_bytes is None else None,
        engine,
        block_size=int(row["block_size"]),
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_model_len=int(row["max_model_len"]),
        kv_cache_dtype=row["kv_cache_dtype"],
        groups=cache_groups(
            model.layout,
            int(row["block_size"]),
            tensor_parallel_size=engine.tensor_parallel_size,
            kv_cache_dtype=row["kv_cache_dtype"],
            ratio=engine.rules.group_ratio,
        ),
    )


@pytest.mark.parametrize("row", _rows_with("kv_cache_gib", "kv_cache_tokens"))
def test_tokens_and_concurrency_follow_from_the_logged_gib(row: Row) -> None:
    """Within 0.03 %, or what half of the GiB's last digit is worth."""
    pool = _pool(row, round(float(row["kv_cache_gib"]) * GIB))
    tokens, concurrency = kv_cache_figures(pool, int(row["max_model_len"]))
    error = max(0.0003, HALF_DIGIT / float(row["kv_cache_gib"]))
    assert tokens == pytest.approx(int(row["kv_cache_tokens"]), rel=error)
    assert concurrency == pytest.approx(float(row["max_concurrency"]), abs=0.02, rel=error)


STATED = {
    # Its vision encoder, 0.85 GiB, is not counted.
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 0.02,
    # 0.07 GiB beside the matrices that the shapes tell.
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": 0.015,
}
"""What weights may be off by, where it is more than 1 %."""


@pytest.mark.parametrize("row", _rows_with("weights_gib"))
def test_weights_and_bytes_a_token(row: Row) -> None:
    """Weights within 1 % but for those that `STATED` has; bytes a token exactly."""
    model, tp = _model(row), int(row["tp"])
    stages = list(stages_of(model, _engine(row)))
    per_token = max(
        kv_bytes_per_token(part, tensor_parallel_size=tp, kv_cache_dtype=row["kv_cache_dtype"])
        for _, part, _ in stages
    )
    assert per_token == int(row["kv_bytes_per_token"])
    logged = float(row["weights_gib"])
    assert weight_bytes(stages[0][1], tp) / GIB == pytest.approx(
        logged, rel=STATED.get(row["model"], 0.01), abs=HALF_DIGIT
    )


def _activation_error(row: Row) -> float:
    model = _shape(row) if row["model"] in SHAPES else _model(row)
    ours = activation_bytes(model, get_gpu(row["gpu"]), _engine(row)) / GIB
    return ours / float(row["peak_activation_gib"]) - 1


def _distinct(rows: list[Row]) -> list[Row]:
    keys = ("model", "dtype", "tp", "peak_activation_gib")
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def _of_0_19() -> list[Row]:
    rows = [r for r in _rows() if r["vllm_version"] == "0.19.0" and r["peak_activation_gib"]]
    return [row for row in rows if row["pp"] == "1"]


def test_activation_of_the_models_that_were_held_out() -> None:
    """Mean error 0.3 %, at most 1 %; of the models that were fitted 0.6 and 4.1 %.

    The 4.1 % are Mistral-Small 3.1, whose warm-up has images: vLLM keeps their embeddings, as many
    tokens as a step has, and 0.078 GiB are missing here.
    """
    held_out = _distinct([row for row in _of_0_19() if row["model"] not in FITTED_ON])
    errors = [abs(_activation_error(row)) for row in held_out]
    assert len({row["model"] for row in held_out}) == 6
    assert mean(errors) < 0.004
    assert max(errors) < 0.011
    fitted = _distinct([row for row in _of_0_19() if row["model"] in FITTED_ON])
    errors = [abs(_activation_error(row)) for row in fitted]
    assert mean(errors) < 0.008
    assert max(errors) < 0.042


def test_activation_of_0_11() -> None:
    """38 bytes a logit and the same rest: within 0.2 % of each of the five logs."""
    rows = [row for row in _rows() if row["vllm_version"] == "0.11.0"]
    models = {"RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "Llama-3.1-70B"}
    for row in rows:
        model = get_model(models.get(row["model"], row["model"].removesuffix("-Instruct")))
        ours = activation_bytes(model, get_gpu("H100"), _engine(row)) / GIB
        assert ours == pytest.approx(float(row["peak_activation_gib"]), rel=0.002), row["model"]
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("model", "tp", "published"),
    [("Mixtral-8x7B-v0.1", 2, 1.21), ("Qwen3-30B-A3B", 1, 2.68), ("DeepSeek-V2-Lite", 1, 1.93)],
)
def test_activation_with_experts(model: str, tp: int, published: float) -> None:
    """Published peaks of the same logs, in GiB; on how many GPUs Mixtral ran is inferred."""
    engine = Engine(1024, 8192, tensor_parallel_size=tp, rules=RULES["0.19"])
    ours = activation_bytes(get_model(model), get_gpu("H100"), engine) / GIB
    assert ours == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("row", _rows_with("non_torch_gib"))
def test_non_torch(row: Row) -> None:
    """Within 0.12 GiB but for Granite (0.46 GiB where all others have 0.25)."""
    if "granite" in row["model"]:
        pytest.skip("0.46 GiB of Granite are unexplained")
    if row["vllm_version"] == "0.6.4":
        pytest.skip("0.35 GiB under 0.6.4, whose rules are not known")
    ours = non_torch_bytes(get_gpu(row["gpu"]), _engine(row)) / GIB
    assert ours == pytest.approx(float(row["non_torch_gib"]), abs=0.12)


def test_cuda_graphs_after_start() -> None:
    """Within 16 % of each log of 0.19 in 16 bits, 5 % in the mean; fitted on all of them."""
    rows = [row for row in _of_0_19() if row["model"] in SHAPES]
    errors = [
        abs(graph_bytes(_shape(row), _engine(row)) / GIB / float(row["cudagraph_gib"]) - 1)
        for row in rows
    ]
    assert mean(errors) < 0.06
    assert max(errors) < 0.18


def _pool_error(row: Row) -> float:
    pool = _pool(row)
    if row["num_gpu_blocks"]:
        return pool.num_gpu_blocks / int(row["num_gpu_blocks"]) - 1
    assert pool.kv_cache_bytes is not None
    return pool.kv_cache_bytes / GIB / float(row["kv_cache_gib"]) - 1


EXPLAINED = {
    # 0.31 GiB more than the rules say were not for the pool. An estimate of CUDA graphs of that
    # size is what 24 GB cards log where vLLM subtracts one (0.36 GiB); 0.19.0 does so only if told
    # to, and the run's settings do not say.
    "LLMServingSim @5daddb21 bench/examples/RTX4090_Llama-3.1-8B/vllm_meta.json": 0.08,
    # Its vision encoder, 0.85 GiB, and the images of its warm-up are not counted.
    "llm-d-planner PR #205: mistralai-mistral-small---h100-80gb--tp1pp1dp1--8192": 0.035,
    # 0.6.4: 5 % more activation than logged, 0.10 GiB less non-torch memory.
    "vllm-project/vllm issue #10517": 0.05,
}
"""What the pool may be off by, where it is more than 2 %, by source."""


@pytest.mark.parametrize("row", _rows_with("grade"))
def test_pool_from_gpu_and_flags(row: Row) -> None:
    """Every row within 2 % but for those that `EXPLAINED` has."""
    assert abs(_pool_error(row)) <= EXPLAINED.get(row["source"], 0.02)


def test_mean_error_of_pools_on_h100() -> None:
    """The v0.19 rows on one stage: 0.2 % in the mean."""
    errors = [abs(_pool_error(row)) for row in _of_0_19()]
    assert len(errors) >= 30
    assert mean(errors) < 0.002
