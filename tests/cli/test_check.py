"""``kvsim check``: sources, exit codes, gains, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sim.errors import FileError
from sim.health import CHECKS, go_through
from sim.health.from_metrics import facts_of_metrics
from sim.health.report import report_text
from tests.cli.conftest import Kvsim

SPEC = """\
num_requests = 80
[arrivals]
kind = "constant"
rate = 4
[[classes]]
name = "chat"
prefix = [{ tokens = 480 }]
input_len = 48
output_len = 100
"""
PERTURBED = SPEC + "perturbation = { tokens = 16, start = 10 }\n"
FLAGS = ("--max-model-len", "1024", "--step-time", "constant:0.01")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "changed.toml"
    path.write_text(PERTURBED)
    return path


@pytest.fixture
def folder(kvsim: Kvsim, tmp_path: Path, spec: Path) -> Path:
    assert kvsim("run", "--trace", spec, *FLAGS, "-o", tmp_path / "run").code == 0
    return tmp_path / "run"


def _reports(kvsim: Kvsim, *arguments: str | Path) -> list[dict[str, Any]]:
    done = kvsim("check", *arguments, "--json", "--fail-on", "never")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def _checks(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in report["findings"]}


def test_a_prefix_change_is_found_with_the_token_that_differs(kvsim: Kvsim, folder: Path) -> None:
    done = kvsim("check", folder)
    assert done.code == 1
    assert "hit_rate_kept: the hit rate falls from 8" in done.out
    words = " ".join(done.out.split())
    assert "chat-39 differ first at token 0 (token 0 of 'chat:prefix 1:1' and" in words
    assert "agree again from token 0 and 16 on, for 480" in words
    (report,) = _reports(kvsim, folder)
    found = _checks(report)["hit_rate_kept"]
    assert found["severity"] == "error"
    assert "at 9." in found["figure"] or "at 10." in found["figure"]


def test_a_run_and_its_configuration_say_the_same(kvsim: Kvsim, folder: Path, spec: Path) -> None:
    (run,) = _reports(kvsim, folder)
    (configured,) = _reports(kvsim, "--trace", spec, *FLAGS)
    assert run["findings"] == configured["findings"]
    assert run["passed"] == configured["passed"]


def test_a_sound_configuration(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "sound.toml"
    path.write_text(SPEC)
    done = kvsim("check", "--trace", path, *FLAGS, "--fail-on", "warning")
    assert done.code == 0, done.out
    (report,) = _reports(kvsim, "--trace", path, *FLAGS)
    assert set(_checks(report)) == {"budget"}  # far more pool than it needs
    assert report["unknown"] == {}


def test_what_a_change_brings_is_simulated(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "sound.toml"
    path.write_text(SPEC)
    flags = (*FLAGS, "--no-enable-prefix-caching")
    found = _checks(_reports(kvsim, "--trace", path, *flags)[0])["caching_on"]
    before, after = found["gain"]["users_held"]
    assert after > 1.5 * before
    assert found["timing"] == "assumed"
    none = _checks(_reports(kvsim, "--trace", path, *flags, "--no-gains")[0])["caching_on"]
    assert none["gain"] is None
    words = " ".join(kvsim("check", "--trace", path, *flags).out.split())
    assert "simulated with --enable-prefix-caching (times assumed): " in words


def test_what_is_missing_to_simulate_a_change(kvsim: Kvsim, spec: Path) -> None:
    alone = kvsim("check", "--gpu-memory-utilization", "0.97")
    assert "gain: add --trace to simulate it" in alone.out
    assert alone.out.startswith("configuration\n")
    flags = ("--num-gpu-blocks-override", "999", "--max-model-len", "1024", "--step-time", "table")
    done = kvsim("check", "--trace", spec, "--block-size", "8", *flags)
    assert "gain: not simulated: --step-time 'table' is unknown" in " ".join(done.out.split())


def test_a_model_with_states_shares_in_large_blocks(kvsim: Kvsim, spec: Path) -> None:
    """Qwen3.5's attention blocks are as large as a state: a prefix of 480 tokens fills none."""
    flags = ("--model", "Qwen3.5-27B", "--gpu", "H200", "--max-model-len", "32768")
    found = _checks(_reports(kvsim, "--trace", spec, *flags, "--no-gains")[0])["block_and_prefix"]
    assert found["figure"].startswith("block_size 784, while 39 requests start")
    assert found["severity"] == "info"  # the size is not for the user to choose
    assert "0.0 % of the prompt tokens can hit" in found["reason"]


def test_who_reserves_cannot_share(kvsim: Kvsim, spec: Path) -> None:
    """--enable-prefix-caching would contradict the allocator; blocks are none of its business."""
    flags = ("--trace", spec, *FLAGS, "--allocator", "reserve-max", "--no-gains")
    (report,) = _reports(kvsim, *flags)
    assert _checks(report)["caching_on"]["settings"] == {"allocator": "prefix"}
    assert report["unknown"] == {}
    assert not {"tails", "kernel_blocks"} & set(report["passed"])


def test_changes_of_a_long_load_are_simulated_on_its_first_requests(
    kvsim: Kvsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as a run of these alone, which the report says."""
    lines = [
        json.dumps({"arrival_time": row / 8, "prompt": [["same", 320], [f"{row}", 64]],
                    "output_len": 40})
        for row in range(40)
    ]  # fmt: skip
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    whole.write_text("\n".join(lines))
    part.write_text("\n".join(lines[:25]))
    flags = (*FLAGS, "--no-enable-prefix-caching")
    (alone,) = _reports(kvsim, "--trace", part, *flags)
    monkeypatch.setattr("sim.health.gains.MOST_REQUESTS", 25)
    (report,) = _reports(kvsim, "--trace", whole, *flags)
    found, expected = _checks(report)["caching_on"], _checks(alone)["caching_on"]
    assert found["gain"] == expected["gain"] != {}
    assert (found["gain_requests"], expected["gain_requests"]) == (25, None)
    said = " ".join(kvsim("check", "--trace", whole, *flags).out.split())
    assert "on the first 25 requests (times" in said


def test_who_is_refused_could_hit_nothing(kvsim: Kvsim, tmp_path: Path) -> None:
    """Three of four requests are longer than max_model_len: their prefix is never looked up."""
    path = tmp_path / "long.jsonl"
    lines = [
        {"arrival_time": row, "prompt": [["same", 2000 if row % 4 else 160]], "output_len": 4}
        for row in range(16)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    (report,) = _reports(kvsim, "--trace", path, *FLAGS, "--no-gains")
    assert "12 requests refused" in _checks(report)["lengths"]["figure"]
    assert "hit_rate" in report["passed"]
    assert "hit_rate" not in _checks(report)


def test_a_comparison_is_checked_run_by_run(kvsim: Kvsim, tmp_path: Path, spec: Path) -> None:
    for name in ("paged", "prefix"):  # as kvsim compare leaves them, without its charts
        flags = ("--allocator", name, "-o", tmp_path / "both" / name)
        assert kvsim("run", "--trace", spec, *FLAGS, *flags).code == 0
    (tmp_path / "both" / "compare.json").write_text("[]")
    paged, prefix = _reports(kvsim, tmp_path / "both", "--no-gains")
    assert "caching_on" in _checks(paged)
    assert "hit_rate_kept" in _checks(prefix)


@pytest.mark.parametrize(
    ("fail_on", "code"), [("never", 0), ("error", 0), ("warning", 1), ("info", 1)]
)
def test_exit_codes(kvsim: Kvsim, fail_on: str, code: int) -> None:
    """A warning and nothing graver: utilization of 0.97."""
    flags = ("--gpu-memory-utilization", "0.97", "--fail-on", fail_on)
    assert kvsim("check", *flags).code == code


def test_without_a_load_what_needs_one_is_said(kvsim: Kvsim) -> None:
    (report,) = _reports(kvsim, "--gpu", "H100")
    assert report["findings"] == []
    assert {"lengths", "hit_rate", "preemptions", "seats"} <= set(report["unknown"])
    assert {"starts", "margin"} <= set(report["passed"])
    assert kvsim("check", "--gpu", "H100").out.count("not checked") == 1
    assert "for want of --trace" in " ".join(kvsim("check", "--gpu", "H100").out.split())


def test_what_does_not_start_has_no_room(kvsim: Kvsim) -> None:
    (report,) = _reports(kvsim, "--gpu", "H100", "--model", "DeepSeek-V3", "-tp", "2")
    assert "starts" in _checks(report)
    assert "margin" in report["unknown"]


def test_a_configuration_file(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('gpu_memory_utilization = 0.99\nfail_on = "warning"\n')
    assert kvsim("check", "--config", path).code == 1


def test_a_log_beside_its_configuration(kvsim: Kvsim, tmp_path: Path, spec: Path) -> None:
    """The log names model and settings, flags the card and the load: then changes are simulated."""
    path = tmp_path / "server.log"
    path.write_text(
        "INFO 04-02 10:00:00 [utils.py:233] non-default args: {'model': "
        "'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 1024, 'gpu_memory_utilization': "
        "0.97, 'enable_prefix_caching': False}\n"
        "INFO 04-02 10:00:20 [kv_cache_utils.py:1314] GPU KV cache size: 190,000 tokens\n"
    )
    (alone,) = _reports(kvsim, "--log", path)
    assert _checks(alone)["margin"]["unknown_gain"] == "add --trace, --gpu to simulate it"
    flags = ("--trace", spec, "--gpu", "A100-40", "--step-time", "constant:0.01")
    (report,) = _reports(kvsim, "--log", path, *flags)
    assert {"margin", "caching_on", "identical"} <= set(_checks(report))
    assert _checks(report)["caching_on"]["gain"]


@pytest.mark.parametrize(
    "fixed", ["'kv_cache_memory_bytes': 2147483648", "'num_gpu_blocks_override': 1024"]
)
def test_a_pool_that_was_fixed_is_simulated(
    kvsim: Kvsim, tmp_path: Path, spec: Path, fixed: str
) -> None:
    """A pool of 16,384 tokens, by log or scrape, and not what the card would hold."""
    path = tmp_path / "server.log"
    path.write_text(
        "INFO 04-02 10:00:00 [utils.py:233] non-default args: {'model': "
        f"'meta-llama/Llama-3.1-8B', 'max_model_len': 1024, 'enable_prefix_caching': False, "
        f"'gpu_memory_utilization': 0.9, {fixed}}}\n"
        "INFO 04-02 10:00:20 [kv_cache_utils.py:1314] GPU KV cache size: 16,384 tokens\n"
    )
    flags = ("--trace", spec, "--gpu", "A100-40", "--step-time", "constant:0.01")
    (report,) = _reports(kvsim, "--log", path, *flags)
    before, _ = _checks(report)["caching_on"]["gain"]["users_held"]
    assert 16384 / 640 < before < 16384 / 540  # of 528 to 628 tokens, in blocks
    labels = fixed.replace("'", "").replace(": ", '="') + '"'
    text = (
        generate_latest(_registry()).decode().replace("cache_config_info{", "cache_config_info{@")
    )
    scrape = tmp_path / "metrics.txt"
    scrape.write_text(text.replace("@", labels + ",").replace('caching="True"', 'caching="False"'))
    more = ("--model", "Llama-3.1-8B", "--max-model-len", "1024")
    (report,) = _reports(kvsim, "--metrics", scrape, *flags, *more)
    assert _checks(report)["caching_on"]["gain"]["users_held"][0] == before


# ---- Metrics -------------------------------------------------------------------------------------


def _registry(usage: float = 0.4) -> CollectorRegistry:
    """What a server has, made by the library that vLLM uses."""
    registry = CollectorRegistry()
    names = ("model_name", "engine")

    def gauge(name: str, value: float) -> None:
        Gauge(name, "-", names, registry=registry).labels("m", "0").set(value)

    def counter(name: str, value: float) -> None:
        Counter(name, "-", names, registry=registry).labels("m", "0").inc(value)

    gauge("vllm:num_requests_running", 64)
    gauge("vllm:num_requests_waiting", 40)
    gauge("vllm:kv_cache_usage_perc", usage)
    counter("vllm:prefix_cache_queries", 1000)
    counter("vllm:prefix_cache_hits", 250)
    counter("vllm:num_preemptions", 7)
    finished = Counter("vllm:request_success", "-", (*names, "finished_reason"), registry=registry)
    finished.labels("m", "0", "stop").inc(60)
    finished.labels("m", "0", "length").inc(40)
    for name, length in (("vllm:request_prompt_tokens", 30), ("vllm:request_generation_tokens", 8)):
        buckets = (1, 2, 5, 10, 20, 50, 100)
        histogram = Histogram(name, "-", names, registry=registry, buckets=buckets)
        histogram.labels("m", "0").observe(length)
    labels = ("block_size", "gpu_memory_utilization", "num_gpu_blocks", "enable_prefix_caching")
    info = Gauge("vllm:cache_config_info", "-", (*labels, "engine"), registry=registry)
    info.labels("16", "0.97", "1001", "True", "0").set(1)
    return registry


def test_a_scrape_is_read_by_its_definitions(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_bytes(generate_latest(_registry()))
    (facts,) = facts_of_metrics(path)
    (point,) = facts.series
    assert (point.running, point.waiting, point.usage) == (64, 40, 0.4)
    assert facts.hit_rate == 0.25
    assert (facts.num_preemptions, facts.num_requests) == (7, 100)
    assert (facts.block_size, facts.kv_tokens) == (16, 16016)
    assert (facts.gpu_memory_utilization, facts.enable_prefix_caching) == (0.97, True)
    assert (facts.mean_len, facts.longest) == (38, 50 + 10)


def test_what_a_scrape_shows(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_bytes(generate_latest(_registry()))
    (report,) = _reports(kvsim, "--metrics", path, "--max-num-seqs", "64")
    assert set(_checks(report)) == {"margin", "preemptions", "seats"}


def test_a_federation_is_read_server_by_server(tmp_path: Path) -> None:
    """Two servers of one model: their labels differ in the instance only, nothing is added up."""
    path = tmp_path / "metrics.txt"
    texts = [generate_latest(_registry(usage)).decode() for usage in (0.4, 0.5)]
    servers = (f'engine="0",instance="{name}\x1b[2J:1"' for name in "ab")
    pairs = zip(texts, servers, strict=True)
    path.write_text("".join(text.replace('engine="0"', server) for text, server in pairs))
    found = facts_of_metrics(path)
    assert [facts.series[0].usage for facts in found] == [0.4, 0.5]
    assert [(facts.num_requests, facts.kv_tokens) for facts in found] == [(100, 16016)] * 2
    assert ["instance 'a" in facts.name for facts in found] == [True, False]
    assert not any("\x1b" in report_text(go_through(facts)) for facts in found)


def test_label_sets_of_one_engine_are_added_up(tmp_path: Path) -> None:
    """A histogram by another label, too: each bucket is the sum, as count and sum are."""
    path = tmp_path / "metrics.txt"
    labels = 'engine="0",model_name="m",by="x"'
    more = [
        f'vllm:request_prompt_tokens_{name}{{{labels}{le}}} {value}\n'
        for name, le, value in (
            ("bucket", ',le="50.0"', 0), ("bucket", ',le="100.0"', 1), ("bucket", ',le="+Inf"', 1),
            ("count", "", 1), ("sum", "", 70),
        )
    ]  # fmt: skip
    path.write_bytes(generate_latest(_registry()) + "".join(more).encode())
    (facts,) = facts_of_metrics(path)
    assert (facts.mean_len, facts.longest) == (50 + 8, 100 + 10)


def test_names_of_before_beside_those_of_now(tmp_path: Path) -> None:
    """vLLM 0.9 and 0.10 expose usage by both names; it counts once."""
    text = generate_latest(_registry()).decode()
    old = text.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    both = [row for row in old.splitlines() if "gpu_cache_usage" in row]
    path = tmp_path / "metrics.txt"
    for content in (old, text + "\n".join([*both, ""])):
        path.write_text(content)
        assert facts_of_metrics(path)[0].series[0].usage == 0.4


def test_one_scrape_tells_no_change(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_bytes(generate_latest(_registry()))
    (report,) = _reports(kvsim, "--metrics", path)
    assert "hit_rate_kept" in report["unknown"]


def test_a_series_of_scrapes(kvsim: Kvsim, tmp_path: Path) -> None:
    """OpenMetrics with timestamps, as for backfilling: a drop of the hit rate is found in it."""
    rows: dict[str, list[tuple[int, float]]] = {
        "vllm:num_requests_running": [(10 * n, 20) for n in range(12)],
        "vllm:num_requests_waiting": [(10 * n, 0) for n in range(12)],
        "vllm:kv_cache_usage_perc": [(10 * n, 0.6) for n in range(12)],
    }
    lines = []
    for name, values in rows.items():
        lines += [f"# TYPE {name} gauge", *(f"{name} {value} {time}" for time, value in values)]
    hits = [900 * min(n, 6) + 100 * max(0, n - 6) for n in range(12)]
    for name, counts in (
        ("vllm:prefix_cache_queries", [1000 * n for n in range(12)]),
        ("vllm:prefix_cache_hits", hits),
    ):
        lines.append(f"# TYPE {name} counter")
        lines += [f"{name}_total {count} {10 * n}" for n, count in enumerate(counts)]
    lines.append("# TYPE vllm:request_prompt_tokens histogram")
    for time in (0, 110):  # the library's parser of OpenMetrics takes this for a broken histogram
        for bound, count in (("10.0", time // 20), ("+Inf", time // 10)):
            lines.append(f'vllm:request_prompt_tokens_bucket{{le="{bound}"}} {count} {time}')
    path = tmp_path / "series.txt"
    path.write_text("\n".join([*lines, "# EOF", ""]))
    (report,) = _reports(kvsim, "--metrics", path)
    assert _checks(report)["hit_rate_kept"]["figure"] == (
        "the hit rate falls from 90 to 10 % at 70.0 s"
    )


# ---- Bad input -----------------------------------------------------------------------------------

METRICS = generate_latest(_registry())
BAD_METRICS = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "binary": (bytes(range(256)) * 10, "is no text"),
    "huge": (b"x" * 2_000_000, "no metrics text"),
    "prose": (b"hello world, this is no metric\n", "no metrics text"),
    "cut": (METRICS[: METRICS.index(b"} 64.0")], "no metrics text"),
    "missing": (
        b"".join(row for row in METRICS.splitlines(True) if b"usage" not in row),
        "vllm:kv_cache_usage_perc missing",
    ),
    "sglang": (METRICS.replace(b"vllm:", b"sglang:"), "metrics of sglang"),
    "other": (METRICS.replace(b"vllm:", b"python_"), "without a family that starts with vllm:"),
    "nan": (METRICS.replace(b"} 64.0", b"} NaN"), "running nan: expected a finite number from 0"),
    "two scrapes": (METRICS + METRICS, "stands there twice with the same labels"),
    "percent": (generate_latest(_registry(36.5)), "36.5: expected a share from 0 to 1"),
}


@pytest.mark.parametrize("name", BAD_METRICS)
def test_metrics_that_are_none(kvsim: Kvsim, tmp_path: Path, name: str) -> None:
    data, said = BAD_METRICS[name]
    path = tmp_path / "metrics.txt"
    path.write_bytes(data)
    done = kvsim("check", "--metrics", path)
    assert done.code == 1
    assert said in done.refusal
    assert len(done.refusal) < 400


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.integers(0, len(METRICS)), st.integers(0, 40), st.binary(max_size=12))
def test_damaged_metrics_are_read_or_refused(
    tmp_path: Path, start: int, length: int, instead: bytes
) -> None:
    path = tmp_path / "metrics.txt"
    path.write_bytes(METRICS[:start] + instead + METRICS[start + length :])
    try:
        found = facts_of_metrics(path)
    except FileError:
        return
    for facts in found:
        assert go_through(facts).name == facts.name


BAD_LOGS = {
    "empty": (b"", "is empty"),
    "binary": (bytes(range(256)) * 10, "none of a server"),
    "huge": (b"x" * 2_000_000, "none of a server"),
    "engine": (b"llama_new_context_with_model: n_ctx = 4096\n", "none of a server"),
    "metrics": (METRICS, "is for --metrics"),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_logs_that_are_none(kvsim: Kvsim, tmp_path: Path, name: str) -> None:
    data, said = BAD_LOGS[name]
    path = tmp_path / "server.log"
    path.write_bytes(data)
    done = kvsim("check", "--log", path)
    assert done.code == 2
    assert said in done.refusal


def _edited(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_run_folders_that_are_not_whole(kvsim: Kvsim, tmp_path: Path, folder: Path) -> None:
    def refused() -> str:
        done = kvsim("check", folder)
        assert done.code == 1
        return done.refusal

    config = json.loads((folder / "manifest.json").read_text())["config"]
    _edited(folder, "manifest.json", config=config | {"swap_space": 4}, kvsim={"version": "9.1"})
    assert "'swap_space' is no setting here: the run is of kvsim '9.1'" in refused()
    _edited(folder, "manifest.json", config=config | {"block_size": "x"}, kvsim={"version": "9.1"})
    assert "block_size: expected" in refused()
    _edited(folder, "manifest.json", config=config | {"model": "gone"}, kvsim={"version": "9.1"})
    assert "run: manifest.json: --model 'gone' is unknown" in refused()
    _edited(folder, "manifest.json", config=3)
    assert "key config: expected an object" in refused()
    whole = json.loads((folder / "summary.json").read_text())
    for slots in (-1, 1):
        _edited(folder, "summary.json", kv_cache_slots=slots)
        assert f"key kv_cache_slots: {slots}; expected as many as" in refused()
    _edited(folder, "summary.json", kv_cache_slots=whole["kv_cache_slots"], num_preemptions=-5)
    _edited(folder, "manifest.json", config=config)
    assert "`$.num_preemptions`; expected a run of this version" in refused()
    (folder / "summary.json").write_text(json.dumps(whole))
    (folder / "manifest.json").unlink()
    assert "manifest.json is missing: the folder is half-written" in refused()
    summary = {key: value for key, value in whole.items() if key != "refused"}
    (folder / "manifest.json").write_text('{"config": {}, "kvsim": {}, "trace": {}}')
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "missing required field `refused`; expected a run of this version" in refused()
    (folder / "summary.json").write_text(json.dumps(summary | {"refused": 3}))
    assert "`$.refused`; expected a run of this version" in refused()
    (folder / "summary.json").write_text('{"alloc')
    assert "summary.json" in refused()
    (folder / "steps.parquet").unlink()
    (folder / "summary.json").unlink()
    assert "summary.json" in refused()
    assert "Not a directory" in kvsim("check", folder / "manifest.json").refusal
    assert "No such file" in kvsim("check", tmp_path / "none").refusal


def test_a_run_whose_trace_is_gone_or_another(
    kvsim: Kvsim, tmp_path: Path, folder: Path, spec: Path
) -> None:
    moved = tmp_path / "moved.toml"
    spec.rename(moved)
    done = kvsim("check", folder, "--no-gains")
    assert "is not at hand: add --trace" in done.notes[0]
    assert "hit_rate_kept" in done.out  # the series has it all the same
    assert "differ first" not in done.out
    assert "differ first" in kvsim("check", folder, "--trace", moved, "--no-gains").out
    moved.write_text(SPEC)
    done = kvsim("check", folder, "--trace", moved)
    assert "is not the trace of the run" in done.refusal


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to check: expected DIR, --log FILE"),
        (("x", "--log", "y"), "DIR and --log are given: expected one of them"),
        (("--fail-on", "errors"), "did you mean 'error'?"),
        (("x", "--block-size", "32"), "--block-size 32 and DIR: a run has settings of its own"),
        (("x", "y"), "unexpected argument 'y'"),
        (("--output-dir", "x"), "No such option"),
        (("--gpu", "H1000"), "--gpu 'H1000' is unknown"),
    ],
)
def test_wrong_usage(kvsim: Kvsim, arguments: tuple[str, ...], said: str) -> None:
    done = kvsim("check", *arguments)
    assert done.code == 2
    assert said in done.refusal


def test_every_check_has_a_question_of_its_own() -> None:
    assert len({check.question for check in CHECKS.values()}) == len(CHECKS)


def test_what_a_terminal_obeys_is_not_printed(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "names.jsonl"
    lines = [
        {
            "arrival_time": row,
            "request_id": f"\x1b[2J{row}",
            "prompt": [[f"\x07{row}", 16], ["same", 400]],
            "output_len": 4,
        }
        for row in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = kvsim("check", "--trace", path, *FLAGS)
    assert "identical: " in done.out
    assert not {"\x1b", "\x07"} & set(done.out + done.err)
