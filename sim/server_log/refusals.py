"""What a refusal asks for: how much is missing, and which setting would fit."""

import math
from collections.abc import Iterator

from sim.server_log.records import Refusal, Said, Startup, least


def advice(startup: Startup, refusal: Refusal) -> Iterator[str]:
    """Yield what *refusal* means, one line each, from the figures of *startup*."""
    where = f"line {refusal.line}: refused"
    match refusal.kind:
        case "max_model_len" if refusal.pool_tokens is not None:
            yield (
                f"{where}: a request of {refusal.max_model_len:,} tokens is longer than the pool "
                f"of {refusal.pool_tokens:,}: max_model_len is "
                f"{(refusal.max_model_len or 0) - refusal.pool_tokens:,} too long"
            )
        case "max_model_len":
            yield from _too_long(startup, refusal, where)
        case "no_memory":
            yield from _nothing_left(startup, where)
        case "free_memory":
            yield from _not_free(refusal, where)
        case "out_of_memory":
            free = "" if refusal.available_gib is None else f", {refusal.available_gib:g} free"
            yield (
                f"{where}: an allocation of {refusal.needed_gib or 0:g} GiB failed{free}: what is "
                "not cache was larger than profiled, or others use the card"
            )
        case _:
            yield f"{where}: {refusal.message}"


def _too_long(startup: Startup, refusal: Refusal, where: str) -> Iterator[str]:
    """One request of the longest length needs more than there is."""
    needed, available = refusal.needed_gib or 0.0, refusal.available_gib or 0.0
    length, missing = refusal.max_model_len or 0, needed - available
    fits = refusal.estimated_max_model_len
    if fits is not None:
        longest = f"max_model_len {fits:,} fits, as the server estimates"
    else:
        guess = int(length * available / needed) if needed > 0 else 0
        longest = f"max_model_len of about {guess:,} fits, if all of it grows with the length"
    yield (
        f"{where}: a request of {length:,} tokens needs {needed:g} GiB and there are "
        f"{available:g}: {missing:.2f} GiB missing ({missing * 1024:.0f} MiB) a worker; {longest}"
    )
    if "kv_cache_memory_bytes" in startup.fixed_pool:
        free = least(startup.free_gib)
        room = f", {free.value:g} GiB were free at the start" if free is not None else ""
        yield (
            f"kv_cache_memory_bytes sets the cache and replaces gpu_memory_utilization: raise it "
            f"by {missing:.2f} GiB or a little more, in whole blocks{room}"
        )
    else:
        yield from _more(startup, missing)
    yield from _stages(startup, refusal)


def _more(startup: Startup, missing: float) -> Iterator[str]:
    """Which utilization would hold *missing* GiB more."""
    total, share = _card(startup), startup.gpu_memory_utilization
    if total is None or share is None or not isinstance(share.value, float | int):
        return
    wanted = share.value + missing / total.value
    if wanted <= 1:
        yield (
            f"gpu_memory_utilization {math.ceil(wanted * 1000) / 1000:g} instead of "
            f"{share.value:g} of {total.value:g} GiB would fit, if so much is free"
        )
    else:
        yield f"no gpu_memory_utilization fits: it would take {wanted:.2f} of {total.value:g} GiB"


def _card(startup: Startup) -> Said | None:
    """Answer the memory of the card that has least; a mangled line may say 0."""
    return least([said for said in startup.total_gib if said.value > 0])


def _stages(startup: Startup, refusal: Refusal) -> Iterator[str]:
    """With pipeline stages, each holds the cache of its own layers only."""
    stages = startup.pipeline_parallel_size
    needed, available = refusal.needed_gib, refusal.available_gib
    if stages is None or stages.value in {1, None} or not needed or not available:
        return
    partition = startup.setting("VLLM_PP_LAYER_PARTITION")
    layers = _layers("" if partition is None else partition.value)
    length = refusal.max_model_len or 0
    text = (
        f"with {stages.value} pipeline stages each holds only its layers, and {needed:g} GiB may "
        "be those of all (vllm-project/vllm#34076)"
    )
    if len(layers) == stages.value:
        part = layers[0] / sum(layers)
        text += (
            f": {layers[0]} of {sum(layers)} layers take {needed * part:.2f} GiB, and in "
            f"{available:g} GiB about {int(length * available / (needed * part)):,} tokens fit"
        )
    yield text + "; the stage with least memory for each of its layers binds"


def _layers(text: object) -> list[int]:
    parts = str(text).strip("'\"").split(",")
    return [int(part) for part in parts if part.strip().isdigit() and int(part) > 0]


def _nothing_left(startup: Startup, where: str) -> Iterator[str]:
    kv, total = startup.kv_cache_gib, _card(startup)
    if kv is None:
        yield (
            f"{where}: weights and activations take the whole budget: raise "
            "gpu_memory_utilization, or shrink what is profiled (max_num_batched_tokens)"
        )
        return
    missing = max(0.0, -kv.value)
    share = f" (more than {missing / total.value:.3f} of the card)" if total is not None else ""
    yield (
        f"{where}: the budget is {missing:.2f} GiB less than weights, activations and the rest "
        f"take (line {kv.line}): raise gpu_memory_utilization by more than that{share}, and by the "
        "cache of one request, or shrink what is profiled (max_num_batched_tokens, images); "
        "lowering it makes it worse"
    )


def _not_free(refusal: Refusal, where: str) -> Iterator[str]:
    free, total = refusal.available_gib or 0.0, refusal.total_gib or 0.0
    most_share = math.floor(1000 * free / total) / 1000 if total > 0 else 0.0
    yield (
        f"{where}: {refusal.utilization:g} of {total:g} GiB is {refusal.needed_gib or 0:g}, and "
        f"{free:g} were free: {(refusal.needed_gib or 0) - free:.2f} GiB are others'; at most "
        f"gpu_memory_utilization {most_share:g} fits"
    )
