"""Whether a table can be right: its times against what the GPU can do at best."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.columns import FloatArray
from sim.errors import ConfigError
from sim.hardware import GpuSpec, get_gpu
from sim.timing.table import TimingTable

LARGEST_L2 = 128_000_000
"""Bytes of the largest L2 cache of any GPU here. Calls that move more than four times as much
cannot have had their data in it, however often they were repeated."""

LAUNCH_US = 5.0
"""What a kernel takes at least, about, in microseconds."""

MAX_OFF = 100.0
"""Times off by more than this factor are in another unit. The medians of aiconfigurator-core 0.12.0
are 1.1 to 4.7 times the roofline with a launch."""

PEAK_MARGIN = 1.05
"""Above this share of peak bandwidth a time is impossible: clocks do not explain it."""

MAX_IMPOSSIBLE = 0.01
"""Share of impossible rows from which a table is refused."""

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "fp8_block": 1.0,
          "int8": 1.0, "nvfp4": 0.5}  # fmt: skip
_LATENT_DIM = 576
"""Of MLA, whose one vector a token is key and value: kv_lora_rank 512 + qk_rope_head_dim 64."""

_UNITS = {1e-6: "seconds", 1e-3: "milliseconds", 1e3: "nanoseconds", 1e6: "picoseconds"}


class _Work(NamedTuple):
    """What calls have to move and compute: bytes [n] and FLOPs at the rate of bf16 [n]."""

    num_bytes: FloatArray
    flops: FloatArray


def _decode(table: TimingTable) -> _Work:
    c = table.columns
    keys = (c["batch"] * (c["context"] + 1)).astype(np.float64)
    return _Work(keys * _token_bytes(table), 4.0 * keys * c["num_heads"] * c["head_dim"])


def _prefill(table: TimingTable) -> _Work:
    c = table.columns
    chunk, history = c["query_len"].astype(np.float64), c["query_context"]
    pairs = c["batch"] * chunk * (history + chunk / 2)
    flops = 4.0 * pairs * c["num_heads"] * c["head_dim"]
    return _Work(c["batch"] * (history + chunk) * _token_bytes(table), flops)


def _gemm(table: TimingTable) -> _Work:
    c = table.columns
    m, n, k = (c[name].astype(np.float64) for name in ("num_tokens", "n", "k"))
    num_bytes = _element_bytes(c["dtype"])
    return _Work((n * k) * num_bytes + m * (n + k), m * n * k * num_bytes)


_WORK = {"decode_attention": _decode, "prefill_attention": _prefill, "gemm": _gemm}
"""The operations whose least work is known. Queries and outputs of attention are not counted, and
activations of products with one byte an element."""


def _token_bytes(table: TimingTable) -> FloatArray:
    """Answer the bytes of keys and values of one token [n]."""
    c = table.columns
    is_latent = (c["num_kv_heads"] == 1) & (c["head_dim"] == _LATENT_DIM)
    elements = np.where(is_latent, 1.0, 2.0) * c["num_kv_heads"] * c["head_dim"]
    return elements * _element_bytes(c["kv_dtype"])


def _element_bytes(dtypes: npt.NDArray[np.object_]) -> FloatArray:
    """Answer the bytes of an element [n]; 1 for types that are not known."""
    return np.array([_BYTES.get(dtype, 1.0) for dtype in dtypes.tolist()])


def check_units(table: TimingTable, where: str) -> None:
    """Check that the times of attention and products are microseconds, by the GPU's roofline.

    Of each operation the median is looked at: of the calls too large for an L2 cache, else of all.

    Raises:
        ConfigError: they are off about a thousandfold or more; or the table's GPU is unknown.
    """
    gpu = _gpu(table, where)
    for op, work_of in _WORK.items():
        rows = table.where(op=op)
        if not len(rows):
            continue
        work = work_of(rows)
        least = 1e6 * np.maximum(work.num_bytes / gpu.hbm_bandwidth, work.flops / gpu.bf16_flops)
        large = work.num_bytes > 4 * LARGEST_L2
        seen = large if large.any() else np.ones(len(rows), dtype=np.bool_)
        ratio = float(np.median((rows.columns["latency_us"] / (least + LAUNCH_US))[seen]))
        if not 1 / MAX_OFF < ratio < MAX_OFF:
            unit = min(_UNITS, key=lambda factor: abs(np.log(ratio / factor)))
            raise ConfigError(
                f"{where}: {op}: latency_us looks like {_UNITS[unit]}: the median is {ratio:.2g} "
                f"of the roofline of {gpu.name}; expected microseconds"
            )


def check_peaks(table: TimingTable, where: str) -> None:
    """Check that decodes and products do not read memory faster than the GPU can.

    Only calls that are too large for an L2 cache are looked at.

    Raises:
        ConfigError: more than `MAX_IMPOSSIBLE` of an operation's calls, by one kernel, are faster
            than `PEAK_MARGIN` of peak bandwidth; or the table's GPU is unknown.
    """
    gpu = _gpu(table, where)
    for op in ("decode_attention", "gemm"):
        rows = table.where(op=op)
        if not len(rows):
            continue
        num_bytes = _WORK[op](rows).num_bytes
        shares = num_bytes / (rows.columns["latency_us"] * 1e-6 * gpu.hbm_bandwidth)
        large = num_bytes > 4 * LARGEST_L2
        for (kernel,) in rows.distinct("kernel"):
            seen = shares[large & (rows.columns["kernel"] == kernel)]
            impossible = int((seen > PEAK_MARGIN).sum())
            if impossible > MAX_IMPOSSIBLE * len(seen):
                raise ConfigError(
                    f"{where}: {op} by {kernel}: {impossible} of the {len(seen)} calls too large "
                    f"for an L2 cache read memory faster than {PEAK_MARGIN:.0%} of the peak of "
                    f"{gpu.name} (up to {seen.max():.0%}): these times cannot be right"
                )


def _gpu(table: TimingTable, where: str) -> GpuSpec:
    try:
        return get_gpu(table.info.gpu)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
