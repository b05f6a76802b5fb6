"""All of this folder: ``python results/regenerate.py paper``.

`TASKS` names every run. ``runs.csv`` has what each measured, ``curves.csv`` the normalized
latencies, ``summary.csv`` and ``host_check.csv`` what is published beside what came out.
"""

import csv
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any, NamedTuple

from paper import experiments
from paper.charts import draw
from paper.experiments import (
    ALPACA,
    BLOCK_BYTES,
    HOST_CHECK,
    LEVELS,
    MAIN_LEVEL,
    MAPPED,
    SHAREGPT,
    Curve,
)
from paper.runs import (
    ENGINE,
    HERE,
    HOST_PER_REQUEST_S,
    HOST_S,
    SEEDS,
    SERVERS,
    SYSTEMS,
    Load,
    run,
)
from sim.files import atomic, write_json
from sim.results import versions

FIGURE_2 = {
    "Orca (Max)": {"live": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "Orca (Pow2)": {"live": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "Orca (Oracle)": {"live": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
    "vLLM": {"live": 96.3},
}
FIGURE_13 = {
    "ShareGPT, 2 req/s": dict(zip(SYSTEMS, (7.00, 9.81, 13.62, 30.42), strict=True)),
    "Alpaca, 30 req/s": dict(zip(SYSTEMS, (7.00, 43.24, 72.75, 132.44), strict=True)),
}
FIGURE_12 = {"Orca (Oracle)": (1.7, 2.7), "Orca (Max)": (2.7, 8.0)}
FIGURE_15 = {
    ("Alpaca", 2): 6.09, ("Alpaca", 4): 8.53, ("Alpaca", 6): 9.79,
    ("ShareGPT", 2): 16.2, ("ShareGPT", 6): 30.5,
}  # fmt: skip
FIGURE_16 = {80: 1.67, 341: 3.58}
WASTE_MB = (4, 15)
"""vAttention's, of a request at worst with groups of 64 KB."""

LOADS = {"ShareGPT, 2 req/s": SHAREGPT, "Alpaca, 30 req/s": ALPACA}
ORCA = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
VARIATIONS: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "no host time": ("", {"host": 0.0}, tuple(SYSTEMS)),
    "twice the host time": ("", {"host": 2.0}, tuple(SYSTEMS)),
    "answers cut at 1,024 tokens": ("sharegpt-cut", {}, tuple(SYSTEMS)),
    "skewed prompts": ("sharegpt-skewed", {}, tuple(SYSTEMS)),
    "first fit, no buddies": ("", {"changes": {"placement": "first_fit"}}, ORCA),
    "chunked prefill": ("", {"changes": {"enable_chunked_prefill": True}}, ["vLLM"]),
}
"""What is changed, one at a time: other lengths, arguments of `experiments.occupancy`, of whom."""

Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Row(NamedTuple):
    """A line of ``summary.csv``.

    Attributes:
        published: a value, or the ends of a range.
        limit: of the difference, in its unit; 0 of a range.
    """

    figure: str
    variant: str
    quantity: str
    published: float | tuple[float, float]
    ours: float
    unit: str = "%"
    limit: float | None = None

    @property
    def difference(self) -> float:
        """In points, or in per cent of what is published; 0 inside a range."""
        if isinstance(self.published, tuple):
            low, high = self.published
            near = min(max(self.ours, low), high)
        else:
            near = self.published
        return self.ours - near if self.unit == "points" else 100 * (self.ours / near - 1)

    def cells(self) -> dict[str, str]:
        """Answer it as text, by column."""
        bounds = self.published if isinstance(self.published, tuple) else (self.published,)
        met = "" if self.limit is None else "no" if abs(self.difference) > self.limit else "yes"
        return {
            "figure": self.figure,
            "variant": self.variant,
            "quantity": self.quantity,
            "published": " to ".join(f"{bound:g}" for bound in bounds),
            "ours": f"{self.ours:.9g}",
            "difference": f"{self.difference:+.1f}",
            "unit": self.unit,
            "limit": "" if self.limit is None else f"{self.limit:g}",
            "met": met,
        }


# ---- what is run


def tasks() -> dict[tuple[Any, ...], Task]:
    """Answer every run by name, the longest first."""
    found: dict[tuple[Any, ...], Task] = {}
    for name, server in SERVERS.items():
        load = Load("sharegpt", 1, 900 if name == "OPT-175B" else 3600)
        for system in SYSTEMS:
            found["curve", name, system] = (experiments.curve, (system, server, load, 0.5), {})
    for prefix in FIGURE_16:
        for system in ("Orca (Oracle)", "vLLM"):
            found["prefix", prefix, system] = (experiments.shared_prefix, (system, prefix), {})
    for system in SYSTEMS:
        for load_name, load in LOADS.items():
            for seed in SEEDS[: 1 if load is ALPACA else None]:
                found["occupancy", "", load_name, system, seed] = (
                    experiments.occupancy, (system, load._replace(seed=seed)), {},
                )  # fmt: skip
            for change, (lengths, arguments, systems) in VARIATIONS.items():
                if system not in systems or (load is ALPACA and "host" not in arguments):
                    continue
                changed = load._replace(lengths=lengths or load.lengths)
                found["occupancy", change, load_name, system, 0] = (
                    experiments.occupancy, (system, changed), arguments,
                )  # fmt: skip
    for lengths, samples in FIGURE_15:
        found["sampling", lengths, samples] = (
            experiments.sampling_saving, (lengths.lower(), samples), {},
        )  # fmt: skip
    for longest in HOST_CHECK:
        found["host check", longest] = (experiments.host_check, (longest,), {})
    return found


def call(task: Task) -> Any:
    """Answer what *task* measures."""
    function, arguments, keywords = task
    return function(*arguments, **keywords)


def _run_all() -> dict[tuple[Any, ...], Any]:
    named = tasks()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:
        results = {}
        for name, result in zip(named, pool.map(call, named.values()), strict=True):
            sys.stderr.write(f"paper: {', '.join(str(part) for part in name if part != '')}\n")
            results[name] = result
        return results


# ---- what is written


def table_1() -> list[Row]:
    """Answer the token slots of each model."""
    return [
        Row("Table 1", name, "KV slots", server.slots, experiments.slots(server))
        for name, server in SERVERS.items()
    ]


def figures_2_and_13(runs: Mapping[tuple[Any, ...], Mapping[str, float]]) -> list[Row]:
    """Answer means over seeds of *runs*, as `tasks` names them."""

    def mean(load: str, system: str, measure: str) -> float:
        return fmean(run[measure] for name, run in runs.items() if name[1:4] == ("", load, system))

    sharegpt = "ShareGPT, 2 req/s"
    rows = []
    for system, shares in FIGURE_2.items():
        for state, share in shares.items():
            ours = mean(sharegpt, system, state)
            rows.append(Row("Fig. 2", system, f"{state} (% of slots)", share, ours, "points", 3))
        if system in ORCA:
            live, reserved = (mean(sharegpt, system, s) for s in ("live", "reserved"))
            published = shares["live"] / (shares["live"] + shares["reserved"])
            name = "live / (live + reserved)"
            rows.append(Row("Fig. 2", system, name, round(published, 3), live / (live + reserved)))
    for load, batches in FIGURE_13.items():
        for system, batch in batches.items():
            limit = 0.05 if system == "Orca (Max)" else 15
            name, ours = f"batched requests, {load}", mean(load, system, "running")
            rows.append(Row("Fig. 13", system, name, batch, ours, "%", limit))
    return rows


def ratios(results: Mapping[tuple[Any, ...], Curve]) -> list[Row]:
    """Answer how many times the rates of others vLLM sustains (Figures 12 and 16)."""
    rows = []
    for name in SERVERS:
        for level in LEVELS:
            rates = {s: results["curve", name, s].sustained[level] for s in SYSTEMS}
            for other, band in FIGURE_12.items():
                quantity = f"rate of vLLM / rate of {other}, {level} s a token"
                ours = rates["vLLM"] / rates[other]
                limit = 0 if level == MAIN_LEVEL else None
                rows.append(Row("Fig. 12", name, quantity, band, ours, "%", limit))
    for prefix, published in FIGURE_16.items():
        for level in LEVELS:
            paged, oracle = (
                results["prefix", prefix, system].sustained[level]
                for system in ("vLLM", "Orca (Oracle)")
            )
            quantity = f"rate of vLLM / rate of Orca (Oracle), {level} s a token"
            limit = 25 if level == MAIN_LEVEL else None
            name = f"prefix of {prefix} tokens"
            rows.append(Row("Fig. 16", name, quantity, published, paged / oracle, "%", limit))
    return rows


def page_groups() -> list[Row]:
    """Answer vAttention's waste and batches."""
    rows = []
    for mapped in MAPPED:
        name = f"{mapped.model.partition('/')[2]}, {mapped.gpus} GPU"
        waste = experiments.worst_waste(mapped, "64 KB") / 2**20
        rows.append(Row("vAttention", name, "waste at worst, 64 KB (MB)", WASTE_MB, waste))
        for group in BLOCK_BYTES:
            batch = experiments.largest_batch(mapped, group)
            quantity = f"largest batch, {group}" + " (given)" * (group == "64 KB")
            rows.append(Row("vAttention", name, quantity, mapped.batches[group], batch))
    return rows


def _write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [
        {key: f"{value:.9g}" if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]
    with atomic(HERE / name) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _write_curves(curves: Mapping[tuple[Any, ...], Curve]) -> None:
    rows = []
    for (kind, which, system), curve in curves.items():
        model, prefix = (which, 0) if kind == "curve" else ("LLaMA-13B", which)
        for rate, latency in curve.tried.items():
            row = {"model": model, "prefix_tokens": prefix, "system": system}
            rows.append(row | {"request_rate": rate, "normalized_latency_s": latency})
    _write("curves.csv", rows)


def _manifest() -> dict[str, Any]:
    settings: dict[str, Any] = SERVERS["OPT-13B"].settings() | SYSTEMS["vLLM"]
    result = run(SHAREGPT._replace(seconds=10).trace(), settings)
    return versions() | {
        "engine": ENGINE,
        "systems": SYSTEMS,
        "servers": {name: server._asdict() for name, server in SERVERS.items()},
        "seeds": SEEDS,
        "host_overhead_s": {"a step": HOST_S, "a request of a step": HOST_PER_REQUEST_S},
        "timing": [source._asdict() for source in result.step_time.sources],
    }


def _measured(names: Sequence[str], results: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    return {name: value for name, value in results.items() if name[0] in names}


def main(*, figures: bool = False) -> None:
    """Write every file of this folder but the README; or only draw the figures again."""
    if not figures:
        results = _run_all()
        runs = _measured(["occupancy"], results)
        curves = _measured(["curve", "prefix"], results)
        columns = ("change", "load", "system", "seed")
        _write("runs.csv", (dict(zip(columns, n[1:], strict=True)) | m for n, m in runs.items()))
        _write_curves(curves)
        check = (
            {"longest_output": longest, "benchmark": tokens[0], "repeated": tokens[1]}
            | {"ours": results["host check", longest]}
            for longest, tokens in HOST_CHECK.items()
        )
        _write("host_check.csv", check)
        savings = [
            Row("Fig. 15", f"{lengths}, {samples} samples", "blocks saved by sharing (%)", share,
                results["sampling", lengths, samples], "points")
            for (lengths, samples), share in FIGURE_15.items()
        ]  # fmt: skip
        rows = [*table_1(), *figures_2_and_13(runs), *ratios(curves), *savings, *page_groups()]
        _write("summary.csv", (row.cells() for row in rows))
        write_json(HERE / "manifest.json", _manifest())
    draw(HERE)
