"""Runs side by side, in words: the tables of a comparison. Reads summaries only."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tabulate

from sim.report import Summary, percent

tabulate.MIN_PADDING = 0  # its default of two columns a header would not fit 100 columns


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
    _Column("goodput\nreq/s", "request_goodput", ".2f", max),
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
            "prefix_cache_hit_pct": percent(summary["prefix_cache_hit_rate"]),
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
            *(part for table in comparison_tables(rows) for part in (table.title, _text(table))),
        ]
    )


class Table(NamedTuple):
    """One table of a comparison, as text; a cell that ends in * is the best of its column."""

    title: str
    headers: list[str]
    rows: list[tuple[str, ...]]


def comparison_tables(rows: Sequence[Summary]) -> list[Table]:
    """Answer the tables of a comparison: a row an allocator."""
    return [
        _table(
            "Concurrency, and where the KV slots are (time-weighted % of the pool)", rows, _MEMORY
        ),
        _table("Throughput and latency", rows, _SPEED),
    ]


def _table(title: str, rows: Sequence[Summary], columns: Sequence[_Column]) -> Table:
    cells = [[row["allocator"] for row in rows]]
    columns = [column for column in columns if column.key in rows[0]]  # goodput if asked for
    for column in columns:
        values = [row[column.key] for row in rows]
        numbers = [value for value in values if value is not None]
        shown = ["-" if value is None else f"{value:{column.spec}}" for value in values]
        best = None
        if column.best and len(set(shown) - {"-"}) > 1:  # alike as printed: nobody is best
            best = f"{column.best(numbers):{column.spec}}"
        cells.append([f"{text}{'*' if text == best else ' '}" for text in shown])
    headers = ["allocator", *(f"{column.header}" for column in columns)]
    return Table(title, headers, list(zip(*cells, strict=True)))


def _text(table: Table) -> str:
    align = ("left", *("right" for _ in table.headers[1:]))
    return tabulate.tabulate(
        table.rows,
        table.headers,
        tablefmt="simple",
        colalign=align,
        disable_numparse=True,
    )
