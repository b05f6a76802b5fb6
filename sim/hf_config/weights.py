"""The matrices of a configuration, by how they are stored and shared."""

from typing import NamedTuple

from sim.hf_config.fields import Fields
from sim.hf_config.layers import Kind
from sim.hf_config.quant import Quantization
from sim.hf_config.shape import Shape
from sim.model_spec import Holders, WeightPart

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k",
         "top_k_experts", "moe_k", "num_experts_per_topk")  # fmt: skip
EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
WIDTH = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_size", "d_ff",
         "dense_intermediate_size")  # fmt: skip
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                "share_expert_dim", "shared_intermediate_size")  # fmt: skip
NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

UNGATED = frozenset({
    "opt", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt", "phi",
    "starcoder2", "nemotron", "nemotron_h", "xglm", "codegen", "persimmon", "biogpt", "galactica",
})  # fmt: skip
"""Families whose MLP has one projection up, not two."""

FOUR_TIMES = frozenset({"gpt2", "gptj", "gpt_neo", "gpt_bigcode", "bloom", "falcon", "mpt"})
"""Families whose classes make the MLP four times as wide as the residual stream if nothing is said."""

TIED = frozenset({
    "gpt2", "gpt_bigcode", "gpt_neo", "bloom", "opt", "falcon", "mpt", "gemma", "gemma2", "gemma3",
    "gemma3n", "gemma4", "cohere", "cohere2", "openelm", "codegen",
})  # fmt: skip
"""Families whose classes tie input and output embeddings if nothing is said."""


class Experts(NamedTuple):
    """The mixture of experts of a layer; no experts where num is 0."""

    num: int = 0
    top_k: int = 0
    width: int = 0
    shared_width: int = 0


def family(fields: Fields) -> str:
    """Answer the model's type without the ending of its text part."""
    return fields.word("model_type").removesuffix("_text").removesuffix("_text_model")


def is_gated(fields: Fields) -> bool:
    """Whether MLPs multiply a gate with the projection up."""
    act = fields.word("hidden_act", "mlp_hidden_act", "activation_function", "hidden_activation")
    return family(fields) not in UNGATED and act != "relu2"


def is_tied(fields: Fields) -> bool:
    """Whether input and output embeddings are one matrix."""
    return fields.flag("tie_word_embeddings", "share_input_output_layers",
                       default=family(fields) in TIED)  # fmt: skip


def dense_width(fields: Fields, hidden: int) -> int | None:
    """Answer the width of a dense MLP; None if nothing says."""
    if family(fields) == "llama4":
        return fields.integer("intermediate_size_mlp") or fields.integer(*WIDTH)
    width = fields.integer("dense_intermediate_size", *WIDTH)
    return 4 * hidden if width is None and family(fields) in FOUR_TIMES else width


def experts_of(fields: Fields) -> Experts:
    """Answer the experts of layers that have some.

    Raises:
        ConfigError: experts without a width, or more a token than there are.
    """
    ffn = fields.sub("ffn_config")
    source = ffn if ffn is not None and ffn.has(*NUM_EXPERTS) else fields
    num = source.integer(*NUM_EXPERTS, least=0) or 0
    if num <= 1:
        return Experts()
    top_k = source.integer(*TOP_K, most=num)
    width = source.integer(*EXPERT_WIDTH) or source.integer(*WIDTH)
    if top_k is None:
        fields.note(f"{TOP_K[0]} is missing: 1 assumed, of {num} experts")
    shared = fields.integer(*SHARED_WIDTH, least=0)
    if shared is None:
        shared = (fields.integer(*NUM_SHARED, least=0) or 0) * (width or 0)
    if family(fields) == "llama4":
        shared = width or 0
    return Experts(num, top_k or 1, width or 0, shared)


def has_experts(fields: Fields, num_layers: int) -> list[bool]:
    """Answer which layers have experts, where the model has any."""
    words = fields.items("mlp_layer_types", length=num_layers)
    if words is not None:
        return [word != "dense" for word in words]
    _, frequency = fields.raw("moe_layer_freq")
    if isinstance(frequency, list):
        return [bool(n) for n in fields.integers("moe_layer_freq", length=num_layers) or ()]
    layers = fields.word("moe_layers_enum")
    if layers:
        named = {int(word) for word in layers[:100_000].split(",") if word.strip().isdecimal()}
        return [i in named for i in range(num_layers)]
    first = fields.integer("first_k_dense_replace", "moe_layer_start_index", least=0) or 0
    every = fields.integer("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq",
                           "moe_layer_interval", "expert_layer_period", least=0) or 1  # fmt: skip
    dense = fields.integers("mlp_only_layers") or []
    offset = fields.integer("expert_layer_offset", least=0)
    if offset is None:
        offset = every - 1 if not fields.has("moe_layer_freq") else 0
    return [i >= first and i not in dense and i % every == offset % every
            for i in range(num_layers)]  # fmt: skip


class Counter:
    """Elements of a model's matrices, added up part by part."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._parts: dict[tuple[str, Holders], list[int]] = {}

    def add(self, name: str, elements: int, held_by: Holders = "ranks",
            active: int | None = None) -> None:  # fmt: skip
        """Count *elements* of part *name*, of which *active* are used by a token [all]."""
        counts = self._parts.setdefault((name, held_by), [0, 0])
        counts[0] += elements
        counts[1] += elements if active is None else active

    def parts(self) -> tuple[WeightPart, ...]:
        """Answer what was counted, with the bits of each part."""
        bits = {**self._quantization.bits, "output embedding": self._quantization.lm_head}
        return tuple(
            WeightPart(name=name, elements=elements, active=active, held_by=held_by,
                       bits=bits.get(name, 0))
            for (name, held_by), (elements, active) in self._parts.items()
            if elements
        )  # fmt: skip


def count_weights(
    fields: Fields, shape: Shape, kinds: list[Kind], quantization: Quantization
) -> tuple[tuple[WeightPart, ...], tuple[str, ...]]:
    """Answer the matrices of *fields*, and the fields that are missing to count them all.

    Norms, biases and convolutions are left out; encoders of images and sound too.

    Raises:
        ConfigError: a field makes no sense.
    """
    missing: list[str] = []
    counter = Counter(quantization)
    hidden = shape.hidden
    vocabulary = fields.integer("vocab_size", "padded_vocab_size")
    if vocabulary is None:
        missing.append("vocab_size")
    else:
        counter.add("input embedding", vocabulary * hidden, "vocabulary")
        if not is_tied(fields):
            counter.add("output embedding", vocabulary * hidden, "vocabulary")
    for i, kind in enumerate(kinds):
        _mixer(counter, fields, shape, i, kind)
    _feed_forward(counter, fields, shape, kinds, missing)
    return counter.parts(), tuple(dict.fromkeys(missing))


def _mixer(counter: Counter, fields: Fields, shape: Shape, layer: int, kind: Kind) -> None:
    """Count the matrices around what mixes tokens in a layer."""
    if kind in {"mamba", "both"}:
        _mamba(counter, fields, shape.hidden)
    if kind == "linear":
        _linear(counter, fields, shape)
    elif kind == "conv":
        counter.add("linear attention", 4 * shape.hidden**2)
    elif fields.has("compress_ratios"):
        _compressed(counter, fields, shape, layer)
    elif kind in {"full", "sliding", "chunked", "cross", "both"}:
        if fields.integer("kv_lora_rank") is not None:
            _latent(counter, fields, shape, layer)
        else:
            _attention(counter, fields, shape, layer, kind)


def _attention(counter: Counter, fields: Fields, shape: Shape, layer: int, kind: Kind) -> None:
    heads, kv_heads = shape.heads[layer], shape.kv_heads[layer]
    key, value = shape.key_dims[layer], shape.value_dims[layer]
    shared = False
    if kind == "sliding":
        kv_heads = fields.integer("swa_num_key_value_heads") or kv_heads
    else:
        wide = fields.integer("global_head_dim")
        if wide is not None:
            key, value = wide, wide
            kv_heads = fields.integer("num_global_key_value_heads") or kv_heads
        shared = fields.flag("attention_k_eq_v")
    query = heads * key * (2 if fields.flag("attn_output_gate") else 1)
    share = fields.integer("share_q_dim")
    if share is not None:  # Step 3: a low rank between residual stream and query
        counter.add("attention", shape.hidden * share, "everyone")
        counter.add("attention", share * query)
        query = 0
    counter.add("attention", shape.hidden * (query + heads * value))
    counter.add("attention", shape.hidden * kv_heads * (key + (0 if shared else value)),
                "kv_heads")  # fmt: skip


def _latent(counter: Counter, fields: Fields, shape: Shape, layer: int) -> None:
    hidden, heads = shape.hidden, shape.heads[layer]
    rank, rope = fields.needed("the latent", "kv_lora_rank"), fields.integer(
        "qk_rope_head_dim", least=0
    )
    nope = fields.integer("qk_nope_head_dim", least=0) or 0
    value = fields.integer("v_head_dim") or nope
    query_rank = fields.integer("q_lora_rank", least=0) or 0
    query = heads * (nope + (rope or 0))
    counter.add("attention", hidden * (query_rank + rank + (rope or 0)), "everyone")
    counter.add("attention", (query_rank or hidden) * query
                + rank * heads * (nope + value) + heads * value * hidden)  # fmt: skip
    if fields.flag("mla_use_output_gate"):
        counter.add("attention", hidden * heads * value)
    types = fields.items("indexer_types", length=shape.num_layers)
    if types is None or types[layer] == "full":
        _indexer(counter, fields, hidden, query_rank or hidden)


def _indexer(counter: Counter, fields: Fields, hidden: int, query_rank: int) -> None:
    width, heads = fields.integer("index_head_dim"), fields.integer("index_n_heads")
    if width is not None and heads is not None:
        counter.add("indexer", query_rank * heads * width + hidden * (width + heads), "everyone")


def _compressed(counter: Counter, fields: Fields, shape: Shape, layer: int) -> None:
    """Count DeepSeek-V4's attention: low ranks for queries and output, one latent, compressors."""
    hidden, heads, width = shape.hidden, shape.heads[layer], shape.key_dims[layer]
    query_rank = fields.needed("the query", "q_lora_rank")
    groups, rank = fields.integer("o_groups") or 1, fields.needed("the output", "o_lora_rank")
    ratio = (fields.integers("compress_ratios", length=shape.num_layers) or [])[layer]
    counter.add("attention", hidden * (query_rank + width), "everyone")
    counter.add("attention", query_rank * heads * width + heads * width * rank
                + groups * rank * hidden)  # fmt: skip
    if ratio:
        counter.add("indexer", hidden * 2 * width * (2 if ratio == 4 else 1), "everyone")
    if ratio == 4:
        _indexer(counter, fields, 0, query_rank)
        index, index_heads = fields.integer("index_head_dim") or 0, fields.integer("index_n_heads")
        counter.add("indexer", hidden * (4 * index + (index_heads or 0)), "everyone")


def _mamba(counter: Counter, fields: Fields, hidden: int) -> None:
    heads = fields.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    width = fields.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    state = fields.integer("mamba_d_state", "ssm_state_size", "state_size") or 0
    inner = fields.integer("mamba_d_ssm", "mamba_intermediate_size") or hidden * (
        fields.integer("mamba_expand", "expand") or 2
    )
    if heads is not None and width is not None:
        inner = heads * width
        groups = fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
        counter.add("mamba", hidden * (3 * inner + 2 * groups * state + heads))
        return
    rank = fields.integer("mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
    counter.add("mamba", hidden * 3 * inner + inner * (2 * rank + 2 * state))


def _linear(counter: Counter, fields: Fields, shape: Shape) -> None:
    hidden = shape.hidden
    delta = fields.sub("linear_attn_config")
    if delta is not None and delta.has("num_heads"):
        heads, width = delta.needed("heads", "num_heads"), delta.needed("heads", "head_dim")
        inner = heads * width
        gate = hidden * inner if delta.flag("use_full_rank_gate") else width * (hidden + inner)
        counter.add("linear attention", hidden * (4 * inner + heads) + gate
                    + width * (hidden + inner))  # fmt: skip
        return
    if fields.has("linear_num_value_heads"):
        key = (fields.integer("linear_num_key_heads") or 0) * (
            fields.integer("linear_key_head_dim") or 0
        )
        heads = fields.integer("linear_num_value_heads") or 0
        value = heads * (fields.integer("linear_value_head_dim") or 0)
        counter.add("linear attention", hidden * (2 * key + 3 * value + 2 * heads))
        return
    inner = shape.heads[0] * shape.key_dims[0]
    counter.add("linear attention", 5 * hidden * inner)


def _feed_forward(
    counter: Counter, fields: Fields, shape: Shape, kinds: list[Kind], missing: list[str]
) -> None:
    """Count the MLPs and experts of every layer."""
    hidden, matrices = shape.hidden, 3 if is_gated(fields) else 2
    experts = experts_of(fields)
    widths = _dense_widths(fields, shape)
    routed = has_experts(fields, shape.num_layers) if experts.num else [False] * shape.num_layers
    places = _places(fields, kinds)
    beside = fields.flag("enable_moe_block")  # Gemma 4: a dense MLP beside the experts
    narrow = fields.integer("moe_latent_size", "routed_expert_hidden_size")
    for i in range(shape.num_layers):
        if places is not None and places[i] == "":
            continue
        if places is not None and experts.num:
            is_routed = places[i] == "moe"
        else:
            is_routed = routed[i]
        if is_routed:
            if not experts.width:
                missing.append(EXPERT_WIDTH[0])
            one = matrices * (narrow or hidden) * experts.width
            counter.add("experts", experts.num * one, active=experts.top_k * one)
            counter.add("router", hidden * experts.num, "everyone")
            counter.add("shared experts", matrices * hidden * experts.shared_width)
            if narrow is not None:
                counter.add("latent of experts", 2 * hidden * narrow, "everyone")
        if not is_routed or beside:
            if widths is None:
                missing.append(WIDTH[0])
            else:
                counter.add("mlp", matrices * hidden * widths[i])


def _places(fields: Fields, kinds: list[Kind]) -> list[str] | None:
    """Answer, where MLPs are layers of their own, which layers they are: "mlp", "moe" or ""."""
    pattern = fields.word("hybrid_override_pattern")
    if pattern:
        return [{"-": "mlp", "E": "moe"}.get(letter, "") for letter in pattern[: len(kinds)]]
    words = fields.items("layers_block_type")
    if words and any(word in {"moe", "mlp"} for word in words):
        return [word if word in {"moe", "mlp"} else "" for word in words[: len(kinds)]]
    return None


def _dense_widths(fields: Fields, shape: Shape) -> list[int] | None:
    """Answer the width of every layer's MLP; None if nothing says."""
    hidden = shape.hidden
    if fields.has("block_configs"):
        return list(
            fields.layers("block_configs", shape.num_layers, lambda b: _block_width(b, hidden))
        )
    multipliers = fields.items("ffn_multipliers", length=shape.num_layers)
    if multipliers is not None:
        divisor = fields.integer("ffn_dim_divisor") or 256
        return [_multiple(hidden * _factor(fields, m), divisor) for m in multipliers]
    width = dense_width(fields, hidden)
    return None if width is None else [width] * shape.num_layers


def _factor(fields: Fields, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1000:
        raise fields.error("ffn multiplier", value, "a number from 0 to 1000")
    return float(value)


def _multiple(width: float, of: int) -> int:
    """Answer *width* as the nearest multiple, never more than a tenth below."""
    rounded = max(of, int(width + of / 2) // of * of)
    return rounded + of if rounded < 0.9 * width else rounded


def _block_width(block: Fields, hidden: int) -> int:
    """Answer the width of a searched block's MLP (``configuration_decilm.py``)."""
    ffn = block.sub("ffn")
    if ffn is None or ffn.flag("no_op"):
        return 0
    if ffn.flag("replace_with_linear"):
        return -(-hidden // 3)
    width = ffn.integer("intermediate_size")
    if width is not None:
        return width
    _, mult = ffn.raw("ffn_mult")
    if mult is None:
        raise ffn.error("ffn_mult", None, "a number")
    return -(-int(2 * _factor(ffn, mult) * hidden / 3) // 256) * 256
