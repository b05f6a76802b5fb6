"""Checks of the card and the pool: does it start, does it stay within memory, is memory lost."""

import math

from sim.health.facts import Facts, Finding

SAFE_UTILIZATION = 0.95
"""From here on less than 5 % of the card is left to other processes, to what PyTorch's allocator
cannot use again, and to peaks above the profiled one; vLLM's default leaves 8 %."""

ROOM_SHARE = 0.9
"""Peaks above this share of their room are too close: keep a tenth, as for any margin."""

PROFILE_SHARE = 0.25
"""An activation peak of a quarter of the pool is more than steps are worth: a step half as large
gives an eighth more pool."""

GRAPHS_SHARE = 0.25
"""CUDA graphs of a quarter of the pool, likewise."""

PADDING = 0.10
"""Padding of layers that is worth another block size or group."""

HEAVY_TOKEN = 2**19
"""Bytes a token on one GPU: 512 KiB is a 7B model without grouped heads; 128 KiB is usual."""

SAME_RATE = 0.01
"""Bytes a token that agree so well are computed from the same layers."""

Found = Finding | None


def starts(facts: Facts) -> Found:
    """Whether the server starts."""
    if not facts.refusals:
        return None
    return Finding(
        check="starts",
        severity="error",
        figure="the server does not start",
        reason="; ".join(why for why, _ in facts.refusals),
        change="; ".join(dict.fromkeys(change for _, change in facts.refusals)),
    )


def margin(facts: Facts) -> Found:
    """Whether activations, CUDA graphs and others have room beside the pool."""
    if facts.steps_overrun:
        return Finding(
            check="margin",
            severity="error",
            figure=f"{100 * facts.steps_overrun:.2f} % of steps needed more activation than the "
            f"{facts.room_gib or 0:.2f} GiB beside the pool",
            reason="each of them is an out-of-memory error on a real card",
            change=_less(facts),
            settings=_lower(facts),
        )
    needed = facts.activation_gib if facts.step_gib is None else facts.step_gib
    if facts.room_gib is not None and needed is not None and needed > ROOM_SHARE * facts.room_gib:
        over = needed > facts.room_gib
        return Finding(
            check="margin",
            severity="error" if over else "warning",
            figure=f"activations need {needed:.2f} GiB, the room beside the pool is "
            f"{facts.room_gib:.2f} GiB",
            reason="out of memory is likely" if over else "less than a tenth of it is left",
            change=_less(facts),
            settings=_lower(facts),
        )
    share = facts.gpu_memory_utilization
    if share is None or share < SAFE_UTILIZATION:
        return None
    left = "" if facts.outside_gib is None else f", {facts.outside_gib:.2f} GiB"
    return Finding(
        check="margin",
        severity="warning",
        figure=f"gpu_memory_utilization {share:g} leaves {100 * (1 - share):.1f} % of the card"
        f"{left}{facts.at('gpu_memory_utilization')}",
        reason="activations float with the batch, and what PyTorch cannot use again or another "
        "process takes is not in any profile: out of memory under load",
        change=_less(facts),
        settings=_lower(facts),
    )


def _less(facts: Facts) -> str:
    if facts.is_sized is False:
        return "--kv-cache-memory-bytes or --num-gpu-blocks-override lower, or neither of them"
    return "--gpu-memory-utilization 0.92 or less, or fewer --max-num-batched-tokens"


def _lower(facts: Facts) -> dict[str, object]:
    share = facts.gpu_memory_utilization
    return (
        {}
        if facts.is_sized is False or share is None
        else {"gpu_memory_utilization": min(share, 0.92)}
    )


def graphs(facts: Facts) -> Found:
    """Whether CUDA graphs take what the pool should have."""
    taken, pool, left = facts.graph_gib, facts.kv_gib, facts.outside_gib
    if taken is None:
        return None
    if facts.graphs_outside and left is not None and taken > left:
        return Finding(
            check="graphs",
            severity="error",
            figure=f"CUDA graphs of about {taken:.2f} GiB, {left:.2f} GiB outside utilization",
            reason="this version captures them after the pool is sized: out of memory is likely",
            change="--gpu-memory-utilization lower, fewer --max-num-seqs, or --enforce-eager",
            settings={
                "gpu_memory_utilization": math.floor(100 * (1 - taken / (facts.total_gib or 1)))
                / 100
            },
        )
    shrinks = facts.is_sized is not False and not facts.graphs_outside
    if pool is None or pool <= 0 or taken <= GRAPHS_SHARE * pool or not shrinks:
        return None
    return Finding(
        check="graphs",
        severity="warning",
        figure=f"CUDA graphs take {taken:.2f} GiB, the cache has {pool:.2f} GiB"
        f"{facts.at('graph_gib', 'kv_gib')}",
        reason=f"without them it would have {taken + pool:.2f} GiB",
        change="fewer --max-num-seqs, which fewer and smaller graphs serve; or a higher "
        "--gpu-memory-utilization, or --enforce-eager",
        settings={"enforce_eager": True},
    )


def profile(facts: Facts) -> Found:
    """Whether the profiled step is larger than it need be."""
    said = [text for name, text in facts.remarks if name == "profile"]
    peak, pool = facts.activation_gib, facts.kv_gib
    is_large = (
        facts.is_sized is not False
        and peak is not None
        and pool is not None
        and peak > PROFILE_SHARE * pool > 0
    )
    if not said and not is_large:
        return None
    v0 = [text for name, text in facts.remarks if name == "v0_profile"]
    figures = said or [
        f"the profiled activation peak is {peak:.2f} GiB, the pool {pool:.2f} GiB"
        f"{facts.at('activation_gib', 'kv_gib')}"
    ]
    return Finding(
        check="profile",
        severity="warning",
        figure=figures[0],
        reason="what one step of max_num_batched_tokens takes is not cache"
        + (f"; {v0[0]}" if v0 else ""),
        change="fewer --max-num-batched-tokens, and chunked prefill on",
        settings=_half_step(facts),
    )


def _half_step(facts: Facts) -> dict[str, object]:
    step = facts.max_num_batched_tokens
    if step is None or facts.max_num_seqs is None or step // 2 < max(facts.max_num_seqs, 512):
        return {}
    return {"max_num_batched_tokens": step // 2}


def workers(facts: Facts) -> Found:
    """Whether the worker whose memory was printed sets the pool."""
    said = [text for name, text in facts.remarks if name == "workers"]
    if not said:
        return None
    return Finding(
        check="workers",
        severity="info",
        figure="; ".join(said),
        reason="more GPUs split heads and weights, not requests: the pool is that of one of them",
        change="free what others hold on the GPU with least",
    )


def tokens_shown(facts: Facts) -> Found:
    """Whether the tokens that were printed are those that fit."""
    said = [text for name, text in facts.remarks if name == "token_line"]
    if not said:
        return None
    return Finding(
        check="tokens_shown",
        severity="info",
        figure=said[0],
        reason="a hybrid model: before vLLM 0.21 the line counts one group of layers, since then "
        "concurrency x max_model_len; the memory is the same",
        change="none: compare concurrency or blocks across versions, not tokens",
    )


def suggestion(facts: Facts) -> Found:
    """Whether the size that the server advises for the pool can be used."""
    said = [text for name, text in facts.remarks if name == "suggestion"]
    if not said:
        return None
    return Finding(
        check="suggestion",
        severity="info",
        figure=said[0],
        reason="the advice alone is wrong (vllm-project/vllm#57936): the pool in use is not "
        "computed from it",
        change="none: leave the pool to --gpu-memory-utilization, or fix the size counted once by "
        "--kv-cache-memory-bytes",
    )


def free_share(facts: Facts) -> Found:
    """Whether the pool follows from what is free and not from what is needed."""
    said = [text for name, text in facts.remarks if name == "free_share"]
    if not said:
        return None
    return Finding(
        check="free_share",
        severity="info",
        figure=said[0],
        reason="TensorRT-LLM takes a share of what is free, by default 90 %, whatever the batch",
        change="kv_cache_free_gpu_memory_fraction or max_tokens, if others need the card",
    )


def layers_whole(facts: Facts) -> Found:
    """Whether layers with windows keep more than their windows."""
    said, own = facts.bytes_per_token, facts.own_rates
    if said is None or own is None or facts.source == "configuration":
        return None
    whole, windowed = own
    if abs(said / whole - 1) > SAME_RATE or windowed > (1 - 10 * SAME_RATE) * whole:
        return None
    return Finding(
        check="layers_whole",
        severity="warning",
        figure=f"{said:,.0f} bytes a token{facts.at('bytes_per_token')}, as if all layers kept "
        f"every token; with windows {windowed:,.0f}",
        reason="the engine gives layers with windows whole sequences",
        change="its hybrid cache manager (vLLM: no --disable-hybrid-kv-cache-manager), or a newer "
        "version",
    )


def heavy_token(facts: Facts) -> Found:
    """Whether a token takes much more than usual."""
    said = facts.bytes_per_token
    if said is None or said < HEAVY_TOKEN:
        return None
    return Finding(
        check="heavy_token",
        severity="info",
        figure=f"a token takes {said:,.0f} bytes of cache on each GPU{facts.at('bytes_per_token')}",
        reason=f"a GiB holds {2**30 / said:,.0f} tokens: every head keeps its own K and V; with "
        "grouped heads it is four to eight times as many",
        change="a model with grouped heads, --kv-cache-dtype fp8, or -tp",
        settings={"kv_cache_dtype": "fp8"},
    )


def hybrid_blocks(facts: Facts) -> Found:
    """Whether blocks of a hybrid model waste memory."""
    size, padding = facts.block_size, facts.padding
    if padding is not None and padding >= PADDING:
        return Finding(
            check="hybrid_blocks",
            # Of a model alone nobody can change it.
            severity="warning" if facts.source == "log" else "info",
            figure=f"layers are padded to groups of one size: up to {100 * padding:.0f} % of the "
            f"cache is wasted{facts.at('padding')}",
            reason="every request holds blocks in each group, so that tokens / length says more "
            "than fits: a draft model or a rare kind of layer sets the size of all groups",
            change="without a draft model, if there is one; else count blocks, not tokens: kvsim "
            "capacity has the block tables",
        )
    if size is None or not facts.is_state_sized:
        return None
    mean = facts.mean_len
    if mean is not None and size / 2 < PADDING * mean:
        return None
    of = "" if mean is None else f", requests have {mean:,.0f} tokens"
    return Finding(
        check="hybrid_blocks",
        severity="warning" if mean is not None else "info",
        figure=f"attention blocks of {size:,} tokens, as large as a state{of}"
        f"{facts.at('block_size')}",
        reason=f"each request wastes about {size // 2:,} tokens of its last block, and shares only "
        "prefixes of whole blocks",
        change="count blocks, not tokens: kvsim capacity has the block tables",
    )
