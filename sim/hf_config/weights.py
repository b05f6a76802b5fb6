"""The matrices of a configuration, by how they are stored and shared."""

from typing import NamedTuple

from sim.hf_config.fields import Fields
from sim.hf_config.layers import Kind
from sim.hf_config.mixers import Counter, count_mixer
from sim.hf_config.quant import Quantization
from sim.hf_config.shape import Shape
from sim.model_spec import WeightPart

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "num_experts_per_topk",
)
EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
WIDTH = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "inner_size",
    "d_ff",
    "dense_intermediate_size",
)
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
    "shared_intermediate_size",
)
NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

UNGATED = frozenset(
    {
        "opt",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "starcoder2",
        "nemotron",
        "nemotron_h",
        "xglm",
        "codegen",
        "persimmon",
        "biogpt",
        "galactica",
    }
)
"""Families whose MLP has one projection up, not two."""

FOUR_TIMES = frozenset({"gpt2", "gptj", "gpt_neo", "gpt_bigcode", "bloom", "falcon", "mpt"})
"""Families whose classes make an MLP four times as wide as the residual stream if none is given."""

TIED = frozenset(
    {
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "bloom",
        "opt",
        "falcon",
        "mpt",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "cohere",
        "cohere2",
        "openelm",
        "codegen",
    }
)
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
    return fields.flag(
        "tie_word_embeddings", "share_input_output_layers", default=family(fields) in TIED
    )


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
    return [
        i >= first and i not in dense and i % every == offset % every for i in range(num_layers)
    ]


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
        count_mixer(counter, fields, shape, i, kind)
    _feed_forward(counter, fields, shape, kinds, missing)
    return counter.parts(), tuple(dict.fromkeys(missing))


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
        is_routed = places[i] == "moe" if places is not None and experts.num else routed[i]
        if is_routed:
            if not experts.width:
                missing.append(EXPERT_WIDTH[0])
            one = matrices * (narrow or hidden) * experts.width
            counter.add("experts", experts.num * one, active=experts.top_k * one)
            counter.expert_shape = (experts.width, narrow or hidden)
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
