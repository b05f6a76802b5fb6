"""A card and what it holds, in words: the report of ``kvsim capacity``. Reads rows only."""

from collections.abc import Sequence
from typing import Any

BAR_WIDTH = 72
_LETTERS = {
    "weights": "W",
    "peak activation": "a",
    "non-torch": "n",
    "CUDA graphs": "g",
    "KV cache": "K",
    "outside utilization": ".",
    "unused": ".",
}
"""What the bar draws; every letter is there at least once."""

Answer = dict[str, Any]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Answer a table: words to the left, numbers and their heads to the right."""
    left = [not any(row[c][:1].isdigit() for row in rows) for c in range(len(head))]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left[column] else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


def bar(shares: Sequence[Answer]) -> str:
    """Answer the card as a line of `BAR_WIDTH` letters, each of one share."""
    total = sum(share["bytes"] for share in shares)
    sizes = [max(1, round(BAR_WIDTH * share["bytes"] / total)) for share in shares]
    sizes[sizes.index(max(sizes))] += BAR_WIDTH - sum(sizes)
    drawn = "".join(_LETTERS[s["name"]] * n for s, n in zip(shares, sizes, strict=True))
    return f"[{drawn}]"


def _card(answer: Answer) -> list[str]:
    """Answer the breakdown of the card; nothing when blocks or bytes were given without it."""
    if not answer["breakdown"]:
        return []
    rows = [
        (
            f"{_LETTERS[share['name']]} {share['name']}",
            f"{share['bytes']:,}",
            f"{share['gib']:.2f}",
            f"{share['percent']:.1f}",
            share["provenance"],
        )
        for share in answer["breakdown"]
    ]
    return [
        "",
        _table(("one card", "bytes", "GiB", "%", "known by"), rows),
        bar(answer["breakdown"]),
    ]


def _holds(answer: Answer) -> list[str]:
    """Answer how many requests the pool holds, by allocator."""
    held, lengths = answer["concurrency"], answer["lengths"]
    prefix = f", {lengths['prefix_len']:,} of them shared" if lengths["prefix_len"] else ""
    rows = [
        ("reserve-max", f"{held['reserve_max']:,}", f"each has {answer['max_model_len']:,} slots"),
        ("paged", f"{held['paged']:,.1f}", f"each has {lengths['blocks']:,.1f} blocks"),
    ]
    if held["prefix"] is not None:
        rows.append(("prefix", f"{held['prefix']:,.1f}", "whole blocks of the prefix once"))
    estimate = answer["hand_estimate"]
    if estimate is not None:
        rows.append(
            (
                "hand estimate",
                f"{estimate['requests']:,.1f}",
                f"utilization of what weights leave: {estimate['gib']:.2f} GiB",
            )
        )
    head = ("requests at once", "memory holds", "because")
    return [
        "",
        f"mean {lengths['tokens']:,.0f} tokens ({lengths['where']}){prefix}",
        _table(head, rows),
        f"binding: {answer['binding']}",
    ]


def _options(answer: Answer) -> list[str]:
    """Answer the ways to hold the users that were asked for."""
    if answer["options"] is None:
        return []
    rows = []
    for option in answer["options"]:
        utilization, price = option["utilization"], option["usd_per_hour"]
        rows.append(
            (
                option["flags"],
                f"{option['held']:,}",
                "none" if utilization is None else f"{utilization:.2f}",
                "none" if option["gpus"] is None else str(option["gpus"]),
                "" if price is None else f"{price:.2f}",
            )
        )
    head = (
        f"to hold {answer['users']:,} users",
        f"users at {answer['gpu_memory_utilization']:g}",
        "least utilization for all",
        "cards for all",
        "USD/h",
    )
    return ["", _table(head, rows)]


def capacity_report(answer: Answer) -> str:
    """Answer the report of `sim.commands.capacity.answer_of`, vLLM's own line first."""
    lines = [answer["kv_cache_line"], f"KV pool: {answer['kv_pool_provenance']}"]
    lines += [*_card(answer), *_holds(answer), *_options(answer)]
    return "\n".join(lines)


def _number(what: str, value: float | None) -> str:
    if value is None:
        return ""
    if "GiB" in what or what in {"concurrency", "utilization"}:
        return f"{value:,.2f}"
    return f"{value:,.0f}"


def log_report(answer: Answer) -> str:
    """Answer the report of ``kvsim capacity --from-log``: said and computed, then findings."""
    lines: list[str] = []
    for number, start in enumerate(answer["starts"], 1):
        title = f"start {number}" if len(answer["starts"]) > 1 else "the server"
        parts = (start["name"], start["engine"], start["version"], start["model"], start["gpu"])
        lines += [f"{title}: {', '.join(part for part in parts if part)}"]
        rows = [
            (
                line["what"],
                str(line["line"]),
                _number(line["what"], line["said"]),
                _number(line["what"], line["ours"]),
                "" if line["percent"] is None else f"{line['percent']:+.2f}",
                line["origin"],
            )
            for line in start["lines"]
        ]
        if rows:
            lines.append(_table(("figure", "line", "said", "computed", "% off", "from"), rows))
        lines += [f"note: {note}" for note in start["notes"]]
        lines.append("")
    lines += [f"- {finding}" for finding in answer["findings"]]
    return "\n".join(lines).rstrip()
