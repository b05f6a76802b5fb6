"""Models by name: the shapes that memory and step time follow from."""

import functools

import msgspec

from sim.errors import ConfigError
from sim.tables import load_table
from workloads.errors import did_you_mean


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dense decoder-only transformer with full attention in every layer.

    Names follow Hugging Face's ``config.json``.

    Attributes:
        name: Hugging Face id, ``organisation/model``.
        num_hidden_layers: layers, every one with attention and an MLP.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: key and value heads of a layer; fewer than query heads under GQA.
        head_dim: elements of one head.
        intermediate_size: width inside the MLP.
        vocab_size: rows of the embedding and of the output projection.
        gated_mlp: the MLP multiplies a gate with an up projection (SwiGLU); else one projection.
        tie_word_embeddings: input and output embeddings are one matrix.
        max_position_embeddings: longest sequence in tokens that the model was made for.
        num_parameters: matrices and embeddings; norms and biases left out.
        dtype: of weights and KV cache, as ``torch_dtype`` spells it.
        source: where the row was read.
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
    max_position_embeddings: int
    num_parameters: int
    dtype: str
    source: str


@functools.cache
def _models() -> dict[str, ModelSpec]:
    """Answer every model of ``sim/data/models.toml`` by its name."""
    rows = load_table("models")
    return {name: msgspec.convert({"name": name, **row}, ModelSpec) for name, row in rows.items()}


def model_names() -> list[str]:
    """Answer the names that `get_model` knows, in alphabetical order."""
    return sorted(_models())


def get_model(name: str) -> ModelSpec:
    """Answer the model called *name*: its full id, or what follows the slash, in any case.

    Raises:
        ConfigError: no such model; the message has the nearest name and all of them.
    """
    wanted = name.strip().lower()
    for full, model in _models().items():
        if wanted in (full.lower(), full.lower().rpartition("/")[2]):
            return model
    raise ConfigError(f"--model {name!r} is unknown; {did_you_mean(name, model_names())}")
