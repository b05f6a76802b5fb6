"""``kvsim trace`` and specifications as ``--trace``."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Kvsim
from workloads.readers import read_trace
from workloads.sources import read_workload

SPEC = """
num_requests = 40
[arrivals]
kind = "poisson"
rate = 8
[[classes]]
input_len = { kind = "uniform", low = 10, high = 300 }
output_len = 12
turns = 2
think_time = 1
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "chat.toml"
    path.write_text(SPEC)
    return path


def _without_names(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text)
    return {key: value for key, value in found.items() if "trace" not in key}


def test_a_run_takes_a_specification_and_its_seed(kvsim: Kvsim, spec: Path) -> None:
    one, again, other = (
        kvsim("run", "--trace", spec, "--json", "--seed", seed) for seed in ("3", "3", "4")
    )
    assert one.code == again.code == other.code == 0
    assert one.out == again.out != other.out
    assert json.loads(one.out)["completed"] == 40


def test_a_frozen_specification_runs_as_the_specification(
    kvsim: Kvsim, spec: Path, tmp_path: Path
) -> None:
    frozen = tmp_path / "frozen.jsonl"
    assert kvsim("trace", "convert", spec, "--seed", "3", "-o", frozen).code == 0
    flags = ("--json", "--closed-loop", "--allocator", "prefix", "--seed", "3")
    results = [kvsim("run", "--trace", path, *flags) for path in (spec, frozen)]
    assert [each.code for each in results] == [0, 0]
    assert _without_names(results[0].out) == _without_names(results[1].out)


def test_compare_and_capacity_take_a_specification(
    kvsim: Kvsim, spec: Path, tmp_path: Path
) -> None:
    flags = ("--trace", spec, "--seed", "2", "--max-model-len", "2048")
    found = kvsim("compare", *flags, "--allocator", "paged,prefix", "-o", tmp_path / "out")
    assert found.code == 0, found.err
    manifest = json.loads((tmp_path / "out" / "paged" / "manifest.json").read_text())
    assert manifest["seeds"] == {"seed": 2}
    assert kvsim("capacity", *flags).code == 0


def test_a_sweep_draws_once_a_seed(kvsim: Kvsim, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        f'[fixed]\ntrace = "{spec.name}"\nmax_model_len = 2048\n[grid]\nseed = [1, 2]\n'
    )
    folder = tmp_path / "out"
    done = kvsim("sweep", tmp_path / "sweep.toml", "-o", folder, "--jobs", "1")
    assert done.code == 0, done.err
    summaries = [json.loads(path.read_text()) for path in folder.glob("cells/*/summary.json")]
    inputs = {each["total_input_tokens"] for each in summaries}
    expected = {int(read_workload(spec, seed=s).num_prompt_tokens.sum()) for s in (1, 2)}
    assert inputs == expected
    assert len(expected) == 2


def test_sample(kvsim: Kvsim, samples: Path, tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    done = kvsim(
        "trace", "sample", samples / "mooncake.jsonl", "-o", path, "--every", "2", "--end", "9",
        "--request-rate", "inf",
    )  # fmt: skip
    assert done.code == 0
    assert "of 20 requests" in done.err
    part = read_trace(path)
    assert set(part.arrival_ps.tolist()) == {0}


def test_fit(kvsim: Kvsim, samples: Path, tmp_path: Path) -> None:
    path = tmp_path / "fit.toml"
    done = kvsim("trace", "fit", samples / "conversation.jsonl", "-o", path, "--seed", "5")
    assert done.code == 0
    assert "KS distance" in done.out
    assert "prompt tokens seen before, %" in done.out
    assert done.out.endswith("imitation: 1,000 requests, seed 5\n")
    assert len(read_workload(path)) == 1000


@pytest.mark.parametrize("name", ["chat", "few_shot", "agents"])
def test_shipped_specifications_run(kvsim: Kvsim, samples: Path, name: str) -> None:
    done = kvsim("run", "--trace", samples / f"{name}.toml", "--gpu", "H100", "--json",
                 "--allocator", "prefix", "--max-model-len", "65536")  # fmt: skip
    assert done.code == 0
    assert json.loads(done.out)["failed"] == 0
    assert json.loads(done.out)["prefix_cache_hit_rate"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("convert",), "--output is missing: expected a file to write, -o FILE.jsonl"),
        (("convert", "-o", "x.jsonl"), "a trace is missing"),
        (("convert", "SPEC", "-o", "x.txt"), "--output x.txt: expected a name ending in .jsonl"),
        (("fit", "SPEC", "-o", "x.jsonl"), "--output x.jsonl: expected a name ending in .toml"),
        (("convert", "SPEC", "-o", "x.jsonl", "--seed", "x"), "--seed: expected a whole number"),
        (("sample", "SPEC", "-o", "x.jsonl", "--every", "0"), "--every: expected a whole number"),
        (("sample", "SPEC", "-o", "x.jsonl", "--start", "x"), "--start: expected a number from 0"),
        (("sample", "SPEC", "-o", "x.jsonl", "--start", "2", "--end", "1"), "--end 1 is not after"),
        (("sample", "SPEC", "-o", "x.jsonl", "--trace-format", "natve"), "did you mean 'native'?"),
        (("inspect", "SPEC", "--trace-format", "native:x=1"), "option 'x' is unknown"),
        (("inspekt", "SPEC"), "unknown command 'inspekt'"),
    ],
)  # fmt: skip
def test_refusals(
    kvsim: Kvsim,
    spec: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    refusal: str,
) -> None:
    monkeypatch.chdir(spec.parent)
    done = kvsim("trace", *(str(spec) if a == "SPEC" else a for a in arguments))
    assert done.code == 2
    assert refusal in done.refusal
    assert [path.name for path in spec.parent.iterdir()] == ["chat.toml"]


@pytest.mark.parametrize("command", ["convert", "sample"])
def test_what_is_read_is_not_written(
    kvsim: Kvsim, samples: Path, tmp_path: Path, command: str
) -> None:
    path, link = tmp_path / "trace.jsonl", tmp_path / "link.jsonl"
    content = (samples / "mooncake.jsonl").read_bytes()
    path.write_bytes(content)
    link.symlink_to(path)
    for source, output in ((path, path), (link, path), (path, link)):
        done = kvsim("trace", command, source, "-o", output)
        assert done.code == 2
        assert "is what is read: expected another file" in done.refusal
    assert path.read_bytes() == content


def test_a_faulty_specification_leaves_what_was_written(kvsim: Kvsim, spec: Path) -> None:
    out = spec.with_name("x.jsonl")
    out.write_text("old")
    spec.write_text(SPEC.replace("rate", "rat"))
    done = kvsim("trace", "convert", spec, "-o", out)
    assert done.code in (1, 2)
    assert "arrivals: unknown key 'rat': did you mean 'rate'?" in done.refusal
    assert out.read_text() == "old"
