"""Every figure of summary.json, computed again the slow way from the step table."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cli import main
from sim.gaps import describe, single_gaps
from sim.summary import _inter_token_latency, _peak_per_second

SLOW = ("--step-time", "linear:0.01,1e-3,1e-6")
TIGHT = ("--num-gpu-blocks-override", "14", "--max-model-len", "160", *SLOW)
ROOMY = ("--num-gpu-blocks-override", "200", "--max-model-len", "160", *SLOW)
STATES = ("live", "reserved", "internal", "external", "cached", "free")


@given(st.dictionaries(st.integers(1, 10**13), st.integers(1, 40), min_size=1, max_size=30))
@settings(deadline=None)
def test_pooled_gaps_equal_the_expanded_list(gaps: dict[int, int]) -> None:
    expanded = np.repeat(list(gaps), list(gaps.values())) / 1e12
    got = _inter_token_latency(describe(single_gaps(gaps)))
    expected = {
        "mean_itl_ms": expanded.mean(),
        "median_itl_ms": np.percentile(expanded, 50),
        "std_itl_ms": expanded.std(),
        "p99_itl_ms": np.percentile(expanded, 99),
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(1e3 * value, rel=1e-9, abs=1e-9), name


def test_no_gaps() -> None:
    nothing = _inter_token_latency(describe(single_gaps({})))
    assert set(nothing.values()) == {None}


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=20))
def test_peak_per_second(lives: list[tuple[float, float]]) -> None:
    start = np.array([first for first, _ in lives])
    end = np.array([first + length for first, length in lives])
    origin = start.min()
    alive: Counter[int] = Counter()
    for first, last in zip(start, end, strict=True):
        alive.update(range(int(first - origin), int(last - origin) + 1))
    assert _peak_per_second(start, end) == max(alive.values())


def _trace(path: Path) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    arrival = 2.5
    for row in range(40):
        arrival += float(rng.exponential(0.06)) + (20.0 if row == 25 else 0.0)  # a long pause
        segments = [[f"s{row % 3}", int(rng.integers(1, 50))], [f"u{row}", 1 + row]]
        output = 1 if row % 7 == 0 else int(rng.integers(2, 60))
        rows.append({"arrival_time": round(arrival, 6), "prompt": segments, "output_len": output})
    rows[0]["prompt"] = [["too long", 160]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _token_times(requests: pd.DataFrame, steps: pd.DataFrame) -> dict[str, list[float]]:
    """Answer when each token of each request came, from who was scheduled for how many tokens.

    A request samples at the end of a step that brings what it computed up to what it has. A
    preemption takes away what it computed; these requests are so short that all of it is computed
    again in the step that resumes them, but for the cache hit, which adds up to the step's.
    """
    prompts = dict(zip(requests["request_id"], requests["num_prompt_tokens"], strict=True))
    cached = dict(zip(requests["request_id"], requests["num_cached_tokens"], strict=True))
    times: dict[str, list[float]] = {name: [] for name in prompts}
    computed: dict[str, float] = {}
    for step in steps.to_dict("records"):
        for name in filter(None, step["preempted"].split(";")):
            computed.pop(name)
        scheduled = dict(part.rsplit(":", 1) for part in step["scheduled"].split(";") if part)
        for name in filter(None, step["admitted"].split(";")):
            computed[name] = cached[name]
        hits = 0.0
        for name in filter(None, step["resumed"].split(";")):
            computed[name] = prompts[name] + len(times[name]) - int(scheduled[name])
            hits += computed[name]
        assert hits == step["preempted_cache_hits"]
        end = step["time"] + step["duration"]
        for name, tokens in scheduled.items():
            computed[name] += int(tokens)
            has = prompts[name] + len(times[name])
            assert computed[name] <= has
            if computed[name] == has:
                times[name].append(end)
    return times


def _spread(name: str, seconds: Any) -> dict[str, float]:
    values = 1e3 * np.array(seconds)
    return {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.percentile(values, 50),
        f"std_{name}_ms": values.std(),
        f"p99_{name}_ms": np.percentile(values, 99),
    }


def _expected(requests: pd.DataFrame, steps: pd.DataFrame) -> dict[str, float]:
    """Answer what `sim.summary.summarize` should, from the rows of single steps."""
    times = _token_times(requests, steps)
    arrival = dict(zip(requests["request_id"], requests["arrival_time"], strict=True))
    prompts = dict(zip(requests["request_id"], requests["num_prompt_tokens"], strict=True))
    done = [name for name, tokens in times.items() if tokens]
    first_served = min(arrival[name] for name in done)
    start, end = min(arrival.values()), max(times[name][-1] for name in done)
    duration = end - start
    num_output = sum(len(times[name]) for name in done)
    per_second, alive = Counter[int](), Counter[int]()
    for name in done:
        per_second.update(int(time - first_served) for time in times[name])
        begin, last = arrival[name] - first_served, times[name][-1] - first_served
        alive.update(range(int(begin), int(last) + 1))
    weight = steps["duration"]
    waits = dict(zip(requests["request_id"], requests["scheduled_time"], strict=True))
    waited = sum(waits[name] - arrival[name] for name in done)
    gone: dict[str, float] = {}
    for step in steps.to_dict("records"):
        gone |= dict.fromkeys(filter(None, step["preempted"].split(";")), step["time"])
        for name in filter(None, step["resumed"].split(";")):
            waited += step["time"] - gone.pop(name)

    def mean(column: str) -> float:
        return float((steps[column] * weight).sum() / duration)

    held = sum(mean(f"kv_{state}_slots") for state in ("live", "reserved", "internal"))
    top = steps[["kv_live_slots", "kv_reserved_slots", "kv_internal_slots"]].sum(axis=1).max()
    capacity = steps[[f"kv_{state}_slots" for state in STATES]].sum(axis=1)
    assert capacity.nunique() == 1
    more = [name for name in done if len(times[name]) > 1]
    return {
        "num_prompts": len(requests),
        "completed": len(done),
        "failed": len(requests) - len(done),
        "duration": duration,
        "total_input_tokens": sum(prompts[name] for name in done),
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_output + sum(prompts[n] for n in done)) / duration,
        "max_output_tokens_per_s": max(per_second.values()),
        "max_concurrent_requests": max(alive.values()),
        **_spread("ttft", [times[name][0] - arrival[name] for name in done]),
        **_spread("e2el", [times[name][-1] - arrival[name] for name in done]),
        **_spread("tpot", [(times[n][-1] - times[n][0]) / (len(times[n]) - 1) for n in more]),
        **_spread("itl", np.concatenate([np.diff(times[name]) for name in done])),
        "num_steps": len(steps),
        "kv_cache_slots": capacity.iloc[0],
        "mean_num_requests_running": mean("running"),
        "mean_num_requests_waiting": waited / duration,
        "max_num_requests_running": steps["running"].max(),
        "mean_kv_cache_usage_perc": held / capacity.iloc[0],
        "max_kv_cache_usage_perc": top / capacity.iloc[0],
        # Between steps nobody holds anything, so these means need no more than the steps.
        **{
            f"kv_{state}_pct": 100 * mean(f"kv_{state}_slots") / capacity.iloc[0]
            for state in ("live", "reserved", "internal")
        },
        "prefix_cache_queries": steps["prefix_cache_queries"].sum(),
        "prefix_cache_hits": steps["prefix_cache_hits"].sum(),
        "preempted_cache_queries": steps["preempted_cache_queries"].sum(),
        "preempted_cache_hits": steps["preempted_cache_hits"].sum(),
        "num_preemptions": requests["num_preemptions"].sum(),
        "recomputed_tokens": steps["recomputed_tokens"].sum(),
        "allocation_refusals": steps["num_refusals"].sum(),
    }


@pytest.mark.parametrize("pool", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize(
    "allocator", ["prefix", "paged", "reserve-max", "reserve-pow2", "reserve-oracle"]
)
def test_every_figure_from_the_steps(tmp_path: Path, allocator: str, pool: tuple[str, ...]) -> None:
    rows = _trace(tmp_path / "trace.jsonl")
    flags = ["--trace", str(tmp_path / "trace.jsonl"), *pool, "--allocator", allocator]
    assert main(["run", *flags, "--save-steps", "-o", str(tmp_path)]) == 0
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    steps = pd.read_parquet(tmp_path / "steps.parquet")
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    expected = _expected(requests, steps)
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert sum(summary[f"kv_{state}_pct"] for state in STATES) == pytest.approx(100)
    lengths = [min(row["output_len"], 160 - sum(n for _, n in row["prompt"])) for row in rows]
    assert summary["total_output_tokens"] == sum(lengths[1:])
    assert summary["refused"] == {"prompt_too_long": 1}
    hits, queries = summary["prefix_cache_hits"], summary["prefix_cache_queries"]
    rate = summary["prefix_cache_hit_rate"]
    assert rate == (pytest.approx(hits / queries) if allocator == "prefix" else None)
    if pool is TIGHT and allocator in {"prefix", "paged"}:
        assert summary["num_preemptions"] > 0
