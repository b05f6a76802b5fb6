"""How weights are stored: ``quantization_config`` as bits an element, and what it leaves alone."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from sim.hf_config.fields import Fields

LINEAR = ("attention", "linear attention", "mamba", "mlp", "experts", "shared experts")
"""Parts that are quantized where nothing else is said: routers, embeddings and norms are not."""

MAX_GROUPS = 16
"""Groups of ``config_groups`` that are looked at: they are numbered."""

MAX_NAMES = 2_000_000
"""Names in a list of matrices: the file's size bounds them, not the number of layers."""

SCALE_BITS = 32
"""Of a scale of fp8 blocks (DeepSeek); smaller ones cannot be seen in the sum."""

_MARKS = {
    "attention": ("self_attn", "attention", "attn"),
    "linear attention": ("linear_attn", "linear_attention"),
    "mamba": ("mamba", "mixer", "ssm", "conv1d"),
    "mlp": ("mlp", "feed_forward", "ffn"),
    "experts": ("experts", "block_sparse_moe"),
    "shared experts": ("shared_expert", "shared_mlp"),
}
"""Parts of a module's name by which the lists of exceptions mean a part."""


class Quantization(NamedTuple):
    """How weights are stored.

    Attributes:
        method: its name; "" for none.
        bits: of an element with scales and zero points, by part of `LINEAR`; else 16 bits.
        kv_cache: the cache is made for fp8: what ``--kv-cache-dtype auto`` means.
        lm_head: bits of the output embedding; 0 for the model's dtype.
    """

    method: str = ""
    bits: Mapping[str, float] = MappingProxyType({})
    kv_cache: bool = False
    lm_head: float = 0


def quantization_of(fields: Fields, num_layers: int, sidecar: Fields | None) -> Quantization:
    """Answer how the weights of *fields* are stored; *sidecar* is ``hf_quant_config.json``.

    Raises:
        ConfigError: a number in it makes no sense.
    """
    given = fields.sub("quantization_config") or fields.sub("compression_config")
    if given is None and sidecar is not None:
        given = sidecar.sub("quantization") or sidecar
    if given is None:
        return Quantization(*_experts_only({}, fields))
    method = given.word("quant_method", "quant_algo", "format").lower() or "config_groups"
    algorithm = given.word("quant_algo").upper()
    mixed = _mixed(given)
    if mixed:
        named, mixed = _experts_only(mixed, fields)
        return Quantization(named or method, mixed, _fp8_cache(given))
    base = _bits(given, method, algorithm)
    if base is None:
        shown = f"{method} {algorithm}".strip()[:60]
        fields.note(f"quantization {shown!r} is unknown: weights are counted in 16 bits")
        return Quantization(method, {}, _fp8_cache(given))
    parts = ("experts",) if method == "mxfp4" else LINEAR
    bits = dict.fromkeys(parts, base)
    for part, share in _left_out(given, num_layers).items():
        if part in bits:
            bits[part] = share * 16 + (1 - share) * bits[part]
    quantized_head = method in {"gptq", "awq"} and given.flag("lm_head")
    named, bits = _experts_only(bits, fields)
    return Quantization(named or method, bits, _fp8_cache(given), base if quantized_head else 0)


def _experts_only(bits: dict[str, float], fields: Fields) -> tuple[str, dict[str, float]]:
    """Answer *bits* with experts in 4 bits where ``expert_dtype`` says so (DeepSeek-V4)."""
    if fields.word("expert_dtype") not in {"fp4", "mxfp4"}:
        return "", bits
    return "fp8 with fp4 experts", {**bits, "experts": 4 + 8 / 32}


def _bits(given: Fields, method: str, algorithm: str) -> float | None:
    """Answer the bits of a quantized element with its share of scales; None if unknown."""
    weights = _group(given)
    if weights is not None:
        return _grouped(weights, algorithm)
    if method in {"gptq", "awq", "auto-round", "gptq_marlin", "awq_marlin", "autoround"}:
        bits = given.integer("bits", "w_bit", most=16) or 4
        size = _group_size(given, missing=128)
        return bits + ((16 + bits) / size if size else 0)
    four = method == "bitsandbytes" and given.flag("load_in_4bit", "_load_in_4bit")
    for found, bits_of_scale, default in (
        (four, 32, 64),
        (method == "mxfp4" or algorithm.startswith("MXFP4"), 8, 32),
        ("NVFP4" in algorithm or method in {"nvfp4", "modelopt_fp4", "petit_nvfp4"}, 8, 16),
        (any(word in algorithm for word in ("INT4", "W4A16", "W4A8")), 16, 128),
    ):
        if found:
            return 4 + bits_of_scale / (_group_size(given) or default)
    eight = {"fp8", "fbgemm_fp8", "ptpc_fp8", "int8", "experts_int8", "w8a8_int8",
             "bitsandbytes"}  # fmt: skip
    if method in eight or algorithm.startswith(("FP8", "INT8", "W8A8", "MXFP8")):
        block = given.integers("weight_block_size")
        return 8 + (SCALE_BITS / max(1, block[0] * block[1]) if block and len(block) == 2 else 0)
    return None


def _mixed(given: Fields) -> dict[str, float]:
    """Answer the bits of each part where matrices are named with theirs; {} where all are alike.

    A part with matrices of several kinds gets their mean.
    """
    found: dict[str, list[float]] = {}
    groups = given.sub("config_groups")
    for name in [f"group_{i}" for i in range(MAX_GROUPS)]:
        group = groups.sub(name) if groups is not None else None
        weights = group.sub("weights") if group is not None else None
        if group is None or weights is None or not isinstance(group.raw("targets")[1], list):
            continue
        bits = _grouped(weights, "")
        for target in group.items("targets", most=MAX_NAMES) or ():
            for part in _parts_of(target[:200].lower()) if isinstance(target, str) else ():
                found.setdefault(part, []).append(bits)
    layers = given.raw("quantized_layers")[1]
    for target, what in layers.items() if isinstance(layers, dict) else ():
        algorithm = what.get("quant_algo") if isinstance(what, dict) else None
        layer = Fields(what, given.where) if isinstance(what, dict) else given
        bits_or_none = _bits(layer, "", str(algorithm).upper())
        for part in _parts_of(target[:200].lower()) if bits_or_none is not None else ():
            found.setdefault(part, []).append(bits_or_none or 16)
    return {part: sum(values) / len(values) for part, values in found.items()}


def _group(given: Fields) -> Fields | None:
    """Answer the weights of the first group of ``config_groups`` that has any."""
    groups = given.sub("config_groups")
    for name in [f"group_{i}" for i in range(MAX_GROUPS)]:
        group = groups.sub(name) if groups is not None else None
        weights = group.sub("weights") if group is not None else None
        if weights is not None:
            return weights
    return None


def _grouped(weights: Fields, algorithm: str) -> float:
    """Answer the bits of compressed-tensors' and ModelOpt's weights."""
    bits = weights.integer("num_bits", most=16) or 8
    size = _group_size(weights)
    if not size:
        return bits
    four_bit_float = bits == 4 and weights.word("type") == "float"
    scale = 8 if four_bit_float or "FP4" in algorithm else 16
    zero = 0 if four_bit_float or weights.flag("symmetric", default=True) else bits
    return bits + (scale + zero) / size


def _group_size(given: Fields, missing: int = 0) -> int:
    """Answer elements that share a scale; 0 for a whole row or matrix, which -1 means."""
    size = given.integer("group_size", "q_group_size", least=-1)
    return missing if size is None else max(0, size)


def _fp8_cache(given: Fields) -> bool:
    """Whether it says that the KV cache is fp8: a scheme as an object or as a word."""
    scheme = given.sub("kv_cache_scheme")
    if scheme is not None:
        return scheme.integer("num_bits") == 8 and scheme.word("type") in {"float", ""}
    name, word = given.raw("kv_cache_scheme", "kv_cache_quant_algo")
    if not name:
        return False
    if isinstance(word, str) and word.upper() in {"FP8", "FP8_E4M3", "FLOAT8"}:
        return True
    if isinstance(word, str) and word.upper() not in {"NONE", "AUTO", ""}:
        given.note(f"{name} {word!r} is unknown: the KV cache is counted in the model's dtype")
    return False


def _left_out(given: Fields, num_layers: int) -> dict[str, float]:
    """Answer the share of each part's matrices that stay in 16 bits, from the lists of names.

    Names are looked at for the parts of `_MARKS` and for layer numbers; they are patterns of
    several kinds, of which no expression is run.
    """
    everywhere: set[str] = set()
    layers: dict[str, set[int]] = {}
    for list_name in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        entries = (
            given.items(list_name, most=MAX_NAMES)
            if isinstance(given.raw(list_name)[1], list)
            else None
        )
        for entry in entries or ():
            if not isinstance(entry, str):
                continue
            number = re.search(r"layers\\?\.(\d{1,4})(?!\d)", entry[:200])
            for part in _parts_of(entry[:200].lower()):
                if number is None:
                    everywhere.add(part)
                else:
                    layers.setdefault(part, set()).add(int(number[1]))
    shares = {part: min(1.0, len(found) / num_layers) for part, found in layers.items()}
    return shares | dict.fromkeys(everywhere, 1.0)


def _parts_of(name: str) -> Iterable[str]:
    """Answer the part of `LINEAR` that a module's name means, the most particular first."""
    if any(word in name for word in ("vision", "visual", "router", "embed", "audio", "indexer")):
        return ()
    if re.search(r"\bgate$|shared_expert_gate|lm_head|norm", name.rstrip("*$.")):
        return ()
    for part in ("shared experts", "experts", "linear attention", "mamba", "attention", "mlp"):
        if any(mark in name for mark in _MARKS[part]):
            return (part,)
    return ()
