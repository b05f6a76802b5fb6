"""The kernels that one step of a model launches on one GPU of a tensor-parallel group.

As vLLM 0.33.0 splits a model (``model_executor/layers/linear.py``, ``models/llama.py``,
``models/qwen3_moe.py``, ``models/deepseek_v2.py``): projections by column or by row, experts by
their inside width or, with expert parallel, whole ones; norms and routers on every rank.
"""

from typing import Literal, NamedTuple

from sim.kv_spec import dtype_bytes, kv_heads_per_rank, padded_vocab_size
from sim.models import ModelSpec

Term = Literal[
    "linear layers", "MoE", "norms and activations", "lm_head and sampling", "all-reduce"
]

LOGIT_BYTES = 4
"""The sampler works in 32 bits (vLLM 0.33.0, ``v1/sample/sampler.py``)."""

COLLECTIVES = ("all_reduce", "all_gather")
"""Operations between ranks."""

PER_SEQUENCE: Term = "lm_head and sampling"
"""The term that grows with requests, not with tokens."""


LATENT_BLOCK = {
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""Widths of DeepSeek-V3's attention, as whole blocks of latent attention were measured."""


class Call(NamedTuple):
    """A kernel that a step launches *launches* times, for all tokens or for one of every request.

    Attributes:
        term: what of a step it belongs to.
        op: its name in a timing table (`sim.timing.table.OPERATIONS`).
        launches: how often a step runs it.
        n, k: of a product [tokens, k] x [k, n]; of experts, their inside and outside width. Else 0.
        bytes_per_token: of a collective's message; else what is read and written by no product.
    """

    term: Term
    op: str
    launches: int
    n: int = 0
    k: int = 0
    bytes_per_token: int = 0


class ExpertShape(NamedTuple):
    """The experts of a layer on one rank.

    Attributes:
        num_local: experts on this rank.
        num_experts: experts of the layer.
        top_k: of those, that a token goes through.
        width: inside an expert on this rank.
        num_matrices: of an expert, 3 if gated.
    """

    num_local: int
    num_experts: int
    top_k: int
    width: int
    num_matrices: int

    def touched(self, num_tokens: float) -> float:
        """Answer how many of this rank's experts *num_tokens* are likely to touch.

        Each token goes to top_k of all experts, all alike: an expert stays untouched by n tokens
        with probability (1 - top_k / num_experts)^n.
        """
        untouched: float = (1 - self.top_k / self.num_experts) ** num_tokens
        return self.num_local * (1 - untouched)

    def assignments(self, num_tokens: float) -> float:
        """Answer how many pairs of token and expert this rank computes, on average."""
        return num_tokens * self.top_k * self.num_local / self.num_experts


class LatentDims(NamedTuple):
    """Widths of latent attention: of the values in the latent, of a head's keys, and values."""

    kv_lora_rank: int
    qk_head_dim: int
    v_head_dim: int


DEEPSEEK_V3_DIMS = LatentDims(kv_lora_rank=512, qk_head_dim=192, v_head_dim=128)
"""Of the models whose latent attention was measured (``config.json`` of DeepSeek-V3)."""


class AttentionShape(NamedTuple):
    """Heads of one rank. MLA has one kv head of its latent's width, which is key and value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentDims | None = None

    def __str__(self) -> str:
        heads = f"{self.num_heads} query and {self.num_kv_heads} kv heads"
        return f"{heads}, head_dim {self.head_dim}"


def attention_shape(model: ModelSpec, tensor_parallel_size: int) -> AttentionShape:
    """Answer the heads of one rank."""
    heads = model.num_attention_heads // tensor_parallel_size
    if model.is_mla:
        latent = LatentDims(model.kv_lora_rank, model.head_dim, model.v_head_dim)
        return AttentionShape(heads, 1, model.kv_lora_rank + model.qk_rope_head_dim, latent)
    kv_heads = kv_heads_per_rank(model, tensor_parallel_size)
    return AttentionShape(heads, kv_heads, model.head_dim)


def expert_shape(
    model: ModelSpec, tensor_parallel_size: int, *, enable_expert_parallel: bool
) -> ExpertShape:
    """Answer the routed experts of one rank."""
    split = 1 if enable_expert_parallel else tensor_parallel_size
    return ExpertShape(
        num_local=model.num_experts * split // tensor_parallel_size,
        num_experts=model.num_experts,
        top_k=model.num_experts_per_tok,
        width=model.moe_intermediate_size // split,
        num_matrices=3 if model.gated_mlp else 2,
    )


def has_latent_block(model: ModelSpec) -> bool:
    """Whether the attention of *model* has the widths of `LATENT_BLOCK`, with any heads."""
    return all(getattr(model, name) == width for name, width in LATENT_BLOCK.items())


def calls_of(
    model: ModelSpec, tensor_parallel_size: int, *, enable_expert_parallel: bool = False
) -> list[Call]:
    """Answer every kernel of a step but attention and routed experts' shapes (`expert_shape`).

    Names are vLLM's. The rows of the embedding that a step looks up are all-reduced once, each
    layer's attention and MLP outputs once each; the logits of every rank are gathered.
    """
    tp, layers, hidden = tensor_parallel_size, model.num_hidden_layers, model.hidden_size
    calls = [
        *attention_projections(model, tp),
        *_mlp(model, tp, enable_expert_parallel=enable_expert_parallel),
        *_small_kernels(model, tp),
        Call(PER_SEQUENCE, "lm_head", 1, padded_vocab_size(model) // tp, hidden),
        Call(PER_SEQUENCE, "sampler", 1, bytes_per_token=model.vocab_size * LOGIT_BYTES),
    ]
    if tp > 1:
        size = hidden * dtype_bytes(model)
        logits = padded_vocab_size(model) // tp * dtype_bytes(model)
        calls += [
            Call("all-reduce", "all_reduce", 2 * layers + 1, bytes_per_token=size),
            Call(PER_SEQUENCE, "all_gather", 1, bytes_per_token=logits),
        ]
    return [call for call in calls if call.launches]


def _small(op: str, launches: int, num_bytes: int) -> Call:
    return Call("norms and activations", op, launches, bytes_per_token=num_bytes)


def _small_kernels(model: ModelSpec, tp: int) -> list[Call]:
    """Answer what moves activations and computes little: as many bytes as it reads and writes.

    A norm adds the residual: it reads two rows and writes two. q and k are normed one by one.
    """
    layers, row = model.num_hidden_layers, model.hidden_size * dtype_bytes(model)
    heads, kv_heads, dim, _ = attention_shape(model, tp)
    rotated = (heads + kv_heads) * (model.qk_rope_head_dim or dim) * dtype_bytes(model)
    return [
        _small("embedding", 1, 2 * row),
        _small("layernorm", 2 * layers, 4 * row),
        _small("qk_norm", 2 * layers * model.qk_norm, rotated),
        _small("rotary_emb", layers, 2 * rotated),
        _small("final_layernorm", 1, 4 * row),
    ]


def attention_projections(model: ModelSpec, tp: int) -> list[Call]:
    """Answer the products around the attention of every layer."""
    layers, hidden = model.num_hidden_layers, model.hidden_size
    heads, kv_heads, dim, _ = attention_shape(model, tp)
    if not model.is_mla:
        return [
            Call("linear layers", "qkv_proj", layers, (heads + 2 * kv_heads) * dim, hidden),
            Call("linear layers", "o_proj", layers, hidden, heads * dim),
        ]
    latent = model.q_lora_rank + dim
    query = heads * model.head_dim
    return [
        Call("linear layers", "fused_qkv_a_proj", layers, latent, hidden),
        Call("linear layers", "q_b_proj", layers, query, model.q_lora_rank or hidden),
        # kv_b_proj is absorbed into the query and the output, a product a head.
        Call(
            "linear layers", "k_up_proj", layers, heads * model.kv_lora_rank, model.qk_nope_head_dim
        ),
        Call("linear layers", "v_up_proj", layers, heads * model.v_head_dim, model.kv_lora_rank),
        Call("linear layers", "o_proj", layers, hidden, heads * model.v_head_dim),
    ]


def _mlp(model: ModelSpec, tp: int, *, enable_expert_parallel: bool) -> list[Call]:
    layers, hidden = model.num_hidden_layers, model.hidden_size
    gates = 2 if model.gated_mlp else 1

    def dense(count: int, width: int) -> list[Call]:
        return [
            Call("linear layers", "gate_up_proj", count, gates * width // tp, hidden),
            _small("act_fn", count, (gates + 1) * width // tp * dtype_bytes(model)),
            Call("linear layers", "down_proj", count, hidden, width // tp),
        ]

    if not model.is_moe:
        return dense(layers, model.intermediate_size)
    moe_layers = layers - model.num_dense_layers
    experts = expert_shape(model, tp, enable_expert_parallel=enable_expert_parallel)
    calls = dense(model.num_dense_layers, model.intermediate_size)
    if model.shared_expert_intermediate_size:
        calls += dense(moe_layers, model.shared_expert_intermediate_size)
    return [
        *calls,
        Call("linear layers", "gate", moe_layers, model.num_experts, hidden),
        Call("MoE", "moe", moe_layers, experts.width, hidden),
    ]
