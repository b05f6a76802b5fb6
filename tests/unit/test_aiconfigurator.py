"""Tables from aiconfigurator-core: a tiny package of our own, and the real one if there is one."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.config import TimingConfig
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing import Deployment, kernel_step_time
from sim.timing.base import TICKS_PER_PS, StepBatch
from sim.timing.importers import aiconfigurator
from sim.timing.importers.aiconfigurator import read_aiconfigurator
from sim.timing.layers import attention_projections
from sim.timing.table import TableInfo, TimingTable, make_table
from sim.timing.table_check import check_peaks, check_units
from sim.timing.table_file import load, save

INFO = TableInfo(gpu="H200", provenance="measured", source="us", licence="Apache-2.0")
BANDWIDTH = 4.8e12

Rows = Sequence[dict[str, Any]]


def _write(data: Path, path: str, rows: Rows, **same: Any) -> None:
    file = data / f"{path}_perf.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{**same, **row} for row in rows]), file)


def _read_ms(num_bytes: float) -> float:
    """Answer the milliseconds that an H200 reads *num_bytes* in, at 80 % of its peak."""
    return 0.01 + 1e3 * num_bytes / (0.8 * BANDWIDTH)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answer the data folder of a package that knows Llama-3.1-8B and DeepSeek-V3 on an H200."""
    data = tmp_path / "systems" / "data" / "h200_sxm"
    monkeypatch.setattr(aiconfigurator, "_package", lambda: (tmp_path / "systems", "0.12.0"))
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0}
    dtypes = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    same = {"kernel_source": "fa3", "beam_width": 1, **heads, **dtypes}
    decodes: list[dict[str, Any]] = [
        {
            "batch_size": batch,
            "isl": 1,
            "step": step,
            "latency": _read_ms(4096 * batch * (step + 1)),
        }
        for batch in (1, 2, 256)
        for step in (1023, 8191)
    ]
    windowed = {**decodes[0], "window_size": 128, "latency": 0.001}
    slower = {**decodes[0], "latency": _read_ms(4096 * 1024) + 0.002}
    path = "attention/vllm/0.24.0"
    _write(data, f"{path}/generation_attention", [*decodes, windowed, slower], **same)
    older = {name: value for name, value in same.items() if name != "window_size"}
    prompts: list[dict[str, Any]] = [
        {"batch_size": 1, "isl": 1, "step": 0, "latency": 0.009, "kernel_source": "small"},
        {"batch_size": 1, "isl": 512, "step": 0, "latency": 0.02},
        {"batch_size": 1, "isl": 2048, "step": 0, "latency": 0.09},
    ]
    _write(data, f"{path}/context_attention", prompts, **older)
    products = [
        {
            "gemm_dtype": dtype,
            "m": m,
            "n": n,
            "k": k,
            "latency": _read_ms(2 * (n * k + m * (n + k))),
        }
        for dtype in ("bfloat16", "fp8")
        for m in (1, 8192)
        for n in (256, 4096, 16384, 65536, 131072)
        for k in (128, 4096, 8192, 32768)
    ]
    _write(data, "gemm/vllm/0.24.0/gemm", products, kernel_source="linear")
    reduces = [
        {"kernel_source": kernel, "num_gpus": 8, "message_size": size, "latency": time}
        for kernel, floor in (("vLLM_custom_graph", 0.005), ("vLLM_custom_eager", 0.02))
        for size, time in ((1024, floor), (2**27, 1.0))
    ]
    _write(data, "comm/vllm/0.19.0/custom_allreduce", reduces, allreduce_dtype="bfloat16")
    return data


def _add_deepseek(data: Path) -> None:
    module = {
        "model": "deepseek-ai/DeepSeek-V3", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
        "gemm_type": "bfloat16", "num_heads": 16, "tp_size": 1,
    }  # fmt: skip
    decodes = [
        {"batch_size": batch, "isl": 1, "step": step, "latency": 0.1 + 1e-6 * batch * step}
        for batch in (1, 64)
        for step in (2, 65536)
    ]
    other = {**decodes[0], "model": "moonshotai/Kimi-K3", "latency": 1.0}
    _write(
        data,
        "mla/vllm/0.24.0/mla_generation_module",
        [*decodes, other],
        **module,
        kernel_source="a",
    )
    prompts = [
        {"batch_size": 1, "isl": 1, "step": 0, "latency": 0.1, "kernel_source": "a"},
        {"batch_size": 1, "isl": 4096, "step": 0, "latency": 0.8, "kernel_source": "b"},
    ]
    _write(data, "mla/vllm/0.24.0/mla_context_module", prompts, **module)
    experts = [
        {"num_tokens": tokens, "distribution": load, "latency": time,
         "moe_tp_size": tp, "moe_ep_size": ep}
        for tokens, time in ((1, 0.1), (8192, 4.0))
        for load, time in (("balanced", time), ("power_law_1.2", 2 * time))
        for tp, ep in ((8, 1), (1, 8))
    ]  # fmt: skip
    _write(
        data, "moe/vllm/0.24.0/moe", experts, kernel_source="triton", moe_dtype="bfloat16",
        hidden_size=7168, inter_size=2048, topk=8, num_experts=256,
    )  # fmt: skip


def _ms(table: TimingTable, tmp_path: Path, model: str, batch: StepBatch, **more: Any) -> float:
    save(table, tmp_path / "table.parquet")
    assert load(tmp_path / "table.parquet").info == table.info
    timing = TimingConfig(timing_table=str(tmp_path / "table.parquet"))
    deployment = Deployment(model=get_model(model), gpu=get_gpu("H200"), block_size=64, **more)
    return kernel_step_time(timing, deployment).step_time(batch) / TICKS_PER_PS / 1e9


def test_rows_are_microseconds_and_bytes(data: Path) -> None:
    table = read_aiconfigurator("h200_sxm")
    info = table.info
    assert (info.gpu, info.l2_policy, info.licence) == ("H200", "warm", "Apache-2.0")
    assert info.source == "aiconfigurator-core 0.12.0 h200_sxm"
    assert info.versions == {"vllm": "0.24.0"}
    assert info.notes == (
        "generation_attention: 1 rows with sliding windows left out",
        "custom_allreduce is of vllm 0.19.0",
    )
    decodes = table.where(op="decode_attention")
    assert decodes.distinct("num_heads", "num_kv_heads", "head_dim", "block_size", "kv_dtype") == [
        (32, 8, 128, 64, "bfloat16")
    ]
    first = decodes.where(batch=1, context=1023).columns
    fast = 1e3 * _read_ms(4096 * 1024)
    assert first["latency_us"].tolist() == pytest.approx([fast + 1])  # the median of two
    assert first["spread_us"].tolist() == pytest.approx([2])
    assert np.isnan(decodes.where(batch=2).columns["spread_us"]).all()
    prompts = table.where(op="prefill_attention")
    assert prompts.distinct("query_len", "query_context", "kernel") == [
        (1, 0, "small"), (512, 0, "fa3"), (2048, 0, "fa3"),
    ]  # fmt: skip
    reduces = table.where(op="all_reduce")
    assert reduces.distinct("kernel", "message_bytes") == [
        ("vLLM_custom_graph", 2048), ("vLLM_custom_graph", 2**28),
    ]  # fmt: skip
    assert len(table.where(op="gemm", dtype="fp8")) == 40


def test_a_step_of_a_model_by_hand(data: Path, tmp_path: Path) -> None:
    """Kernels of several names that share no size are one library's choice: none is lost."""
    table = read_aiconfigurator("h200_sxm", model="Llama-3.1-8B")
    assert not len(table.where(op="all_reduce"))
    assert "rows that one of 1 ranks of meta-llama/Llama-3.1-8B needs" in table.info.notes
    whole = read_aiconfigurator("h200_sxm")
    assert len(table.where(op="gemm")) < len(whole.where(op="gemm"))
    for batch in (
        StepBatch(2, 2 * 5000, ()),
        StepBatch(0, 0, ((1, 1),)),
        StepBatch(0, 0, ((900, 900),)),
    ):
        time = _ms(table, tmp_path, "Llama-3.1-8B", batch)
        assert time == _ms(whole, tmp_path, "Llama-3.1-8B", batch)
    decode = _ms(table, tmp_path, "Llama-3.1-8B", StepBatch(2, 2 * 1024, ()))
    longer = _ms(table, tmp_path, "Llama-3.1-8B", StepBatch(2, 2 * 8192, ()))
    assert longer - decode == pytest.approx(
        32 * 1e3 * 4096 * 2 * 7168 / (0.8 * BANDWIDTH), rel=1e-6
    )


def test_long_chunks_are_linear_in_time_per_token(data: Path, tmp_path: Path) -> None:
    """a * n + b * n * n is met exactly; here 512 and 2,048 tokens take 11 and 81 us beyond 9."""
    table = read_aiconfigurator("h200_sxm", model="Llama-3.1-8B")
    one, long = (
        _ms(table, tmp_path, "Llama-3.1-8B", StepBatch(0, 0, ((n, n),))) for n in (1, 1280)
    )
    middle = 1280 * (11 / 512 + 81 / 2048) / 2
    _, gemm_one, gemm_long = 0, *(_gemms(table, tmp_path, n) for n in (1, 1280))
    assert long - gemm_long - (one - gemm_one) == pytest.approx(32 * middle / 1e3)


def _gemms(table: TimingTable, tmp_path: Path, num_tokens: int) -> float:
    """Answer all but attention: a chunk's time less that of 32 layers of 5 ms."""
    flat = table.where(op="gemm")
    prompt = {"op": "prefill_attention", "kernel": "x", "dtype": "bfloat16", "kv_dtype": "bfloat16",
              "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 64, "batch": 1,
              "query_len": 16384, "latency_us": 5000.0}  # fmt: skip
    c = flat.columns
    rows = [prompt, *({name: c[name][row] for name in c} for row in range(len(flat)))]
    batch = StepBatch(0, 0, ((num_tokens, num_tokens),))
    return _ms(make_table(INFO, rows, "t"), tmp_path, "Llama-3.1-8B", batch) - 32 * 5.0


def test_whole_blocks_of_latent_attention(data: Path, tmp_path: Path) -> None:
    """Their projections are not priced again; steps of decodes count the new token in theirs."""
    _add_deepseek(data)
    table = read_aiconfigurator("h200_sxm", model="DeepSeek-V3", tensor_parallel_size=8)
    decodes = table.where(op="mla_decode_block")
    assert decodes.distinct("batch", "context", "num_kv_heads", "head_dim") == [
        (1, 1, 1, 576), (1, 65535, 1, 576), (64, 1, 1, 576), (64, 65535, 1, 576),
    ]  # fmt: skip
    assert (
        "mla_generation_module: 1 rows of fp8 attention or other models left out"
        in table.info.notes
    )
    assert "moe: distribution balanced of balanced, power_law_1.2" in table.info.notes
    assert table.where(op="moe").distinct("n", "k", "num_experts", "top_k", "num_gpus") == [
        (256, 7168, 256, 8, 1), (2048, 7168, 32, 8, 8),
    ]  # fmt: skip
    more: dict[str, Any] = {"tensor_parallel_size": 8}
    short, long = (
        _ms(table, tmp_path, "DeepSeek-V3", StepBatch(64, 64 * context, ()), **more)
        for context in (2, 65536)
    )
    assert long - short == pytest.approx(61 * 1e-6 * 64 * 65534, rel=1e-6)
    model = get_model("DeepSeek-V3")
    timing = TimingConfig(timing_table=str(tmp_path / "table.parquet"))
    step = kernel_step_time(timing, Deployment(model=model, gpu=get_gpu("H200"), **more))
    assert any("with its projections" in source.description for source in step.sources)
    priced = {call.name for call in step._token_calls}
    assert not priced & {call.op for call in attention_projections(model, 8)}
    assert {"gate_up_proj", "moe", "all_reduce"} <= priced


def test_kernels_of_latent_attention_have_one_kv_head(data: Path) -> None:
    row = {"kernel_source": "flash_attention", "mla_dtype": "bfloat16", "kv_cache_dtype": "fp8",
           "num_heads": 16, "batch_size": 1, "isl": 1, "step": 8191, "tp_size": 8,
           "latency": 0.02}  # fmt: skip
    _write(data, "mla/sglang/0.5.14/generation_mla", [row])
    _write(data, "mla/sglang/0.5.14/context_mla", [{**row, "isl": 64, "step": 0}])
    nccl = {"kernel_source": "NCCL", "num_gpus": 8, "latency": 0.01}
    kinds = [("all_reduce", "half"), ("all_reduce", "int8"), ("all_gather", "half")]
    _write(
        data, "comm/nccl/2.29.2/nccl",
        [{"op_name": op, "nccl_dtype": dtype, "message_size": 512} for op, dtype in kinds], **nccl,
    )  # fmt: skip
    table = read_aiconfigurator("h200_sxm", backend="sglang")
    names = ("op", "num_kv_heads", "head_dim", "block_size", "kv_dtype", "context", "message_bytes")
    assert table.distinct(*names) == [
        ("all_reduce", 0, 0, 0, "", 0, 1024),
        ("decode_attention", 1, 576, 1, "fp8", 8191, 0),
        ("prefill_attention", 1, 576, 1, "fp8", 0, 0),
    ]  # fmt: skip
    assert table.info.versions == {"sglang": "0.5.14", "nccl": "2.29.2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"system": "h200"}, "system 'h200' is unknown; did you mean 'h200_sxm'"),
        ({"system": "b60"}, "system b60: its GPU is not known; choices: a100_sxm"),
        ({"system": "h200_sxm", "backend": "vlm"}, "backend 'vlm' is unknown; did you mean 'vllm'"),
        ({"system": "h200_sxm", "backend": "trtllm"}, "no trtllm attention for h200_sxm"),
        (
            {"system": "h200_sxm", "backend_version": "0.9"},
            "no vllm 0.9 for h200_sxm; versions: 0.19.0, 0.24.0",
        ),
        ({"system": "h200_sxm", "model": "gpt-5"}, "gpt-5"),
    ],
)  # fmt: skip
def test_refusals(data: Path, arguments: dict[str, Any], message: str) -> None:
    (data.parent / "b60" / "attention").mkdir(parents=True)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_aiconfigurator(**arguments)
    assert "\n" not in str(refusal.value)


def test_a_missing_package_and_a_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"^needs aiconfigurator-core: pip install 'kvsim\[tables\]'$"
    ):
        read_aiconfigurator("h200_sxm")
    monkeypatch.undo()
    (tmp_path / "aiconfigurator_core").mkdir()
    (tmp_path / "aiconfigurator_core" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.11.0")
    with pytest.raises(
        ConfigError, match=r"aiconfigurator-core 0\.11\.0 has no data: expected 0\.12"
    ):
        read_aiconfigurator("h200_sxm")


def test_a_file_that_is_none(data: Path) -> None:
    (data / "gemm/vllm/0.24.0/gemm_perf.parquet").write_text("x")
    with pytest.raises(
        ConfigError, match=r"h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet: .*Parquet"
    ) as refusal:
        read_aiconfigurator("h200_sxm")
    assert str(data) not in str(refusal.value)
    _write(data, "gemm/vllm/0.24.0/gemm", [{"m": 1}])
    with pytest.raises(ConfigError, match=r"no column kernel_source, gemm_dtype, n, k, latency"):
        read_aiconfigurator("h200_sxm")


def _decodes(
    scale: float, sizes: Sequence[tuple[int, int]] = ((256, 8191), (64, 65535))
) -> TimingTable:
    rows = [
        {"op": "decode_attention", "kernel": "x", "kv_dtype": "bfloat16", "num_heads": 32,
         "num_kv_heads": 8, "head_dim": 128, "batch": batch, "context": context,
         "latency_us": scale * 1e3 * _read_ms(4096 * batch * (context + 1))}
        for batch, context in sizes
    ]  # fmt: skip
    return make_table(INFO, rows, "t")


@pytest.mark.parametrize("sizes", [((256, 8191), (1, 1)), ((1, 1), (1, 127))])
def test_times_in_another_unit(sizes: Sequence[tuple[int, int]]) -> None:
    """Of calls too large for L2, else with what a launch takes."""
    check_units(_decodes(1, sizes), "t")
    for factor, unit in ((1e-3, "milliseconds"), (1e3, "nanoseconds"), (1e-6, "seconds")):
        with pytest.raises(
            ConfigError, match=f"^t: decode_attention: latency_us looks like {unit}: "
        ):
            check_units(_decodes(factor, sizes), "t")


def test_the_rule_for_impossible_times() -> None:
    check_peaks(_decodes(0.8), "t")
    check_peaks(_decodes(0.5, [(1, 1023)]), "t")  # in L2
    with pytest.raises(
        ConfigError, match=r"2 of the 2 calls .* faster than 105% of the peak of H200"
    ):
        check_peaks(_decodes(0.7), "t")


needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core"
)


@needs_package
@pytest.mark.parametrize(("batch", "context", "ms"), [(64, 8191, 0.490763), (1, 65535, 0.084331)])
def test_published_rows(batch: int, context: int, ms: float) -> None:
    table = read_aiconfigurator("h200_sxm", model="Qwen3-8B")
    row = table.where(op="decode_attention", kv_dtype="bfloat16", batch=batch, context=context)
    assert row.columns["latency_us"].tolist() == pytest.approx([1e3 * ms], rel=1e-5)
    assert len(table) < 3000


@needs_package
def test_the_table_that_cannot_be_right() -> None:
    with pytest.raises(
        ConfigError, match=r"a100_sxm, trtllm 1\.0\.0: decode_attention .*up to 169%"
    ):
        read_aiconfigurator("a100_sxm", backend="trtllm")
