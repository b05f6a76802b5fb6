"""Kernel times from shapes and a roofline fitted to measured kernels.

Decodes and prefills are two calls of attention, though vLLM makes one of them where it can. The
fits and their errors are in ``sim/data/timing_fits.toml``; what small kernels take is assumed.
"""

from typing import Any

from sim.errors import ConfigError
from sim.hardware import GpuSpec
from sim.tables import load_table
from sim.timing.attention import RooflineAttention
from sim.timing.base import PS_PER_US
from sim.timing.layers import AttentionShape, ExpertShape, LatentDims
from workloads.record import PS_PER_S

PS_PER_NS = 10**3

AICONFIGURATOR_TABLES = "aiconfigurator-core 0.12.0 kernel tables"
"""What a fit comes from that does not say so."""

SMALL_KERNEL_US = 2.0
"""Of a norm, an activation or a rotary embedding at one token: 1.9 to 3.3 us on an RTX 4090
(LLMServingSim's profile, ``dense.csv``). Assumed of every GPU."""

SMALL_KERNEL_BW = 0.9
"""Share of peak bandwidth at many tokens. There the activation of 2,048 tokens, which the L2 cache
does not hold, reaches the peak."""

SAMPLER_US = 25.0
"""Of the sampler at one request there; it reads the logits in 32 bits about once."""

SMALL_KERNELS = (
    f"{SMALL_KERNEL_US:g} us a kernel, {SAMPLER_US:g} us the sampler, and their bytes at "
    f"{SMALL_KERNEL_BW:g} of peak bandwidth, as on an RTX 4090"
)
"""Where the times of `small_kernel` come from, in words."""

FITTED_PAGE = 64
"""Tokens a KV block where a fit does not say so."""

FITTED_HEAD_DIM = 128
"""The attention fits hold for this head_dim where their name does not say so."""

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
        """Answer the time of *size* tokens, in picoseconds: arithmetic and memory one by one."""
        pairs = self._shape.assignments(size)
        elements = self._shape.touched(size) * self._elements + pairs * self._row_elements
        compute = 2 * pairs * self._elements * self._roofline.flop_ps
        memory = elements * self._num_bytes * self._roofline.byte_ps
        return self._roofline.t0_ps + compute + memory


class Transfer:
    """The time of what only moves bytes, by tokens: t0 + bytes / bandwidth."""

    def __init__(self, t0_us: float, bandwidth: float, bytes_per_token: float) -> None:
        """Take latency, and bytes of message a second."""
        self._t0_ps = t0_us * PS_PER_US
        self._token_ps = bytes_per_token * PS_PER_S / bandwidth

    def at(self, size: float) -> float:
        """Answer the time of *size* tokens, in picoseconds."""
        return self._t0_ps + self._token_ps * size


def small_kernel(gpu: GpuSpec, op: str, bytes_per_token: int) -> Transfer:
    """Answer the time of kernel *op*, no product and no attention, by tokens: assumed."""
    launch = SAMPLER_US if op == "sampler" else SMALL_KERNEL_US
    return Transfer(launch, SMALL_KERNEL_BW * gpu.hbm_bandwidth, bytes_per_token)


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
        self.tables: str = fit.get("tables", AICONFIGURATOR_TABLES)
        self.page: int = fit.get("page", FITTED_PAGE)
        self.extrapolated = ""
        if gpu.name != fit["fitted_on"]:
            self.extrapolated = f", scaled from {fit['fitted_on']} by peak bandwidth"

    def error(self, section: str) -> str:
        """Answer the median and 90th percentile of the error of fit *section*, in percent."""
        fit: Any = self._fit
        for name in section.split("."):
            fit = fit[name]
        return f"{fit['error_p50']:g}/{fit['error_p90']:g} %"

    def section(self, op: str, num_gpus: int) -> str:
        """Answer the fit that prices kernel *op*, of those that are not attention."""
        if op in {"all_reduce", "all_gather"}:
            return f"all_reduce.{num_gpus}"
        return "moe" if op == "moe" and self.has("moe") else "gemm"

    def has(self, name: str) -> bool:
        """Whether there is a fit *name*."""
        return name in self._fit

    def gemm(self, n: int, k: int, num_bytes: float) -> Gemm:
        """Answer the time of a product [tokens, k] x [k, n]; *num_bytes* of an element."""
        return Gemm(Roofline(self._fit["gemm"], self._gpu), n, k, num_bytes)

    def experts(self, shape: ExpertShape, hidden_size: int, num_bytes: float) -> Experts:
        """Answer the time of routed experts; by the fit of products where there is no other."""
        fit = self._fit[self.section("moe", 1)]
        return Experts(Roofline(fit, self._gpu), shape, hidden_size, num_bytes)

    def collective(self, op: str, num_gpus: int, bytes_per_token: int) -> Transfer:
        """Answer the time of an all-reduce or all-gather over *num_gpus*.

        A ring moves 2 (N - 1) / N of a message that is reduced, and N - 1 times one that is
        gathered: as much as of a reduced one N / 2 times as long.

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
        share = num_gpus / 2 if op == "all_gather" else 1
        return Transfer(fit["t0_us"], fit["bandwidth"], share * bytes_per_token)

    def attention(
        self, shape: AttentionShape, num_bytes: float, kv_bytes: float, decode_factor: float
    ) -> RooflineAttention:
        """Answer the time of a layer's attention.

        *num_bytes* of an element of queries and outputs, *kv_bytes* of the cache; *decode_factor*
        for the block size.

        Raises:
            ConfigError: the heads are outside what was fitted.
        """
        sections = self.attention_sections(shape, kv_bytes)
        if shape.latent is not None:
            return self._latent_attention(shape, shape.latent, sections, num_bytes, kv_bytes)
        decode, prefill = (self._fit[name] for name in sections)
        heads, kv_heads, dim = shape[:3]
        roofline = Roofline(prefill, self._gpu)
        byte_ps = PS_PER_S / (decode["eff"] * self._gpu.hbm_bandwidth)
        slot_bytes = 2 * kv_heads * dim * kv_bytes
        return RooflineAttention(
            t0=(decode_factor * decode["t0_us"] * PS_PER_US, roofline.t0_ps),
            decode=decode_factor * decode["c_ns"] * PS_PER_NS * kv_heads,
            per_context=decode_factor * slot_bytes * byte_ps,
            pair=4 * heads * dim * roofline.flop_ps,
            chunk=2 * heads * dim * num_bytes * roofline.byte_ps,
            context=slot_bytes * roofline.byte_ps,
            fill=prefill.get("fill_rows", 0) / heads,
        )

    def attention_sections(self, shape: AttentionShape, kv_bytes: float) -> tuple[str, str]:
        """Answer the names of the fits of decodes and of chunks.

        Raises:
            ConfigError: there are none for such heads; the message has those that there are.
        """
        heads, kv_heads, _, latent = shape
        names = ("decode_attention", "prefill_attention")
        decode, prefill = self._section_names(shape, kv_bytes)
        too_many = latent is None and heads > MAX_QUERY_HEADS_A_KV_HEAD * kv_heads
        if too_many or not (self.has(decode) and self.has(prefill)):
            what = "latent attention, " if latent else ""
            known = [name for name in self._fit if name.startswith((names[0], "mla_decode"))]
            raise ConfigError(
                f"--step-time roofline has no fit on {self._gpu.name} for {what}{shape}, KV of "
                f"{kv_bytes} bytes: it knows {', '.join(known)}, and at most "
                f"{MAX_QUERY_HEADS_A_KV_HEAD} query heads a kv head; choose --timing-table or "
                "--step-time linear:..."
            )
        return decode, prefill

    @staticmethod
    def _section_names(shape: AttentionShape, kv_bytes: float) -> tuple[str, str]:
        suffix = "_fp8" if kv_bytes == 1 else ""
        if shape.latent is not None:
            return f"mla_decode{suffix}", "mla_prefill"
        suffix += "" if shape.head_dim == FITTED_HEAD_DIM else f"_hd{shape.head_dim}"
        return f"decode_attention{suffix}", f"prefill_attention{suffix}"

    def has_attention(self, shape: AttentionShape, kv_bytes: float) -> bool:
        """Whether there are fits of attention for such heads."""
        return all(map(self.has, self._section_names(shape, kv_bytes)))

    def _latent_attention(
        self,
        shape: AttentionShape,
        latent: LatentDims,
        sections: tuple[str, str],
        num_bytes: float,
        kv_bytes: float,
    ) -> RooflineAttention:
        """Answer decodes over the latent cache, and prefills over keys and values of every head."""
        decode, prefill = (Roofline(self._fit[name], self._gpu) for name in sections)
        heads = shape.num_heads
        flops = 2 * heads * (shape.head_dim + latent.kv_lora_rank)
        row_bytes = heads * (latent.qk_head_dim + latent.v_head_dim) * num_bytes
        return RooflineAttention(
            t0=(decode.t0_ps, prefill.t0_ps),
            decode=0.0,
            per_context=max(flops * decode.flop_ps, shape.head_dim * kv_bytes * decode.byte_ps),
            pair=2 * heads * (latent.qk_head_dim + latent.v_head_dim) * prefill.flop_ps,
            chunk=row_bytes * prefill.byte_ps,
            context=row_bytes * prefill.byte_ps,
        )
