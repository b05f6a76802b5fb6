"""One HTML file that needs nothing else: summary, charts, and the map with its data inside.

Whatever comes from a file is data: text is escaped, JSON holds no character that ends a script, and
the page's own policy lets run no script but its own and load nothing.
"""

import base64
import hashlib
import html
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from sim.comparison import Table, comparison_rows, comparison_tables
from sim.plots.results import Results
from sim.report import Summary, provenance, run_report

CHARTS = ("running", "slots", "series")
_ALT = {
    "running": "Running requests over time, one curve an allocator",
    "slots": "Where the KV slots are over time, one panel an allocator",
    "series": "Requests, KV slots, prefix hits and preemptions over time",
}


def make_page(
    summaries: Sequence[Summary], data: dict[str, Any], charts: dict[str, bytes]
) -> bytes:
    """Answer the page of runs side by side.

    *data* is what the script draws; *charts* are PNG files by the name of the chart.
    """
    script = "".join(_source(name) for name in ("film.js", "map.js", "series.js", "page.js"))
    style = _source("page.css")
    rows = comparison_rows(summaries)
    first = summaries[0]
    title = f"KV pool of {first['model_id']} on {first['gpu']}"
    parts = {
        "TITLE": html.escape(title),
        "FACTS": html.escape(
            f"{first['num_prompts']:,} {'request' if first['num_prompts'] == 1 else 'requests'}, "
            f"{first['kv_cache_slots']:,} KV slots, block size "
            f"{first['block_size']}, times {first['timing_provenance'] or 'without a source'}"
        ),
        "TABLES": "".join(_table(table) for table in comparison_tables(rows)),
        "BASELINE": html.escape(rows[0]["baseline"]),
        "DETAILS": _details(summaries),
        "CHARTS": "".join(_chart(name, png) for name, png in charts.items()),
        "POLICY": f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'",
        "STYLE": style,
        "DATA": json_in_html(data).decode(),
        "SCRIPT": script,
    }
    # Split first: no part is looked into for the marks of another.
    pieces = _source("page.html").split("@@")
    assert set(pieces[1::2]) == parts.keys(), "every part has one place"
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces).encode()


def json_in_html(value: object) -> bytes:
    """Answer *value* as JSON that can stand in a script element, whatever its texts are."""
    encoded = msgspec.json.encode(value)
    # JSON itself has none of these outside of texts.
    for char in "<>&\u2028\u2029":
        encoded = encoded.replace(char.encode(), f"\\u{ord(char):04x}".encode())
    return encoded


def draw_charts(results: Results) -> dict[str, bytes]:
    """Answer the charts over time of *results*, as PNG files by name."""
    from sim.plots.figures import choose, write_charts  # noqa: PLC0415  # who is refused need not

    drawn, _ = choose(results, None, [], [])
    chosen = {name: drawn[name] for name in CHARTS if name in drawn}
    with tempfile.TemporaryDirectory() as folder:
        paths, _ = write_charts(Path(folder), chosen, ["png"])
        return {path.stem: path.read_bytes() for path in paths}


def _source(name: str) -> str:
    return files("sim.block_map").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _table(table: Table) -> str:
    def cell(text: str, tag: str, attributes: str = "") -> str:
        return f"<{tag}{attributes}>{html.escape(text)}</{tag}>"

    heads = [header.replace("-\n", "").replace("\n", " ") for header in table.headers]
    head = "".join(cell(text, "th", ' scope="col"') for text in heads)
    body = ""
    for name, *values in table.rows:
        cells = "".join(
            cell(value.rstrip("* "), "td", ' class="best"' if value.endswith("*") else "")
            for value in values
        )
        body += "<tr>" + cell(name.strip(), "th", ' scope="row"') + cells + "</tr>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(table.title)}">'
        f"<table><caption>{html.escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _details(summaries: Sequence[Summary]) -> str:
    parts = [("What times and sizes rest on", provenance(summaries))]
    parts += [
        (f"{summary['allocator']}: the whole report", run_report(summary)) for summary in summaries
    ]
    return "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in parts
    )


def _chart(name: str, png: bytes) -> str:
    encoded = base64.b64encode(png).decode()
    return f'<img alt="{_ALT[name]}" src="data:image/png;base64,{encoded}">'
