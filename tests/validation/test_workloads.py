"""Generated workloads in whole runs, against closed forms and the trace they imitate."""

from pathlib import Path
from typing import Any

import pytest

from sim.arrivals import arriving
from sim.settings import FLAG_RANK, Given, resolve
from sim.simulation import Simulation
from sim.summary import summarize
from workloads.fit import fit
from workloads.sources import read_workload
from workloads.spec_text import to_toml

REPETITION = """
num_requests = {num}
[arrivals]
kind = "constant"
rate = 2
[[classes]]
prefix = [{{ tokens = {prefix_len}, variants = {num_prefixes}, equal = true }}]
input_len = {suffix_len}
output_len = 8
"""


def _summary(path: Path, seed: int = 0, **flags: Any) -> dict[str, float]:
    given = {"trace": str(path), "seed": seed, "step_time": "linear:0.001,0.000001,0", **flags}
    run = resolve({k: Given(str(v), FLAG_RANK, k) for k, v in given.items()}).run
    trace = read_workload(path, seed=seed)
    found: dict[str, float] = summarize(Simulation(run, arriving(trace, run.load)).run())
    return found


@pytest.mark.parametrize(("num_prefixes", "prefix_len"), [(10, 256), (3, 1600), (50, 250)])
def test_hit_rate_of_prefix_repetition(tmp_path: Path, num_prefixes: int, prefix_len: int) -> None:
    num, suffix_len = 150, 40
    path = tmp_path / "x.toml"
    path.write_text(
        REPETITION.format(
            num=num, prefix_len=prefix_len, num_prefixes=num_prefixes, suffix_len=suffix_len
        )
    )
    # One at a time, in a pool that holds all: whoever is not the first of its prefix hits its
    # whole blocks.
    blocks = prefix_len // 16 * 16
    expected = (num - num_prefixes) * blocks / (num * (prefix_len + suffix_len))
    found = _summary(path, allocator="prefix", num_gpu_blocks_override=20_000)
    assert found["prefix_cache_hit_rate"] == pytest.approx(expected, rel=1e-12)


def test_a_time_of_day_in_front_destroys_the_hits(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    text = REPETITION.format(num=200, prefix_len=960, num_prefixes=1, suffix_len=40)
    rates = []
    for perturbation in ("", "perturbation = { share = 0.9 }\n"):
        path.write_text(text + perturbation)
        rates.append(_summary(path, allocator="prefix", num_gpu_blocks_override=20_000))
    before, after = (each["prefix_cache_hit_rate"] for each in rates)
    assert before == pytest.approx(0.96 * 199 / 200, rel=1e-12)
    assert after == pytest.approx(0.1 * 0.96, abs=0.06)  # of a tenth of 200 requests, give or take


@pytest.mark.slow
def test_an_imitation_of_azure_2023_loads_as_the_trace_does(shared: Path, tmp_path: Path) -> None:
    path = shared / "traces/azure2023/AzureLLMInferenceTrace_conv.csv"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    (tmp_path / "fit.toml").write_text(to_toml(fit(read_workload(path)), "x"))
    flags: dict[str, Any] = {"request_rate": 5, "step_time": "roofline", "max_model_len": 16_384}
    real = _summary(path, **flags)
    imitations = [_summary(tmp_path / "fit.toml", seed, **flags) for seed in range(5)]
    # One more request a second overloads the card. A few bursts decide the p99 of one seed.
    for name in ("median_ttft_ms", "mean_num_requests_running", "p99_ttft_ms"):
        found = sorted(each[name] for each in imitations)[2]
        assert found == pytest.approx(real[name], rel=0.1), name
