"""Which kind of layer is where: read from the fields that say so, whatever the model is called."""

from collections.abc import Callable
from typing import Literal

from sim.errors import ConfigError
from sim.hf_config.fields import Fields
from sim.hf_config.shape import Shape
from workloads.errors import quote

Kind = Literal["full", "sliding", "chunked", "linear", "mamba", "both", "conv", "cross", "none"]
"""What mixes tokens in a layer; ``both`` is attention beside Mamba, ``none`` keeps nothing."""

_WORDS: dict[str, Kind] = {
    **dict.fromkeys(("full_attention", "attention", "full", "global", "global_attention",
                     "attn", "deepseek_sparse_attention"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "local_attention",
                     "sliding_window", "sliding_window_attention"), "sliding"),
    "chunked_attention": "chunked",
    **dict.fromkeys(("linear_attention", "linear", "gated_delta_net", "kda"), "linear"),
    **dict.fromkeys(("mamba", "mamba2", "m2", "m"), "mamba"),
    **dict.fromkeys(("hybrid", "hybrid_mamba", "mamba_attention"), "both"),
    **dict.fromkeys(("conv", "short_conv"), "conv"),
    **dict.fromkeys(("moe", "mlp", "ffn", "no_op", "none", "dense"), "none"),
}  # fmt: skip
_LETTERS: dict[str, Kind] = {"M": "mamba", "*": "full", "-": "none", "E": "none"}

Rule = Callable[[Fields, int], "list[Kind] | None"]


def layer_kinds(fields: Fields, shape: Shape) -> list[Kind]:
    """Answer the kind of every layer: the first rule whose fields are there decides.

    Then windows that are switched off or longer than any sequence become full attention, and
    layers that attend to an image or share the keys of a layer below keep none of their own.

    Raises:
        ConfigError: a word or letter that means no kind of layer, or a list of another length.
    """
    kinds: list[Kind] | None = None
    for rule in _RULES:
        kinds = rule(fields, shape.num_layers)
        if kinds is not None:
            break
    if kinds is None:
        kinds = ["full"] * shape.num_layers
    if "sliding" in kinds and not _window_binds(fields):
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
    _without_own_keys(fields, kinds)
    return kinds


def window(fields: Fields) -> int:
    """Answer the tokens that sliding layers hold; 0 where no field says."""
    names = ("sliding_window", "sliding_window_size", "interleaved_sliding_window", "window_size",
             "attention_window_size", "sliding_window_attention_size")  # fmt: skip
    if isinstance(fields.raw(*names)[1], list):
        sizes = fields.integers(fields.raw(*names)[0], least=0, holes=True) or []
        return max(sizes, default=0)
    return fields.integer(*names, least=0) or 0


def _window_binds(fields: Fields) -> bool:
    """Whether sliding layers ever drop a token."""
    size = window(fields)
    if not size:
        if fields.has("use_sliding_window") and not fields.flag("use_sliding_window"):
            return False
        raise ConfigError(
            f"{fields.where}: sliding_window is missing, but layers slide: "
            "the KV cache cannot be known"
        )
    longest = fields.integer("max_position_embeddings")
    if longest is not None and size >= longest:
        fields.note(f"sliding_window {size} never binds: full attention")
        return False
    return True


def _without_own_keys(fields: Fields, kinds: list[Kind]) -> None:
    """Mark the layers of *kinds* that keep no keys of their own."""
    crossing = fields.integers("cross_attention_layers")
    for index in crossing or ():
        if index < len(kinds):
            kinds[index] = "cross"
    shared = fields.integer("num_kv_shared_layers", least=0) or 0
    for index in range(max(0, len(kinds) - shared), len(kinds)):
        kinds[index] = "none"
    factor = fields.integer("cla_share_factor", least=0) or 0
    if fields.flag("use_cla") and factor > 1:
        for index in range(len(kinds)):
            kinds[index] = kinds[index] if index % factor == 0 else "none"


def _by_words(fields: Fields, num_layers: int) -> list[Kind] | None:
    """A word a layer: Nemotron 3, Jamba, Zamba, gpt-oss, Gemma, Qwen3-Next, Granite, LFM2."""
    for name in ("layers_block_type", "layer_types", "attention_layers", "decoder_layer_types"):
        if isinstance(fields.raw(name)[1], list):
            words = fields.items(name, length=num_layers) or []
            return [_kind(fields, f"{name}[{i}]", word) for i, word in enumerate(words)]
    return None


def _kind(fields: Fields, name: str, word: object) -> Kind:
    kind = _WORDS.get(word.lower()) if isinstance(word, str) else None
    if kind is None:
        raise ConfigError(
            f"{fields.where}: {name} {quote(word)} is no kind of layer that is known: "
            f"expected one of {', '.join(_WORDS)}"
        )
    return kind


def _by_letters(fields: Fields, num_layers: int) -> list[Kind] | None:
    """A letter a layer: Nemotron-H."""
    pattern = fields.word("hybrid_override_pattern")
    if not pattern:
        return None
    if len(pattern) < num_layers or any(letter not in _LETTERS for letter in pattern):
        raise fields.error(
            "hybrid_override_pattern",
            pattern,
            f"{num_layers} letters of {', '.join(_LETTERS)}",
        )
    return [_LETTERS[letter] for letter in pattern[:num_layers]]


def _by_numbers(fields: Fields, num_layers: int) -> list[Kind] | None:
    """A number a layer: MiMo-V2 (1 slides), MiniMax-Text (1 is full, 0 is linear)."""
    for name, one, zero in (
        ("hybrid_layer_pattern", "sliding", "full"),
        ("attn_type_list", "full", "linear"),
    ):
        numbers = fields.integers(name, length=num_layers) if fields.has(name) else None
        if numbers is not None:
            return [_either(number == 1, one, zero) for number in numbers]
    return None


def _either(first: bool, one: str, other: str) -> Kind:
    kind: Kind = _WORDS[one if first else other]
    return kind


def _by_lists(fields: Fields, num_layers: int) -> list[Kind] | None:
    """Lists of layer numbers, from 1 as Kimi's are, or from 0: ``linear_attn_config``."""
    linear = fields.sub("linear_attn_config")
    if linear is None or not linear.has("full_attn_layers"):
        return None
    full = set(linear.integers("full_attn_layers") or ())
    others = set(linear.integers("kda_layers") or ())
    first = 0 if 0 in full | others else 1
    if full and max(full) >= num_layers + first:
        raise linear.error("full_attn_layers", max(full), f"numbers up to {num_layers}")
    return [_either(i + first in full, "full", "linear") for i in range(num_layers)]


def _by_blocks(fields: Fields, num_layers: int) -> list[Kind] | None:
    """An object a layer, as architecture search leaves them: Nemotron Super and Ultra."""
    if not fields.has("block_configs"):
        return None
    return list(fields.layers("block_configs", num_layers, _kind_of_block))


def _kind_of_block(block: Fields) -> Kind:
    attention = block.sub("attention")
    if attention is None or attention.flag("no_op") or attention.flag("replace_with_linear"):
        return "none"
    if attention.integer("window_length", least=0):
        return "sliding"
    return "full"


def _by_period(fields: Fields, num_layers: int) -> list[Kind] | None:
    """One layer of attention in so many, or where a list says: Jamba, Bamba, Qwen3-Next."""
    indices = fields.integers("attn_layer_indices")
    if indices is not None:
        return [_either(i in indices, "full", "mamba") for i in range(num_layers)]
    period = fields.integer("attn_layer_period")
    if period is not None:
        offset = fields.integer("attn_layer_offset", least=0) or 0
        return [_either(i % period == offset, "full", "mamba") for i in range(num_layers)]
    if fields.has("mamba_d_ssm"):  # Falcon-H1: Mamba and attention side by side in every layer
        return ["both"] * num_layers
    interval = fields.integer("full_attention_interval")
    if interval is not None and fields.has("linear_num_value_heads"):
        return [_either((i + 1) % interval == 0, "full", "linear") for i in range(num_layers)]
    return None


def _by_chunks(fields: Fields, num_layers: int) -> list[Kind] | None:
    """Chunks wherever positions are rotary: Llama 4."""
    if fields.has("attention_chunk_size") and not fields.has("sliding_window"):
        rotary = fields.integers("no_rope_layers") if fields.raw("no_rope_layers")[1] else None
        every = fields.integer("no_rope_layer_interval") or 4
        chunked = rotary or [int((i + 1) % every != 0) for i in range(num_layers)]
        if len(chunked) < num_layers:
            raise fields.error("no_rope_layers", chunked, f"{num_layers} entries")
        return [_either(bool(c), "chunked_attention", "full") for c in chunked[:num_layers]]
    return None


def _by_window(fields: Fields, num_layers: int) -> list[Kind] | None:
    """Sliding windows in some layers or all: Gemma 2 and 3, Cohere 2, Exaone 4, Mistral, Qwen 2."""
    name, sizes = fields.raw("sliding_window", "interleaved_sliding_window")
    if isinstance(sizes, list):
        listed = fields.integers(name, least=0, holes=True) or [0]
        return [_either(listed[i % len(listed)] > 0, "sliding", "full") for i in range(num_layers)]
    if not window(fields):
        return None
    model_type = fields.word("model_type")
    off = fields.has("use_sliding_window") or model_type.startswith("qwen")
    if off and not fields.flag("use_sliding_window"):
        return None
    patterned = _by_pattern(fields, num_layers)
    if patterned is not None:
        return patterned
    first = fields.integer("max_window_layers", least=0)
    if off and first is not None:
        return [_either(i >= first, "sliding", "full") for i in range(num_layers)]
    return ["sliding"] * num_layers


def _by_pattern(fields: Fields, num_layers: int) -> list[Kind] | None:
    """A pattern that repeats: every so many layers is full, or letters L and G."""
    model_type = fields.word("model_type")
    _, pattern = fields.raw(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
    )
    if isinstance(pattern, str) and pattern and set(pattern.upper()) <= {"L", "G"}:
        letters = pattern.upper()
        return [_either(letters[i % len(letters)] == "L", "sliding", "full")
                for i in range(num_layers)]  # fmt: skip
    every = fields.integer(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
    )
    if every is None:  # what the classes of these models say where the file does not
        family = model_type.removesuffix("_text")
        every = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4}.get(family)
        if every is not None:
            fields.note(f"no layer_types: one in {every} has full attention, as in {family}")
    if every is not None:
        return [_either((i + 1) % every != 0, "sliding", "full") for i in range(num_layers)]
    return None


def _by_state(fields: Fields, num_layers: int) -> list[Kind] | None:
    """Mamba alone."""
    if fields.word("model_type") in {"mamba", "mamba2", "falcon_mamba"}:
        return ["mamba"] * num_layers
    return None


_RULES: tuple[Rule, ...] = (
    _by_words, _by_letters, _by_numbers, _by_lists, _by_blocks, _by_state, _by_period, _by_chunks,
    _by_window,
)  # fmt: skip
