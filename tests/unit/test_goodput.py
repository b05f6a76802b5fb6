"""Goodput, counted request by request from the request table, by vLLM's definition."""

import json
from pathlib import Path

import pandas as pd
import pytest

from sim.cli import main
from sim.errors import ConfigError
from sim.goodput import parse_goodput

TIGHT = ("--num-gpu-blocks-override", "14", "--max-model-len", "160")
SLOW = ("--step-time", "linear:0.01,1e-3,1e-6")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = (
        f'{{"arrival_time": {row * 0.3}, "input_length": {30 + 5 * row}, '
        f'"output_len": {1 if row % 4 == 0 else 3 * row}}}\n'
        for row in range(20)
    )
    path.write_text("".join(rows) + '{"arrival_time": 9, "input_length": 160, "output_len": 1}\n')
    return path


@pytest.mark.parametrize(
    "goodput", ["ttft:500", "tpot:20", "ttft:800,tpot:40", "e2el:900 ttft:1e4", "tpot:0", "e2el:0"]
)
def test_goodput(trace: Path, tmp_path: Path, goodput: str) -> None:
    out = tmp_path / "out"
    flags = ("--trace", str(trace), *TIGHT, *SLOW, "--goodput", goodput, "-o", str(out))
    assert main(["run", *flags]) == 0
    summary = json.loads((out / "summary.json").read_text())
    good = 0
    for row in pd.read_parquet(out / "requests.parquet").to_dict("records"):
        if isinstance(row["refused"], str):
            continue
        ttft = row["first_token_time"] - row["arrival_time"]
        latency = row["finish_time"] - row["arrival_time"]
        more = row["num_output_tokens"] - 1
        reached = {
            "ttft": 1e3 * ttft,
            "tpot": 1e3 * (latency - ttft) / more if more else 0,  # of one token: 0
            "e2el": 1e3 * latency,
        }
        limits = dict(part.split(":") for part in goodput.replace(",", " ").split())
        good += all(reached[name] <= float(limit) + 1e-9 for name, limit in limits.items())
    assert summary["request_goodput"] == pytest.approx(good / summary["duration"])
    assert summary["slo_attainment"] == good / 21  # the refused one is not served well
    assert goodput == "e2el:0" or good


def test_neither_rate_nor_goodput_unless_asked(trace: Path, tmp_path: Path) -> None:
    assert main(["run", "--trace", str(trace), *TIGHT, *SLOW, "-o", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert not summary.keys() & {"request_goodput", "slo_attainment", "request_rate"}


@pytest.mark.parametrize("rate", ["4", "inf"])
def test_request_rate_of_a_run(trace: Path, tmp_path: Path, rate: str) -> None:
    """The manifest's configuration repeats it, inf too, for which JSON has no number."""
    first, again = tmp_path / "first", tmp_path / "again"
    flags = ("--trace", str(trace), *TIGHT, *SLOW)
    assert main(["run", *flags, "--request-rate", rate, "-o", str(first)]) == 0
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads((first / "manifest.json").read_text())["config"]))
    assert main(["run", "--config", str(config), "-o", str(again)]) == 0
    summary = json.loads((again / "summary.json").read_text())
    assert summary["request_rate"] == (rate if rate == "inf" else float(rate))
    arrivals = pd.read_parquet(again / "requests.parquet")["arrival_time"]
    assert arrivals.iloc[-1] == pytest.approx(0 if rate == "inf" else 20 / 4)
    assert (first / "summary.json").read_bytes() == (again / "summary.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"^--goodput: expected METRIC:MILLISECONDS"),
        ("tpt:3", r"unknown metric 'tpt'; did you mean 'tpot'\?"),
        ("ttft", r"ttft: expected milliseconds, at least 0, got ''"),
        ("ttft:-1", r"got '-1'"),
        ("ttft:nan", r"got 'nan'"),
        ("ttft:inf", r"got 'inf'"),
        ("ttft:1 ttft:2", r"ttft is there twice"),
        ("itl:5", r"unknown metric 'itl'"),
    ],
)
def test_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_goodput(text)
