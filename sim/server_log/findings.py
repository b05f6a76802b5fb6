"""What the figures of a log mean: identities checked, the pool, what was refused and what fits.

Only what the log itself says is used; where two figures disagree, both are shown.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from sim.server_log.identities import (
    GIB,
    ROUNDING,
    at,
    block_size,
    graphs_share,
    memory_agrees,
    num_workers,
    profile_of_v0,
    rate,
    suggestion,
    tokens_agree,
)
from sim.server_log.records import Said, ServerLog, Startup, least, most
from sim.server_log.refusals import advice


def explain(log: ServerLog, bytes_per_token: float | None = None) -> list[str]:
    """Answer one line per finding, in the order of the log.

    Args:
        log: what a server said.
        bytes_per_token: of the cache, per worker, if it is known otherwise; it tells whether the
            worker whose GiB were printed is the one that binds.
    """
    findings: list[str] = []
    for number, startup in enumerate(log.startups, 1):
        name = f"start {number}" if len(log.startups) > 1 else ""
        name += f" ({startup.name})" if startup.name else ""
        prefix = f"{name.strip()}: " if name else ""
        for part in _PARTS:
            findings += [prefix + line for line in part(startup)]
        if bytes_per_token is not None:
            findings += [prefix + line for line in _binding(startup, bytes_per_token)]
    findings += between(log.startups)
    if log.forgotten:
        findings.append(f"{log.forgotten} earlier starts are left out")
    if log.cut is not None:
        findings.append(f"line {log.cut} ends within a message: what would follow is not known")
    return findings


def _who(said: Said) -> str:
    return said.worker or "the worker without prefix"


def pool_binds(startup: Startup) -> Iterator[str]:
    """The pool is what the worker with least can hold."""
    said = startup.kv_gib
    by_worker = {each.worker: each for each in said}
    low, high = least(list(by_worker.values())), most(list(by_worker.values()))
    if low is not None and high is not None and high.value - low.value > 2 * ROUNDING:
        yield (
            f"{len(by_worker)} workers have {low.value:g} to {high.value:g} GiB for the cache "
            f"{at(low, high)}: all get the blocks that fit the least, {low.value:g} GiB of "
            f"{_who(low)}"
        )
    known = num_workers(startup)
    if 0 < len(by_worker) < known and startup.engine == "vllm" and high is not None:
        yield (
            f"{len(by_worker)} of {known} workers printed its memory for the cache: "
            f"{high.value:g} GiB of {_who(high)} {at(high)} need not be the least, and the least "
            "sets the pool of all; every figure is per GPU"
        )
    blocks = sorted({each.value for each in startup.gpu_blocks})
    if len(blocks) > 1:
        shown = ", ".join(f"{value:,.0f}" for value in blocks)
        yield f"blocks are printed as {shown}: the pool is the smallest, {blocks[0]:,.0f}"
    tokens = sorted({each.value for each in startup.tokens})
    if len(tokens) > 1:
        yield (
            f"the cache is printed as {tokens[0]:,.0f} to {tokens[-1]:,.0f} tokens, a line per "
            f"worker: the pool is the smallest"
        )
    if (override := least(startup.override_blocks)) is not None:
        yield (
            f"num_gpu_blocks_override {at(override)} sets the pool to {override.value:,.0f} "
            "blocks, whatever the memory holds"
        )


def _padding(startup: Startup) -> Iterator[str]:
    wasted = most(startup.padding_pct)
    if wasted is not None:
        yield (
            f"layers are padded to groups of one size, which may waste {wasted.value:g} % "
            f"{at(wasted)}: a hybrid model, every request holds blocks in each group, and tokens / "
            "length says more than fits"
        )


def _units(startup: Startup) -> Iterator[str]:
    said = [each for each in (*startup.load_gib, *startup.k_gib) if each.unit == "GB"]
    if said:
        yield f"{said[0].value:g} GB {at(said[0])} are GiB: the engine divides by 2**30"
    in_bytes = [each for each in startup.kv_gib if each.unit == "bytes"]
    if in_bytes:
        gib = in_bytes[0].value
        yield (
            f"{gib * GIB:,.0f} bytes {at(in_bytes[0])} are {gib:.2f} GiB or {gib * GIB / 1e9:.1f} "
            "GB; TensorRT-LLM takes a share of what is free, by default 90 %, whatever the batch: "
            "kv_cache_free_gpu_memory_fraction or max_tokens limits it"
        )
    for words, each in rate(startup):
        yield f"{words} = {each:,.0f} bytes a token"


def _running(startup: Startup) -> Iterator[str]:
    """How many tokens the pool has, from how fast the usage grows."""
    estimates = []
    for old, new in pairwise(startup.statistics):
        grown = new.kv_usage_pct - old.kv_usage_pct
        if old.clock_s is None or new.clock_s is None or old.engine != new.engine:
            continue
        seconds = new.clock_s - old.clock_s
        speed = (new.prompt_tokens_per_s or 0.0) + (new.generation_tokens_per_s or 0.0)
        if grown >= 1 and 0 < seconds <= 120 and speed > 0 and new.running >= old.running:
            estimates.append(speed * seconds / grown * 100)
    if estimates and startup.kv_cache_tokens is None:
        middle = sorted(estimates)[len(estimates) // 2]
        yield (
            f"usage grows as in a pool of about {middle:,.0f} tokens (middle of "
            f"{len(estimates)} steps, if nothing was freed meanwhile)"
        )
    peak = max(startup.statistics, key=lambda row: row.kv_usage_pct, default=None)
    if peak is not None:
        waiting = "" if peak.waiting is None else f", {peak.waiting} waiting"
        v0 = "; V0 counts a group of sequences as one" if peak.swapped is not None else ""
        yield (
            f"the cache was used up to {peak.kv_usage_pct:g} %, by {peak.running} running{waiting} "
            f"(line {peak.line}){v0}"
        )


def _binding(startup: Startup, bytes_per_token: float) -> Iterator[str]:
    """Whether the worker whose memory was printed is the one that sets the pool."""
    kv, tokens, blocks = least(startup.kv_gib), startup.kv_cache_tokens, startup.num_gpu_blocks
    if tokens is None and blocks is not None:
        tokens = Said(blocks.value * (block_size(startup) or 16), blocks.line)
    if kv is None or tokens is None:
        return
    used = tokens.value * bytes_per_token / GIB
    if kv.value - used > max(0.01, 0.01 * kv.value):
        yield (
            f"{tokens.value:,.0f} tokens of {bytes_per_token:,.0f} bytes take {used:.2f} GiB, less "
            f"than the {kv.value:g} that {_who(kv)} has {at(kv, tokens)}: another worker binds"
        )


def between(startups: Sequence[Startup]) -> Iterator[str]:
    """What changed from one start to the next."""
    for number, (old, new) in enumerate(pairwise(startups), 1):
        kv, other = old.kv_cache_gib, new.kv_cache_gib
        length, longer = old.max_model_len, new.max_model_len
        if kv is None or other is None or length is None or longer is None:
            continue
        if not all(isinstance(word.value, int | float) for word in (length, longer)):  # "auto"
            continue
        if length.value == longer.value or abs(kv.value - other.value) <= 2 * ROUNDING:
            continue
        rates = [each for start in (old, new) for _, each in rate(start)]
        same = len(rates) > 1 and max(rates) <= 1.01 * min(rates)
        yield (
            f"from start {number} to {number + 1}, max_model_len goes from {length.value:,} to "
            f"{longer.value:,} and the cache from {kv.value:g} to {other.value:g} GiB"
            + (f", at the same {rates[0]:,.0f} bytes a token" if same else "")
            + ": the profiled peak grows with the step, so cap max_num_batched_tokens"
        )


def _refusals(startup: Startup) -> Iterator[str]:
    for refusal in startup.refusals:
        yield from advice(startup, refusal)


_PARTS: tuple[Callable[[Startup], Iterator[str]], ...] = (
    pool_binds,
    memory_agrees,
    profile_of_v0,
    tokens_agree,
    graphs_share,
    suggestion,
    _padding,
    _units,
    _running,
    _refusals,
)
