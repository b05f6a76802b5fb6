"""Kernel times from shapes and a roofline fitted to measured kernels.

What is left out: norms, rotary embedding, activation functions, the sampler, and L2 reuse; a real
step is longer. Decodes and prefills are two calls of attention, though vLLM makes one of them where
it can.

The fits and their errors are in ``sim/data/timing_fits.toml``.
"""

from typing import Any

import numpy as np

from sim.columns import FloatArray
from sim.errors import ConfigError
from sim.hardware import GpuSpec
from sim.tables import load_table
from sim.timing.attention import PS_PER_US, RooflineAttention
from sim.timing.layers import AttentionShape, ExpertShape
from workloads.record import PS_PER_S

PS_PER_NS = 10**3

FITTED_HEAD_DIM = 128
"""The attention fits hold for this head_dim only."""

MAX_QUERY_HEADS_A_KV_HEAD = 16
"""The attention fits hold up to this ratio."""


def fitted_gpu_names() -> list[str]:
    """Answer the GPUs that the roofline has a fit for, in alphabetical order."""
    return sorted(name for fit in load_table("timing_fits").values() for name in fit["gpus"])


class Roofline:
    """One fit, in ps: t0 + max(FLOPs / (eff_flops * peak), bytes / (eff_bw * bandwidth)).

    Attributes:
        t0_ps: launch and latency.
        flop_ps: of one floating-point operation.
        byte_ps: of one byte read or written.
    """

    __slots__ = ("byte_ps", "flop_ps", "t0_ps")

    def __init__(self, fit: dict[str, Any], gpu: GpuSpec) -> None:
        self.t0_ps: float = fit["t0_us"] * PS_PER_US
        self.flop_ps: float = PS_PER_S / (fit["eff_flops"] * gpu.bf16_flops)
        self.byte_ps: float = PS_PER_S / (fit["eff_bw"] * gpu.hbm_bandwidth)


class Gemm:
    """The time of a matrix product [m, k] x [k, n], by m."""

    __slots__ = ("_compute_ps", "_fixed_ps", "_row_ps", "_t0_ps")

    def __init__(self, roofline: Roofline, n: int, k: int, num_bytes: float) -> None:
        """Take the sizes n and k, and the bytes of an element."""
        byte_ps = num_bytes * roofline.byte_ps
        self._t0_ps = roofline.t0_ps
        self._compute_ps = 2 * n * k * roofline.flop_ps
        self._fixed_ps = n * k * byte_ps
        self._row_ps = (n + k) * byte_ps

    def at(self, size: float) -> float:
        """Answer the time of *size* rows, in picoseconds."""
        compute = self._compute_ps * size
        memory = self._fixed_ps + self._row_ps * size
        return self._t0_ps + (compute if compute > memory else memory)

    def at_all(self, sizes: FloatArray) -> FloatArray:
        """Answer the times of *sizes* [n], in picoseconds."""
        memory = self._fixed_ps + self._row_ps * sizes
        return self._t0_ps + np.maximum(self._compute_ps * sizes, memory)


class Experts:
    """The time of a layer's routed experts, by tokens: those touched have their weights read."""

    def __init__(
        self, roofline: Roofline, shape: ExpertShape, hidden_size: int, num_bytes: float
    ) -> None:
        """Take the experts of one rank, and the bytes of an element."""
        self._roofline, self._shape = roofline, shape
        self._elements = shape.num_matrices * shape.width * hidden_size
        self._row_elements = shape.num_matrices * (shape.width + hidden_size)
        self._num_bytes = num_bytes

    def at(self, size: float) -> float:
        """Answer the time of *size* tokens, in picoseconds."""
        pairs = self._shape.assignments(size)
        elements = self._shape.touched(size) * self._elements + pairs * self._row_elements
        compute = 2 * pairs * self._elements * self._roofline.flop_ps
        memory = elements * self._num_bytes * self._roofline.byte_ps
        return self._roofline.t0_ps + max(compute, memory)


class Transfer:
    """The time of an all-reduce, by tokens: t0 + bytes / bandwidth."""

    def __init__(self, t0_us: float, bandwidth: float, bytes_per_token: int) -> None:
        """Take latency, and bytes of message a second."""
        self._t0_ps = t0_us * PS_PER_US
        self._token_ps = bytes_per_token * PS_PER_S / bandwidth

    def at(self, size: float) -> float:
        """Answer the time of *size* tokens, in picoseconds."""
        return self._t0_ps + self._token_ps * size


class Fits:
    """All that is fitted for one GPU. Fits give fractions of peak; the peaks are its own.

    Attributes:
        extrapolated: what else the report must say of the source; empty if nothing.
    """

    def __init__(self, gpu: GpuSpec) -> None:
        """Find the fit of *gpu*.

        Raises:
            ConfigError: there is none; the message has the GPUs that have one.
        """
        fit = next((f for f in load_table("timing_fits").values() if gpu.name in f["gpus"]), None)
        if fit is None:
            raise ConfigError(
                f"--step-time roofline has no fit for --gpu {gpu.name}, only for "
                f"{', '.join(fitted_gpu_names())}: choose one, or --timing-table, "
                "--step-time linear:... or constant:..."
            )
        self._fit: dict[str, Any] = fit
        self._gpu = gpu
        self.system: str = fit["system"]
        self.page: int = fit.get("page", 64)
        self.extrapolated = ""
        if gpu.name != fit["fitted_on"]:
            self.extrapolated = f", scaled from {fit['fitted_on']} by peak bandwidth"

    def error(self, name: str) -> tuple[float, float]:
        """Answer the median and 90th percentile of the error of fit *name*, in percent."""
        return self._fit[name]["error_p50"], self._fit[name]["error_p90"]

    def has(self, name: str) -> bool:
        """Whether there is a fit *name*."""
        return name in self._fit

    def gemm(self, n: int, k: int, num_bytes: float) -> Gemm:
        """Answer the time of a product [tokens, k] x [k, n]; *num_bytes* of an element."""
        return Gemm(Roofline(self._fit["gemm"], self._gpu), n, k, num_bytes)

    def experts(self, shape: ExpertShape, hidden_size: int, num_bytes: float) -> Experts:
        """Answer the time of routed experts; by the fit of products where there is no other."""
        fit = self._fit["moe" if self.has("moe") else "gemm"]
        return Experts(Roofline(fit, self._gpu), shape, hidden_size, num_bytes)

    def all_reduce(self, num_gpus: int, bytes_per_token: int) -> Transfer:
        """Answer the time of an all-reduce over *num_gpus*.

        Raises:
            ConfigError: none was measured for that many.
        """
        fits = self._fit.get("all_reduce", {})
        fit = fits.get(str(num_gpus))
        if fit is None:
            known = ", ".join(fits) or "none"
            raise ConfigError(
                f"--tensor-parallel-size {num_gpus}: no all-reduce is fitted for {num_gpus} "
                f"{self._gpu.name}, only for: {known}; choose one, or a --timing-table that has it"
            )
        return Transfer(fit["t0_us"], fit["bandwidth"], bytes_per_token)

    def attention(
        self, shape: AttentionShape, num_bytes: float, kv_bytes: float, decode_factor: float
    ) -> RooflineAttention:
        """Answer the time of a layer's attention.

        *num_bytes* of an element of queries and outputs, *kv_bytes* of the cache; *decode_factor*
        for the block size.

        Raises:
            ConfigError: the heads are outside what was fitted.
        """
        heads, kv_heads, dim, is_mla = shape
        names = (
            ("mla_decode", "mla_prefill") if is_mla else ("decode_attention", "prefill_attention")
        )
        if kv_bytes == 1 and self.has(f"{names[0]}_fp8"):
            names = (f"{names[0]}_fp8", names[1])
        if is_mla and not self.has(names[0]):
            raise ConfigError(
                f"--step-time roofline has no fit of latent attention on {self._gpu.name}: choose "
                "--timing-table, --step-time linear:... or constant:..."
            )
        if not is_mla and (dim != FITTED_HEAD_DIM or heads > MAX_QUERY_HEADS_A_KV_HEAD * kv_heads):
            raise ConfigError(
                f"--step-time roofline is fitted for head_dim {FITTED_HEAD_DIM} and at most "
                f"{MAX_QUERY_HEADS_A_KV_HEAD} query heads a kv head; a rank has {shape}: choose "
                "--timing-table or --step-time linear:..."
            )
        decode, prefill = (self._fit[name] for name in names)
        keys_and_values = 1 if is_mla else 2
        slot_bytes = keys_and_values * kv_heads * dim * kv_bytes
        bandwidth = self._gpu.hbm_bandwidth
        decode_byte_ps = decode_factor * PS_PER_S / (decode["eff"] * bandwidth)
        prefill_byte_ps = PS_PER_S / (prefill["eff_bw"] * bandwidth)
        flop_ps = PS_PER_S / (prefill["eff_flops"] * self._gpu.bf16_flops)
        return RooflineAttention(
            t0=(
                decode_factor * decode["t0_us"] * PS_PER_US,
                prefill["t0_us"] * PS_PER_US,
            ),
            decode=decode_factor * decode["c_ns"] * PS_PER_NS * kv_heads,
            per_context=slot_bytes * decode_byte_ps,
            pair=4 * heads * dim * flop_ps,
            chunk=2 * heads * dim * num_bytes * prefill_byte_ps,
            context=slot_bytes * prefill_byte_ps,
        )
