"""What is in a card's memory before the KV cache, as the chosen version of vLLM accounts for it.

vLLM takes utilization * visible memory and subtracts what its profiling run used: weights, the peak
of torch's allocator beyond them (activation), memory outside torch (non-torch) and, since 0.21, an
estimate of its CUDA graphs. The rules follow from what that run allocates; the constants that do
not are fitted on half of the models of the start-up logs in ``tests/data/vllm_logs.csv`` and held
to the other half (``tests/validation/test_vllm_logs.py``).
"""

from fractions import Fraction
from typing import NamedTuple

from sim.errors import ConfigError
from sim.hardware import GIB, GpuSpec
from sim.kv_groups import FULL_GROUP_RATIO
from sim.kv_spec import dtype_bytes, weight_bytes
from sim.models import ModelSpec


class MemoryRules(NamedTuple):
    """How one version of vLLM accounts for memory.

    Attributes:
        version: the first of the versions that do so, as ``--vllm-version`` names it.
        utilization: default of ``--gpu-memory-utilization``.
        sampler_bytes: of one logit in the sampler's warm-up, beyond the logit in the model's dtype.
        sampler_rows: the sampler keeps a buffer of one fp32 row of logits a multiprocessor.
        keeps_expert_workspace: what experts write between their products stays allocated.
        non_torch_bytes: memory outside torch's allocator on a GPU that is alone.
        non_torch_tp_bytes: the same under tensor parallelism, buffers of collectives included.
        subtracts_graphs: the pool is smaller by an estimate of the CUDA graphs.
        counts_a_group: the tokens printed at start are those of one block table.
        counts_in_flight: windows have room for the tokens of all batches in flight, not of one.
        group_ratio: `sim.kv_groups.cache_groups`.
    """

    version: str
    utilization: float
    sampler_bytes: int
    sampler_rows: bool
    keeps_expert_workspace: bool
    non_torch_bytes: int
    non_torch_tp_bytes: int
    subtracts_graphs: bool
    counts_a_group: bool
    counts_in_flight: bool
    group_ratio: Fraction


VLLM_0_19 = MemoryRules(
    version="0.19",
    utilization=0.9,
    # An fp32 copy, probabilities and exponential noise, 4 bytes each (``v1/sample/sampler.py``,
    # ``v1/sample/ops/topk_topp_sampler.py``); of fp32 models a copy too, as their log shows.
    sampler_bytes=12,
    sampler_rows=True,  # ``v1/sample/ops/topk_topp_triton.py``
    keeps_expert_workspace=True,  # ``v1/worker/workspace.py``
    non_torch_bytes=round(0.25 * GIB),  # 0.24 to 0.26 GiB on H100; Granite 0.46, unexplained
    non_torch_tp_bytes=round(2.1 * GIB),  # 2.06 to 2.21 GiB on two and four H100
    subtracts_graphs=False,
    counts_a_group=True,
    counts_in_flight=False,
    group_ratio=FULL_GROUP_RATIO,
)
VLLM_0_11 = MemoryRules(
    version="0.11",
    utilization=0.9,
    sampler_bytes=36,  # top-k and top-p by sorting: 38 bytes a bf16 logit in five logs of 0.11
    sampler_rows=False,
    keeps_expert_workspace=False,
    non_torch_bytes=round(0.13 * GIB),  # 0.13 and 0.14 GiB on one H100
    non_torch_tp_bytes=round(0.55 * GIB),  # 0.54 and 0.55 GiB on two
    subtracts_graphs=False,
    counts_a_group=True,
    counts_in_flight=False,
    group_ratio=Fraction(5, 4),
)
VLLM_0_33 = VLLM_0_19._replace(
    version="0.33",
    utilization=0.92,
    subtracts_graphs=True,
    counts_a_group=False,
    counts_in_flight=True,
)
"""No log of it has a breakdown: the activation is that of 0.19, whose sampler it has."""

RULES = {rules.version: rules for rules in (VLLM_0_33, VLLM_0_19, VLLM_0_11)}
"""By ``--vllm-version``."""

FIXED_ACTIVATION_BYTES = round(0.045 * GIB)
"""Peak activation that follows from no shape (workspaces of the matrix library). Fitted."""

FORWARD_HIDDEN_TENSORS = 3.5
"""Tensors as large as the residual stream that are alive while an MLP runs. Fitted."""

STAGE_TENSORS = 2
"""Tensors as large as the residual stream that stages hand on, hidden states and residual; on the
first stage the embeddings too. With them the peaks of three kinds of stages in two logs of 0.19
(Llama-3.1-8B in 2 and 4 stages: 1.10, 1.05 and 2.01 GiB) are met within 1 %."""

STAGE_NON_TORCH_BYTES = round(0.07 * GIB)
"""Outside torch on a GPU that is all of a stage: two logs of 0.19 on H100."""

GRAPH_SIZES = 512
"""Most tokens of a CUDA graph (vLLM 0.33.0, ``config/vllm.py``: min(2 * max_num_seqs, 512))."""

GRAPH_ESTIMATE_BYTES = 101_000
"""Of a CUDA graph and layer in vLLM's estimate before start: 0.26 GiB for 86 graphs of 32 layers.

One log (0.21 on an H200, a model of 7B with max_num_seqs 256); another (0.24 on an L40S, a hybrid
of 27B) has 2.4 times as much for each.
"""

GRAPH_FIXED_BYTES = round(0.30 * GIB)
"""CUDA graphs as they turn out after start, whatever the model. Fitted with the next two."""
GRAPH_LAYER_BYTES = round(0.0125 * GIB) / 102
"""The same for a graph and layer (102 graphs in the logs); fitted on logs of 0.19 within 17 %."""
GRAPH_WIDTH_BYTES = round(0.0065 * GIB) / 102 / 4096
"""The same for a graph, layer and element of the residual stream on one rank."""


class MemoryShare(NamedTuple):
    """One part of the card's memory.

    Attributes:
        name: what uses it.
        num_bytes: how much.
        provenance: ``computed``, ``fitted`` or ``given``: what kind of knowledge the size is.
    """

    name: str
    num_bytes: int
    provenance: str


class Engine(NamedTuple):
    """What of an engine's settings its memory follows from, beside model and card.

    Attributes:
        max_num_seqs: requests that the sampler is warmed up with.
        max_num_batched_tokens: tokens of the profiling run.
        tensor_parallel_size: ranks that share the model.
        enable_expert_parallel: ranks hold whole experts.
        enforce_eager: no CUDA graphs.
        rules: of the version of vLLM.
        pipeline_parallel_size: stages of layers.
        stage: which of them, from 0.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    rules: MemoryRules = VLLM_0_33
    pipeline_parallel_size: int = 1
    stage: int = 0

    @property
    def in_flight_tokens(self) -> int:
        """Tokens of batches that are under way at once: what a window has room for beside itself.

        As many batches as stages; with one stage two, because asynchronous scheduling is vLLM's
        default (0.33.0, ``config/vllm.py``: ``max_concurrent_batches``).
        """
        if not self.rules.counts_in_flight:
            return self.max_num_batched_tokens
        stages = self.pipeline_parallel_size
        return self.max_num_batched_tokens * (2 if stages == 1 else stages)


def memory_rules(version: str) -> MemoryRules:
    """Answer the rules of ``--vllm-version``.

    Raises:
        ConfigError: not a version whose rules are known.
    """
    if version not in RULES:
        raise ConfigError(f"--vllm-version {version!r}: expected one of {', '.join(RULES)}")
    return RULES[version]


def sampler_bytes(model: ModelSpec, gpu: GpuSpec | None, engine: Engine) -> int:
    """Answer what the sampler's warm-up with max_num_seqs requests adds to the hidden states.

    Every rank holds all logits. *gpu* None counts no buffer a multiprocessor.
    """
    seqs, size = engine.max_num_seqs, dtype_bytes(model)
    logits = seqs * model.vocab_size * (size + engine.rules.sampler_bytes)
    rows = 0
    if engine.rules.sampler_rows and gpu is not None and gpu.num_sms:
        programs = min(gpu.num_sms, seqs)
        rows = min(1 << (programs - 1).bit_length(), gpu.num_sms)
    return logits + rows * model.vocab_size * 4 + seqs * model.hidden_size * size


def forward_bytes(model: ModelSpec, engine: Engine) -> int:
    """Answer the peak of the layers themselves: an MLP's gate and up projection, and their product.

    All of max_num_batched_tokens go through at once. PagedAttention needs next to nothing.
    """
    size, tokens = dtype_bytes(model), engine.max_num_batched_tokens
    width = 0
    if model.has_dense_layers:
        width = (3 if model.gated_mlp else 2) * model.intermediate_size
        width //= engine.tensor_parallel_size
    return round(tokens * size * (width + FORWARD_HIDDEN_TENSORS * model.hidden_size))


def expert_workspace_bytes(model: ModelSpec, engine: Engine) -> int:
    """Answer the two buffers between the products of routed experts; 0 for a dense model.

    vLLM 0.33.0, ``model_executor/layers/fused_moe`` (``workspace_shapes`` of the Triton experts).
    """
    if not model.is_moe:
        return 0
    ranks = 1 if engine.enable_expert_parallel else engine.tensor_parallel_size
    width = model.moe_intermediate_size // ranks
    columns = max(width, model.hidden_size) + max(2 * width, model.hidden_size)
    rows = engine.max_num_batched_tokens * model.num_experts_per_tok
    return rows * columns * dtype_bytes(model)


def activation_bytes(model: ModelSpec, gpu: GpuSpec | None, engine: Engine) -> int:
    """Answer the peak activation of vLLM's profiling run on one GPU.

    The larger of two moments: a layer at work on max_num_batched_tokens, or the sampler on
    max_num_seqs requests while the hidden states of all tokens are still there. Fitted on 7 models
    of vLLM 0.19 logs (mean error 0.6 %) and held to 6 others: 0.3 % in the mean, at most 1 %.
    Experts: three published figures of such logs are met within 1 %. Only the last stage samples;
    stages hand hidden states and residuals on (`STAGE_TENSORS`).
    """
    hidden = engine.max_num_batched_tokens * model.hidden_size * dtype_bytes(model)
    workspace = expert_workspace_bytes(model, engine)
    forward = forward_bytes(model, engine) + workspace
    sampler = hidden + sampler_bytes(model, gpu, engine)
    if engine.rules.keeps_expert_workspace:
        sampler += workspace
    if engine.pipeline_parallel_size == 1:
        return FIXED_ACTIVATION_BYTES + max(forward, sampler)
    if engine.stage < engine.pipeline_parallel_size - 1:
        sampler = 0
    handed_on = hidden * (STAGE_TENSORS + (engine.stage == 0))
    return FIXED_ACTIVATION_BYTES + handed_on + max(forward, sampler)


def non_torch_bytes(gpu: GpuSpec | None, engine: Engine) -> int:
    """Answer the memory outside torch's allocator on one GPU (fitted).

    The buffers of tensor parallelism are those of GPUs with NVLink; without it the symmetric memory
    of 0.19 is not there, and those of 0.11 are assumed. A GPU that is all of a stage has less than
    one that is alone.
    """
    if engine.tensor_parallel_size == 1 and engine.pipeline_parallel_size > 1:
        return min(engine.rules.non_torch_bytes, STAGE_NON_TORCH_BYTES)
    if engine.tensor_parallel_size == 1:
        return engine.rules.non_torch_bytes
    if gpu is not None and gpu.nvlink_bandwidth is None:
        return min(engine.rules.non_torch_tp_bytes, VLLM_0_11.non_torch_tp_bytes)
    return engine.rules.non_torch_tp_bytes


def graph_count(engine: Engine) -> int:
    """Answer how many CUDA graphs are captured: one a size for mixed steps, and one for decodes.

    Sizes are 1, 2, 4, then multiples of 8 below 256 and of 16 from there, to min(2 * max_num_seqs,
    512, max_num_batched_tokens); decodes have no more tokens than max_num_seqs (vLLM 0.33.0,
    ``config/vllm.py``: 51 and 35 at max_num_seqs 256).
    """
    if engine.enforce_eager:
        return 0
    most = min(2 * engine.max_num_seqs, GRAPH_SIZES, engine.max_num_batched_tokens)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= most]
    return len(sizes) + len([size for size in sizes if size <= engine.max_num_seqs])


def graph_estimate_bytes(model: ModelSpec, engine: Engine) -> int:
    """Answer vLLM's estimate of its CUDA graphs before start; 0 where it subtracts none."""
    if not engine.rules.subtracts_graphs:
        return 0
    return graph_count(engine) * model.num_hidden_layers * GRAPH_ESTIMATE_BYTES


def graph_bytes(model: ModelSpec, engine: Engine) -> int:
    """Answer the memory of CUDA graphs after start, on top of what the profiling run saw (fitted).

    Where vLLM subtracts no estimate, it has to fit in what utilization leaves.
    """
    graphs = graph_count(engine)
    if not graphs:
        return 0
    width = GRAPH_WIDTH_BYTES * model.hidden_size / engine.tensor_parallel_size
    return round(GRAPH_FIXED_BYTES + graphs * model.num_hidden_layers * (GRAPH_LAYER_BYTES + width))


def fixed_shares(model: ModelSpec, gpu: GpuSpec | None, engine: Engine) -> tuple[MemoryShare, ...]:
    """Answer what is in one card's memory before any KV cache."""
    shares = [
        MemoryShare("weights", weight_bytes(model, engine.tensor_parallel_size), "computed"),
        MemoryShare("peak activation", activation_bytes(model, gpu, engine), "fitted"),
        MemoryShare("non-torch", non_torch_bytes(gpu, engine), "fitted"),
    ]
    graphs = graph_estimate_bytes(model, engine)
    if graphs:
        shares.append(MemoryShare("CUDA graphs", graphs, "fitted"))
    return tuple(shares)
