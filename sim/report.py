"""Results in words: the report of one run, and the table of a comparison. Reads summaries only."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tabulate

_WIDTH = 50
tabulate.MIN_PADDING = 0  # its default of two columns a header would not fit 100 columns
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


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def provenance(summary: Summary) -> str:
    """Answer where sizes and times come from: the first lines of every report."""
    return (
        f"timing: {summary['timing']} ({summary['timing_provenance']})\n"
        f"KV pool: {summary['kv_pool_provenance']}"
    )


def run_report(summary: Summary) -> str:
    """Answer the report of one run: vLLM's result table, then the KV cache."""
    lines = [
        f"{' Simulated Serving Result ':=^{_WIDTH}}",
        _line("Successful requests:", summary["completed"]),
        _line("Failed requests:", summary["failed"]),
        _line("Benchmark duration (s):", summary["duration"]),
        _line("Total input tokens:", summary["total_input_tokens"]),
        _line("Total generated tokens:", summary["total_output_tokens"]),
        _line("Request throughput (req/s):", summary["request_throughput"]),
        _line("Output token throughput (tok/s):", summary["output_throughput"]),
        _line("Peak output token throughput (tok/s):", float(summary["max_output_tokens_per_s"])),
        _line("Peak concurrent requests:", float(summary["max_concurrent_requests"])),
        _line("Total token throughput (tok/s):", summary["total_token_throughput"]),
    ]
    for title, short, key in _LATENCIES:
        lines.append(f"{title:-^{_WIDTH}}")
        for kind, prefix in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            lines.append(_line(f"{kind} {short} (ms):", summary[f"{prefix}_{key}_ms"]))
    lines += _kv_lines(summary)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _kv_lines(summary: Summary) -> list[str]:
    lines = [
        f"{' KV Cache ':=^{_WIDTH}}",
        _line("Allocator:", summary["allocator"]),
        _line("KV cache size (tokens):", summary["kv_cache_slots"]),
        _line("Mean running requests:", summary["mean_num_requests_running"]),
        _line("Peak running requests:", summary["max_num_requests_running"]),
        _line("Mean waiting requests:", summary["mean_num_requests_waiting"]),
        _line("Mean KV cache usage (%):", _percent(summary["mean_kv_cache_usage_perc"])),
        _line("Peak KV cache usage (%):", _percent(summary["max_kv_cache_usage_perc"])),
        _line("Live slots (% of pool):", summary["kv_live_pct"]),
        _line("Reserved slots (% of pool):", summary["kv_reserved_pct"]),
        _line("Internal fragmentation (% of pool):", summary["kv_internal_pct"]),
        _line("External fragmentation (% of pool):", summary["kv_external_pct"]),
        _line("Cached slots (% of pool):", summary["kv_cached_pct"]),
        _line("Free slots (% of pool):", summary["kv_free_pct"]),
        _line("Prefix cache hit rate (%):", _percent(summary["prefix_cache_hit_rate"])),
        _line("Preemptions:", summary["num_preemptions"]),
        _line("Recomputed tokens:", summary["recomputed_tokens"]),
        _line("Allocation refusals:", summary["allocation_refusals"]),
        _line("Engine steps:", summary["num_steps"]),
    ]
    if summary["num_clipped_requests"]:
        lines.append(_line("Outputs cut at max_model_len:", summary["num_clipped_requests"]))
    for reason, count in summary["refused"].items():
        lines.append(_line(f"Refused ({reason}):", count))
    return lines


class _Column(NamedTuple):
    """One column of a comparison: what it shows, and which end of it is better."""

    header: str
    key: str
    spec: str
    best: Callable[[list[float]], float] | None = None


_MEMORY = (
    _Column("running\nmean", "mean_num_requests_running", ".1f", max),
    _Column("running\npeak", "max_num_requests_running", ".0f", max),
    _Column("factor\nrunning", "running_factor", ".2f", max),
    _Column("live\n%", "kv_live_pct", ".1f", max),
    _Column("reserved\n%", "kv_reserved_pct", ".1f", min),
    _Column("internal\n%", "kv_internal_pct", ".1f", min),
    _Column("external\n%", "kv_external_pct", ".1f", min),
    _Column("cached\n%", "kv_cached_pct", ".1f"),
    _Column("free\n%", "kv_free_pct", ".1f"),
)
_SPEED = (
    _Column("output\ntok/s", "output_throughput", ".0f", max),
    _Column("factor\ntok/s", "throughput_factor", ".2f", max),
    _Column("req/s", "request_throughput", ".2f", max),
    _Column("TTFT ms\np50", "median_ttft_ms", ".0f", min),
    _Column("TTFT ms\np99", "p99_ttft_ms", ".0f", min),
    _Column("TPOT ms\np50", "median_tpot_ms", ".1f", min),
    _Column("TPOT ms\np99", "p99_tpot_ms", ".1f", min),
    _Column("preemp-\ntions", "num_preemptions", ".0f"),
    _Column("prefix\nhit %", "prefix_cache_hit_pct", ".1f", max),
)


def comparison_rows(summaries: Sequence[Summary]) -> list[Summary]:
    """Answer *summaries* with the factors against the baseline: reserve-max, else the first."""
    labels = [summary["allocator"] for summary in summaries]
    base = summaries[labels.index("reserve-max") if "reserve-max" in labels else 0]

    def factor(summary: Summary, key: str) -> float | None:
        return summary[key] / base[key] if summary[key] and base[key] else None

    return [
        {
            **summary,
            "baseline": base["allocator"],
            "running_factor": factor(summary, "mean_num_requests_running"),
            "throughput_factor": factor(summary, "output_throughput"),
            "prefix_cache_hit_pct": _percent(summary["prefix_cache_hit_rate"]),
        }
        for summary in summaries
    ]


def comparison_report(rows: Sequence[Summary]) -> str:
    """Answer the tables of a comparison: a row an allocator, the best of a column marked."""
    first = rows[0]
    return "\n\n".join(
        [
            f"{first['num_prompts']:,} requests, {first['model_id']} on {first['gpu']}, "
            f"block size {first['block_size']}\n"
            f"* is the best of its column; factors are against {first['baseline']}",
            "Concurrency, and where the KV slots are (time-weighted % of the pool)",
            _table(rows, _MEMORY),
            "Throughput and latency",
            _table(rows, _SPEED),
        ]
    )


def _table(rows: Sequence[Summary], columns: Sequence[_Column]) -> str:
    cells = [[row["allocator"] for row in rows]]
    for column in columns:
        values = [row[column.key] for row in rows]
        numbers = [value for value in values if value is not None]
        shown = ["-" if value is None else f"{value:{column.spec}}" for value in values]
        best = None
        if column.best and len(set(shown) - {"-"}) > 1:  # alike as printed: nobody is best
            best = f"{column.best(numbers):{column.spec}}"
        cells.append([f"{text}{'*' if text == best else ' '}" for text in shown])
    headers = ["allocator", *(f"{column.header}" for column in columns)]
    align = ("left", *("right" for _ in columns))
    return tabulate.tabulate(
        list(zip(*cells, strict=True)),
        headers,
        tablefmt="simple",
        colalign=align,
        disable_numparse=True,
    )
