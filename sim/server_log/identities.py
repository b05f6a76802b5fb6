"""Figures of a log that must agree, each computation with both sides."""

from collections.abc import Iterator, Sequence

from sim.server_log.records import Said, Startup, least, most

GIB = 2**30
ROUNDING = 0.005
"""GiB, or requests: half of the last digit that is printed."""

_TOKENS_CHANGE = (0, 21)
"""Since 0.21.0 the token line is concurrency times max_model_len; before, one group's share."""


def at(*said: Said | None) -> str:
    """Answer "(lines 1, 2)": where they stand."""
    lines = sorted({each.line for each in said if each is not None})
    return f"(line{'s' if len(lines) > 1 else ''} {', '.join(str(line) for line in lines)})"


def _of(said: Sequence[Said], worker: str) -> Said | None:
    """Answer the first figure of *worker*, or of the only one that spoke."""
    own = [each for each in said if each.worker == worker]
    return own[0] if own else said[0] if len({each.worker for each in said}) == 1 else None


def memory_agrees(startup: Startup) -> Iterator[str]:
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
        where = at(kv, *(term for _, term in terms))
        if abs(rest - kv.value) <= slack:
            yield f"{sum_shown} = {rest:.2f} GiB, as printed: {kv.value:g} {where}"
        else:
            yield (
                f"{sum_shown} = {rest:.2f} GiB, but {kv.value:g} is printed {where}: "
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


def profile_of_v0(startup: Startup) -> Iterator[str]:
    """What the pool of vLLM V0 depends on."""
    v0 = startup.wording is not None and startup.wording.value == "V0"
    if v0 and startup.kv_gib:
        yield (
            "V0 profiles a step of max_num_batched_tokens, which is max_model_len while chunked "
            "prefill is off (it turns itself on above 32k): a longer max_model_len leaves less pool"
        )


def tokens_agree(startup: Startup) -> Iterator[str]:
    """Blocks, tokens and concurrency say the same three times, except on hybrid models."""
    blocks, tokens = startup.num_gpu_blocks, startup.kv_cache_tokens
    size = block_size(startup)
    if blocks is not None and tokens is not None and blocks.value > 0:
        each = tokens.value / blocks.value
        if each.is_integer():
            yield (
                f"{tokens.value:,.0f} tokens / {blocks.value:,.0f} blocks = {each:.0f} tokens a "
                f"block {at(blocks, tokens)}" + _against(size, each)
            )
        else:
            yield (
                f"{tokens.value:,.0f} tokens are no multiple of {blocks.value:,.0f} blocks "
                f"{at(blocks, tokens)}: layers are in groups that each take blocks of their own"
            )
    elif tokens is not None and startup.engine == "vllm" and not startup.concurrency:
        held = size or 16
        if tokens.value % held == 0:
            assumed = "" if size else ", if blocks have 16"
            yield f"{tokens.value:,.0f} tokens are {tokens.value / held:,.0f} blocks{assumed}"
    yield from _requests_agree(startup)


def _requests_agree(startup: Startup) -> Iterator[str]:
    """Concurrency times the length of a request is the tokens of the pool."""
    blocks, tokens = startup.num_gpu_blocks, startup.kv_cache_tokens
    requests, length = least(startup.concurrency), least(startup.request_tokens)
    held = tokens
    if held is None and blocks is not None:
        held = Said(blocks.value * (block_size(startup) or 16), blocks.line)
    if requests is None or length is None or held is None:
        return
    fits = requests.value * length.value
    shown = f"{requests.value:g} x {length.value:,.0f} = {fits:,.0f} tokens"
    where = at(requests, held)
    if abs(fits - held.value) <= ROUNDING * length.value + 1:
        yield f"{shown}, as {held.value:,.0f} within rounding {where}"
    elif tokens is not None and counts_a_group(startup):
        yield (
            f"{shown}, but {held.value:,.0f} are printed {where}: a hybrid model, whose token line "
            "counts one group of layers before vLLM 0.21; compare concurrency or blocks, not "
            "tokens, with a later version"
        )
    else:
        yield (
            f"{shown}, but {held.value:,.0f} are printed {where}: a request takes more than its "
            "length, in whole blocks or in state of its own"
        )
    if counts_requests(startup) and tokens is not None:
        yield (
            f"the {tokens.value:,.0f} tokens are concurrency x max_model_len, as since vLLM 0.21: "
            "on a hybrid model, requests of another length hold another number"
        )
    if blocks is None or tokens is None or not blocks.value or not requests.value:
        return
    if not (tokens.value / blocks.value).is_integer():
        each = blocks.value / requests.value
        yield f"{blocks.value:,.0f} blocks / {requests.value:g} = {each:.1f} blocks a request"


def counts_a_group(startup: Startup) -> bool:
    """Answer whether fewer tokens are printed than the requests that fit would have."""
    requests, length = least(startup.concurrency), least(startup.request_tokens)
    tokens = startup.kv_cache_tokens
    if requests is None or length is None or tokens is None:
        return False
    return (requests.value - ROUNDING) * length.value > tokens.value + 1


def counts_requests(startup: Startup) -> bool:
    """Answer whether the token line is of vLLM 0.21 or later."""
    if startup.version is not None:
        parts = str(startup.version.value).split(".")
        if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit():
            return (int(parts[0]), int(parts[1])) >= _TOKENS_CHANGE
    return startup.wording is not None and startup.wording.value in {
        "0.21 or later",
        "0.28 or later",
    }


def block_size(startup: Startup) -> int | None:
    """Answer tokens a block, if that was said."""
    if startup.block_size:
        return int(startup.block_size[-1].value)
    word = startup.setting("block_size", "page_size")
    return word.value if word is not None and isinstance(word.value, int) else None


def _against(size: int | None, each: float) -> str:
    if size is None or size == each:
        return ""
    if size > each and (size / each).is_integer():
        return f", while a block has {size}: the layers are in {size / each:.0f} groups"
    return f", while block_size is said to be {size}"


def num_workers(startup: Startup) -> int:
    """Answer the workers that spoke, or that there are by the sizes that were said."""
    ranks = 1
    for word in (startup.tensor_parallel_size, startup.pipeline_parallel_size):
        ranks *= word.value if word is not None and isinstance(word.value, int) else 1
    return max(len(startup.workers), ranks)


def rate(startup: Startup) -> list[tuple[str, float]]:
    """Answer bytes of cache a token that the figures give, each with its computation in words."""
    rates = []
    kv, tokens = startup.kv_cache_gib, startup.kv_cache_tokens
    # One worker's GiB and the tokens of all are of one worker only where all spoke.
    spoke = len({said.worker for said in startup.kv_gib}) or 1
    counted = startup.tokens and not counts_a_group(startup) and spoke >= num_workers(startup)
    if kv is not None and counted and tokens is not None and tokens.value > 0:
        rates.append((f"{kv.value:g} GiB / {tokens.value:,.0f} tokens", kv.value, tokens.value))
    for refusal in startup.refusals:
        needed, length = refusal.needed_gib, refusal.max_model_len
        if refusal.kind == "max_model_len" and needed and length:
            rates.append((f"{needed:g} GiB / {length:,} tokens", needed, length))
        available, fits = refusal.available_gib, refusal.estimated_max_model_len
        if available and fits:
            rates.append((f"{available:g} GiB / {fits:,} tokens", available, fits))
    return [(words, gib * GIB / count) for words, gib, count in rates if gib > 0]


def graphs_share(startup: Startup) -> Iterator[str]:
    """CUDA graphs are the difference of two utilizations, which tells the size of the card."""
    graphs, kv = most(startup.graph_gib), startup.kv_cache_gib
    share, without = most(startup.utilization), least(startup.utilization_without_graphs)
    if graphs is not None and share is not None and without is not None:
        part = share.value - without.value
        if part > 0.001:
            low = (graphs.value - ROUNDING) / (part + 0.0001)
            high = (graphs.value + ROUNDING) / (part - 0.0001)
            yield (
                f"{graphs.value:g} GiB of CUDA graphs are {share.value:g} - {without.value:g} = "
                f"{part:.4f} of the card {at(graphs, without)}, which then has {low:.1f} to "
                f"{high:.1f} GiB; the other utilizations on that line are advice, not settings"
            )
    if graphs is not None and kv is not None and graphs.value > kv.value > 0:
        yield (
            f"CUDA graphs take {graphs.value:g} GiB, more than the cache, {kv.value:g} "
            f"{at(graphs, kv)}; without them it would be {graphs.value + kv.value:.2f} GiB"
        )


def graphs_in_peak(startup: Startup) -> Said | None:
    """Answer the estimate of CUDA graphs that the printed activation peak holds; None if none.

    vLLM 0.28 and later print the peak with what they subtract for graphs: the pool then is the
    budget less what is consumed and that peak (vllm-project/vllm#57936).
    """
    graphs, peak, kv = most(startup.graph_gib), most(startup.activation_gib), least(startup.kv_gib)
    budget, consumed = most(startup.requested_gib), most(startup.consumed_gib)
    if graphs is None or peak is None or kv is None or budget is None or consumed is None:
        return None
    rest = budget.value - consumed.value - peak.value
    is_on = bool(startup.utilization_without_graphs) or any(
        said.value <= 0 for said in startup.suggested_gib
    )
    holds = graphs.value <= peak.value + ROUNDING and abs(rest - kv.value) <= 4 * ROUNDING
    return graphs if is_on and holds else None


def suggestion(startup: Startup) -> Iterator[str]:
    """The cache that the server advises to fix counts CUDA graphs once, or is no setting."""
    advised, graphs = least(startup.suggested_gib), graphs_in_peak(startup)
    if advised is None:
        return
    said = f"the server advises --kv-cache-memory of {advised.value:g} GiB {at(advised)}"
    if graphs is not None:
        taken = most(startup.graph_taken_gib)
        captured = "" if taken is None else f" ({taken.value:g} GiB)"
        yield (
            f"{said}: CUDA graphs are in it twice, as captured{captured} and as estimated "
            f"({graphs.value:g} GiB of the activation peak) {at(graphs)}; counted once, it is "
            f"{advised.value + graphs.value:.2f} GiB"
        )
    elif advised.value <= 0:
        yield f"{said}, which is no setting"
