"""The vLLM paper's experiments: what `results/paper` says is what comes out, and in the bands.

A change here is explained in CHANGELOG.md, and the experiments are made again
(``python results/regenerate.py paper``).
"""

import csv
import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "results"
SHAREGPT, ALPACA = "ShareGPT, 2 req/s", "Alpaca, 30 req/s"
SYSTEMS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")


@pytest.fixture(scope="module")
def paper() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RESULTS))
        yield importlib.import_module("paper.paper")


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / "paper" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _changed(old: dict[str, str], new: dict[str, float]) -> dict[str, tuple[str, float]]:
    """Answer old and new of each number that is not what it was, to the nine digits of the file."""
    return {
        name: (old[name], value)
        for name, value in new.items()
        if not math.isclose(float(old[name]), value, rel_tol=1e-8, abs_tol=1e-12)
    }


def _occupancy(paper: ModuleType, change: str, load: str, system: str, seed: int) -> dict[str, Any]:
    named = paper.tasks()["occupancy", change, load, system, seed]
    (old,) = (
        row
        for row in _rows("runs.csv")
        if (row["change"], row["load"]) == (change, load)
        and (row["system"], row["seed"]) == (system, str(seed))
    )
    return _changed(old, paper.call(named))


@pytest.mark.parametrize("system", SYSTEMS)
def test_memory_and_batches(paper: ModuleType, system: str) -> None:
    """Figures 2 and 13: an hour of ShareGPT-like requests."""
    assert _occupancy(paper, "", SHAREGPT, system, 0) == {}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_other_run(paper: ModuleType, system: str) -> None:
    for kind, *name in paper.tasks():
        if kind == "occupancy" and name[2] == system:
            assert _occupancy(paper, *name) == {}, name


def _published(paper: ModuleType, rows: list[Any]) -> dict[str, tuple[str, str]]:
    """Answer old and new of *rows* of the summary that differ from the file's."""
    old = {(row["figure"], row["variant"], row["quantity"]): row for row in _rows("summary.csv")}
    pairs = [(old[row.figure, row.variant, row.quantity], row.cells()) for row in rows]
    return {str(new): (was["ours"], new["ours"]) for was, new in pairs if was != new}


def test_slots_of_table_1(paper: ModuleType) -> None:
    rows = paper.table_1()
    assert _published(paper, rows) == {}
    assert [row.ours for row in rows] == [15_728, 9_557, 60_074]
    assert all(abs(row.difference) < 1.5 for row in rows)


def test_page_groups(paper: ModuleType) -> None:
    """Of vAttention; a request wastes at worst 2 * layers groups on each worker, less a token."""
    rows = paper.page_groups()
    assert _published(paper, rows) == {}
    for row in rows:
        assert abs(row.difference) < (1.6 if "waste" in row.quantity else 6), row


@pytest.mark.parametrize("longest", [32, 1536])
def test_host_time(paper: ModuleType, longest: int) -> None:
    """A benchmark of vLLM 0.1 that the paper has no part in."""
    (old,) = (row for row in _rows("host_check.csv") if row["longest_output"] == str(longest))
    new = paper.call(paper.tasks()["host check", longest])
    assert _changed(old, {"ours": new}) == {}
    assert 0.95 * float(old["repeated"]) < new < 1.05 * float(old["benchmark"])


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["Alpaca", "ShareGPT"])
def test_sharing_by_parallel_sampling(paper: ModuleType, lengths: str) -> None:
    new = paper.call(paper.tasks()["sampling", lengths, 2])
    rows = {row["variant"]: row for row in _rows("summary.csv")}
    assert _changed(rows[f"{lengths}, 2 samples"], {"ours": new}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_rates_sustained(paper: ModuleType, system: str) -> None:
    """Figure 12, OPT-66B: every rate tried, and what came of it."""
    curve = paper.call(paper.tasks()["curve", "OPT-66B", system])
    old = {
        row["request_rate"]: row["normalized_latency_s"]
        for row in _rows("curves.csv")
        if (row["model"], row["system"]) == ("OPT-66B", system)
    }
    new = {f"{rate:.9g}": latency for rate, latency in curve.tried.items()}
    assert new.keys() == old.keys()
    assert _changed(old, new) == {}


def test_what_is_published_is_met() -> None:
    """Every limit of the summary but those that the README explains."""
    rows = [row for row in _rows("summary.csv") if row["limit"]]
    missed = {
        (row["figure"], row["variant"], row["quantity"]) for row in rows if row["met"] == "no"
    }
    assert missed == {
        ("Fig. 12", "OPT-175B", "rate of vLLM / rate of Orca (Max), 0.5 s a token"),
        ("Fig. 12", "OPT-175B", "rate of vLLM / rate of Orca (Oracle), 0.5 s a token"),
        ("Fig. 2", "Orca (Pow2)", "external (% of slots)"),
        ("Fig. 2", "vLLM", "live (% of slots)"),
        ("Fig. 13", "vLLM", f"batched requests, {ALPACA}"),
    }
    assert len(rows) == 13 + 8 + 6 + 2


def test_the_share_of_live_slots_is_the_workloads() -> None:
    """Live over live and reserved: 0.60 whatever the reservation."""
    rows = [row for row in _rows("summary.csv") if row["quantity"] == "live / (live + reserved)"]
    assert len(rows) == 3
    assert all(float(row["ours"]) == pytest.approx(0.60, abs=0.01) for row in rows)


def test_the_summary_is_that_of_the_runs(paper: ModuleType) -> None:
    """Figures 2, 13, 12 and 16 are worked out from the files of the runs, whose test is above."""
    measures = ("running", "live", "reserved", "internal", "external")
    runs = {
        ("occupancy", row["change"], row["load"], row["system"], row["seed"]): {
            measure: float(row[measure]) for measure in measures
        }
        for row in _rows("runs.csv")
    }
    curves: dict[tuple[Any, ...], dict[float, float]] = {}
    for row in _rows("curves.csv"):
        prefix = int(row["prefix_tokens"])
        name = ("prefix", prefix) if prefix else ("curve", row["model"])
        tried = curves.setdefault((*name, row["system"]), {})
        tried[float(row["request_rate"])] = float(row["normalized_latency_s"])
    found = {
        name: paper.Curve(
            tried,
            {
                level: max(rate for rate, latency in tried.items() if latency <= level)
                for level in paper.LEVELS
            },
        )
        for name, tried in curves.items()
    }
    rows = [*paper.figures_2_and_13(runs), *paper.ratios(found)]
    old = {(row["figure"], row["variant"], row["quantity"]): row for row in _rows("summary.csv")}
    for row in rows:
        was = old[row.figure, row.variant, row.quantity]
        assert float(was["ours"]) == pytest.approx(row.ours, rel=1e-8), row
        assert was["met"] == row.cells()["met"], row


def test_the_tables_for_readers_say_what_the_summary_says() -> None:
    """The README's headline, and the table beside the paper's figures: every number of ours."""
    ours = {
        (row["figure"], row["variant"], row["quantity"]): float(row["ours"])
        for row in _rows("summary.csv")
    }
    page = (RESULTS / "paper" / "README.md").read_text()
    headline = (REPOSITORY / "README.md").read_text()
    running, load = f"batched requests, {SHAREGPT}", "rate of vLLM / rate of {}, 0.5 s a token"
    live = [ours["Fig. 2", system, "live (% of slots)"] for system in SYSTEMS]
    batched = [ours["Fig. 13", system, running] for system in SYSTEMS]
    for share, batch in zip(live, batched, strict=True):
        assert f"/ {share:.1f} |" in headline
        assert f"/ {batch:.2f} |" in headline
    for states in ("live", "reserved", "internal", "external"):
        name = f"{states} (% of slots)"
        shown = ", ".join(f"{ours['Fig. 2', s, name]:.1f}" for s in SYSTEMS[:3])
        assert shown.replace(", 0.0", ", 0") in page, states
    for other in ("Orca (Oracle)", "Orca (Max)"):
        ratios = [ours["Fig. 12", f"OPT-{n}", load.format(other)] for n in ("13B", "66B", "175B")]
        assert ", ".join(f"{ratio:.2f}" for ratio in ratios) in page
        assert f"/ {ratios[0]:.1f} times" in headline
    for load_name in (SHAREGPT, ALPACA):
        three = [ours["Fig. 13", s, f"batched requests, {load_name}"] for s in SYSTEMS]
        assert ", ".join(f"{batch:.2f}" for batch in three[:3]) + f"; {three[3]:.2f}" in page
