"""One run in words. Reads its summary only."""

from collections.abc import Sequence
from typing import Any

_WIDTH = 50
_LATENCIES = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("End-to-end Latency", "E2EL", "e2el"),
)

Summary = dict[str, Any]


def _line(label: str, value: float | str | None) -> str:
    """Answer one line as vLLM prints it (``benchmarks/serve.py:1220``)."""
    if value is None:
        value = "n/a"
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def percent(share: float | None) -> float | None:
    """Answer *share* of 1 as a share of 100."""
    return None if share is None else 100 * share


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def provenance(summaries: Sequence[Summary]) -> str:
    """Answer where sizes and times come from: the first lines of every report.

    What holds for some of several runs only names their allocators.
    """
    runs: dict[str, list[str]] = {}
    for summary in summaries:
        lines = list(summary["timing"])
        if summary["timing_steps_outside"]:
            outside = f"{summary['timing_steps_outside']:,} of {summary['num_steps']:,} steps"
            lines.append(f"{outside} are beyond the table: priced by the roofline, fitted")
        for line in lines:
            runs.setdefault(line, []).append(summary["allocator"])
    whose = {
        line: "" if len(names) == len(summaries) else f" of {', '.join(names)}"
        for line, names in runs.items()
    }
    return "\n".join(
        [
            *(f"timing{whose[line]}: {line}" for line in runs),
            f"KV pool: {summaries[0]['kv_pool_provenance']}",
        ]
    )


def run_report(summary: Summary) -> str:
    """Answer the report of one run: vLLM's result table, then the KV cache."""
    lines = [
        f"{' Simulated Serving Result ':=^{_WIDTH}}",
        _line("Successful requests:", summary["completed"]),
        _line("Failed requests:", summary["failed"]),
        *_load_lines(summary),
        _line("Benchmark duration (s):", summary["duration"]),
        _line("Total input tokens:", summary["total_input_tokens"]),
        _line("Total generated tokens:", summary["total_output_tokens"]),
        _line("Request throughput (req/s):", summary["request_throughput"]),
        *_goodput_lines(summary),
        _line("Output token throughput (tok/s):", summary["output_throughput"]),
        _line("Peak output token throughput (tok/s):", float(summary["max_output_tokens_per_s"])),
        _line("Peak concurrent requests:", float(summary["max_concurrent_requests"])),
        _line("Total token throughput (tok/s):", summary["total_token_throughput"]),
    ]
    for title, short, key in _LATENCIES:
        lines.append(f"{title:-^{_WIDTH}}")
        for kind, prefix in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            lines.append(_line(f"{kind} {short} (ms):", summary[f"{prefix}_{key}_ms"]))
    if any(summary["step_time_s"].values()):
        lines.append(f"{'Where Steps Spend Time':-^{_WIDTH}}")
        lines += _timing_lines(summary)
    lines += _kv_lines(summary)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _load_lines(summary: Summary) -> list[str]:
    rate = summary.get("request_rate")
    return [] if rate is None else [_line("Request rate configured (RPS):", rate)]


def _goodput_lines(summary: Summary) -> list[str]:
    if "request_goodput" not in summary:
        return []
    return [
        _line("Request goodput (req/s):", summary["request_goodput"]),
        _line("Requests that meet the SLOs (%):", percent(summary["slo_attainment"])),
    ]


def _timing_lines(summary: Summary) -> list[str]:
    terms: dict[str, float] = summary["step_time_s"]
    total = sum(terms.values())
    largest_first = sorted(terms.items(), key=lambda item: -item[1])
    return [_line(f"{term} (% of step time):", 100 * time / total) for term, time in largest_first]


def _kv_lines(summary: Summary) -> list[str]:
    lines = [
        f"{' KV Cache ':=^{_WIDTH}}",
        _line("Allocator:", summary["allocator"]),
        _line("KV cache size (tokens):", summary["kv_cache_slots"]),
        _line("Mean running requests:", summary["mean_num_requests_running"]),
        _line("Peak running requests:", summary["max_num_requests_running"]),
        _line("Mean waiting requests:", summary["mean_num_requests_waiting"]),
        _line("Mean KV cache usage (%):", percent(summary["mean_kv_cache_usage_perc"])),
        _line("Peak KV cache usage (%):", percent(summary["max_kv_cache_usage_perc"])),
        _line("Live slots (% of pool):", summary["kv_live_pct"]),
        _line("Reserved slots (% of pool):", summary["kv_reserved_pct"]),
        _line("Internal fragmentation (% of pool):", summary["kv_internal_pct"]),
        _line("External fragmentation (% of pool):", summary["kv_external_pct"]),
        _line("Cached slots (% of pool):", summary["kv_cached_pct"]),
        _line("Free slots (% of pool):", summary["kv_free_pct"]),
        _line("Prefix cache hit rate (%):", percent(summary["prefix_cache_hit_rate"])),
        _line("Preemptions:", summary["num_preemptions"]),
        _line("Recomputed tokens:", summary["recomputed_tokens"]),
        _line("Allocation refusals:", summary["allocation_refusals"]),
        _line("Engine steps:", summary["num_steps"]),
        _line("Largest activation of a step (GiB):", _gib(summary["max_activation_bytes"])),
        _line("Room for activation (GiB):", _gib(summary["activation_room_bytes"])),
        _line("Steps that overrun it (%):", summary["steps_overrun_pct"]),
    ]
    if summary["num_clipped_requests"]:
        lines.append(_line("Outputs cut at max_model_len:", summary["num_clipped_requests"]))
    for reason, count in summary["refused"].items():
        lines.append(_line(f"Refused ({reason}):", count))
    return lines
