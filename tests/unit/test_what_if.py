"""Other settings, run in process: the figures are those of `kvsim run`, and changes are checked."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.arrivals import recorded
from sim.cli import main
from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.settings import FLAG_RANK, Given, resolve
from sim.what_if import Change, Outcome, changed, compared, what_if
from workloads.record import Trace

SLOW = {"step_time": "linear:0.01,0,0", "num_gpu_blocks_override": 101, "max_model_len": 160}


def config_of(**values: Any) -> RunConfig:
    given = {name: Given(value, FLAG_RANK, f"--{name}") for name, value in values.items()}
    return resolve(given).run


@pytest.fixture
def equal_requests(tmp_path: Path) -> Path:
    """Forty requests at once of 33 + 15 tokens: three blocks of 16 from the first token on."""
    path = tmp_path / "equal.jsonl"
    line = {"arrival_time": 0, "input_length": 33, "output_len": 16}
    path.write_text(f"{json.dumps(line)}\n" * 40)
    return path


def trace_of(config: RunConfig) -> Trace:
    return recorded(config.load)


def test_figures_by_hand(equal_requests: Path) -> None:
    """100 usable blocks hold 33 requests of three; 16 steps of 10 ms serve them, 16 the other 7."""
    config = config_of(**SLOW, trace=str(equal_requests), allocator="paged", goodput="ttft:100")
    found = what_if(config, trace_of(config))
    assert found.max_num_requests_running == 33
    assert found.mean_num_requests_running == pytest.approx((33 + 7) / 2)
    assert found.users_held == pytest.approx(100 / 3)
    assert found.output_throughput == pytest.approx(40 * 16 / 0.32)
    assert found.median_ttft_ms == pytest.approx(10)
    assert found.median_tpot_ms == pytest.approx(10)
    assert found.slo_attainment == pytest.approx(33 / 40)
    assert found.request_goodput == pytest.approx(33 / 0.32)
    assert found.num_preemptions == 0
    assert found.usd_per_million_output_tokens == pytest.approx(3.0 / 3600 / 2000 * 1e6)  # A100-40
    assert found.num_gpus == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"allocator": "reserve-max"},
        {"allocator": "reserve-oracle", "placement": "buddy"},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 9, "block_size": 32},
        {"request_rate": 3.5, "goodput": "tpot:20"},
        {"request_rate": "inf"},
        {"tensor_parallel_size": 2, "gpu": "H100"},
    ],
    ids=str,
)
def test_as_kvsim_run_has_it(
    changes: dict[str, Any], samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {**SLOW, "trace": str(samples / "tokens.jsonl")}
    config = config_of(**base)
    found = what_if(config, trace_of(config), changes)
    flags = []
    for name, value in {**base, **changes}.items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    assert main(["run", "--json", *flags]) == 0
    summary = json.loads(capsys.readouterr().out)
    ours = {"users_held", "num_gpus", "usd_per_hour", "usd_per_million_output_tokens"}
    slos = {"request_goodput", "slo_attainment"} - summary.keys()
    for name in set(Outcome._fields) - ours - slos:
        assert getattr(found, name) == summary[name], name
    assert {getattr(found, name) for name in slos} <= {None}


def test_changes_go_there_and_back() -> None:
    config = config_of(model="Qwen/Qwen3-8B", gpu="H100", allocator="paged")
    assert changed(config, {}) == config
    there = changed(config, {"allocator": "contiguous", "reservation": "pow2", "block_size": 32})
    assert there.label == "reserve-pow2"
    assert changed(there, {"placement": "buddy"}).label == "reserve-pow2-buddy"
    assert changed(there, {"allocator": "paged", "block_size": 16}) == config
    assert changed(config, {"enable_prefix_caching": True}).label == "prefix"
    assert changed(config, {"gpu": "L40S"}).scheduler == config.scheduler
    assert changed(config, {"gpu": "L40S", "max_num_seqs": None}).scheduler.max_num_seqs == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_siz": 32}, "setting 'block_siz' is unknown; did you mean 'block_size'?"),
        ({"output_dir": "x"}, "setting 'output_dir' is unknown"),
        ({"block_size": 0}, "--block-size: expected a whole number, at least 1"),
        ({"allocator": "pagd"}, "--allocator: unknown value 'pagd'; did you mean 'paged'"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        changed(config_of(), changes)
    assert str(refusal.value).startswith(message)


def test_a_trace_that_was_read_stays(samples: Path) -> None:
    config = config_of()
    for name, value in (("trace", str(samples / "tokens.jsonl")), ("seed", 3)):
        with pytest.raises(ConfigError, match=f"setting '{name}'"):
            what_if(config, trace_of(config), {name: value})


def test_what_does_not_fit_is_refused() -> None:
    config = config_of()
    with pytest.raises(CapacityError, match="weights do not fit"):
        what_if(config, trace_of(config), {"model": "meta-llama/Llama-3.1-70B"})


def test_replicas_by_hand(equal_requests: Path) -> None:
    """Two pools of 100 blocks take 20 requests each: all at once, in 16 steps of 10 ms."""
    config = config_of(**SLOW, trace=str(equal_requests), allocator="paged", goodput="ttft:100")
    found = what_if(config, trace_of(config), replicas=2)
    assert found.max_num_requests_running == found.mean_num_requests_running == 40
    assert found.users_held == pytest.approx(2 * 100 / 3)
    assert found.output_throughput == pytest.approx(40 * 16 / 0.16)
    assert found.slo_attainment == 1
    assert found.request_goodput == pytest.approx(40 / 0.16)
    assert found.max_kv_cache_usage_perc == pytest.approx(0.6)
    assert found.num_gpus == 2
    assert found.usd_per_million_output_tokens == pytest.approx(6.0 / 3600 / 4000 * 1e6)


@pytest.mark.parametrize(("limit", "running"), [(7, 7), (2, 3)])
def test_replicas_share_out_concurrency(equal_requests: Path, limit: int, running: int) -> None:
    config = config_of(**SLOW, trace=str(equal_requests), allocator="paged", max_concurrency=limit)
    assert what_if(config, trace_of(config), replicas=3).max_num_requests_running == running


def test_replicas_share_out_what_a_run_has() -> None:
    """Every request is served once, and percentiles are of all of them."""
    roomy = {**SLOW, "num_gpu_blocks_override": 5001, "max_model_len": 8192}
    config = config_of(**roomy, goodput="tpot:50")
    trace = trace_of(config)
    one, three = (what_if(config, trace, replicas=n) for n in (1, 3))
    assert three.median_tpot_ms == one.median_tpot_ms == pytest.approx(10)  # no step is slower
    assert three.slo_attainment == one.slo_attainment == 1
    assert three.p99_ttft_ms is not None
    assert one.p99_ttft_ms is not None
    assert three.p99_ttft_ms < one.p99_ttft_ms
    json.dumps(three._asdict())


def test_more_replicas_than_sessions(equal_requests: Path) -> None:
    config = config_of(**SLOW, trace=str(equal_requests), allocator="paged")
    with pytest.raises(ConfigError, match=r"^41 replicas: .*equal.jsonl has fewer sessions$"):
        what_if(config, trace_of(config), replicas=41)


def test_compared() -> None:
    config = config_of(**SLOW)
    before = what_if(config, trace_of(config))
    after = before._replace(output_throughput=None, num_preemptions=before.num_preemptions + 3)
    found = compared(before, after)
    assert found["num_gpus"] == Change(1, 1, 0, 1.0)
    assert found["output_throughput"] == Change(before.output_throughput, None, None, None)
    assert found["num_preemptions"].difference == 3
    assert found.keys() == set(Outcome._fields) - {"timing_provenance"}
