"""Checks of settings against the load: lengths, requests at once, preemptions, block tails."""

from collections.abc import Sequence

from sim.health.facts import Facts, Finding, Point

FULL = 0.97
"""Usage from which a pool counts as full: admissions stop a request short of the end."""

IDLE = 0.5
"""A pool that is never used beyond this is twice what the load needs."""

QUEUED = 0.1
"""Waiting requests, as a share of the running ones, that make a queue."""

LASTING = 0.25
"""Share of the intervals with work in which something must hold to be the rule, not an episode."""

PREEMPTED, STORM = 0.01, 0.25
"""Preemptions a request: one in a hundred is worth a look; one in four is a storm, in which
requests are computed again instead of served."""

RECOMPUTED = 0.10
"""Share of all tokens computed again that makes a storm, too: a tenth of the card does nothing."""

TAILS = 0.05
"""Half a block, as a share of what a request holds: what the chapter calls almost zero waste."""

LONG = 4.0
"""max_model_len over the longest request: reservations then are mostly air."""

FEW = 2.0
"""Requests of max_model_len: with fewer in the pool, one long request leaves no room for others."""

PLATEAU = 4
"""Intervals in a row with equally many running and others waiting: a limit, and not chance."""

Found = Finding | None


def _busy(facts: Facts) -> list[Point]:
    """Answer the intervals in which anything ran or waited."""
    return [point for point in facts.series if point.running or point.waiting]


def _is_queued(point: Point) -> bool:
    return (point.waiting or 0.0) > QUEUED * max(point.running or 0.0, 1.0)


def _share(points: Sequence[Point], every: Sequence[Point]) -> float:
    return len(points) / len(every) if every else 0.0


def _reserves(facts: Facts) -> bool:
    """Answer whether each request takes max_model_len, however short it is."""
    return (facts.allocator or "").startswith("reserve-max")


def lengths(facts: Facts) -> Found:
    """Whether max_model_len fits the lengths that come."""
    limit, longest = facts.max_model_len, facts.longest
    lost = [
        f"{count:,} {what}"
        for count, what in (
            (facts.num_refused, "requests refused"),
            (facts.num_clipped, "outputs cut"),
        )
        if count
    ]
    if lost and limit is not None:
        return Finding(
            check="lengths",
            severity="error" if facts.num_refused else "warning",
            figure=f"{' and '.join(lost)} at max_model_len {limit:,}",
            reason=f"the longest request has {longest or 0:,} tokens"
            if longest
            else "they do not fit",
            change=f"--max-model-len {longest or 'larger'}",
            settings={} if longest is None else {"max_model_len": longest},
        )
    if limit is None or longest is None or not _reserves(facts) or limit < LONG * longest:
        return None
    return Finding(
        check="lengths",
        severity="warning",
        figure=f"max_model_len {limit:,}, the longest request has {longest:,} tokens",
        reason="each request has max_model_len slots reserved, whatever it writes",
        change=f"--max-model-len {longest}, or paging, which does not care",
        settings={"max_model_len": longest},
    )


def few_fit(facts: Facts) -> Found:
    """Whether the pool holds more than a request or two of the longest length."""
    fit, limit, longest = facts.concurrency, facts.max_model_len, facts.longest
    if fit is None or fit >= FEW or facts.refusals:
        return None
    if limit and longest and not _reserves(facts) and fit * limit / longest >= FEW:
        return None  # no request is so long
    return Finding(
        check="few_fit",
        severity="warning",
        figure=f"the pool holds {fit:.2f} requests of max_model_len "
        f"{facts.max_model_len or 0:,}{facts.at('concurrency', 'max_model_len')}",
        reason="one request of that length leaves no room for a second, and is preempted by others",
        change="--max-model-len as short as the need, --kv-cache-dtype fp8, or more GPUs",
        settings={"kv_cache_dtype": "fp8"},
    )


def budget(facts: Facts) -> Found:
    """Whether the pool is near its budget under load, and not over it."""
    busy = _busy(facts)
    if not busy:
        return None
    peak = max(busy, key=lambda point: point.usage or 0.0)
    full = [p for p in busy if _demand(p) > 1 or ((p.usage or 0.0) >= FULL and _is_queued(p))]
    if _share(full, busy) >= LASTING:
        most = max(busy, key=_demand)
        fit = (most.running or 0.0) / (most.usage or 1.0)
        return Finding(
            check="budget",
            severity="warning",
            figure=f"{most.running or 0:,.0f} running requests hold "
            f"{100 * (most.usage or 0):.1f} % of the pool and {most.waiting or 0:,.0f} wait "
            f"({most.where}): about {fit:,.0f} fit, "
            f"{(most.running or 0) + (most.waiting or 0):,.0f} are there",
            reason="the load asks for more than the pool has: requests queue, and admissions that "
            "fit only at first end in preemptions",
            change="a larger pool (--gpu-memory-utilization, --kv-cache-dtype fp8, more GPUs), or "
            "fewer requests per server"
            + (
                "; --scheduler-reserve-full-isl (vLLM's default) admits whole prompts only"
                if facts.source in {"log", "metrics"}  # a run has said whether it is on
                else ""
            ),
            settings={"kv_cache_dtype": "fp8"},
        )
    if (peak.usage or 0.0) >= IDLE or any(_is_queued(point) for point in busy):
        return None
    return Finding(
        check="budget",
        severity="info",
        figure=f"the pool is used up to {100 * (peak.usage or 0):.1f} % ({peak.where})",
        reason="half of it was never needed by this load",
        change="none needed; more load, a smaller card, or a lower --gpu-memory-utilization",
    )


def _demand(point: Point) -> float:
    """Answer the pools that the running and the waiting together would fill."""
    if not point.running or not point.usage or not _is_queued(point):
        return 0.0
    return point.usage * (point.running + (point.waiting or 0.0)) / point.running


def preemptions(facts: Facts) -> Found:
    """Whether requests are computed again because there was no room."""
    said = [text for name, text in facts.remarks if name == "preempted"]
    count, requests = facts.num_preemptions, facts.num_requests
    each = None if not count or not requests else count / requests
    again = facts.recomputed or 0.0
    if said and not count:
        figure, storm = said[0], False
    elif not count or (each is not None and each < PREEMPTED):
        return None
    else:
        share = "" if each is None else f", {each:.2f} a request"
        figure = f"{count:,} preemptions{share}{facts.at('num_preemptions')}"
        storm = (each or 0.0) >= STORM or again >= RECOMPUTED
    why = "each one throws a request's cache away and computes it again"
    if facts.recomputed:
        why += f": {100 * facts.recomputed:.1f} % of all tokens"
    change = "a larger pool, or --watermark"
    if any("SWAP" in text for text in said):
        why = (
            "no cache was left for a running request; V0 moves groups of several sequences to CPU "
            "memory, and ends with an error if --swap-space has no room for them"
        )
        change = "a larger --swap-space, fewer sequences a request (n, best_of), or vLLM V1"
    settings: dict[str, object] = {}
    if facts.max_num_seqs is not None and (running := _most_running(facts)) > 1:
        settings = {"max_num_seqs": max(1, round(0.8 * min(facts.max_num_seqs, running)))}
    say = f" ({settings['max_num_seqs']}, say)" if settings else ""
    return Finding(
        check="preemptions",
        severity="error" if storm else "warning",
        figure=figure,
        reason=why,
        change=f"fewer --max-num-seqs{say}, {change}",
        settings=settings,
    )


def _most_running(facts: Facts) -> int:
    return int(max((point.running or 0.0 for point in facts.series), default=0.0))


def seats(facts: Facts) -> Found:
    """Whether max_num_seqs keeps requests waiting that memory has room for."""
    busy = _busy(facts)
    limit = facts.max_num_seqs
    waiting = [p for p in busy if _is_queued(p) and (p.usage or 0.0) < 0.9]
    if limit is not None:
        stuck = [p for p in waiting if (p.running or 0.0) >= 0.99 * limit]
        if not busy or _share(stuck, busy) < LASTING:
            return None
        figure = f"max_num_seqs {limit:,} requests run{facts.at('max_num_seqs')}"
    else:
        stuck = _plateau(waiting)
        if len(stuck) < PLATEAU:
            return None
        figure = f"{stuck[0].running or 0:,.0f} requests run throughout"
    last = stuck[-1]
    usage = last.usage or 0.0
    more = int((last.running or 0.0) / max(usage, 0.01) * 0.9)
    return Finding(
        check="seats",
        severity="warning",
        figure=f"{figure} and {last.waiting or 0:,.0f} wait, while {100 * usage:.0f} % of the pool "
        f"is used ({last.where})",
        reason="seats run out before memory does",
        change=f"--max-num-seqs {more:,}, which the pool has room for",
        settings={"max_num_seqs": more},
    )


def _plateau(points: Sequence[Point]) -> list[Point]:
    """Answer the longest row of *points* with equally many running."""
    best: list[Point] = []
    row: list[Point] = []
    for point in points:
        row = [*row, point] if row and point.running == row[-1].running else [point]
        best = max(best, row, key=len)
    return best


def tails(facts: Facts) -> Found:
    """Whether blocks are small against what requests hold."""
    size, mean = facts.block_size, facts.mean_len
    if size is None or mean is None or facts.kernel_block_size is None or size <= 16:
        return None
    waste = size / 2 / (mean + size / 2)
    if waste < TAILS or (facts.num_tables or 1) > 1:
        return None
    return Finding(
        check="tails",
        severity="warning",
        figure=f"block_size {size} and {mean:,.0f} tokens a request{facts.at('block_size')}",
        reason=f"about {100 * waste:.0f} % of what requests hold is the empty end of a last block",
        change="--block-size 16",
        settings={"block_size": 16},
    )


def kernel_blocks(facts: Facts) -> Found:
    """Whether kernels take blocks of that size."""
    size, multiple = facts.block_size, facts.kernel_block_size
    if size is None or multiple is None or not size % multiple:
        return None
    return Finding(
        check="kernel_blocks",
        severity="warning",
        figure=f"block_size {size}{facts.at('block_size')}",
        reason=f"FlashAttention and Triton kernels need multiples of {multiple}: vLLM fails when "
        "it makes the cache",
        change=f"--block-size {multiple}",
        settings={"block_size": multiple},
    )
