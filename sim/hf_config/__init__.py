"""Any Hugging Face ``config.json`` as a `ModelSpec`, by the fields that are in it.

No architecture is listed: what a file says decides. What it leaves to the code of its architecture
is assumed as most have it, and said in the note; what the KV cache follows from is never assumed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import ConfigError, FileError
from sim.hf_config.caches import layout_of
from sim.hf_config.fields import Fields, load_json, shown_path
from sim.hf_config.known import ENCODERS, KNOWN
from sim.hf_config.layers import Kind, layer_kinds
from sim.hf_config.quant import quantization_of
from sim.hf_config.shape import Shape, longest_context, shape_of
from sim.hf_config.weights import (
    count_weights,
    dense_width,
    experts_of,
    family,
    has_experts,
    is_gated,
    is_tied,
)
from sim.model_spec import ModelSpec, check_heads, count_parameters

CONFIG_FILE = "config.json"
QUANT_FILE = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt writes what other tools put into ``config.json``."""


def read_config(path: Path) -> ModelSpec:
    """Answer the model of the ``config.json`` at *path*, or in the folder *path*.

    Raises:
        FileError: it cannot be read, or is no JSON object.
        ConfigError: a field is missing that the KV cache follows from, or makes no sense; the
            message has the file, the field and what was expected.
    """
    where = f"--model {shown_path(path)}"
    try:
        path = path.expanduser()
        is_folder = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{where}: {error}; expected the path of a config.json") from None
    if is_folder:
        if not (path / CONFIG_FILE).is_file():
            raise FileError(f"{where}: a folder without {CONFIG_FILE}")
        path = path / CONFIG_FILE
    values = load_json(path, where)
    sidecar = None
    if path.name == CONFIG_FILE and (path.parent / QUANT_FILE).is_file():
        sidecar_where = f"{where}: {QUANT_FILE}"
        sidecar = Fields(load_json(path.parent / QUANT_FILE, sidecar_where), sidecar_where)
    name = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    return spec_of(values, name=name or path.stem, where=where, sidecar=sidecar)


def spec_of(
    values: Mapping[str, Any],
    *,
    name: str,
    where: str,
    source: str = "",
    sidecar: Fields | None = None,
) -> ModelSpec:
    """Answer the model that *values*, a parsed ``config.json``, describe; *where* begins messages.

    Raises:
        ConfigError: as `read_config`.
    """
    fields = Fields.of_language_model(values, where)
    if fields.word("model_type") in ENCODERS:
        raise ConfigError(
            f"{where}: model_type {fields.word('model_type')}: expected a model that decodes; "
            "this one only encodes and keeps no keys and values"
        )
    if fields.flag("is_encoder_decoder"):
        raise ConfigError(f"{where}: is_encoder_decoder: expected a model that only decodes")
    shape = shape_of(fields)
    quantization = quantization_of(fields, shape.num_layers, sidecar)
    dtype = _dtype(fields)
    compressed = fields.has("compress_ratios")
    kinds: list[Kind] = ["full"] * shape.num_layers if compressed else layer_kinds(fields, shape)
    auto = "fp8" if quantization.kv_cache else dtype
    if quantization.kv_cache:
        fields.note("the KV cache is fp8 by default: the quantization's kv_cache_scheme says so")
    layout = layout_of(fields, shape, dtype, auto)
    if not layout.caches:
        raise ConfigError(f"{where}: no layer keeps keys, values or a state: expected some")
    parts, missing = count_weights(fields, shape, kinds, quantization)
    if missing:
        fields.note(f"{', '.join(missing)} missing: weights cannot be counted")
    kind = family(fields)
    if kind not in KNOWN:
        shown = kind or "(none)"
        fields.note(
            f"model_type {shown[:60]!r} is unknown: its layers are read from the fields that are "
            "there, as other decoders have them"
        )
    full = ModelSpec(
        name=name,
        **_plain_fields(fields, shape, kinds),
        max_position_embeddings=longest_context(fields),
        num_parameters=sum(part.elements for part in parts),
        dtype=dtype,
        source=source or f"{CONFIG_FILE} given",
        note="; ".join(fields.notes),
        kv_layout=layout,
        weights=parts,
        unknown=missing,
    )
    plain = msgspec.structs.replace(full, kv_layout=None, weights=())
    same = not quantization.method and plain.layout == layout and not missing
    spec = plain if same and count_parameters(plain) == full.num_parameters else full
    check_heads(spec, where)
    return spec


def _plain_fields(fields: Fields, shape: Shape, kinds: list[Kind]) -> dict[str, Any]:
    """Answer the fields of a `ModelSpec` that describe one layer of each kind."""
    first = next((i for i, kind in enumerate(kinds) if kind not in {"none", "mamba", "linear"}), 0)
    experts = experts_of(fields)
    routed = has_experts(fields, shape.num_layers) if experts.num else []
    is_latent = fields.integer("kv_lora_rank") is not None
    nope = fields.integer("qk_nope_head_dim", least=0) or 0
    rope = fields.integer("qk_rope_head_dim", least=0) or 0
    latent = {
        "kv_lora_rank": fields.integer("kv_lora_rank") or 0,
        "q_lora_rank": fields.integer("q_lora_rank", least=0) or 0,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": fields.integer("v_head_dim") or nope,
    }
    mixture = {
        "num_experts": experts.num,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width,
        "num_dense_layers": routed.count(False),
    }
    act = family(fields)
    return {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": max(shape.heads),
        "num_key_value_heads": max(*shape.kv_heads, 1),
        "head_dim": nope + rope if is_latent else shape.key_dims[first],
        "intermediate_size": dense_width(fields, shape.hidden) or 0,
        "vocab_size": fields.integer("vocab_size", "padded_vocab_size") or 0,
        "gated_mlp": is_gated(fields),
        "tie_word_embeddings": is_tied(fields),
        "qk_norm": fields.flag("use_qk_norm", default=act.startswith("qwen3")),
        **(mixture if experts.num else {}),
        **(latent if is_latent else {}),
    }


def _dtype(fields: Fields) -> str:
    """Answer the dtype that vLLM runs the model in under ``--dtype auto``."""
    word = fields.word("dtype", "torch_dtype").removeprefix("torch.").lower()
    if word in {"", "auto"}:
        fields.note("dtype is missing: bfloat16 assumed")
        return "bfloat16"
    if word == "float32":
        fields.note("dtype float32: run in bfloat16, as vLLM does by default")
        return "bfloat16"
    word = {"half": "float16", "fp16": "float16", "bf16": "bfloat16"}.get(word, word)
    if word not in {"bfloat16", "float16"}:
        raise fields.error("torch_dtype", word, "bfloat16, float16 or float32")
    return word
