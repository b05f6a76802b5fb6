"""What the figures of a log mean: identities checked, the pool, what was refused and what fits.

Only what the log itself says is used; where two figures disagree, both are shown.
"""

import math
from collections.abc import Iterator, Sequence

from sim.server_log.records import Refusal, Said, ServerLog, Startup, first, least, most

GIB = 2**30
ROUNDING = 0.005
"""GiB: half of the last digit that is printed."""

_SPEC_CHANGE = (0, 21)
"""Since 0.21.0 the token line is concurrency times max_model_len; before, one group's share."""


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
        for part in (_pool, _memory, _tokens, _graphs, _padding, _units, _running, _refusals):
            findings += [prefix + line for line in part(startup)]
        if bytes_per_token is not None:
            findings += [prefix + line for line in _binding(startup, bytes_per_token)]
    findings += _between(log.startups)
    if log.forgotten:
        findings.append(f"{log.forgotten} earlier starts are left out")
    if log.cut is not None:
        findings.append(f"line {log.cut} ends within a message: what would follow is not known")
    return findings


def _at(*said: Said | None) -> str:
    lines = sorted({each.line for each in said if each is not None})
    return f"(line{'s' if len(lines) > 1 else ''} {', '.join(str(line) for line in lines)})"


def _who(said: Said) -> str:
    return said.worker or "the worker without prefix"


def _size(startup: Startup, name: str) -> int:
    word = getattr(startup, f"{name}_parallel_size")
    return word.value if word is not None and isinstance(word.value, int) else 1


def _pool(startup: Startup) -> Iterator[str]:
    """The pool is what the worker with least can hold."""
    said = startup.kv_gib
    by_worker = {each.worker: each for each in said}
    low, high = least(list(by_worker.values())), most(list(by_worker.values()))
    if low is not None and high is not None and high.value - low.value > 2 * ROUNDING:
        yield (
            f"{len(by_worker)} workers have {low.value:g} to {high.value:g} GiB for the cache "
            f"{_at(low, high)}: all get the blocks that fit the least, {low.value:g} GiB of "
            f"{_who(low)}"
        )
    ranks = _size(startup, "tensor") * _size(startup, "pipeline")
    known = max(len(startup.workers), ranks)
    if 0 < len(by_worker) < known and startup.engine == "vllm" and high is not None:
        yield (
            f"{len(by_worker)} of {known} workers printed its memory for the cache: "
            f"{high.value:g} GiB of {_who(high)} {_at(high)} need not be the least, and the least "
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
            f"num_gpu_blocks_override {_at(override)} sets the pool to {override.value:,.0f} "
            "blocks, whatever the memory holds"
        )


def _of(said: Sequence[Said], worker: str) -> Said | None:
    """Answer the first figure of *worker*, or of the only one that spoke."""
    own = [each for each in said if each.worker == worker]
    return own[0] if own else said[0] if len({each.worker for each in said}) == 1 else None


def _memory(startup: Startup) -> Iterator[str]:
    """The budget less what is not cache is the cache."""
    for kv in {each.worker: each for each in reversed(startup.kv_gib)}.values():
        budget, slack, shown = _budget(startup, kv.worker)
        terms = _terms(startup, kv.worker)
        if budget is None or not terms:
            continue
        rest = budget - sum(term.value for _, term in terms)
        slack += ROUNDING * (len(terms) + 1)
        graphs = _of(startup.graph_gib, kv.worker)
        sum_shown = shown + "".join(f" - {term.value:g} {name}" for name, term in terms)
        if graphs is not None and abs(rest - kv.value) > slack >= abs(
            rest - graphs.value - kv.value
        ):
            rest -= graphs.value
            sum_shown += f" - {graphs.value:g} CUDA graphs, estimated"
        at = _at(kv, *(term for _, term in terms))
        if abs(rest - kv.value) <= slack:
            yield f"{sum_shown} = {rest:.2f} GiB, as printed: {kv.value:g} {at}"
        else:
            yield (
                f"{sum_shown} = {rest:.2f} GiB, but {kv.value:g} is printed {at}: "
                f"{abs(rest - kv.value):.2f} GiB {'less' if kv.value < rest else 'more'}"
            )


def _budget(startup: Startup, worker: str) -> tuple[float | None, float, str]:
    """Answer the GiB that a worker may use, how far rounding may be off, and in words."""
    requested, total = _of(startup.requested_gib, worker), _of(startup.total_gib, worker)
    if requested is not None:
        return requested.value, ROUNDING, f"{requested.value:g} requested"
    share = startup.gpu_memory_utilization
    if share is None or total is None or not isinstance(share.value, float | int):
        return None, 0.0, ""
    return share.value * total.value, ROUNDING, f"{share.value:g} x {total.value:g} in all"


def _terms(startup: Startup, worker: str) -> list[tuple[str, Said]]:
    """Answer what is not cache, each with its name; nothing if a part was not said."""
    weights = _of(startup.profile_gib, worker) or _of(startup.load_gib, worker)
    named = (
        (("all but the cache", _of(startup.non_kv_gib, worker)),),
        (
            ("peak with weights", _of(startup.torch_peak_gib, worker)),
            ("non-torch", _of(startup.non_torch_gib, worker)),
        ),
        (
            ("weights and non-torch", _of(startup.consumed_gib, worker)),
            ("activation peak", _of(startup.activation_gib, worker)),
        ),
        (
            ("weights", weights),
            ("activation peak", _of(startup.activation_gib, worker)),
            ("non-torch", _of(startup.non_torch_gib, worker)),
        ),
    )
    for terms in named:
        known = [(name, term) for name, term in terms if term is not None]
        if len(known) == len(terms):
            return known
    return []


def _tokens(startup: Startup) -> Iterator[str]:
    """Blocks, tokens and concurrency say the same three times, except on hybrid models."""
    blocks, tokens = startup.num_gpu_blocks, startup.kv_cache_tokens
    requests, length = least(startup.concurrency), least(startup.request_tokens)
    size = first_size(startup)
    if blocks is not None and tokens is not None and blocks.value > 0:
        each = tokens.value / blocks.value
        if each.is_integer():
            yield (
                f"{tokens.value:,.0f} tokens / {blocks.value:,.0f} blocks = {each:.0f} tokens a "
                f"block {_at(blocks, tokens)}" + _against(size, each)
            )
        else:
            yield (
                f"{tokens.value:,.0f} tokens are no multiple of {blocks.value:,.0f} blocks "
                f"{_at(blocks, tokens)}: layers are in groups that each take blocks of their own"
            )
    elif tokens is not None and startup.engine == "vllm" and requests is None:
        held = size or 16
        if tokens.value % held == 0:
            assumed = "" if size else ", if blocks have 16"
            yield f"{tokens.value:,.0f} tokens are {tokens.value / held:,.0f} blocks{assumed}"
    if requests is None or length is None:
        return
    fits, slack = requests.value * length.value, ROUNDING * length.value + 1
    held_tokens = tokens
    if held_tokens is None and blocks is not None:
        held_tokens = Said(blocks.value * (size or 16), blocks.line)
    if held_tokens is None:
        return
    at = _at(requests, held_tokens)
    shown = f"{requests.value:g} x {length.value:,.0f}"
    if abs(fits - held_tokens.value) <= slack:
        yield f"{shown} = {fits:,.0f} tokens, as {held_tokens.value:,.0f} within rounding {at}"
    elif fits > held_tokens.value:
        yield (
            f"{shown} = {fits:,.0f} tokens, but {held_tokens.value:,.0f} are printed {at}: a hybrid "
            "model, whose token line counts one group of layers before vLLM 0.21; compare "
            "concurrency or blocks, not tokens, with a later version"
        )
    else:
        yield (
            f"{shown} = {fits:,.0f} tokens, but {held_tokens.value:,.0f} are printed {at}: a request "
            "takes more than its length, in whole blocks or in state of its own"
        )
    if _counts_requests(startup) and tokens is not None:
        yield (
            f"the {tokens.value:,.0f} tokens are concurrency x max_model_len, as since vLLM 0.21: on "
            "a hybrid model, requests of another length hold another number"
        )
    if blocks is not None and requests.value > 0 and tokens is not None:
        taken, plain = blocks.value / requests.value, tokens.value / blocks.value
        if not plain.is_integer():
            yield f"{blocks.value:,.0f} blocks / {requests.value:g} = {taken:.1f} blocks a request"


def _counts_requests(startup: Startup) -> bool:
    """Answer whether the token line is of vLLM 0.21 or later."""
    if startup.version is not None:
        parts = str(startup.version.value).split(".")
        if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit():
            return (int(parts[0]), int(parts[1])) >= _SPEC_CHANGE
    return startup.wording is not None and startup.wording.value in {
        "0.21 or later",
        "0.28 or later",
    }


def first_size(startup: Startup) -> int | None:
    """Answer tokens a block, if that was said."""
    if startup.block_size:
        return int(startup.block_size[-1].value)
    word = first((startup.setting("block_size"), startup.setting("page_size")))
    return word.value if word is not None and isinstance(word.value, int) else None


def _against(size: int | None, each: float) -> str:
    if size is None or size == each:
        return ""
    if size > each and (size / each).is_integer():
        return f", while a block has {size}: the layers are in {size / each:.0f} groups"
    return f", while block_size is said to be {size}"


def rate(startup: Startup) -> list[tuple[str, float]]:
    """Answer bytes of cache a token that the figures give, each with its computation in words."""
    rates = []
    kv, tokens = startup.kv_cache_gib, startup.kv_cache_tokens
    # One worker's GiB and the tokens of all are of one worker only where all spoke.
    if kv is not None and startup.tokens and tokens is not None and tokens.value > 0:
        rates.append((f"{kv.value:g} GiB / {tokens.value:,.0f} tokens", kv.value, tokens.value))
    for refusal in startup.refusals:
        needed, length = refusal.needed_gib, refusal.max_model_len
        if refusal.kind == "max_model_len" and needed and length:
            rates.append((f"{needed:g} GiB / {length:,} tokens", needed, length))
        available, fits = refusal.available_gib, refusal.estimated_max_model_len
        if available and fits:
            rates.append((f"{available:g} GiB / {fits:,} tokens", available, fits))
    return [(words, gib * GIB / count) for words, gib, count in rates if gib > 0]


def _graphs(startup: Startup) -> Iterator[str]:
    graphs, kv = most(startup.graph_gib), startup.kv_cache_gib
    share, without = most(startup.utilization), least(startup.utilization_without_graphs)
    if graphs is not None and share is not None and without is not None:
        part = share.value - without.value
        if part > 0.001:
            yield (
                f"{graphs.value:g} GiB of CUDA graphs are {share.value:g} - {without.value:g} = "
                f"{part:.4f} of the card {_at(graphs, without)}: about {graphs.value / part:.1f} "
                "GiB in all; the other utilizations on that line are advice, not settings"
            )
    if graphs is not None and kv is not None and graphs.value > kv.value > 0:
        yield (
            f"CUDA graphs take {graphs.value:g} GiB, more than the cache, {kv.value:g} "
            f"{_at(graphs, kv)}; without them it would be {graphs.value + kv.value:.2f} GiB"
        )


def _padding(startup: Startup) -> Iterator[str]:
    wasted = most(startup.padding_pct)
    if wasted is not None:
        yield (
            f"layers are padded to groups of one size, which may waste {wasted.value:g} % "
            f"{_at(wasted)}: a hybrid model, every request holds blocks in each group, and tokens / "
            "length says more than fits"
        )


def _units(startup: Startup) -> Iterator[str]:
    said = [each for each in (*startup.load_gib, *startup.k_gib) if each.unit == "GB"]
    if said:
        yield f"{said[0].value:g} GB {_at(said[0])} are GiB: the engine divides by 2**30"
    in_bytes = [each for each in startup.kv_gib if each.unit == "bytes"]
    if in_bytes:
        gib = in_bytes[0].value
        yield (
            f"{gib * GIB:,.0f} bytes {_at(in_bytes[0])} are {gib:.2f} GiB or {gib * GIB / 1e9:.1f} "
            "GB; TensorRT-LLM takes a share of what is free, by default 90 %, whatever the batch: "
            "kv_cache_free_gpu_memory_fraction or max_tokens limits it"
        )
    for words, each in rate(startup):
        yield f"{words} = {each:,.0f} bytes a token"


def _running(startup: Startup) -> Iterator[str]:
    """How many tokens the pool has, from how fast the usage grows."""
    estimates = []
    for old, new in zip(startup.statistics, startup.statistics[1:], strict=False):
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
            f"usage grows as in a pool of about {middle:,.0f} tokens (from {len(estimates)} pairs "
            "of statistics, if nothing was freed meanwhile)"
        )
    peak = max(startup.statistics, key=lambda row: row.kv_usage_pct, default=None)
    if peak is not None:
        waiting = "" if peak.waiting is None else f", {peak.waiting} waiting"
        v0 = "; V0 counts a group of sequences as one" if peak.swapped is not None else ""
        yield (
            f"the cache was used up to {peak.kv_usage_pct:g} %, by {peak.running} running{waiting} "
            f"(line {peak.line}){v0}"
        )


def _refusals(startup: Startup) -> Iterator[str]:
    from sim.server_log.refusals import advice  # noqa: PLC0415  # it needs the rates from here

    for refusal in startup.refusals:
        yield from advice(startup, refusal)


def _binding(startup: Startup, bytes_per_token: float) -> Iterator[str]:
    """Whether the worker whose memory was printed is the one that sets the pool."""
    kv, tokens = least(startup.kv_gib), startup.kv_cache_tokens
    if kv is None or tokens is None:
        return
    used = tokens.value * bytes_per_token / GIB
    if kv.value - used > max(0.01, 0.01 * kv.value):
        yield (
            f"{tokens.value:,.0f} tokens of {bytes_per_token:,.0f} bytes take {used:.2f} GiB, less "
            f"than the {kv.value:g} that {_who(kv)} has {_at(kv, tokens)}: another worker binds"
        )


def _between(startups: Sequence[Startup]) -> Iterator[str]:
    """What changed from one start to the next."""
    for number, (old, new) in enumerate(zip(startups, startups[1:], strict=False), 1):
        kv, other = old.kv_cache_gib, new.kv_cache_gib
        length, longer = old.max_model_len, new.max_model_len
        if kv is None or other is None or length is None or longer is None:
            continue
        if length.value == longer.value or abs(kv.value - other.value) <= 2 * ROUNDING:
            continue
        rates = [each for start in (old, new) for _, each in rate(start)]
        same = len(rates) > 1 and max(rates) <= 1.01 * min(rates)
        yield (
            f"from start {number} to {number + 1}, max_model_len goes from {length.value:,} to "
            f"{longer.value:,} and the cache from {kv.value:g} to {other.value:g} GiB"
            + (f", at the same {rates[0]:,.0f} bytes a token" if same else "")
            + ": a longer profiled step takes more activation memory; cap max_num_batched_tokens"
        )


def is_refused(refusals: Sequence[Refusal]) -> bool:
    """Answer whether the server did not start."""
    return any(refusal.kind != "other" for refusal in refusals)
