"""Fit kernel-time formulas to measured tables; write ``sim/data/timing_fits.toml`` and the errors.

    python results/timing_fits/fit.py DATA_DIR SHARED_PUBLISHED

DATA_DIR is ``aiconfigurator_core/systems/data`` of an installed aiconfigurator-core 0.12.0
(Apache-2.0; not part of this repository). SHARED_PUBLISHED holds ``fitted_params.json``, whose
numbers are kept where it has them, and ``e2e_rtx4090/profile`` (LLMServingSim, MIT).

Every fit minimises the sum of absolute log errors. Formulas are in the header of the TOML file.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

HERE = Path(__file__).parent
TOML = HERE.parents[1] / "sim" / "data" / "timing_fits.toml"
Array = NDArray[np.float64]

MIN_CONTEXT = 128
MAX_RATIO = 16
"""Query heads a kv head."""
HBM_OVER_L2 = 4
HIDDEN_MLA, ROPE_MLA, NOPE_MLA = 512, 64, 128
"""Latent, rotary and plain dimensions of DeepSeek's MLA."""


@dataclass(frozen=True)
class Gpu:
    """What is fitted for one family: names, peaks and tables.

    Attributes:
        names: GPUs of ``gpus.toml`` that the fits apply to; the first of ``fitted_on``'s kind.
        fitted_on: the one that the tables were measured on.
        system: folder of the tables, and how the TOML calls it.
        version: of the vLLM tables.
        bandwidth, flops, l2: peaks (bytes/s, dense bf16 FLOP/s) and bytes.
        mla: backend and version of the MLA kernel tables.
        all_reduce: backend, version and kernel source of the all-reduce table.
    """

    names: tuple[str, ...]
    fitted_on: str
    system: str
    title: str
    version: str
    bandwidth: float
    flops: float
    l2: float
    mla: tuple[str, str] | None = None
    all_reduce: tuple[str, str, str] = ("vllm", "0.24.0", "vLLM_custom_graph")


TRTLLM_MLA = ("trtllm", "1.3.0rc20")
"""Attention kernels alone, decode from the latent cache and prefill expanded as vLLM does it;
SGLang's prefill is absorbed, and its fp8 decode on Hopper takes 12 times the time of its bytes."""
GPUS = {
    "A100": Gpu(
        ("A100-40", "A100-80"), "A100-80", "a100_sxm", "A100 SXM", "0.14.0", 2.039e12, 312e12, 40e6,
        None, ("vllm", "0.14.0", "vLLM_custom_graph"),
    ),
    "H100": Gpu(
        ("H100",), "H100", "h100_sxm", "H100 SXM", "0.24.0", 3.35e12, 989e12, 50e6, TRTLLM_MLA
    ),
    "H200": Gpu(
        ("H200",), "H200", "h200_sxm", "H200 SXM", "0.24.0", 4.8e12, 989e12, 50e6, TRTLLM_MLA
    ),
    "B200": Gpu(
        ("B200",), "B200", "b200_sxm", "B200 SXM", "0.24.0", 7.7e12, 2250e12, 126e6, TRTLLM_MLA
    ),
    "GB200": Gpu(
        ("GB200",), "GB200", "gb200", "GB200", "0.24.0", 8.0e12, 2500e12, 126e6, TRTLLM_MLA
    ),
    "B300": Gpu(
        ("B300",), "B300", "b300_sxm", "B300 SXM", "0.24.0", 7.75e12, 2250e12, 126e6, TRTLLM_MLA
    ),
    "GB300": Gpu(
        ("GB300",), "GB300", "gb300", "GB300", "0.24.0", 8.0e12, 2500e12, 126e6, TRTLLM_MLA
    ),
    "L40S": Gpu(
        ("L40S",), "L40S", "l40s", "L40S", "0.24.0", 0.864e12, 362.05e12, 96e6, None,
        ("vllm", "0.22.0", "vLLM_custom_graph"),
    ),
    "RTX-PRO-6000": Gpu(
        ("RTX-PRO-6000",), "RTX-PRO-6000", "rtx_pro_6000_server", "RTX PRO 6000 Server", "0.24.0",
        1.792e12, 467.8e12, 128e6,
    ),
}  # fmt: skip

RTX_4090 = Gpu(("RTX-4090",), "RTX-4090", "", "RTX 4090", "", 1.008e12, 165.15e12, 72e6)

KEPT_DECODE = "three-parameter, HBM-resident rows only (KV bytes > 4*L2)"
MIN_INTER = 256
"""Columns of an expert on one rank: below, the kernels are slower than their bytes and FLOPs."""
UNGATED = {(2688, 1856), (1024, 2688)}
"""(hidden, inter) of the mixtures of experts without a gate matrix (Nemotron)."""

RTX_PRO_6000_NCCL = {
    4096: 12.7, 16384: 13.87, 65536: 14.76, 131072: 17.38, 262144: 21.72, 524288: 29.84,
    1048576: 41.04, 2097152: 67.31, 4194304: 124.87, 8388608: 240.6, 16777216: 471.1,
    20971520: 587.1,
}  # fmt: skip
"""Bytes and microseconds of a 2-GPU NCCL all-reduce over PCIe 5, CUDA-graphed: LLMServingSim (MIT),
profiler/perf/RTXPRO6000/hardware.yaml."""


@dataclass
class Fit:
    """One section of the TOML file, and its errors.

    Attributes:
        values: parameters as written.
        refit: parameters that this script finds, where published ones are kept.
        used, again: p50 and p90 of the absolute percentage error of both, on the fitted rows.
        everywhere: of the parameters written, on rows of any size.
    """

    gpu: str
    section: str
    kernel: str
    table: str
    rows: int
    values: dict[str, float]
    refit: dict[str, float] = field(default_factory=dict)
    used: tuple[float, float] = (0.0, 0.0)
    again: tuple[float, float] | None = None
    everywhere: tuple[float, float] | None = None
    published: tuple[float, float] | None = None
    extra: dict[str, float] = field(default_factory=dict)


def percentiles(predicted: Array, measured: Array) -> tuple[float, float]:
    """Answer p50 and p90 of the absolute percentage error."""
    p50, p90 = np.percentile(np.abs(predicted / measured - 1) * 100, [50, 90])
    return round(float(p50), 1), round(float(p90), 1)


def solve(model: Any, start: list[float], measured: Array) -> Array:
    """Answer the positive parameters with the least sum of absolute log errors of ``model``."""
    best = None
    for scale in (0.05, 0.002):  # from least squares of the small errors towards least absolutes
        first = np.log(start) if best is None else best.x
        best = least_squares(
            lambda p: np.log(model(np.exp(p)) / measured),
            first,
            loss="soft_l1",
            f_scale=scale,
            bounds=(np.log(1e-9), np.log(1e9)),
        )
    assert best is not None
    return np.asarray(np.exp(best.x), dtype=np.float64)


def sum_model(columns: list[Array]) -> Any:
    """Answer the model p[0] + p[1] * columns[0] + ..."""

    def model(p: Array) -> Array:
        total = np.full_like(columns[0], p[0])
        for weight, column in zip(p[1:], columns, strict=True):
            total = total + weight * column
        return total

    return model


def max_model(compute: Array, memory: Array) -> Any:
    """Answer the model p[0] + max(p[1] * compute, p[2] * memory)."""
    return lambda p: p[0] + np.maximum(p[1] * compute, p[2] * memory)


def read(data: Path, system: str, family: str, backend: str, name: str) -> pd.DataFrame:
    """Answer one table, repeated keys merged to their median, in microseconds."""
    frame = pd.read_parquet(data / system / family / backend / f"{name}_perf.parquet")
    if "attention" in name and "window_size" not in frame:
        frame["window_size"] = 0
    keys = [c for c in frame.columns if c not in {"latency", "power", "power_limit", "device"}]
    merged = frame.groupby(keys, dropna=False, sort=False)["latency"].median().reset_index()
    merged["us"] = merged.pop("latency") * 1e3
    return merged


def kernels(frame: pd.DataFrame) -> str:
    """Answer the kernels of *frame*, the most frequent first."""
    return ", ".join(frame["kernel_source"].value_counts().index)


def attention_rows(
    frame: pd.DataFrame, kv_dtype: str, dim: int, *, any_ratio: bool = False
) -> pd.DataFrame:
    """Answer the rows of one kv dtype and head_dim, without window, of the ratios fitted."""
    return frame[
        (frame["head_dim"] == dim)
        & (frame["window_size"] == 0)
        & (frame["kv_cache_dtype"] == kv_dtype)
        & (any_ratio | (frame["num_heads"] <= MAX_RATIO * frame["num_key_value_heads"]))
    ]


def numbers(series: Any) -> Array:
    """Answer *series* as floats."""
    return np.asarray(series, dtype=np.float64)


def decode_columns(gpu: Gpu, batch: Array, context: Array, kv_heads: Array, size: int) -> Any:
    """Answer B * kv_heads / 1000, KV bytes, and microseconds of them at peak; size: a token's."""
    num_bytes = batch * context * kv_heads * size
    return batch * kv_heads * 1e-3, num_bytes, num_bytes / gpu.bandwidth * 1e6


def decode_fit(
    name: str, gpu: Gpu, rows: pd.DataFrame, kv_bytes: int, dim: int, kept: dict[str, Any] | None
) -> Fit:
    """Fit t0 + c * B * kv_heads + KV bytes / (eff * bandwidth) to the rows with KV > 4 x L2."""
    rows = rows[rows["step"] + 1 >= MIN_CONTEXT]
    columns = decode_columns(
        gpu,
        numbers(rows["batch_size"]),
        numbers(rows["step"]) + 1,
        numbers(rows["num_key_value_heads"]),
        2 * dim * kv_bytes,
    )
    suffix = ("_fp8" if kv_bytes == 1 else "") + ("" if dim == 128 else f"_hd{dim}")
    return _decode(name, f"decode_attention{suffix}", gpu, rows, columns, kept)


def _decode(
    name: str,
    section: str,
    gpu: Gpu,
    rows: pd.DataFrame,
    columns: Any,
    kept: dict[str, Any] | None,
    everything: bool = False,
) -> Fit:
    """Fit the decode formula; *everything*: the rows are not L2-warm, so use them all."""
    per_row, num_bytes, peak_us = columns
    measured = numbers(rows["us"])
    hbm = np.ones(len(rows), bool) if everything else num_bytes > HBM_OVER_L2 * gpu.l2
    p = solve(sum_model([per_row[hbm], peak_us[hbm]]), [15.0, 5.0, 1.2], measured[hbm])
    refit = {"t0_us": p[0], "eff": 1 / p[2], "c_ns": p[1]}
    values = {k: float(kept[k]) for k in refit} if kept else refit

    def predict(v: dict[str, float]) -> Array:
        return np.asarray(v["t0_us"] + v["c_ns"] * per_row + peak_us / v["eff"])

    return Fit(
        name, section, kernels(rows[hbm]) if "kernel_source" in rows else "flash_attn (vLLM)",
        "", int(hbm.sum()), values, refit,
        percentiles(predict(values)[hbm], measured[hbm]),
        percentiles(predict(refit)[hbm], measured[hbm]),
        percentiles(predict(values), measured),
        (kept["ape_pct"]["hbm_p50"], kept["ape_pct"]["hbm_p90"]) if kept else None,
    )  # fmt: skip


def roofline_fit(
    name: str, section: str, rows: pd.DataFrame, compute: Array, memory: Array,
    kept: dict[str, Any] | None, additive: bool,
) -> Fit:  # fmt: skip
    """Fit t0, eff_flops and eff_bw; *compute* and *memory* are microseconds at peak."""
    measured = numbers(rows["us"])
    model = sum_model([compute, memory]) if additive else max_model(compute, memory)
    p = solve(model, [8.0, 1.6, 1.6], measured)
    refit = {"t0_us": p[0], "eff_flops": 1 / p[1], "eff_bw": 1 / p[2]}
    values = {k: float(kept[k]) for k in refit} if kept else refit

    def predict(v: dict[str, float]) -> Array:
        return np.asarray(model(np.array([v["t0_us"], 1 / v["eff_flops"], 1 / v["eff_bw"]])))

    return Fit(
        name, section, kernels(rows) if "kernel_source" in rows else "", "", len(rows), values,
        refit, percentiles(predict(values), measured), percentiles(predict(refit), measured), None,
        (kept["ape_pct"]["p50"], kept["ape_pct"]["p90"]) if kept else None,
    )  # fmt: skip


def prefill_columns(gpu: Gpu, rows: pd.DataFrame, dim: int, kv_bytes: int) -> tuple[Array, Array]:
    """Answer microseconds at peak of the FLOPs and bytes of causal attention without history."""
    batch, isl = numbers(rows["batch_size"]), numbers(rows["isl"])
    heads, kv_heads = numbers(rows["num_heads"]), numbers(rows["num_key_value_heads"])
    flops = 2 * batch * heads * dim * isl**2
    del kv_bytes  # keys and values come from the projections in bf16, so count them so
    num_bytes = 2 * batch * isl * dim * (2 * heads + 2 * kv_heads)
    return flops / gpu.flops * 1e6, num_bytes / gpu.bandwidth * 1e6


def gemm_columns(
    gpu: Gpu, m: Array, n: Array, k: Array, size: int, speed: int
) -> tuple[Array, Array]:
    """Answer microseconds at peak; *size* bytes an operand's element, results in bf16."""
    flops = 2 * m * n * k
    num_bytes = size * (m * k + n * k) + 2 * m * n if size == 1 else 2 * (m * k + n * k + m * n)
    return flops / (speed * gpu.flops) * 1e6, num_bytes / gpu.bandwidth * 1e6


def moe_columns(gpu: Gpu, rows: pd.DataFrame) -> tuple[Array, Array]:
    """Answer microseconds at peak of one rank's experts, of which the expected number is read."""
    tokens, topk = numbers(rows["num_tokens"]), numbers(rows["topk"])
    experts, ranks = numbers(rows["num_experts"]), numbers(rows["moe_ep_size"])
    hidden = numbers(rows["hidden_size"])
    inter = numbers(rows["inter_size"]) / numbers(rows["moe_tp_size"])
    touched = experts / ranks * (1 - (1 - topk / experts) ** tokens)
    routed = tokens * topk / ranks
    flops = routed * 2 * 3 * hidden * inter
    num_bytes = 2 * (touched * 3 * hidden * inter + routed * (2 * hidden + 3 * inter))
    return flops / gpu.flops * 1e6, num_bytes / gpu.bandwidth * 1e6


def mla_decode_columns(gpu: Gpu, rows: pd.DataFrame, size: int) -> tuple[Array, Array]:
    """Answer microseconds at peak: latent cache read once, all heads' products."""
    batch, context = numbers(rows["batch_size"]), numbers(rows["step"]) + 1
    heads = numbers(rows["num_heads"])
    flops = 2 * batch * context * heads * (2 * HIDDEN_MLA + ROPE_MLA)
    num_bytes = batch * context * (HIDDEN_MLA + ROPE_MLA) * size
    return flops / gpu.flops * 1e6, num_bytes / gpu.bandwidth * 1e6


def mla_prefill_columns(gpu: Gpu, rows: pd.DataFrame) -> tuple[Array, Array]:
    """Answer microseconds at peak of causal attention with 192-wide keys and 128-wide values."""
    batch, isl = numbers(rows["batch_size"]), numbers(rows["isl"])
    heads = numbers(rows["num_heads"])
    wide = NOPE_MLA + ROPE_MLA
    flops = batch * heads * isl**2 * (wide + NOPE_MLA)
    num_bytes = 2 * batch * isl * heads * 2 * (wide + NOPE_MLA)
    return flops / gpu.flops * 1e6, num_bytes / gpu.bandwidth * 1e6


def all_reduce_fit(name: str, gpus: int, kernel: str, num_bytes: Array, us: Array) -> Fit:
    """Fit t0 + bytes / bandwidth, bytes of the message of one GPU."""
    p = solve(sum_model([num_bytes * 1e-6]), [5.0, 5.0], us)
    values = {"t0_us": p[0], "bandwidth": 1e12 / p[1]}
    predicted = p[0] + p[1] * num_bytes * 1e-6
    return Fit(
        name, f"all_reduce.{gpus}", kernel, "", len(us), values, values,
        percentiles(predicted, us), None, None, None,
    )  # fmt: skip


def all_reduce_fits(name: str, gpu: Gpu, data: Path) -> Iterator[Fit]:
    """Fit messages of 4 KiB to 128 MiB for every number of GPUs."""
    backend, version, kernel = gpu.all_reduce
    frame = read(data, gpu.system, "comm", f"{backend}/{version}", "custom_allreduce")
    frame = frame[frame["kernel_source"] == kernel]
    frame = frame.assign(bytes=2.0 * frame["message_size"])  # the table counts bf16 elements
    frame = frame[(frame["bytes"] >= 2**12) & (frame["bytes"] <= 2**27)]
    for gpus, rows in frame.groupby("num_gpus"):
        fit = all_reduce_fit(name, int(gpus), kernel, numbers(rows["bytes"]), numbers(rows["us"]))
        fit.table = f"{gpu.system}/comm/{backend}/{version}/custom_allreduce"
        yield fit


def published(document: Any, system: str, kind: str, backend: str, dtype: str) -> Any:
    """Answer the published fit, or None."""
    for fit in document["gpus"].get(system, {}).get(kind, []):
        source = fit.get("backend", fit.get("source"))
        its_dtype = fit.get("kv_dtype", fit.get("dtype"))
        wanted = f"kv={dtype}" if kind == "prefill_attention" else dtype
        if source == backend and its_dtype == wanted and fit.get("fit", KEPT_DECODE) == KEPT_DECODE:
            return fit
    return None


def system_fits(name: str, gpu: Gpu, data: Path, document: Any) -> Iterator[Fit]:
    """Yield every fit of one GPU from the aiconfigurator tables."""
    backend = f"vllm/{gpu.version}"
    where = f"{gpu.system}/%s/{backend}/%s"
    decode = read(data, gpu.system, "attention", backend, "generation_attention")
    prefill = read(data, gpu.system, "attention", backend, "context_attention")
    for dim in (128, 64):
        for dtype, size in (("bfloat16", 2), ("fp8", 1)):
            rows = attention_rows(decode, dtype, dim)
            suffix = ("_fp8" if size == 1 else "") + ("" if dim == 128 else f"_hd{dim}")
            if len(rows):
                kept = published(document, gpu.system, "decode_attention", backend, dtype)
                fit = decode_fit(name, gpu, rows, size, dim, kept if dim == 128 else None)
                fit.table = where % ("attention", "generation_attention")
                yield fit
            rows = attention_rows(prefill, dtype, dim, any_ratio=True)
            rows = rows[rows["isl"] >= 16]
            if len(rows):
                kept = published(document, gpu.system, "prefill_attention", backend, dtype)
                compute, memory = prefill_columns(gpu, rows, dim, size)
                section = f"prefill_attention{suffix}"
                fit = roofline_fit(
                    name, section, rows, compute, memory, kept if dim == 128 else None, True
                )
                fit.table = where % ("attention", "context_attention")
                yield fit
    gemm = read(data, gpu.system, "gemm", backend, "gemm")
    gemm = gemm[(gemm["m"] <= 8192) & (gemm["n"] >= 256) & (gemm["k"] >= 256)]
    for dtype, size, speed in (("bfloat16", 2, 1), ("fp8", 1, 2)):
        rows = gemm[gemm["gemm_dtype"] == dtype]
        if len(rows):
            kept = published(document, gpu.system, "gemm", backend, dtype)
            m, n, k = (numbers(rows[c]) for c in "mnk")
            compute, memory = gemm_columns(gpu, m, n, k, size, speed)
            section = "gemm" if size == 2 else "gemm_fp8"
            fit = roofline_fit(name, section, rows, compute, memory, kept, False)
            fit.table = where % ("gemm", "gemm")
            yield fit
    yield from moe_fits(name, gpu, data, backend)
    yield from mla_fits(name, gpu, data)
    yield from all_reduce_fits(name, gpu, data)


def moe_fits(name: str, gpu: Gpu, data: Path, backend: str) -> Iterator[Fit]:
    """Fit the gated bf16 mixtures under power_law_1.01, without expert parallelism."""
    moe = read(data, gpu.system, "moe", backend, "moe")
    gated = [
        pair not in UNGATED and topk < 22
        for *pair, topk in zip(moe["hidden_size"], moe["inter_size"], moe["topk"], strict=True)
        for pair in [tuple(pair)]
    ]
    moe = moe[np.asarray(gated) & (moe["moe_dtype"] == "bfloat16") & (moe["num_tokens"] <= 16384)]
    moe = moe[moe["inter_size"] >= MIN_INTER * moe["moe_tp_size"]]
    alone = moe[(moe["moe_ep_size"] == 1) & (moe["distribution"] == "power_law_1.01")]
    compute, memory = moe_columns(gpu, alone)
    fit = roofline_fit(name, "moe", alone, compute, memory, None, True)
    fit.table = f"{gpu.system}/moe/{backend}/moe"

    def errors(rows: pd.DataFrame) -> tuple[float, float]:
        flops, num_bytes = moe_columns(gpu, rows)
        v = fit.values
        model = sum_model([flops, num_bytes])
        p = np.array([v["t0_us"], 1 / v["eff_flops"], 1 / v["eff_bw"]])
        return percentiles(model(p), numbers(rows["us"]))

    for what, rows in (
        ("ep1_balanced", moe[(moe["moe_ep_size"] == 1) & (moe["distribution"] == "balanced")]),
        ("ep_balanced", moe[(moe["moe_ep_size"] > 1) & (moe["distribution"] == "balanced")]),
        ("ep_skewed", moe[(moe["moe_ep_size"] > 1) & (moe["distribution"] == "power_law_1.01")]),
    ):
        if len(rows):
            p50, p90 = errors(rows)
            fit.extra |= {f"error_{what}_p50": p50, f"error_{what}_p90": p90}
    yield fit


def mla_fits(name: str, gpu: Gpu, data: Path) -> Iterator[Fit]:
    """Fit the MLA kernels (attention only, no projections)."""
    if gpu.mla is None:
        return
    backend = "/".join(gpu.mla)
    decode = read(data, gpu.system, "mla", backend, "generation_mla")
    prefill = read(data, gpu.system, "mla", backend, "context_mla")
    for dtype, size in (("bfloat16", 2), ("fp8", 1)):
        rows = decode[(decode["kv_cache_dtype"] == dtype) & (decode["step"] + 1 >= MIN_CONTEXT)]
        num_bytes = rows["batch_size"] * (rows["step"] + 1.0) * (HIDDEN_MLA + ROPE_MLA) * size
        hbm = rows[num_bytes > HBM_OVER_L2 * gpu.l2]
        if len(hbm):
            section = "mla_decode" if size == 2 else "mla_decode_fp8"
            columns = mla_decode_columns(gpu, hbm, size)
            fit = roofline_fit(name, section, hbm, *columns, None, False)
            most = 3.0 - size  # where FLOPs never bind, the fit leaves their share open
            fit.values["eff_flops"] = min(fit.values["eff_flops"], most)
            fit.table = f"{gpu.system}/mla/{backend}/generation_mla"
            yield fit
    rows = prefill[(prefill["kv_cache_dtype"] == "bfloat16") & (prefill["isl"] >= 16)]
    if len(rows):
        fit = roofline_fit(name, "mla_prefill", rows, *mla_prefill_columns(gpu, rows), None, True)
        fit.table = f"{gpu.system}/mla/{backend}/context_mla"
        yield fit


def profile_fits(profile: Path) -> Iterator[Fit]:
    """Yield the fits of the RTX 4090: Llama-3.1-8B's layers inside vLLM 0.19, eager.

    Between two calls of a kernel the profile runs the rest of the layer (0.4 GB of weights), so
    nothing is L2-warm: small rows count too.
    """
    gpu, heads, kv_heads, dim, hidden, inter, vocab = RTX_4090, 32, 8, 128, 4096, 14336, 128256
    frame = pd.read_csv(profile / "attention.csv").rename(columns={"time_us": "us"})
    rows = frame[(frame["prefill_chunk"] == 0) & (frame["kv_decode"] + 1 >= MIN_CONTEXT)]
    columns = decode_columns(
        gpu,
        numbers(rows["n_decode"]),
        numbers(rows["kv_decode"]) + 1,
        np.full(len(rows), float(kv_heads)),
        4 * dim,
    )
    fit = _decode("RTX-4090", "decode_attention", gpu, rows, columns, None, everything=True)
    fit.table = "LLMServingSim profile, attention.csv"
    yield fit

    rows = frame[(frame["prefill_chunk"] > 0) & (frame["n_decode"] == 0)]
    chunk, history = numbers(rows["prefill_chunk"]), numbers(rows["kv_prefill"])
    compute = 4 * heads * dim * chunk * (history + chunk / 2) / gpu.flops * 1e6
    memory = 4 * dim * (heads * chunk + kv_heads * (history + chunk)) / gpu.bandwidth * 1e6
    full = (chunk >= 256) | (history == 0)
    fit = roofline_fit(
        "RTX-4090", "prefill_attention", rows[full], compute[full], memory[full], None, True
    )
    fit.kernel, fit.table = "flash_attn (vLLM)", "LLMServingSim profile, attention.csv"
    fit.extra["fill_rows"] = 8192
    v = fit.values
    predicted = v["t0_us"] + compute / v["eff_flops"] + memory / v["eff_bw"]
    measured = numbers(rows["us"])
    for what, keep in (
        ("no_history", history == 0),
        ("small_chunk", ~full),
    ):
        p50, p90 = percentiles(predicted[keep], measured[keep])
        fit.extra |= {f"error_{what}_p50": p50, f"error_{what}_p90": p90}
    rows_of_queries = np.maximum(chunk, fit.extra["fill_rows"] / heads)
    filled = predicted + (rows_of_queries - chunk) * history * (
        4 * heads * dim / gpu.flops * 1e6 / v["eff_flops"]
    )
    p50, p90 = percentiles(filled[~full], measured[~full])
    fit.extra |= {"error_small_chunk_filled_p50": p50, "error_small_chunk_filled_p90": p90}
    yield fit

    shapes = {
        "qkv_proj": ((heads + 2 * kv_heads) * dim, hidden), "o_proj": (hidden, heads * dim),
        "gate_up_proj": (2 * inter, hidden), "down_proj": (hidden, inter),
    }  # fmt: skip
    dense = pd.read_csv(profile / "dense.csv").rename(columns={"tokens": "m", "time_us": "us"})
    dense = dense[dense["layer"].isin(shapes)]
    head = pd.read_csv(profile / "per_sequence.csv").rename(
        columns={"sequences": "m", "time_us": "us"}
    )
    both = pd.concat([dense, head[head["layer"] == "lm_head"]], ignore_index=True)
    shapes["lm_head"] = (vocab, hidden)
    n = np.array([float(shapes[layer][0]) for layer in both["layer"]])
    k = np.array([float(shapes[layer][1]) for layer in both["layer"]])
    columns = gemm_columns(gpu, numbers(both["m"]), n, k, 2, 1)
    fit = roofline_fit("RTX-4090", "gemm", both, *columns, None, False)
    fit.kernel, fit.table = "torch.nn.functional.linear", "LLMServingSim profile, dense.csv"
    yield fit


def bad_tables(data: Path) -> pd.DataFrame:
    """Answer, for every decode table and kernel, how often HBM-sized rows exceed 105 % of peak."""
    found = []
    for system, gpu in {g.system: g for g in GPUS.values()}.items():
        for path in sorted((data / system).rglob("generation_*_perf.parquet")):
            if path.name.split("_perf")[0] not in {"generation_attention", "generation_mla"}:
                continue
            table = str(path.relative_to(data).parent / path.name.removesuffix("_perf.parquet"))
            frame = pd.read_parquet(path)
            size = frame["kv_cache_dtype"].map({"bfloat16": 2, "fp8": 1}).astype(float)
            tokens = frame["batch_size"] * (frame["step"] + 1.0)
            if "head_dim" in frame:
                width = 2.0 * frame["num_key_value_heads"] * frame["head_dim"]
                if "window_size" in frame:
                    width = width.where(frame["window_size"] == 0)
            else:
                width = pd.Series(float(HIDDEN_MLA + ROPE_MLA), index=frame.index)
            frame["bytes"] = tokens * width * size
            frame["share"] = frame["bytes"] / (frame["latency"] * 1e-3) / gpu.bandwidth
            hbm = frame[frame["bytes"] > HBM_OVER_L2 * gpu.l2]
            for (kernel, dtype), rows in hbm.groupby(["kernel_source", "kv_cache_dtype"]):
                found.append(check_row(table, kernel, dtype, rows["share"]))
        for path in sorted((data / system).rglob("gemm_perf.parquet")):
            table = str(path.relative_to(data).parent / "gemm")
            frame = pd.read_parquet(path)
            frame = frame[frame["gemm_dtype"].isin(["bfloat16", "fp8"])]
            num_bytes = frame["gemm_dtype"].map({"bfloat16": 2.0, "fp8": 1.0})
            num_bytes = num_bytes.astype(float) * frame["n"] * frame["k"]
            frame["share"] = num_bytes / (frame["latency"] * 1e-3) / gpu.bandwidth
            hbm = frame[num_bytes > HBM_OVER_L2 * gpu.l2]
            for (kernel, dtype), rows in hbm.groupby(["kernel_source", "gemm_dtype"]):
                found.append(check_row(table, kernel, dtype, rows["share"]))
    return pd.DataFrame(found)


def check_row(table: str, kernel: str, dtype: str, share: "pd.Series[float]") -> dict[str, Any]:
    """Answer one row of the check: how many of the HBM-sized rows exceed 105 % of peak."""
    above = share > 1.05
    return {
        "table": table, "kernel": kernel, "dtype": dtype, "rows": len(share),
        "above_105_percent": int(above.sum()), "percent_of_rows": round(100 * above.mean(), 1),
        "max_percent_of_peak": round(100 * float(share.max())),
    }  # fmt: skip


HEADER = """\
# Kernel times of one layer on one GPU, fitted to measured tables; bf16 unless the section says fp8,
# head_dim 128 unless it says hd64, no window, 16 query heads or fewer a kv head (prefill: any),
# contexts of 128 tokens and more, KV pages of 64 tokens (RTX 4090: 16).
#
#   decode_attention   t0 + c * B * kv_heads + KV bytes / (eff * bandwidth)
#   gemm               t0 + max(2 * m * n * k / (eff_flops * peak), bytes / (eff_bw * bandwidth))
#   prefill_attention  t0 + FLOPs / (eff_flops * peak) + bytes / (eff_bw * bandwidth)
#   moe                as prefill_attention; of a rank's E_rank experts
#                      E_rank * (1 - (1 - k / E)^tokens) are read, three matrices of 256 columns
#                      or more; a rank has tokens * k / ranks rows; tokens are those of all ranks
#   mla_decode         as gemm; FLOPs 2 * B * context * heads * (2 * 512 + 64), bytes
#                      B * context * (512 + 64) * bytes of an element; without projections
#   mla_prefill        as prefill_attention; 192-wide keys, 128-wide values, bf16
#   all_reduce.N       t0 + bytes / bandwidth for N GPUs; bytes of the message of one GPU, 4 KiB to
#                      128 MiB; CUDA graph
#
# bandwidth and peak are those of the GPU in gpus.toml; of fp8 products (gemm_fp8) the peak is
# twice that of bf16. t0_us in microseconds, c_ns in nanoseconds, all_reduce's bandwidth in bytes/s.
# error_p50 and error_p90 are absolute percentage errors over the rows fitted. Decode is fitted on
# the rows whose KV exceeds 4 x the L2 cache: the tables repeat each kernel on the same buffers, so
# that smaller ones are read from L2, which a step that walks through layers never does. On all
# rows, L2-warm ones too, the error is error_all_p50 and error_all_p90. error_ep* are errors of the
# same parameters with experts spread over ranks; the table there has the busiest rank.
#
# fill_rows (RTX 4090): a chunk of n queries behind a history costs, beyond what it costs without,
# the pairs of max(n, fill_rows / heads) queries: fewer do not fill the GPU.
#
# Source: NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0), tables of the vLLM backend unless `table`
# says otherwise; the RTX 4090 from LLMServingSim (MIT). Least absolute log errors. Written by
# results/timing_fits/fit.py; how good they are: results/timing_fits/README.md.
"""


def toml_number(key: str, value: float) -> str:
    """Answer *value* with the digits that its kind of parameter deserves."""
    if key == "bandwidth":
        return f"{value:.4g}".replace("e+", "e")
    if key.startswith("error"):
        return f"{value:.1f}"
    if key == "fill_rows":
        return f"{value:.0f}"
    return f"{round(value, 4)}"


def write_toml(fits: list[Fit]) -> None:
    """Write the fits, a section a family."""
    lines = [HEADER]
    for name, gpu in {**GPUS, "RTX-4090": RTX_4090}.items():
        names = ", ".join(f'"{n}"' for n in gpu.names)
        system = f"vllm {gpu.version}, {gpu.title}"
        lines.append(f'[{name}]\ngpus = [{names}]\nfitted_on = "{gpu.fitted_on}"')
        if name == "RTX-4090":
            system = "vllm 0.19.0, RTX 4090, page size 16"
            lines += ['tables = "LLMServingSim kernel times"', "page = 16"]
        lines.append(f'system = "{system}"\n')
        for fit in fits:
            if fit.gpu != name:
                continue
            lines += [f"[{name}.{fit.section}]", f'kernel = "{fit.kernel}"']
            lines += [f'table = "{fit.table}"', f"rows = {fit.rows}"]
            lines += [f"{k} = {toml_number(k, v)}" for k, v in fit.values.items()]
            p50, p90 = fit.published or fit.used
            lines += [f"error_p50 = {p50}", f"error_p90 = {p90}"]
            if fit.everywhere:
                p50, p90 = fit.everywhere
                lines += [f"error_all_p50 = {p50}", f"error_all_p90 = {p90}"]
            lines += [f"{k} = {toml_number(k, v)}" for k, v in fit.extra.items()]
            lines.append("")
    TOML.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def write_errors(fits: list[Fit]) -> None:
    """Write fits.csv, and errors.md with the same numbers to read."""
    rows = []
    for fit in fits:
        row: dict[str, Any] = {"gpu": fit.gpu, "fit": fit.section, "rows": fit.rows}
        row |= {k: float(toml_number(k, v)) for k, v in fit.values.items()}
        row |= {"p50": fit.used[0], "p90": fit.used[1]}
        if fit.published:
            row |= {"published_p50": fit.published[0], "published_p90": fit.published[1]}
            row |= {f"refit_{k}": float(toml_number(k, v)) for k, v in fit.refit.items()}
            if fit.again:
                row |= {"refit_p50": fit.again[0], "refit_p90": fit.again[1]}
        if fit.everywhere:
            row |= {"all_p50": fit.everywhere[0], "all_p90": fit.everywhere[1]}
        row |= {"kernel": fit.kernel, "table": fit.table, **fit.extra}
        rows.append(row)
    pd.DataFrame(rows).to_csv(HERE / "fits.csv", index=False)

    def show(values: dict[str, float]) -> str:
        return " / ".join(toml_number(k, v) for k, v in values.items())

    lines = [
        "# Errors of the fits", "",
        "Written by `fit.py`. Parameters in the order of the file: t0 / eff / c (decode),",
        "t0 / eff_flops / eff_bw, or t0 / bandwidth. p50 and p90 are absolute percentage errors on",
        "the fitted rows. A refit is shown where published values are kept.", "",
        "| GPU | fit | kernel | rows | parameters | p50/p90 | refit | its p50/p90 |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for fit in fits:
        again = f"{fit.again[0]} / {fit.again[1]}" if fit.published and fit.again else ""
        refit = show(fit.refit) if fit.published else ""
        lines.append(
            f"| {fit.gpu} | {fit.section} | {fit.kernel} | {fit.rows} | {show(fit.values)} "
            f"| {fit.used[0]} / {fit.used[1]} | {refit} | {again} |"
        )
    (HERE / "errors.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def check_all_reduce(fits: list[Fit]) -> None:
    """Write the RTX PRO 6000 fit for two GPUs beside LLMServingSim's measurement."""
    fit = next(f for f in fits if (f.gpu, f.section) == ("RTX-PRO-6000", "all_reduce.2"))
    sizes = np.array(list(RTX_PRO_6000_NCCL), dtype=np.float64)
    times = np.array(list(RTX_PRO_6000_NCCL.values()))
    own = all_reduce_fit("", 2, "", sizes, times).values
    columns: dict[str, Any] = {"bytes": sizes.astype(int), "measured_us": times}
    for name, values in (("fit", fit.values), ("fit_of_these", own)):
        predicted = values["t0_us"] + sizes / values["bandwidth"] * 1e6
        columns[f"{name}_us"] = predicted.round(1)
        columns[f"{name}_error_percent"] = ((predicted / times - 1) * 100).round(1)
    pd.DataFrame(columns).to_csv(HERE / "all_reduce_check.csv", index=False)
    print("RTX PRO 6000, fit of LLMServingSim's own rows:", own)


def main() -> None:
    """Fit everything and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("published", type=Path)
    args = parser.parse_args()
    text = (args.published / "fitted_params.json").read_text(encoding="utf-8")
    document = json.loads(text)
    fits: list[Fit] = []
    for name, gpu in GPUS.items():
        fits += system_fits(name, gpu, args.data, document)
    fits += profile_fits(args.published / "e2e_rtx4090" / "profile")
    write_toml(fits)
    write_errors(fits)
    check_all_reduce(fits)
    bad_tables(args.data).to_csv(HERE / "peak_bandwidth_check.csv", index=False)


if __name__ == "__main__":
    main()
