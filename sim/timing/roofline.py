"""Step times from the shapes of a model and a roofline fitted to measured kernels.

Step = layers * (qkv, o, up and down projections + decode attention + prefill attention) + output
projection of the tokens that are sampled. What is left out: the host, norms, rotary embedding,
activation functions, the sampler, and L2 reuse; a real step is longer. Decodes and prefills are two
calls of attention, though vLLM makes one of them where it can.

The fits and their errors are in ``sim/data/timing_fits.toml``.
"""

from typing import Any

from sim.errors import ConfigError
from sim.hardware import GpuSpec
from sim.kv_spec import dtype_bytes
from sim.models import ModelSpec
from sim.tables import load_table
from sim.timing.base import TICKS_PER_PS, DecodeLine, StepBatch
from workloads.record import PS_PER_S

PS_PER_US = 10**6
PS_PER_NS = 10**3

AICONFIGURATOR_TABLES = "aiconfigurator-core 0.12.0 kernel tables"
"""What a fit comes from that does not say so."""

FITTED_HEAD_DIM = 128
"""The fits hold for this head_dim only."""

MAX_QUERY_HEADS_A_KV_HEAD = 16
"""The fits hold up to this ratio."""


def fitted_gpu_names() -> list[str]:
    """Answer the GPUs that the roofline has a fit for, in alphabetical order."""
    return sorted(name for fit in load_table("timing_fits").values() for name in fit["gpus"])


def _fit_of(gpu: GpuSpec) -> dict[str, Any]:
    """Answer the fit of *gpu*; ConfigError, with the GPUs that have one, if there is none."""
    for fit in load_table("timing_fits").values():
        if gpu.name in fit["gpus"]:
            return dict(fit)
    raise ConfigError(
        f"--step-time roofline has no fit for --gpu {gpu.name}, only for "
        f"{', '.join(fitted_gpu_names())}: choose one, or --step-time linear:... or constant:..."
    )


class Gemm:
    """The time of a matrix product [m, k] x [k, n] on one GPU, in picoseconds.

    t0 + max(2mnk / (eff_flops * peak), (mk + kn + mn) * bytes / (eff_bw * bandwidth)), with all
    that does not depend on m computed once.

    Attributes:
        t0_ps: launch and latency.
        compute_ps: arithmetic, for each row.
        fixed_ps: reading the weights.
        row_ps: reading and writing one row of activations.
    """

    __slots__ = ("compute_ps", "fixed_ps", "row_ps", "t0_ps")

    def __init__(self, fit: dict[str, Any], gpu: GpuSpec, n: int, k: int, num_bytes: int) -> None:
        """Take the ``gemm`` fit, the sizes n and k, and the bytes of an element."""
        byte_ps: float = num_bytes * PS_PER_S / (fit["eff_bw"] * gpu.hbm_bandwidth)
        self.t0_ps: float = fit["t0_us"] * PS_PER_US
        self.compute_ps: float = 2 * n * k * PS_PER_S / (fit["eff_flops"] * gpu.bf16_flops)
        self.fixed_ps: float = n * k * byte_ps
        self.row_ps: float = (n + k) * byte_ps

    def time_ps(self, m: int) -> float:
        """Answer the time of *m* rows, in picoseconds."""
        compute = self.compute_ps * m
        memory = self.fixed_ps + self.row_ps * m
        return self.t0_ps + (compute if compute > memory else memory)


class RooflineStepTime:
    """Prices a step by a roofline fitted to kernels measured on this kind of GPU.

    The fit gives fractions of peak; the peaks are the GPU's own. For A100-40 that extrapolates: the
    fit was made on the A100-80, which has 31 % more bandwidth.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec) -> None:
        """Compute the constants of *model* on *gpu*.

        Raises:
            ConfigError: there is no fit for the GPU, or the model's heads are outside the fits.
        """
        fit = _fit_of(gpu)
        decode, prefill = fit["decode_attention"], fit["prefill_attention"]
        heads, kv_heads, dim = (
            model.num_attention_heads,
            model.num_key_value_heads,
            model.head_dim,
        )
        if dim != FITTED_HEAD_DIM or heads > MAX_QUERY_HEADS_A_KV_HEAD * kv_heads:
            raise ConfigError(
                f"--step-time roofline is fitted for head_dim {FITTED_HEAD_DIM} and at most "
                f"{MAX_QUERY_HEADS_A_KV_HEAD} query heads a kv head; {model.name} has head_dim "
                f"{dim}, {heads} query heads and {kv_heads} kv heads: choose --step-time linear:..."
            )
        self.provenance = "fitted"
        self.description = (
            f"roofline fitted to {fit.get('tables', AICONFIGURATOR_TABLES)} ({fit['system']}): "
            f"decode p50/p90 error {decode['error_p50']}/{decode['error_p90']} % on "
            "HBM-resident rows, no host overhead"
        )
        if gpu.name != fit["fitted_on"]:
            self.description += f", scaled from {fit['fitted_on']} by peak bandwidth"

        num_bytes = dtype_bytes(model)
        hidden, inter = model.hidden_size, model.intermediate_size

        def gemm(n: int, k: int) -> Gemm:
            return Gemm(fit["gemm"], gpu, n, k, num_bytes)

        self.num_layers = model.num_hidden_layers
        self.layer_gemms = (
            gemm((heads + 2 * kv_heads) * dim, hidden),
            gemm(hidden, heads * dim),
            gemm((2 if model.gated_mlp else 1) * inter, hidden),
            gemm(hidden, inter),
        )
        self.lm_head = gemm(model.vocab_size, hidden)

        byte_ps: float = PS_PER_S / (decode["eff"] * gpu.hbm_bandwidth)
        self._decode_t0_ps: float = decode["t0_us"] * PS_PER_US
        self._decode_ps: float = decode["c_ns"] * PS_PER_NS * kv_heads
        self._decode_context_ps: float = 2 * kv_heads * dim * num_bytes * byte_ps

        byte_ps = PS_PER_S / (prefill["eff_bw"] * gpu.hbm_bandwidth)
        self._prefill_t0_ps: float = prefill["t0_us"] * PS_PER_US
        self._pair_ps: float = 4 * heads * dim * PS_PER_S / (prefill["eff_flops"] * gpu.bf16_flops)
        self._chunk_ps: float = 2 * heads * dim * num_bytes * byte_ps
        self._context_ps: float = 2 * kv_heads * dim * num_bytes * byte_ps
        self._lines: dict[int, DecodeLine] = {}
        self._gemms_ps: dict[int, float] = {}

    def decode_attention_ps(self, num_decodes: int, decode_context: int) -> float:
        """Answer the time of one layer's decode attention, in picoseconds; 0 without decodes.

        Linear in both: *decode_context* is the sum of the contexts of *num_decodes* requests.
        """
        if num_decodes == 0:
            return 0.0
        return (
            self._decode_t0_ps
            + self._decode_ps * num_decodes
            + self._decode_context_ps * decode_context
        )

    def prefill_attention_ps(self, prefills: tuple[tuple[int, int], ...]) -> float:
        """Answer the time of one layer's attention over all chunks in one call, in picoseconds.

        A chunk of n tokens that ends at context c attends n * (c - n) + n * n / 2 pairs, reads the
        keys and values of c tokens, reads queries and writes outputs of n tokens. At c = n this is
        the fitted formula: 2 * heads * head_dim * n * n FLOPs, and
        n * head_dim * (2 * heads + 2 * kv_heads) elements moved.
        """
        if not prefills:
            return 0.0
        pairs = 0.0
        chunks = contexts = 0
        for chunk, context in prefills:
            pairs += chunk * (context - 0.5 * chunk)
            chunks += chunk
            contexts += context
        return (
            self._prefill_t0_ps
            + self._pair_ps * pairs
            + self._chunk_ps * chunks
            + self._context_ps * contexts
        )

    def step_time(self, batch: StepBatch) -> int:
        """Answer the time of *batch*, in ticks."""
        num_decodes, decode_context, prefills, num_sampled = batch
        if not prefills:
            fixed, per_context = self.decode_line(num_decodes)
            return fixed + per_context * decode_context
        num_tokens = num_decodes
        for chunk, _ in prefills:
            num_tokens += chunk
        layer = self._layer_gemms_ps(num_tokens) + self.prefill_attention_ps(prefills)
        if num_decodes:
            layer += self.decode_attention_ps(num_decodes, decode_context)
        step = self.num_layers * layer
        if num_sampled:
            step += self.lm_head.time_ps(num_sampled)
        return round(step * TICKS_PER_PS)

    def decode_line(self, num_decodes: int) -> DecodeLine:
        """Answer the line of *num_decodes* requests; each is computed once."""
        line = self._lines.get(num_decodes)
        if line is None:
            layer = self._layer_gemms_ps(num_decodes) + self.decode_attention_ps(num_decodes, 0)
            step = self.num_layers * layer + self.lm_head.time_ps(num_decodes)
            slope = self.num_layers * self._decode_context_ps
            line = DecodeLine(round(step * TICKS_PER_PS), round(slope * TICKS_PER_PS))
            self._lines[num_decodes] = line
        return line

    def _layer_gemms_ps(self, num_tokens: int) -> float:
        """Answer the time of one layer's products; each number of tokens is computed once."""
        layer = self._gemms_ps.get(num_tokens)
        if layer is None:
            layer = sum((gemm.time_ps(num_tokens) for gemm in self.layer_gemms), start=0.0)
            self._gemms_ps[num_tokens] = layer
        return layer
