"""The fitted roofline: agreement with measured kernels, arithmetic by hand, and refusals."""

import msgspec
import pytest

from sim.config import TimingConfig
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.models import ModelSpec, get_model
from sim.tables import load_table
from sim.timing import CONTIGUOUS, Deployment, KernelStepTime, kernel_step_time
from sim.timing.attention import RooflineAttention, decode_time
from sim.timing.base import TICKS_PER_PS, StepBatch, StepTimeModel
from sim.timing.layers import attention_shape, calls_of, expert_shape
from sim.timing.roofline import Fits, fitted_gpu_names, small_kernel

LLAMA = get_model("Llama-3.1-8B")
EAGER = TimingConfig(enforce_eager=True)
"""Without padding, so that a step is the plain sum of its parts."""


def roofline(
    gpu: str = "H200", model: str | ModelSpec = LLAMA, block_size: int = 64
) -> KernelStepTime:
    """Answer the step time where the block size is that of the fits."""
    spec = get_model(model) if isinstance(model, str) else model
    return kernel_step_time(EAGER, Deployment(spec, get_gpu(gpu), block_size=block_size))


def attention(gpu: str = "H200") -> RooflineAttention:
    return Fits(get_gpu(gpu)).attention(attention_shape(LLAMA, 1), 2, 2, 1.0)


def decode_ms(gpu: str, batch: int, history: int) -> float:
    context = batch * (history + 1)  # the new token is attended too
    time = decode_time(attention(gpu).decode_segments(batch), context)
    assert time is not None
    return time / 1e9


def prefill(chunk: int, context: int) -> StepBatch:
    return StepBatch(0, 0, ((chunk, context),))


def _ps(model: StepTimeModel, batch: StepBatch) -> float:
    return model.step_time(batch) / TICKS_PER_PS


@pytest.mark.parametrize(
    ("batch", "history", "measured_ms", "error"),
    [
        # aiconfigurator-core 0.12.0, H200, vLLM 0.24.0, FA3, 32 query and 8 kv heads, bf16. All are
        # HBM-resident, where the fit's p50/p90 error is 1.9/6.8 %. It is off by +5.0, +1.9, +4.4,
        # -3.6 and, beyond its p90, -8.0 %.
        (64, 1023, 0.080704, 0.068),
        (64, 8191, 0.490763, 0.068),
        (256, 1023, 0.272533, 0.068),
        (16, 4095, 0.082256, 0.068),
        (1, 65535, 0.084331, 0.085),
    ],
)
def test_decode_attention_agrees_with_measured_kernels(
    batch: int, history: int, measured_ms: float, error: float
) -> None:
    assert decode_ms("H200", batch, history) == pytest.approx(measured_ms, rel=error)


@pytest.mark.parametrize(
    ("batch", "history", "measured_ms"),
    [(1, 1023, 0.013648), (1, 8191, 0.018923), (16, 511, 0.016773)],
)
def test_decode_attention_is_slower_than_kernels_measured_in_l2(
    batch: int, history: int, measured_ms: float
) -> None:
    """KV of 4 to 34 MB stays in the L2 cache of the measurement, not of an engine: +36 to +63 %."""
    assert 1.3 < decode_ms("H200", batch, history) / measured_ms < 1.7


def test_a_whole_decode_step_is_near_aiconfigurator_s() -> None:
    """Qwen3-32B on H200, 16 requests of 4,096 tokens: 23.4 ms here, 24.44 there (-4 %)."""
    step_ps = _ps(roofline(model="Qwen3-32B"), StepBatch(16, 16 * 4096, ()))
    assert step_ps / 1e9 == pytest.approx(24.44, rel=0.05)


def test_gemm_by_hand() -> None:
    """The gate and up projection of Llama-3.1-8B on H100: n = 28,672, k = 4,096."""
    gemm = Fits(get_gpu("H100")).gemm(28672, 4096, 2)
    for m in (1, 8192):
        compute_s = 2 * m * 28672 * 4096 / (0.798 * 989e12)
        memory_s = (m * 4096 + 4096 * 28672 + m * 28672) * 2 / (0.857 * 3.35e12)
        assert gemm.at(m) == pytest.approx(3.55e6 + max(compute_s, memory_s) * 1e12)
        assert (compute_s > memory_s) == (m == 8192)


def test_prefill_attention_by_hand() -> None:
    """A whole prompt is the fitted formula; a chunk behind a prefix attends its prefix too."""
    cost = attention("H100")
    n = 2048
    compute_s = 2 * 32 * 128 * n**2 / (0.695 * 989e12)
    memory_s = 2 * n * 128 * (2 * 32 + 2 * 8) / (0.407 * 3.35e12)
    whole_ps = 12.81e6 + (compute_s + memory_s) * 1e12
    assert cost.step_time(((n, n),), 0, 0) == pytest.approx(whole_ps)
    two_ps = 12.81e6 + 2 * (compute_s + memory_s) * 1e12
    assert cost.step_time(((n, n), (n, n)), 0, 0) == pytest.approx(two_ps)

    pairs = 512 * 1536 + 512**2 / 2
    compute_s = 4 * 32 * 128 * pairs / (0.695 * 989e12)
    memory_s = 2 * 128 * (2 * 32 * 512 + 2 * 8 * 2048) / (0.407 * 3.35e12)
    chunk_ps = 12.81e6 + (compute_s + memory_s) * 1e12
    assert cost.step_time(((512, 2048),), 0, 0) == pytest.approx(chunk_ps)


def test_chunks_of_a_prompt_compute_the_pairs_of_the_whole() -> None:
    """Chunking repeats only the launch and the reading of earlier keys and values."""
    cost = attention("H100")
    chunks = [(512, 512), (512, 1024), (512, 1536), (512, 2048)]
    reread = 2 * 2 * 8 * 128 * (512 + 1024 + 1536) / (0.407 * 3.35e12) * 1e12
    apart = sum(cost.step_time((chunk,), 0, 0) for chunk in chunks)
    whole = cost.step_time(((2048, 2048),), 0, 0)
    assert apart == pytest.approx(whole + 3 * 12.81e6 + reread)


@pytest.mark.parametrize("gpu", fitted_gpu_names())
def test_roofline_grows_with_tokens_context_and_requests(gpu: str) -> None:
    model = roofline(gpu)
    families = [
        [prefill(n, 8192) for n in (1, 7, 64, 513, 2048, 8192)],
        [prefill(64, n) for n in (64, 128, 4096, 131072)],
        [StepBatch(n, 100_000, ()) for n in (1, 8, 64, 256, 1024)],
        [StepBatch(8, n, ()) for n in (8, 1000, 1001, 1_000_000)],
        [StepBatch(8, 8000, ((256, 256),) * n) for n in range(4)],
    ]
    for batches in families:
        times = [model.step_time(batch) for batch in batches]
        assert all(isinstance(time, int) for time in times)
        assert times == sorted(set(times))


def test_a_step_is_the_sum_of_its_parts() -> None:
    """vLLM computes the logits of every request of a step, of prompts not yet whole too."""
    model, fits = roofline("H100"), Fits(get_gpu("H100"))
    gemms = [(c, fits.gemm(c.n, c.k, 2)) for c in calls_of(LLAMA, 1) if c.n]
    gpu = get_gpu("H100")
    small = [(c, small_kernel(gpu, c.op, c.bytes_per_token)) for c in calls_of(LLAMA, 1) if not c.n]
    assert [call.op for call, _ in gemms] == [
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head",
    ]  # fmt: skip
    step = sum(call.launches * gemm.at(264) for call, gemm in gemms[:4])
    step += sum(call.launches * cost.at(9 if call.op == "sampler" else 264) for call, cost in small)
    step += 32 * attention("H100").step_time(((256, 512),), 8, 8000)
    step += gemms[4][1].at(9)
    assert _ps(model, StepBatch(8, 8000, ((256, 512),))) == pytest.approx(step, abs=1)


def test_tokens_are_padded_to_a_cuda_graph() -> None:
    graphs = kernel_step_time(TimingConfig(), Deployment(LLAMA, get_gpu("H100"), block_size=64))
    eager = roofline("H100")
    nine, sixteen = (StepBatch(n, 9000, ()) for n in (9, 16))
    attention_ps = [32 * decode_ms("H100", n, 9000 // n) * 1e9 for n in (9, 16)]
    gap = _ps(eager, sixteen) - _ps(graphs, nine)
    lm_head = Fits(get_gpu("H100")).gemm(128256, 4096, 2)
    sampler = small_kernel(get_gpu("H100"), "sampler", 4 * 128256)
    logits = [lm_head.at(n) + sampler.at(n) for n in (9, 16)]
    expected = attention_ps[1] - attention_ps[0] + logits[1] - logits[0]
    assert gap == pytest.approx(expected, rel=0.02)
    assert _ps(graphs, prefill(513, 513)) == _ps(eager, prefill(513, 513))


def test_an_ungated_mlp_has_one_projection_up() -> None:
    up = {
        name: next(call for call in calls_of(get_model(name), 1) if call.op == "gate_up_proj")
        for name in ("Llama-2-13b-hf", "opt-13b")
    }
    assert up["Llama-2-13b-hf"].n == 2 * 13824
    assert up["opt-13b"].n == 20480


def test_a100_40_is_the_a100_80_scaled_by_bandwidth() -> None:
    small, large = roofline("A100-40", "opt-13b"), roofline("A100-80", "opt-13b")
    batch = StepBatch(16, 16_000, ())
    assert 1.2 < _ps(small, batch) / _ps(large, batch) < 2.039 / 1.555
    assert "scaled from A100-80 by peak bandwidth" in small.sources[0].description
    assert "scaled" not in large.sources[0].description


def test_the_block_size_slows_decode_attention_down() -> None:
    """Assumed factors, said beside the fit; memory without blocks is as fast as large ones."""
    batch = StepBatch(64, 64 * 8192, ())
    times = {size: _ps(roofline(block_size=size), batch) for size in (1, 8, 16, 64, CONTIGUOUS)}
    assert times[1] > times[8] > times[16] > times[64] == times[CONTIGUOUS]
    assert "block_size factor" not in {source.terms for source in roofline(block_size=64).sources}
    (factor,) = (s for s in roofline(block_size=16).sources if s.terms == "block_size factor")
    assert factor.provenance == "assumed"
    assert "for block_size 16 over block_size 64" in factor.description


def test_sources_name_the_fit() -> None:
    assert str(roofline("H100").sources[0]) == (
        "decode attention (±1.3/7.2 %), prefill attention (±5.9/20.1 %), linear layers "
        "(±6.7/22.2 %), lm_head (±6.7/22.2 %) fitted (roofline of aiconfigurator-core 0.12.0 "
        "kernel tables, vllm 0.24.0, H100 SXM; p50/p90 error of each, of decodes whose KV exceeds "
        "the L2 cache)"
    )


def test_the_split_by_term_adds_up() -> None:
    """Two rows: three steps that decode, and a chunk with decodes."""
    import numpy as np  # noqa: PLC0415

    model = roofline("H100")
    run = sum(_ps(model, StepBatch(8, 8000 + 8 * j, ())) for j in range(3))
    mixed = _ps(model, StepBatch(8, 8024, ((256, 512),)))
    rows = {
        name: np.array(values)
        for name, values in {
            "num_steps": (3, 1, 0),
            "duration_ps": (round(run), round(mixed), 10**12),
            "num_decodes": (8, 8, 0),
            "num_late_decodes": (0, 0, 0),
            "num_prefills": (0, 1, 0),
            "num_prefill_tokens": (0, 256, 0),
            "decode_context": (8000, 8024, 0),
        }.items()
    }
    terms = model.split(rows)
    assert sum(terms.values()) == pytest.approx((run + mixed) / 1e12)
    cost = attention("H100")
    decodes = sum(decode_time(cost.decode_segments(8), 8000 + 8 * j) or 0 for j in range(4))
    assert terms["decode attention"] == pytest.approx(32 * decodes / 1e12)
    chunk = cost.step_time(((256, 512),), 0, 0)
    assert terms["prefill attention"] == pytest.approx(32 * chunk / 1e12)
    assert model.steps_outside(rows) == 0


def test_the_roofline_refuses_what_it_has_no_fit_for() -> None:
    narrow = msgspec.structs.replace(LLAMA, head_dim=80)
    with pytest.raises(ConfigError, match=r"no fit on H100 for .* head_dim 80, .* it knows decode"):
        roofline("H100", narrow)
    wide = msgspec.structs.replace(LLAMA, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="at most 16 query heads a kv head"):
        roofline("H100", wide)


def test_fp8_that_was_not_measured_is_priced_as_16_bits() -> None:
    batch = StepBatch(8, 8 * 5000, ((256, 512),))
    found = {}
    for gpu in ("A100-80", "H100"):
        for kv_cache_dtype in ("auto", "fp8"):
            deployment = Deployment(LLAMA, get_gpu(gpu), kv_cache_dtype=kv_cache_dtype)
            model = kernel_step_time(EAGER, deployment)
            found[gpu, kv_cache_dtype] = _ps(model, batch)
            said = [s.terms for s in model.sources if "that of a 16-bit KV cache" in s.description]
            wanted = ["decode attention, prefill attention"]
            assert said == (wanted if (gpu, kv_cache_dtype) == ("A100-80", "fp8") else [])
    assert found["A100-80", "fp8"] == found["A100-80", "auto"]
    assert found["H100", "fp8"] < found["H100", "auto"]


def test_the_peaks_are_those_of_the_fit() -> None:
    """The fits are fractions of these peaks, so a change of a GPU's row would change the times."""
    peaks = {"A100-80": (2.039e12, 312e12), "H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}
    fitted_on = {fit["fitted_on"] for fit in load_table("timing_fits").values()}
    assert fitted_on >= set(peaks)
    for name, (bandwidth, flops) in peaks.items():
        assert (get_gpu(name).hbm_bandwidth, get_gpu(name).bf16_flops) == (bandwidth, flops)


def test_small_kernels_by_hand() -> None:
    """Llama-3.1-8B on an RTX 4090, where the activation of 2,048 tokens was measured at 169 us."""
    calls = {call.op: call for call in calls_of(LLAMA, 1)}
    activation = calls["act_fn"]
    assert activation.launches == 32
    assert activation.bytes_per_token == 3 * 14336 * 2
    kernel = small_kernel(get_gpu("RTX-4090"), "act_fn", activation.bytes_per_token)
    assert kernel.at(1) / 1e6 == pytest.approx(2.1, abs=0.05)
    assert kernel.at(2048) / 1e6 == pytest.approx(2 + 2048 * 3 * 14336 * 2 / (0.9 * 1008e3))
    assert calls["layernorm"].launches == 64
    assert calls["layernorm"].bytes_per_token == 4 * 4096 * 2
    assert calls["rotary_emb"].bytes_per_token == 2 * 40 * 128 * 2
    assert "qk_norm" not in calls
    qwen = {call.op: call for call in calls_of(get_model("Qwen3-8B"), 2)}
    assert qwen["qk_norm"].launches == 2 * 36
    assert qwen["qk_norm"].bytes_per_token == (16 + 4) * 128 * 2


def test_experts_read_the_weights_that_tokens_touch() -> None:
    """Qwen3-30B-A3B: 16 tokens touch 82 of 128 experts on average."""
    model = get_model("Qwen3-30B-A3B")
    experts = expert_shape(model, 2, enable_expert_parallel=True)
    assert experts[:4] == (64, 128, 8, 768)
    assert experts.touched(16) == pytest.approx(64 * (1 - (1 - 8 / 128) ** 16))
    assert expert_shape(model, 2, enable_expert_parallel=False)[:4] == (128, 128, 8, 384)
    one = expert_shape(model, 1, enable_expert_parallel=False)
    cost = Fits(get_gpu("H200")).experts(one, model.hidden_size, 2)
    weights_s = one.touched(16) * 3 * 768 * 2048 * 2 / 4.8e12
    assert weights_s < cost.at(16) / 1e12 < 2 * weights_s
