"""What is in a trace, in words and as a chart; numbers are `workloads.inspection`'s."""

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import tabulate

from workloads.record import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_BINS = 120
"""Points of the curve of arrivals."""


def inspection_report(found: dict[str, Any]) -> str:
    """Answer the report of what `workloads.inspection.inspect` *found*."""
    rate, burstiness = found["request_rate"], found["burstiness"]
    lines = [
        f"{found['name']}: {found['format']}, {found['num_requests']:,} requests in "
        f"{found['duration']:,.1f} s"
        + ("" if rate is None else f", {rate:.4g} a second")
        + ("" if burstiness is None else f", burstiness {burstiness:.3g} (1 is Poisson)"),
        f"{found['total_input_tokens']:,} tokens in, {found['total_output_tokens']:,} out",
        "",
    ]
    rows = {"tokens in": found["input_len"], "tokens out": found["output_len"]}
    sessions = found["sessions"]
    if sessions is not None:
        rows |= {"turns": sessions["turns"], "think time, s": sessions["think_time"]}
    names = list(found["input_len"])
    lines.append(
        tabulate.tabulate(
            [[what, *(f"{values[name]:,.6g}" for name in names)] for what, values in rows.items()],
            ["", *names],
            tablefmt="simple",
            colalign=("left", *("right" for _ in names)),
            disable_numparse=True,
        )
    )
    if sessions is not None:
        lines.append(f"{sessions['num_sessions']:,} sessions")
    return "\n".join([*lines, "", *_reuse_lines(found), *_notes(found)])


def _reuse_lines(found: dict[str, Any]) -> list[str]:
    reuse = found["reuse"]
    lines = [
        f"of prompt tokens {100 * reuse['repeated_tokens']:.2f} % were in an earlier prompt",
        f"blocks of {reuse['block_size']}: {reuse['num_accesses']:,} accesses to "
        f"{reuse['num_blocks']:,}, {100 * reuse['accessed_once']:.1f} % of them once; a cache "
        f"without limit hits {100 * reuse['hit_ratio']:.2f} %"
        + (f" (by one block in {reuse['one_in']})" if reuse["one_in"] > 1 else ""),
    ]
    if reuse["hit_ratio"]:
        shown = ", ".join(
            f"{100 * each['hit_ratio']:.2f} % of {each['blocks']:,}" for each in reuse["lru"]
        )
        lines.append(f"LRU hits, by blocks it holds: {shown}")
        distance = reuse["reuse_distance"]
        lines.append(
            f"other blocks between two accesses: p50 {distance['p50']:,.0f}, "
            f"p90 {distance['p90']:,.0f}, p99 {distance['p99']:,.0f}"
        )
    for each in found["most_shared"]:
        lines.append(
            f"{each['num_requests']:,} requests begin with the same {each['num_tokens']:,} tokens"
        )
    return lines


def _notes(found: dict[str, Any]) -> list[str]:
    return ["", *(f"- {odd}" for odd in found["oddities"])] if found["oddities"] else []


def draw_trace(trace: Trace, found: dict[str, Any]) -> "Figure":
    """Draw arrivals over time, lengths, and the hits of caches of any size."""
    import numpy as np  # noqa: PLC0415  # only who draws pays
    from matplotlib.figure import Figure  # noqa: PLC0415  # as above

    from sim.plots.style import PALETTE  # noqa: PLC0415  # as above
    from workloads.inspection import lru_curve  # noqa: PLC0415  # as above
    from workloads.record import PS_PER_S  # noqa: PLC0415  # as above

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    arrivals, lengths, hits = figure.subplots(1, 3)
    seconds = (trace.arrival_ps - trace.arrival_ps[0]) / PS_PER_S
    end = max(float(seconds[-1]), 1e-9)
    counts, edges = np.histogram(seconds, bins=min(NUM_BINS, len(trace)), range=(0, end))
    arrivals.stairs(counts / np.diff(edges), edges, color=PALETTE[0])
    arrivals.set(xlabel="time (s)", ylabel="requests/s", ylim=(0, None), xlim=(0, end))
    rate = found["request_rate"]
    arrivals.set_title("all at once" if rate is None else f"{rate:.3g} requests/s", loc="left")
    for what, values, color, line in (
        ("in", trace.num_prompt_tokens, PALETTE[0], "-"),
        ("out", trace.num_output_tokens, PALETTE[1], "--"),
    ):
        lengths.ecdf(values, color=color, linestyle=line, label=f"tokens {what}")
    lengths.set(xscale="log", xlabel="tokens", ylabel="share of requests", ylim=(0, 1))
    median = found["input_len"]["p50"], found["output_len"]["p50"]
    lengths.set_title(f"half have {median[0]:,.0f} in, {median[1]:,.0f} out", loc="left")
    lengths.legend(frameon=False)
    reuse = found["reuse"]
    sizes, ratios = lru_curve(trace, reuse["block_size"])
    hits.plot(sizes, 100 * ratios, color=PALETTE[2])
    hits.axhline(100 * reuse["hit_ratio"], color="#888888", linestyle=":", label="without limit")
    hits.set(xscale="log", ylim=(0, None), ylabel="blocks hit (%)")
    hits.set_xlabel(f"LRU cache (blocks of {reuse['block_size']} tokens)")
    hits.set_title(f"a cache can hit {100 * reuse['hit_ratio']:.1f} %", loc="left")
    hits.legend(frameon=False)
    figure.suptitle(PurePath(found["name"]).name, fontsize=11)
    return figure
