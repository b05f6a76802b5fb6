"""What of a model the allocators and the step times do not model: refused, or said in a note."""

from collections.abc import Iterator

from sim.errors import ConfigError
from sim.models import ModelSpec


def modelled_notes(
    model: ModelSpec, *, max_model_len: int, pipeline_parallel_size: int, prices_kernels: bool
) -> Iterator[str]:
    """Answer what a run of *model* approximates; *prices_kernels*: steps are sums of its kernels.

    Allocators give every layer of a sequence the same blocks, and kernels are those of layers that
    are all alike.

    Raises:
        ConfigError: that would be wrong for *model*, not only pessimistic.
    """
    where = f"--model {model.name}"
    if pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {pipeline_parallel_size}: runs have one stage; expected 1, "
            "or kvsim capacity"
        )
    kinds = {cache.kind for cache in model.layout.caches}
    if kinds & {"state", "compressed"}:
        raise ConfigError(
            f"{where}: layers keep {model.layout.describe()}: allocators here model keys and "
            "values of every token only; expected a model with attention in every layer"
        )
    if model.layout.longest_window and max_model_len > model.layout.longest_window:
        yield (
            f"{where}: windows are not modelled: layers ({model.layout.describe()}) keep all of a "
            "sequence, as under vLLM's --disable-hybrid-kv-cache-manager, so that fewer requests "
            "fit than by default, and attention reads all of it, so that steps take longer"
        )
    if not prices_kernels:
        return
    if model.dtype == "float32":
        raise ConfigError(
            f"{where} in float32: kernels are priced in 16 bits; expected --dtype bfloat16, or "
            "--step-time linear:... or constant:..."
        )
    unlike = _unlike(model)
    if unlike:
        raise ConfigError(
            f"{where}: --step-time roofline and tables price layers that are alike, and this model "
            f"has {unlike}; expected --step-time linear:... or constant:..."
        )
    if any(part.bits for part in model.weights):
        yield f"{where}: step times are those of 16-bit weights, memory that of quantized ones"


def _unlike(model: ModelSpec) -> str:
    """Answer what makes layers of *model* unlike each other; "" if they are alike."""
    if model.unknown:
        return f"no {', '.join(model.unknown)} in its config.json"
    caches = model.layout.caches
    if any(cache.kind in {"index", "cross"} for cache in caches):
        return f"layers {model.layout.describe()}"
    if len({(cache.num_kv_heads, cache.head_elements) for cache in caches}) > 1:
        return "heads that differ between layers"
    if sum(cache.num_layers for cache in caches) != model.num_hidden_layers:
        return "layers without attention of their own"
    alike = model.plain_parameters()
    if abs(alike - model.num_parameters) > 1e-2 * model.num_parameters:
        return "MLPs that differ between layers"
    return ""
