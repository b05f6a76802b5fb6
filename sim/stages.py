"""Pipeline parallelism: what of a model one stage of layers holds."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from sim.errors import ConfigError
from sim.kv_groups import CacheGroups
from sim.models import ModelSpec, WeightPart, count_parameters, weight_parts


class Span(NamedTuple):
    """Layers from *start* up to *end*, of *total*."""

    start: int
    end: int
    total: int

    def of(self, number: int) -> int:
        """Answer the share of *number* that are spread evenly over all layers."""
        return self.end * number // self.total - self.start * number // self.total


def spans_of_stages(num_layers: int, num_stages: int) -> list[Span]:
    """Answer the layers of each stage.

    What is left over goes to stages before the last, which has the output embedding, from the back
    (vLLM 0.33.0, ``distributed/utils.py``: ``get_pp_indices``).

    Raises:
        ConfigError: fewer layers than stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: expected at most {num_layers}, the layers "
            "there are"
        )
    layers = [num_layers // num_stages] * num_stages
    for i in range(2, num_layers % num_stages + 2):
        layers[-i] += 1
    ends = [sum(layers[: i + 1]) for i in range(num_stages)]
    return [Span(end - n, end, num_layers) for n, end in zip(layers, ends, strict=True)]


def model_of_stage(model: ModelSpec, span: Span) -> ModelSpec:
    """Answer *model* as the stage of *span* holds it: its layers, and embeddings at both ends.

    Layers of several kinds are taken to be spread evenly, but for dense ones before experts, which
    come first.
    """
    if span.end - span.start == span.total:
        return model
    rest = model.num_parameters - count_parameters(model)
    dense = max(0, min(span.end, model.num_dense_layers) - span.start)
    part = msgspec.structs.replace(
        model, num_hidden_layers=span.end - span.start, num_dense_layers=dense
    )
    part = msgspec.structs.replace(part, num_parameters=count_parameters(part) + span.of(rest))
    layout = model.kv_layout
    if layout is not None:
        caches = tuple(
            msgspec.structs.replace(cache, num_layers=span.of(cache.num_layers))
            for cache in layout.caches
            if span.of(cache.num_layers)
        )
        layout = msgspec.structs.replace(layout, caches=caches)
    weights = tuple(_shares(model, weight_parts(part), span))
    return msgspec.structs.replace(part, kv_layout=layout, weights=weights)


def _shares(model: ModelSpec, parts: tuple[WeightPart, ...], span: Span) -> Iterator[WeightPart]:
    """Answer what the stage of *span* has of *parts*.

    Parts that *model* lists are those of all layers, others are the stage's already. The input
    embedding is on the first stage, the output embedding, which may be the same matrix, on the
    last.
    """
    first, last = span.start == 0, span.end == span.total
    for part in parts:
        if part.held_by != "vocabulary":
            yield _times(part, span.of) if model.weights else part
        elif model.tie_word_embeddings:
            if first or last:
                yield part
        elif not model.weights:  # both in one part
            if first or last:
                yield _times(part, lambda elements: elements // 2)
        elif last if part.name == "output embedding" else first:
            yield part


def _times(part: WeightPart, share: Callable[[int], int]) -> WeightPart:
    return msgspec.structs.replace(part, elements=share(part.elements), active=share(part.active))


def groups_of_stage(groups: CacheGroups, span: Span) -> CacheGroups:
    """Answer the block tables of *groups*, of a whole model, with a block's size on one stage.

    All stages have the same tables, each with those of its layers that are in them (vLLM 0.33.0,
    ``v1/core/kv_cache_utils.py``: ``_project_kv_cache_groups_to_worker``).

    Raises:
        ConfigError: compressed layers, of which vLLM's packing by stage is not modelled.
    """
    if span.end - span.start == span.total:
        return groups
    if groups.padding_bytes:
        raise ConfigError("stages of compressed layers are not modelled")
    most = max(group.num_layers for group in groups.groups)
    here = max(span.of(group.num_layers) for group in groups.groups)
    return groups._replace(bytes_per_block=groups.bytes_per_block * here // most)
