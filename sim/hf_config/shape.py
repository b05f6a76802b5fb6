"""Widths and heads of a model, by every name that configurations give them."""

from typing import NamedTuple

from sim.errors import ConfigError
from sim.hf_config.fields import MAX_HEADS, MAX_LAYERS, Fields

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "n_kv_head",
    "num_query_groups", "multi_query_group_num", "num_attention_groups",
)  # fmt: skip
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "head_size", "d_head")
LISTS_OF_LAYERS = (
    "layers_block_type", "layer_types", "block_configs", "attn_type_list", "hybrid_layer_pattern",
)  # fmt: skip
POSITIONS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length",
    "n_ctx", "model_max_length", "max_context_length", "max_seq_length", "max_target_positions",
)  # fmt: skip

DEFAULT_POSITIONS = 2048
"""Of a configuration that names no longest context (vLLM 0.33.0, ``config/model.py``)."""


class Shape(NamedTuple):
    """Widths of a model; a value a layer where layers may differ.

    Attributes:
        num_layers: layers, attention or not.
        hidden: width of the residual stream.
        heads: query heads of every layer.
        kv_heads: KV heads of every layer, were it one with full attention.
        key_dims: elements of a key of every layer.
        value_dims: elements of a value of every layer.
    """

    num_layers: int
    hidden: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]


def shape_of(fields: Fields) -> Shape:
    """Answer the widths in *fields*.

    Raises:
        ConfigError: one is missing that the KV cache follows from, or makes no sense.
    """
    num_layers = number_of_layers(fields)
    hidden = fields.needed("the width of a head", *HIDDEN)
    heads = _a_layer(fields, HEADS, num_layers)
    if heads is None:
        if fields.integer("kv_lora_rank") is None:
            raise ConfigError(f"{fields.where}: {HEADS[0]} is missing: KV heads cannot be known")
        heads = (1,) * num_layers
    kv_heads = _kv_heads(fields, num_layers, heads)
    key_dims = _head_dims(fields, num_layers, hidden, heads)
    value = fields.integer("v_head_dim")
    is_latent = fields.integer("kv_lora_rank") is not None
    value_dims = key_dims if value is None or is_latent else (value,) * num_layers
    return Shape(num_layers, hidden, heads, kv_heads, key_dims, value_dims)


def number_of_layers(fields: Fields) -> int:
    """Answer how many layers there are: as given, else the length of a list with one entry each.

    Raises:
        ConfigError: neither is there.
    """
    given = fields.integer(*LAYERS, most=MAX_LAYERS)
    if given is not None:
        return given
    for name in LISTS_OF_LAYERS:
        entries = fields.items(name) if isinstance(fields.raw(name)[1], list) else None
        if entries:
            fields.note(f"{LAYERS[0]} is missing: {len(entries)}, as many as {name} has")
            return len(entries)
    pattern = fields.word("hybrid_override_pattern")
    if pattern and len(pattern) <= MAX_LAYERS:
        return len(pattern)
    raise ConfigError(f"{fields.where}: {LAYERS[0]} is missing: the KV cache cannot be known")


def _a_layer(fields: Fields, names: tuple[str, ...], num_layers: int) -> tuple[int, ...] | None:
    """Answer one number a layer from a number or a list; None if none of *names* is there."""
    name, value = fields.raw(*names)
    if not name:
        return None
    if isinstance(value, list):
        return tuple(fields.integers(name, length=num_layers, least=1, most=MAX_HEADS) or ())
    number = fields.integer(*names, most=MAX_HEADS)
    return None if number is None else (number,) * num_layers


def _kv_heads(fields: Fields, num_layers: int, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Answer the KV heads of every layer."""
    blocks = fields.items("block_configs") if fields.has("block_configs") else None
    if blocks is not None:
        return tuple(
            kv if kv is not None else full // per_group if per_group else full
            for full, (kv, per_group) in zip(
                heads, fields.layers("block_configs", num_layers, _heads_of_block), strict=True
            )
        )
    for name in ("num_key_value_heads_per_layer", "num_key_value_heads"):
        if isinstance(fields.raw(name)[1], list):
            return tuple(
                fields.integers(name, length=num_layers, least=0, most=MAX_HEADS, holes=True) or ()
            )
    # Falcon's flags decide, whatever number stands beside them; GPT-BigCode's is the same flag.
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return (1,) * num_layers
    attention = fields.sub("attn_config")
    if attention is not None:
        if attention.word("attn_type") == "multiquery_attention":
            return (1,) * num_layers
        number = attention.integer(*KV_HEADS, most=MAX_HEADS)
        if number is not None:
            return (number,) * num_layers
    given = _a_layer(fields, KV_HEADS, num_layers)
    if given is None:
        fields.note("num_key_value_heads is missing: as many as attention heads, as before GQA")
    return given or heads


def _heads_of_block(block: Fields) -> tuple[int | None, int | None]:
    """Answer KV heads of a searched block, given or by query heads that share one."""
    attention = block.sub("attention")
    if attention is None:
        return None, None
    return attention.integer("num_key_value_heads", most=MAX_HEADS), attention.integer(
        "n_heads_in_group"
    )


def _head_dims(
    fields: Fields, num_layers: int, hidden: int, heads: tuple[int, ...]
) -> tuple[int, ...]:
    """Answer the elements of a head of every layer: as given, else the hidden size shared out."""
    given = _a_layer(fields, HEAD_DIM, num_layers)
    if given is not None:
        return given
    nope, rope = fields.integer("qk_nope_head_dim", least=0), fields.integer("qk_rope_head_dim")
    if nope is not None and rope is not None:
        return (nope + rope,) * num_layers
    for number in heads:
        if hidden % number:
            raise ConfigError(
                f"{fields.where}: {HEAD_DIM[0]} is missing and {HIDDEN[0]} {hidden} is no multiple "
                f"of {HEADS[0]} {number}: the width of a head cannot be known"
            )
    return tuple(hidden // number for number in heads)


def longest_context(fields: Fields) -> int:
    """Answer the tokens that the model was made for, with its rope scaling, as vLLM reads it.

    vLLM 0.33.0, ``config/model.py``: the smallest of what is named; a scaling by factor multiplies
    it, YaRN's the length before scaling.
    """
    given = fields.integer(*POSITIONS)
    if given is None:
        fields.note(f"{POSITIONS[0]} is missing: {DEFAULT_POSITIONS} tokens assumed, as vLLM does")
        return DEFAULT_POSITIONS
    scaling = fields.sub("rope_scaling") or fields.sub("rope_parameters")
    kind = "" if scaling is None else scaling.word("rope_type", "type")
    if scaling is None or kind in {"", "default", "su", "longrope", "llama3", "mrope"}:
        return given
    original = scaling.integer("original_max_position_embeddings")
    _, factor = scaling.raw("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < 10**6:
        return given
    if kind == "yarn" and original is not None:
        return max(given, int(original * factor))
    return given if original is not None else int(given * factor)
