"""Facts of a server's log: what it said when it started, and its lines of statistics."""

from typing import Any

from sim.health.facts import Facts, Point
from sim.server_log import Refusal, Said, ServerLog, Startup, Word
from sim.server_log.findings import between, pool_binds
from sim.server_log.identities import (
    block_size,
    counts_a_group,
    graphs_in_peak,
    profile_of_v0,
    rate,
    suggestion,
)
from sim.server_log.records import least, most
from sim.server_log.refusals import advice


def facts_of_log(log: ServerLog, name: str) -> list[Facts]:
    """Answer the facts of every start in *log*, which *name* names."""
    several = len(log.startups) > 1
    found = []
    for number, startup in enumerate(log.startups, 1):
        whose = f"{name}, start {number}" if several else name
        whose += f" ({startup.name})" if startup.name else ""
        found.append(facts_of_startup(startup, whose))
    for old, new, facts in zip(log.startups, log.startups[1:], found[1:], strict=False):
        facts.remarks += [("profile", line.partition(", ")[2]) for line in between([old, new])]
    return found


def facts_of_startup(startup: Startup, name: str) -> Facts:
    """Answer what one start of an engine told."""
    facts = Facts(source="log", name=name, engine=startup.engine)

    def take(field: str, said: Said | Word | None, kind: Any = float) -> None:
        if said is not None and isinstance(said.value, int | float):
            setattr(facts, field, kind(said.value))
            facts.places[field] = f"line {said.line}"

    take("block_size", _size(startup), int)
    take("max_model_len", startup.max_model_len, int)
    take("max_num_seqs", startup.setting("max_num_seqs", "max_running_requests"), int)
    take("enable_prefix_caching", startup.setting("enable_prefix_caching"), bool)
    take("gpu_memory_utilization", startup.gpu_memory_utilization)
    take("total_gib", most(startup.total_gib))
    take("kv_gib", startup.kv_cache_gib)
    take("kv_tokens", startup.kv_cache_tokens, int)
    take("concurrency", least(startup.concurrency))
    take("padding", most(startup.padding_pct))
    take("graph_gib", most(startup.graph_gib or startup.graph_taken_gib))
    take("activation_gib", _activation(startup))
    if facts.padding is not None:
        facts.padding /= 100
    if facts.total_gib is not None and facts.gpu_memory_utilization is not None:
        facts.outside_gib = (1 - facts.gpu_memory_utilization) * facts.total_gib
    facts.is_sized = not startup.fixed_pool
    rates = rate(startup)
    if rates:
        facts.bytes_per_token = rates[0][1]
        facts.places["bytes_per_token"] = rates[0][0]
    if startup.refusals or startup.concurrency or startup.kv_cache_tokens or startup.statistics:
        facts.refusals = [
            ("; ".join(advice(startup, refusal)), _helps(startup, refusal))
            for refusal in startup.refusals
        ]
    facts.remarks = list(_remarks(startup))
    _statistics(facts, startup)
    return facts


def _helps(startup: Startup, refusal: Refusal) -> str:
    """Answer the flag that helps against *refusal*."""
    match refusal.kind:
        case "max_model_len":
            fits = refusal.estimated_max_model_len or refusal.pool_tokens
            shorter = f"--max-model-len {fits}" if fits else "a shorter --max-model-len"
            is_given = "kv_cache_memory_bytes" in startup.fixed_pool
            more = "--kv-cache-memory-bytes" if is_given else "--gpu-memory-utilization"
            return f"{shorter}, or a higher {more} if the card has room"
        case "no_memory":
            return "a higher --gpu-memory-utilization, or fewer --max-num-batched-tokens"
        case "free_memory":
            return "a lower --gpu-memory-utilization, or end what else is on the card"
        case "out_of_memory":
            return "a lower --gpu-memory-utilization, or fewer --max-num-batched-tokens"
        case _:
            return "as it says"


def _size(startup: Startup) -> Word | None:
    size = block_size(startup)
    if size is None:
        return None
    said = startup.block_size[-1] if startup.block_size else startup.setting("block_size")
    return Word(size, said.line if said is not None else 0)


def _activation(startup: Startup) -> Said | None:
    """Answer the peak of the profiling run above the weights, of the worker with most."""
    peak, weights = most(startup.torch_peak_gib), startup.weights_gib
    said, graphs = most(startup.activation_gib), graphs_in_peak(startup)
    if said is not None and graphs is not None:
        return said._replace(value=said.value - graphs.value)
    if said is not None or peak is None or weights is None:
        return said
    return peak._replace(value=peak.value - weights.value)


def _remarks(startup: Startup) -> list[tuple[str, str]]:
    """Answer what only a log tells, by the check that it is for."""
    remarks = [("workers", line) for line in pool_binds(startup)]
    remarks += [("suggestion", line) for line in suggestion(startup)]
    kv = startup.kv_cache_gib
    if startup.engine == "trtllm" and kv is not None:
        share = f"{kv.value:.2f} GiB for the cache (line {kv.line})"
        remarks.append(("free_share", share))
    tokens, requests = startup.kv_cache_tokens, least(startup.concurrency)
    length = least(startup.request_tokens)
    if counts_a_group(startup) and tokens is not None and requests and length:
        remarks.append((
            "token_line",
            f"{tokens.value:,.0f} tokens (line {tokens.line}), but {requests.value:g} requests of "
            f"{length.value:,.0f} are {requests.value * length.value:,.0f} (line {requests.line})",
        ))  # fmt: skip
    if startup.activation_gib or startup.torch_peak_gib:
        remarks += [("v0_profile", line) for line in profile_of_v0(startup)]
    if startup.preemption is not None:
        how, line = startup.preemption
        remarks.append(("preempted", f"a request was preempted by {how} (line {line})"))
    return remarks


def _statistics(facts: Facts, startup: Startup) -> None:
    rows = startup.statistics
    facts.series = [
        Point(
            f"line {row.line}",
            row.running,
            row.waiting,
            row.kv_usage_pct / 100,
            None if row.hit_rate_pct is None else row.hit_rate_pct / 100,
            1.0,
            row.preempted,
        )
        for row in rows
    ]
    if told := [row for row in rows if row.preempted is not None]:
        facts.num_preemptions = sum(row.preempted or 0 for row in told)
        facts.places["num_preemptions"] = _lines(told[0].line, told[-1].line)
    elif rows:
        facts.num_preemptions = 0  # the line leaves them out where there are none
    if hits := [row for row in rows if row.hit_rate_pct is not None]:
        facts.hit_rate = (hits[-1].hit_rate_pct or 0.0) / 100
        facts.places["hit_rate"] = f"line {hits[-1].line}"


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"
