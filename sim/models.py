"""Models by name, or by the path of their ``config.json``."""

import functools
from pathlib import Path

import msgspec

from sim.config import ModelConfig
from sim.errors import ConfigError
from sim.hf_config import read_config, spec_of
from sim.model_spec import (
    ModelSpec,
    ParameterCounts,
    WeightPart,
    check_model,
    count_parameters,
    parameter_counts,
    weight_parts,
)
from sim.tables import load_table
from workloads.errors import did_you_mean

__all__ = [
    "ModelSpec",
    "ParameterCounts",
    "WeightPart",
    "check_model",
    "count_parameters",
    "get_model",
    "model_names",
    "model_of",
    "parameter_counts",
    "weight_parts",
]


ALIASES = {"half": "float16", "float": "float32"}
"""Second names of ``--dtype``."""

LOADED_BITS = {"fp8": 8.0, "bitsandbytes": 4 + 32 / 64}
"""Bits of an element by ``--quantization``, for methods that quantize while they load: fp8 with one
scale a matrix (vLLM, ``layers/quantization/fp8.py``), NF4 with an fp32 scale for 64 elements
(``bitsandbytes.py``). All others need a checkpoint made for them."""

QUANTIZED_HOLDERS = ("ranks", "kv_heads")
"""Parts that those methods quantize, by who holds them (`sim.model_spec.WeightPart`)."""


@functools.cache
def _models() -> dict[str, ModelSpec]:
    """Answer every model of ``sim/data`` by its name, each checked.

    ``models.toml`` has those whose layers are alike and whose weights are in 16 bits, by their
    shapes; ``configs.toml`` the others, by the fields of their ``config.json`` that matter.
    """
    rows = load_table("models")
    models = {name: msgspec.convert({"name": name, **row}, ModelSpec) for name, row in rows.items()}
    for model in models.values():
        check_model(model)
    for name, row in load_table("configs").items():
        spec = spec_of(
            row["config"], name=name, where=f"configs.toml: {name}", source=row["source"]
        )
        notes = [note for note in (row.get("note", ""), spec.note) if note]
        models[name] = msgspec.structs.replace(spec, note="; ".join(notes))
    return models


def model_names() -> list[str]:
    """Answer the names that `get_model` knows, in alphabetical order."""
    return sorted(_models())


def get_model(name: str) -> ModelSpec:
    """Answer the model called *name*: its full id, or what follows the slash, in any case.

    Any other name that ends in ``.json``, begins like a path or is there is the path of a
    ``config.json``, or of a folder with one.

    Raises:
        ConfigError: no such model, with the nearest name and all of them; or a configuration that
            cannot be read or used (`read_config`).
    """
    if (model := _preset(name)) is not None:
        return model
    if (path := model_path(name)) is not None:
        return read_config(path)
    raise ConfigError(f"--model {name!r} is unknown; {did_you_mean(name, model_names())}")


def _preset(name: str) -> ModelSpec | None:
    wanted = name.strip().lower()
    for full, model in _models().items():
        if wanted in (full.lower(), full.lower().rpartition("/")[2]):
            return model
    return None


def model_of(config: ModelConfig) -> ModelSpec:
    """Answer the model of a configuration, in the type and quantization that it asks for.

    ``--dtype`` is the type of weights that are not quantized, and of the KV cache unless the
    checkpoint or ``--kv-cache-dtype`` has another. ``--quantization`` is what vLLM does to a 16-bit
    checkpoint while it loads: linear layers and experts, not embeddings, routers and latents.

    Raises:
        ConfigError: as `get_model`, or a checkpoint that is quantized already.
    """
    model = get_model(config.model)
    if config.dtype != "auto":
        dtype = ALIASES.get(config.dtype, config.dtype)
        layout = model.kv_layout
        if layout is not None and not layout.auto_dtype.startswith("fp8"):
            layout = msgspec.structs.replace(layout, auto_dtype=dtype)
        model = msgspec.structs.replace(model, dtype=dtype, kv_layout=layout)
    if config.quantization is None:
        return model
    if any(part.bits for part in model.weights):
        raise ConfigError(
            f"--quantization {config.quantization}: the weights of {model.name} are quantized "
            "already; expected a checkpoint in 16 bits"
        )
    bits = LOADED_BITS[config.quantization]
    parts = tuple(
        msgspec.structs.replace(part, bits=bits) if part.held_by in QUANTIZED_HOLDERS else part
        for part in weight_parts(model)
    )
    return msgspec.structs.replace(model, weights=parts)


def model_path(name: str, folder: Path | None = None) -> Path | None:
    """Answer the file or folder that *name* means, relative to *folder*; None of a model's name."""
    if _preset(name) is not None:
        return None
    path = Path(name) if folder is None else folder / name
    if name.startswith("~"):
        return Path(name)  # `read_config` knows whose
    if name.lower().endswith(".json") or name.startswith(("/", "./", "../", ".\\")):
        return path
    try:
        return path if path.exists() and name not in {"", "."} else None
    except (OSError, ValueError):  # too long, or a null byte in it
        return None
