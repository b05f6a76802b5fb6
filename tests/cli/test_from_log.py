"""``kvsim capacity --from-log``: what a server said beside what is computed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sim.reconcile import named_model, rules_of
from tests.cli.conftest import Kvsim
from tests.unit.test_imports import HEAVY, _imported

LOG = """\
INFO 04-02 10:00:00 [utils.py:233] non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', \
'max_model_len': 8192, 'gpu_memory_utilization': 0.95, 'max_num_seqs': 1024, \
'max_num_batched_tokens': 8192}
INFO 04-02 10:00:01 [core.py:101] Initializing a V1 LLM engine (v0.19.0) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', tensor_parallel_size=1
INFO 04-02 10:00:09 [model.py:4000] Model loading took 14.99 GiB memory and 5.0 seconds
INFO 04-02 10:00:19 [gpu_worker.py:456] Available KV cache memory: 58.11 GiB
INFO 04-02 10:00:20 [kv_cache_utils.py:1314] GPU KV cache size: 476,016 tokens
INFO 04-02 10:00:20 [kv_cache.py:1319] Maximum concurrency for 8,192 tokens per request: 58.11x
"""

REFUSED = """\
INFO 10-31 03:27:49 [gpu_worker.py:298] Available KV cache memory: 1.71 GiB
ValueError: To serve at least one request with the models's max seq len (131072), (4.54 GiB \
KV cache is needed, which is larger than the available KV cache memory (1.71 GiB). Based on \
the available memory, the estimated maximum model length is 46528.
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    return path


def _answer(kvsim: Kvsim, *arguments: str | Path) -> dict[str, Any]:
    done = kvsim("capacity", "--json", "--from-log", *arguments)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_what_the_log_says_of_model_and_flags_is_taken(kvsim: Kvsim, log: Path) -> None:
    """Said 58.11 GiB and 476,016 tokens; both ways of ours are within 0.1 % of it."""
    (start,) = _answer(kvsim, log, "--gpu", "H100")["starts"]
    assert start["model"] == "meta-llama/Llama-3.1-8B"
    assert start["gpu"] == "H100"
    lines = {line["what"]: line for line in start["lines"]}
    assert (lines["weights, GiB"]["said"], lines["weights, GiB"]["line"]) == (14.99, 3)
    assert abs(lines["weights, GiB"]["percent"]) < 1
    assert abs(lines["KV cache, GiB"]["percent"]) < 0.1
    tokens = [line for line in start["lines"] if line["what"] == "tokens"]
    assert {line["origin"] for line in tokens} == {
        "GPU, model and flags",
        "58.11 GiB of line 4",
    }
    assert all(abs(line["percent"]) < 0.1 for line in tokens)


def test_without_a_gpu_the_card_is_left_out(kvsim: Kvsim, log: Path) -> None:
    done = kvsim("capacity", "--from-log", log)
    assert done.code == 0
    assert "no GPU is named: add --gpu" in done.out
    assert "58.11 GiB of line 4" in done.out
    assert "peak activation" not in done.out


def test_flags_win(kvsim: Kvsim, log: Path) -> None:
    (start,) = _answer(kvsim, log, "--model", "Qwen3-8B", "--max-num-seqs", "64")["starts"]
    assert start["model"] == "Qwen/Qwen3-8B"
    assert start["settings"]["max_num_seqs"] == "64"


def test_a_refusal_is_explained_and_computed(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "refused.log"
    path.write_text(REFUSED)
    alone = kvsim("capacity", "--from-log", path)
    assert alone.code == 0
    assert "no model is named: add --model" in alone.out
    assert "needs 4.54 GiB and there are 1.71: 2.83 GiB missing" in alone.out
    flags = (
        "--model",
        "gpt-oss-120b",
        "--max-num-batched-tokens",
        "1024",
        "--vllm-version",
        "0.11",
    )
    lines = {line["what"]: line for line in _answer(kvsim, path, *flags)["starts"][0]["lines"]}
    assert lines["a longest request, GiB"]["ours"] == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize(
    ("text", "said"), [("", "is empty"), ("hello\nworld\n", "none of a server")]
)
def test_a_file_that_is_no_log(kvsim: Kvsim, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    done = kvsim("capacity", "--from-log", path)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_settings_that_cannot_be_used(kvsim: Kvsim, log: Path) -> None:
    log.write_text(LOG.replace("'max_num_seqs': 1024", "'max_num_seqs': 0"))
    done = kvsim("capacity", "--from-log", log)
    assert done.code == 0
    assert "note: nothing is compared: " in done.out
    assert kvsim("capacity", "--from-log", log, "--max-num-seqs", "none").code == 2
    both = kvsim("capacity", "--from-log", log, "--users", "5")
    assert both.code == 2
    assert "leave one out" in both.err


def test_the_largest_stage_is_compared(kvsim: Kvsim, log: Path) -> None:
    staged = LOG.replace("{'model'", "{'pipeline_parallel_size': 2, 'model'")
    log.write_text(staged)
    lines = {line["what"]: line for line in _answer(kvsim, log)["starts"][0]["lines"]}
    assert lines["weights, GiB"]["ours"] == pytest.approx(7.48, abs=0.005)
    log.write_text(f"VLLM_PP_LAYER_PARTITION=12,20 vllm serve Llama-3.1-8B\n{staged}")
    assert "stages of 12,20 layers, and only even ones are modelled: nothing is compared" in (
        kvsim("capacity", "--from-log", log).out
    )


def test_unknown_models_are_left_out(kvsim: Kvsim, log: Path) -> None:
    log.write_text(LOG.replace("Llama-3.1-8B-Instruct", "nobody-knows"))
    assert "is not known here: add --model" in kvsim("capacity", "--from-log", log).out


@pytest.mark.parametrize(
    ("version", "rules"),
    [
        ("0.11.0", "0.11"),
        ("0.6.4", "0.11"),
        ("0.19.1", "0.19"),
        ("0.21.0", "0.33"),
        ("dev", "0.33"),
    ],
)
def test_rules_of_a_version(version: str, rules: str) -> None:
    assert rules_of(version) == rules


def test_names_of_models() -> None:
    assert named_model("/models/Llama-3.1-8B-Instruct/") == "meta-llama/Llama-3.1-8B"
    assert named_model("./config.json") is None


def test_it_is_light_and_fast(log: Path) -> None:
    start = time.perf_counter()
    imported = _imported("capacity", "--from-log", str(log), "--gpu", "H100")
    assert time.perf_counter() - start < 5  # a fraction of a second on an idle machine
    assert not HEAVY & imported
