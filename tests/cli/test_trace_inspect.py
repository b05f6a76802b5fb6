"""``kvsim trace inspect``: what is in a trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Kvsim
from tests.strategies import make_trace
from workloads.build import build_trace
from workloads.inspection import inspect, lru_curve
from workloads.record import MAX_TOKENS, RequestRecord


def test_what_is_known_by_hand() -> None:
    """Three prompts behind 32 tokens, 10 s apart and of 48 tokens: 2 of 3 blocks are repeated."""
    trace = make_trace(*((10 * i, [("system", 32), (f"u{i}", 16)], 4) for i in range(3)))
    found = inspect(trace, 16)
    assert (found["num_requests"], found["duration"], found["request_rate"]) == (3, 20, 0.1)
    assert found["burstiness"] is None  # gaps that do not vary
    assert found["input_len"]["p50"] == found["input_len"]["max"] == 48
    reuse = found["reuse"]
    assert (reuse["num_accesses"], reuse["num_blocks"]) == (9, 5)
    assert reuse["hit_ratio"] == 4 / 9
    assert reuse["repeated_tokens"] == 64 / 144
    assert reuse["reuse_distance"]["max"] == 2  # one of its own, and one of the prompt before
    assert found["most_shared"] == [{"num_requests": 3, "num_tokens": 32}]
    sizes, ratios = lru_curve(trace, 16)
    assert dict(zip(sizes.tolist(), ratios.tolist(), strict=True)) == {
        1: 0, 2: 0, 3: 4 / 9, 4: 4 / 9, 5: 4 / 9
    }  # fmt: skip


def test_sessions() -> None:
    records = [
        RequestRecord(row + 1, row * 10**12, 10, 5, f"r{row}", None, session, 3 * 10**12)
        for row, session in enumerate(["a", "b", "a", "a"])
    ]
    found = inspect(build_trace(records, name="x", trace_format="none"), 16)["sessions"]
    assert found["num_sessions"] == 2
    assert (found["turns"]["min"], found["turns"]["max"]) == (1, 3)
    assert found["think_time"]["p50"] == 3


def test_published_reuse_of_mooncake(kvsim: Kvsim, shared: Path) -> None:
    trace = shared / "traces" / "mooncake" / "conversation_trace.jsonl"
    done = kvsim("trace", "inspect", trace, "--block-size", "512", "--json")
    found: dict[str, Any] = json.loads(done.out)
    reuse = found["reuse"]
    assert (found["num_requests"], reuse["num_accesses"]) == (12_031, 288_500)
    assert reuse["num_blocks"] == 182_790
    assert round(reuse["hit_ratio"], 4) == 0.3664
    published = {0.01: 0.0523, 0.05: 0.1954, 0.1: 0.2784, 0.25: 0.3535, 0.5: 0.3631}
    ours = {each["share"]: each["hit_ratio"] for each in reuse["lru"]}
    assert {share: ours[share] for share in published} == pytest.approx(published, abs=5e-4)
    assert found["most_shared"][0] == {"num_requests": 12_031, "num_tokens": 512}
    assert "72 outputs of 1 token" in found["oddities"]


def test_a_sample_of_blocks_says_what_all_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts behind one everybody has, each repeated by the 60th after it."""
    trace = make_trace(*((i, [("all", 64), (f"u{i % 60 + i // 120 * 60}", 800)], 1)
                         for i in range(800)))  # fmt: skip
    exact = inspect(trace, 4)["reuse"]
    monkeypatch.setattr("workloads.inspection.MAX_ACCESSES", 8000)
    sampled = inspect(trace, 4)["reuse"]
    assert (exact["one_in"], sampled["one_in"]) == (1, 22)
    assert sampled["num_accesses"] == exact["num_accesses"] == 800 * 216
    assert sampled["num_blocks"] == pytest.approx(exact["num_blocks"], rel=0.01)
    assert sampled["hit_ratio"] == pytest.approx(exact["hit_ratio"], abs=0.005)
    assert sampled["reuse_distance"]["p90"] == pytest.approx(12_016, rel=0.01)
    for one, other in zip(sampled["lru"], exact["lru"], strict=True):
        assert one["hit_ratio"] == pytest.approx(other["hit_ratio"], abs=0.01)
    assert lru_curve(trace, 4)[1][-1] == pytest.approx(exact["hit_ratio"], abs=0.005)


def test_the_longest_prompts_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.inspection.MAX_ACCESSES", 1000)
    trace = make_trace(*((i, [("all", MAX_TOKENS - 5), (f"u{i}", 5)], 1) for i in range(8)))
    reuse = inspect(trace, 1)["reuse"]
    assert reuse["num_accesses"] == 8 * MAX_TOKENS
    assert reuse["hit_ratio"] == pytest.approx(7 / 8, abs=0.01)


def test_prints_and_draws(kvsim: Kvsim, tmp_path: Path) -> None:
    lines = [
        json.dumps({"arrival_time": i / 4, "prompt": [["s", 40], [f"u{i}", 8]], "output_len": 9})
        for i in range(20)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    done = kvsim("trace", "inspect", path, "-o", tmp_path / "t.png")
    assert done.code == 0, done.err
    assert "native, 20 requests in 4.8 s, 4 a second" in done.out
    assert "20 requests begin with the same 40 tokens" in done.out
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "t.png").read_bytes()
    kvsim("trace", "inspect", path, "-o", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes() == first


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 2, "a trace is missing"),
        (("nowhere.jsonl",), 1, "nowhere.jsonl: no such file"),
        (("{trace}", "-o", "chart.pdf"), 2, "expected a name ending in .png or .svg"),
        (("{trace}", "--block-size", "0"), 2, "--block-size: expected"),
    ],
)
def test_refusals(
    kvsim: Kvsim, tmp_path: Path, flags: tuple[str, ...], code: int, said: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_time": 0, "input_length": 10, "output_len": 5}\n')
    done = kvsim("trace", "inspect", *(flag.format(trace=path) for flag in flags))
    assert done.code == code
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_one_request_is_enough(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_time": 0, "input_length": 10, "output_len": 5}\n')
    done = kvsim("trace", "inspect", path, "-o", tmp_path / "t.svg")
    assert (done.code, "1 requests in 0.0 s" in done.out) == (0, True)
