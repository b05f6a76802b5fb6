"""What ``--metrics-port``, ``--speed`` and ``--openmetrics`` show, and no more."""

import contextlib
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sim.simulation import Simulation
from sim.watch.endpoint import Endpoint, served
from sim.watch.names import HISTOGRAMS, SCALARS
from sim.watch.openmetrics import write_openmetrics
from tests.cli.conftest import Kvsim
from tests.conftest import REPOSITORY
from tests.strategies import PREFIX, make_config, random_trace
from workloads.record import PS_PER_S

SMALL = ("--num-gpu-blocks-override", "21", "--max-model-len", "200", "--max-num-seqs", "6")
FLAGS = (*SMALL, "--step-time", "linear:0.01,1e-4,1e-6")
MODEL = {"model_name": "meta-llama/Llama-3.1-8B", "engine": "0"}
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _values(families: list[Metric], **labels: str) -> Values:
    """Answer every value by its name and the labels beside *labels*."""
    return {
        (sample.name, frozenset(sample.labels.items() - labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def _plain(values: Values, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


def _scrape(address: str, accept: str = "") -> str:
    request = urllib.request.Request(address, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def _agrees(values: Values, summary: dict[str, float], folder: Path) -> None:
    """Hold the last values of a run to its summary and its table of requests."""
    counters = {
        "vllm:prefix_cache_queries_total": "prefix_cache_queries",
        "vllm:prefix_cache_hits_total": "prefix_cache_hits",
        "vllm:num_preemptions_total": "num_preemptions",
        "vllm:prompt_tokens_total": "total_input_tokens",
        "vllm:generation_tokens_total": "total_output_tokens",
        "vllm:e2e_request_latency_seconds_count": "completed",
        "kvsim:allocation_refusals_total": "allocation_refusals",
        "kvsim:recomputed_tokens_total": "recomputed_tokens",
    }
    for name, key in counters.items():
        assert _plain(values, name) == summary[key] > 0, name
    success = "vllm:request_success_total"
    assert _plain(values, success, finished_reason="length") == summary["completed"]
    assert _plain(values, success, finished_reason="abort") == 0
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    ttft = [row["first_token_time"] - row["arrival_time"] for row in rows]
    assert _plain(values, "vllm:time_to_first_token_seconds_sum") == pytest.approx(sum(ttft))
    for bound in ("0.02", "0.1", "0.5", "1.0", "+Inf"):
        within = sum(round(seconds, 9) <= float(bound) for seconds in ttft)
        assert _plain(values, "vllm:time_to_first_token_seconds_bucket", le=bound) == within
    assert _plain(values, "vllm:num_requests_running") == 0
    assert _plain(values, "vllm:kv_cache_usage_perc") == 0
    last = max(row["finish_time"] for row in rows)
    assert _plain(values, "kvsim:simulated_seconds") == pytest.approx(last)


@contextlib.contextmanager
def _process(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "import sys; from sim.cli import console; sys.exit(console())"]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_the_endpoint_agrees_with_the_tables_and_changes_nothing(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path
) -> None:
    run = ("run", "--trace", busy_trace, *FLAGS)
    plain = kvsim(*run, "-o", tmp_path / "plain")
    watching = ("--metrics-port", "0", "--metrics-linger", "inf", "--speed", "1000x")
    with _process(*run, "-o", tmp_path / "watched", *watching) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        address = re.fullmatch(
            r"note: metrics are served at (http://127.0.0.1:\d+/metrics)\n", said
        )
        assert address is not None, said
        assert process.stderr.readline() == (
            f"note: the last metrics stay at {address[1]} until Ctrl-C\n"
        )
        text = _scrape(address[1])
        # What a Prometheus of 2023 asks for.
        older = _scrape(address[1], "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, plain.out, "")
    assert older == text
    families = list(parse_text(text))
    assert {family.name for family in families} >= {scalar.name for scalar in SCALARS}
    assert {family.name for family in families if family.type == "histogram"} == set(HISTOGRAMS)
    summary = json.loads((tmp_path / "watched" / "summary.json").read_bytes())
    _agrees(_values(families, **MODEL), summary, tmp_path / "watched")
    for name in ("requests.parquet", "steps.parquet", "summary.json", "manifest.json"):
        expected = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "watched" / name).read_bytes() == expected


def test_scrapes_from_other_threads_see_whole_steps() -> None:
    config = make_config(PREFIX, block_size=8, max_model_len=320, num_gpu_blocks_override=100)
    trace = random_trace(seed=5, num_requests=60)
    expected = Simulation(config, trace).run().recorder.totals
    simulation = Simulation(config, trace)
    endpoint = Endpoint()
    scraped: list[Values] = []
    over = threading.Event()
    num_answers = 0

    def scrape() -> None:
        while not over.is_set():
            scraped.append(_values(list(endpoint.collect()), engine="0"))

    def answer() -> None:  # and wait for a scrape now and then: the run may be faster than they
        nonlocal num_answers
        num_answers += 1
        endpoint.answer()
        while len(scraped) < num_answers // 20:
            endpoint.answer()

    assert list(endpoint.collect()) == []  # before there is a run
    endpoint.attach(simulation.result)
    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    simulation.run(answer)
    endpoint.finish(simulation.allocator.stats())
    over.set()
    for thread in threads:
        thread.join()
    model = {"model_name": config.model.model}
    capacity = simulation.result.recorder.capacity
    assert len(scraped) > 3
    for values in scraped:
        states = ("live", "reserved", "internal", "external", "cached", "free")
        slots = [_plain(values, "kvsim:kv_slots", state=state, **model) for state in states]
        assert sum(slots) == pytest.approx(capacity)
        firsts = _plain(values, "vllm:time_to_first_token_seconds_count", **model)
        gaps = _plain(values, "vllm:inter_token_latency_seconds_count", **model)
        assert firsts + gaps == _plain(values, "vllm:generation_tokens_total", **model)
    last = _values(list(endpoint.collect()), engine="0", **model)
    assert _plain(last, "vllm:num_preemptions_total") == expected.num_preempted
    assert simulation.result.recorder.totals.num_steps == expected.num_steps


def _finished() -> Endpoint:
    """Answer what shows a small run that is over."""
    simulation = Simulation(make_config(PREFIX), random_trace(seed=5, num_requests=10))
    endpoint = Endpoint()
    endpoint.attach(simulation.result)
    simulation.run(endpoint.answer)
    endpoint.finish(simulation.allocator.stats())
    return endpoint


def test_scrapes_may_ask_for_names() -> None:
    wanted = {"vllm:num_preemptions_total", "vllm:e2e_request_latency_seconds_count"}
    with served(_finished(), "127.0.0.1", 0) as address:
        everything = _values(list(parse_text(_scrape(address))))
        query = "&".join(f"name[]={name}" for name in wanted)
        some = _values(list(parse_text(_scrape(f"{address}?{query}"))))
    assert some == {key: value for key, value in everything.items() if key[0] in wanted}
    assert {name for name, _ in some} == wanted


def test_one_answer_is_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.watch.endpoint.PATIENCE_S", 3600)
    simulation = Simulation(make_config(PREFIX), random_trace(seed=5, num_requests=10))
    endpoint, waiting, scraped = Endpoint(), threading.Semaphore(0), list[Values]()
    endpoint.attach(simulation.result)
    condition = endpoint._answered  # who waits for it is seen nowhere else
    wait = condition.wait

    def counted(timeout: float | None = None) -> bool:
        waiting.release()  # the lock is held until it waits
        return wait(timeout)

    monkeypatch.setattr(condition, "wait", counted)
    threads = [
        threading.Thread(target=lambda: scraped.append(_values(list(endpoint.collect()))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for _ in threads:
        assert waiting.acquire(timeout=60)
    endpoint.answer(0)
    for thread in threads:
        thread.join(60)
    assert len(scraped) == 4
    assert all(values == scraped[0] for values in scraped)


def test_clients_that_hang_up_or_never_ask_are_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sim.watch.endpoint._Quiet.timeout", 0.1)
    before = threading.active_count()
    with served(_finished(), "127.0.0.1", 0) as address:
        where = ("127.0.0.1", int(address.rsplit(":")[-1].partition("/")[0]))
        for sent in (b"", b"GET /metrics HTTP/1.1\r\nHost"):
            with socket.create_connection(where, timeout=60) as idle:
                idle.sendall(sent)
                assert idle.recv(1) == b""  # the other side is closed
            with socket.create_connection(where, timeout=60) as gone:
                gone.sendall(sent)
                reset = struct.pack("ii", 1, 0)  # closed by a reset, as by a scan of ports
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        assert "vllm:num_requests_running" in _scrape(address)
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(60 if threading.active_count() > before else 0)
    assert capfd.readouterr() == ("", "")


def _at(text: str, timestamp: str) -> list[Metric]:
    """Answer the samples of one time, checked as a whole file.

    The library's parser (0.23 to 0.26) drops all but the first bucket of later times.
    """
    lines = text.splitlines(keepends=True)
    mine = [line for line in lines if line[0] == "#" or line.endswith(f" {timestamp}\n")]
    families: list[Metric] = list(parse_openmetrics("".join(mine)))  # type: ignore[no-untyped-call]
    return families


def test_openmetrics(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "series", tmp_path / "out"
    series = ("--openmetrics", file, "--openmetrics-interval", "0.25")
    run = ("run", "--trace", busy_trace, *FLAGS, "-o", out, *series)
    done = kvsim(*run, "--openmetrics-epoch", "1e9")
    assert (done.code, done.err) == (0, "")
    text = file.read_text()
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    running = re.findall(r"(?m)^vllm:num_requests_running{.*} (\S+) (\S+)$", text)
    stamps = [stamp for _, stamp in running]
    families = [_at(text, stamp) for stamp in stamps]
    assert all(family.samples for family in families[0])
    summary = json.loads((out / "summary.json").read_bytes())
    _agrees(_values(families[-1], **MODEL), summary, out)
    times = [float(stamp) - 1e9 for stamp in stamps]
    assert times[:-1] == pytest.approx([0.25 * place for place in range(len(times) - 1)])
    assert times[-1] == pytest.approx(summary["duration"], abs=0.001)
    steps = pq.read_table(out / "steps.parquet").to_pylist()
    for time, (value, _) in zip(times[:-1], running, strict=False):
        (row,) = (s for s in steps if s["time"] <= time < s["time"] + s["duration"])
        assert float(value) == row["running"]
    kvsim(*run, "--openmetrics-epoch", "1e9")
    assert file.read_text() == text
    kvsim(*run)
    assert " 0.25\n" in file.read_text()


def test_promtool_backfills_from_it(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Prometheus")
    file = tmp_path / "series"
    kvsim("run", "--trace", busy_trace, *FLAGS, "--openmetrics", file)
    command: list[str | Path] = ["promtool", "tsdb", "create-blocks-from", "openmetrics"]
    command += [file, tmp_path / "blocks"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "NUM SERIES" in done.stdout


def test_a_long_series_needs_little_memory(tmp_path: Path) -> None:
    simulation = Simulation(make_config(PREFIX), random_trace(seed=5, num_requests=10))
    result, stats = simulation.run(), simulation.allocator.stats()
    interval = (result.recorder.now_ps - result.recorder.start_ps) / PS_PER_S / 40
    tracemalloc.start()
    write_openmetrics(tmp_path / "series", result, stats, interval, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len((tmp_path / "series").read_bytes()) > 40 * 20_000
    assert peak < 40 * 20_000


def test_a_file_with_too_many_samples(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "series"
    file.write_text("older")
    run = ("run", "--trace", busy_trace, *SMALL, "--step-time", "constant:10", "-o", tmp_path)
    done = kvsim(*run, "--openmetrics", file, "--openmetrics-interval", "0.001")
    assert done.code == 1
    assert "--openmetrics-interval 0.001 makes more than 20,000 samples" in done.err
    assert file.read_text() == "older"
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("flag", ["--trace", "--config", "--output-dir"])
def test_a_series_replaces_nothing_of_its_run(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, flag: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('allocator = "paged"\n')
    out = tmp_path / "out"
    files = {"--trace": busy_trace, "--config": config, "--output-dir": out / "requests.csv"}
    run = ("run", "--trace", busy_trace, "--config", config, *FLAGS, "-o", out)
    before = busy_trace.read_bytes(), config.read_bytes()
    done = kvsim(*run, "--openmetrics", files[flag])
    assert done.code == 2
    assert f"--openmetrics {files[flag]} is " in done.refusal
    assert (busy_trace.read_bytes(), config.read_bytes()) == before
    assert not out.exists()
    assert kvsim(*run, "--openmetrics", out / "series").code == 0
    assert (out / "series").read_text().endswith("# EOF\n")


def test_a_port_in_use(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = ("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "out")
        done = kvsim(*run, "--metrics-port", port)
    assert done.code == 1
    assert done.refusal == (
        f"kvsim: --metrics-port {port}: Address already in use at 127.0.0.1; "
        "expected a free port from 1024 on, and an address of this machine"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--speed 0x --live", 2, "--speed: expected a number, above 0"),
        ("--speed fast --live", 2, "--speed: expected a number, above 0"),
        ("--speed 60x", 2, "--speed 60x has no effect without --live or --metrics-port"),
        ("--metrics-port 65536", 2, "--metrics-port: expected a whole number"),
        ("--metrics-host ::1", 2, "--metrics-host ::1 has no effect without --metrics-port"),
        ("--metrics-port 0 --metrics-host 203.0.113.1", 1, "at 203.0.113.1"),
        ("--metrics-port 0 --metrics-linger -1", 2, "--metrics-linger: expected a number"),
        ("--openmetrics nowhere/file", 1, "expected a file in a writable folder"),
        ("--openmetrics .", 2, "--openmetrics . is a folder"),
        ("--openmetrics /dev/null", 2, "--openmetrics /dev/null is no regular file"),
        ("--openmetrics x --openmetrics-interval 0", 2, "--openmetrics-interval: expected"),
    ],
)
def test_refused_before_the_run(kvsim: Kvsim, flags: str, code: int, said: str) -> None:
    done = kvsim("run", *flags.split())
    assert done.code == code
    assert said in done.refusal


def test_a_file_may_hold_what_has_no_effect(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('speed = "60x"\n')
    done = kvsim("run", "--trace", busy_trace, *FLAGS, "--config", config)
    assert done.code == 0
    assert len(done.notes) == 1
    assert "has no effect without --live or --metrics-port" in done.notes[0]


def test_names_are_those_of_vllm() -> None:
    lines = (REPOSITORY / "tests" / "data" / "vllm_metric_names.txt").read_text().splitlines()
    known = {line.split()[0]: line.split()[1:] for line in lines if not line.startswith("#")}
    ours = {
        **{
            scalar.name: [scalar.kind, *([scalar.label] if scalar.label else [])]
            for scalar in SCALARS
        },
        **{name: ["histogram"] for name in HISTOGRAMS},
    }
    for name, kind in ours.items():
        assert name.startswith("kvsim:") or known[name] == kind


def test_any_address_of_the_machine() -> None:
    with served(Endpoint(), "localhost", 0) as address:
        assert _scrape(address) == ""
