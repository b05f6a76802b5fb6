"""A model: the shapes that memory and step time follow from, and what they imply."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from sim.errors import ConfigError
from sim.kv_layout import KVLayout, LayerCache

PARAMETERS_TOLERANCE = 1e-3
"""Relative; OPT's learned positions, which the shapes do not tell, are up to 0.08 %."""


Holders = Literal["ranks", "kv_heads", "vocabulary", "everyone"]


class WeightPart(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of a model that are stored and shared alike.

    Attributes:
        name: what they are.
        elements: of all of them together.
        active: of those, what one token goes through.
        held_by: ``ranks``: equal shares; ``kv_heads``: shares, copied where there are fewer KV
            heads than ranks; ``vocabulary``: rows of the padded vocabulary; ``everyone``: copies.
        bits: of one element with its share of scales and zero points; 0: the model's dtype.
    """

    name: str
    elements: int
    active: int
    held_by: Holders = "ranks"
    bits: float = 0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer, dense or with experts.

    With full or latent attention in every layer its fields say everything; else kv_layout has what
    layers keep, weights has the matrices, and the fields are those of an attention layer.

    Names follow Hugging Face's ``config.json``. A field of experts (``num_experts`` and on) is 0 in
    a dense model, a field of latent attention (``kv_lora_rank`` and on) in a model without it.

    Attributes:
        name: Hugging Face id, ``organisation/model``.
        num_hidden_layers: layers, every one with attention and an MLP.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: key and value heads of a layer; fewer than query heads under GQA.
        head_dim: elements of one head; under latent attention those of one query head,
            qk_nope_head_dim + qk_rope_head_dim.
        intermediate_size: width inside the MLP of a dense layer.
        vocab_size: rows of the embedding and of the output projection.
        gated_mlp: the MLP multiplies a gate with an up projection (SwiGLU); else one projection.
        tie_word_embeddings: input and output embeddings are one matrix.
        qk_norm: every head of q and k is normalised, as in Qwen3.
        num_experts: routed experts of a layer (``n_routed_experts``, ``num_local_experts``).
        num_experts_per_tok: routed experts that a token goes through.
        moe_intermediate_size: width inside one routed expert.
        shared_expert_intermediate_size: width of all experts together that every token goes through
            (DeepSeek's ``n_shared_experts * moe_intermediate_size``).
        num_dense_layers: layers that keep a dense MLP, the first ones (``first_k_dense_replace``).
        kv_lora_rank: width of the latent that stands for keys and values (MLA).
        q_lora_rank: width of the latent that queries come from; 0 is none.
        qk_rope_head_dim: elements of a query or key head with rotary embedding, for keys one head.
        qk_nope_head_dim: elements of a query or key head without.
        v_head_dim: elements of a value head.
        max_position_embeddings: longest sequence in tokens that the model was made for.
        num_parameters: matrices and embeddings; norms and biases left out.
        dtype: of weights and KV cache, as ``torch_dtype`` spells it.
        source: where the row was read.
        note: what a user of the row should be told.
        kv_layout: what layers keep for a sequence, where they differ or keep something special.
        weights: matrices by how they are stored, where the fields do not imply them.
        unknown: fields that its ``config.json`` lacks and that weights follow from.
    """

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated_mlp: bool
    tie_word_embeddings: bool
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    num_dense_layers: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    max_position_embeddings: int
    num_parameters: int
    dtype: str
    source: str
    note: str = ""
    kv_layout: KVLayout | None = None
    weights: tuple[WeightPart, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def layout(self) -> KVLayout:
        """What layers keep for a sequence."""
        if self.kv_layout is not None:
            return self.kv_layout
        if self.is_mla:
            elements, heads = self.kv_lora_rank + self.qk_rope_head_dim, 1
        else:
            elements, heads = 2 * self.head_dim, self.num_key_value_heads
        cache = LayerCache(
            kind="latent" if self.is_mla else "full",
            num_layers=self.num_hidden_layers,
            num_kv_heads=heads,
            head_elements=elements,
        )
        return KVLayout(caches=(cache,), auto_dtype=self.dtype)

    def plain_parameters(self) -> int:
        """Answer the elements of all matrices, were the layers all as the fields say."""
        return sum(parameter_counts(msgspec.structs.replace(self, weights=())))

    @property
    def is_moe(self) -> bool:
        """Whether layers have routed experts."""
        return self.num_experts > 0

    @property
    def has_dense_layers(self) -> bool:
        """Whether layers have an MLP without experts."""
        return not self.is_moe or self.num_dense_layers > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention is latent: one compressed vector a token stands for all KV heads."""
        return self.kv_lora_rank > 0


class ParameterCounts(NamedTuple):
    """Elements of a model's matrices over all layers, by how tensor parallelism holds them.

    Norms, biases and learned positions are left out.

    Attributes:
        embeddings: input and output embeddings, or the one that is both; split by vocabulary.
        kv_projections: from the residual stream to keys and values; split by KV head.
        replicated: latent down-projections and routers, which every rank holds.
        split: the rest: by column or by row.
    """

    embeddings: int
    kv_projections: int
    replicated: int
    split: int


def _counted(parts: tuple[WeightPart, ...], *, active: bool) -> ParameterCounts:
    counts: dict[Holders, int] = {"vocabulary": 0, "kv_heads": 0, "everyone": 0, "ranks": 0}
    for part in parts:
        counts[part.held_by] += part.active if active else part.elements
    return ParameterCounts(*counts.values())


def parameter_counts(model: ModelSpec, *, active: bool = False) -> ParameterCounts:
    """Answer the elements of *model*'s matrices; *active*: of those that one token goes through.

    Which of them vLLM replicates: its ``ReplicatedLinear`` layers (``models/deepseek_v2.py``,
    ``models/qwen3_moe.py``).
    """
    if model.weights:
        return _counted(model.weights, active=active)
    m, hidden = model, model.hidden_size
    if m.is_mla:
        query_dim = m.num_attention_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        kv_projections = 0
        replicated = hidden * (m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim)
        split = (
            (m.q_lora_rank or hidden) * query_dim
            + m.kv_lora_rank * m.num_attention_heads * (m.qk_nope_head_dim + m.v_head_dim)
            + m.num_attention_heads * m.v_head_dim * hidden
        )
    else:
        kv_projections = 2 * hidden * m.num_key_value_heads * m.head_dim
        replicated = 0
        split = 2 * hidden * m.num_attention_heads * m.head_dim
    layers, dense_layers = m.num_hidden_layers, m.num_hidden_layers
    mlp_matrices = 3 if m.gated_mlp else 2
    experts = routers = 0
    if m.is_moe:
        dense_layers = m.num_dense_layers
        num_experts = m.num_experts_per_tok if active else m.num_experts
        width = num_experts * m.moe_intermediate_size + m.shared_expert_intermediate_size
        experts = (layers - dense_layers) * mlp_matrices * hidden * width
        routers = (layers - dense_layers) * hidden * m.num_experts
    return ParameterCounts(
        embeddings=(1 if m.tie_word_embeddings else 2) * m.vocab_size * hidden,
        kv_projections=layers * kv_projections,
        replicated=layers * replicated + routers,
        split=layers * split + dense_layers * mlp_matrices * hidden * m.intermediate_size + experts,
    )


def count_parameters(model: ModelSpec, *, active: bool = False) -> int:
    """Answer the elements of all matrices and embeddings that *model*'s shapes imply.

    Norms, biases and learned positions are left out. *active*: of those that one token goes
    through, embeddings in full.
    """
    return sum(parameter_counts(model, active=active))


def weight_parts(model: ModelSpec) -> tuple[WeightPart, ...]:
    """Answer *model*'s matrices by how they are stored and shared.

    What ``num_parameters`` has beyond the shapes (OPT's learned positions) is on every GPU.
    """
    if model.weights:
        return model.weights
    counts, active = parameter_counts(model), parameter_counts(model, active=True)
    rest = model.num_parameters - count_parameters(model)
    held: tuple[tuple[str, Holders, int, int], ...] = (
        ("embeddings", "vocabulary", counts.embeddings, active.embeddings),
        ("kv projections", "kv_heads", counts.kv_projections, active.kv_projections),
        ("replicated", "everyone", counts.replicated, active.replicated),
        ("matrices", "ranks", counts.split, active.split),
        ("others", "everyone", rest, rest),
    )
    return tuple(
        WeightPart(name=name, elements=elements, active=used, held_by=held_by)
        for name, held_by, elements, used in held
    )


_POSITIVE = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "num_parameters",
)  # fmt: skip
_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MOE_OPTIONAL = ("shared_expert_intermediate_size", "num_dense_layers")
_MLA = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_MLA_OPTIONAL = ("q_lora_rank",)


def _problems(m: ModelSpec) -> Iterator[str]:
    """Answer what contradicts itself in *m*, worst first."""
    at_least = dict.fromkeys(_POSITIVE, 1)
    for needed, optional in ((_MOE, _MOE_OPTIONAL), (_MLA, _MLA_OPTIONAL)):
        used = any(getattr(m, name) for name in (*needed, *optional))
        at_least |= dict.fromkeys(needed, int(used)) | dict.fromkeys(optional, 0)
    for name, least in at_least.items():
        if getattr(m, name) < least:
            yield f"{name} {getattr(m, name)}: expected at least {least}"
            return  # what follows divides by them
    if m.num_attention_heads % m.num_key_value_heads:
        yield (
            f"num_attention_heads {m.num_attention_heads}: expected a multiple of "
            f"num_key_value_heads {m.num_key_value_heads}"
        )
    if m.num_experts_per_tok > m.num_experts:
        yield f"num_experts_per_tok {m.num_experts_per_tok}: expected at most {m.num_experts}"
    if m.is_moe and m.num_dense_layers >= m.num_hidden_layers:
        yield f"num_dense_layers {m.num_dense_layers}: expected fewer than num_hidden_layers"
    if m.is_mla and m.head_dim != m.qk_nope_head_dim + m.qk_rope_head_dim:
        yield f"head_dim {m.head_dim}: expected qk_nope_head_dim + qk_rope_head_dim"
    implied = count_parameters(m)
    if abs(m.num_parameters - implied) > PARAMETERS_TOLERANCE * implied:
        yield f"num_parameters {m.num_parameters}: the shapes imply {implied}"


def check_model(model: ModelSpec) -> None:
    """Check that the shapes of *model* agree with each other and with its number of parameters.

    Raises:
        ConfigError: they do not; the message has the field and what was expected.
    """
    problem = next(_problems(model), None)
    if problem is not None:
        raise ConfigError(f"model {model.name}: {problem}")


def check_heads(model: ModelSpec, where: str) -> None:
    """Check that query heads share KV heads equally where all layers are alike.

    *where* begins the message.

    Raises:
        ConfigError: they do not.
    """
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if model.layout.is_plain and not model.is_mla and heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {heads}: expected a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
