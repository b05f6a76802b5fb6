"""The keys of vLLM 0.33.0's ``bench serve`` (``benchmarks/serve.py:1319-1341, 1426-1432``).

Left out: lists (``--save-detailed``), the date, which would differ from run to run, and settings of
a load generator: a replay has none but ``request_rate``. That and ``request_goodput`` are there if
they were asked for.
"""

import json
from itertools import product
from pathlib import Path

import pytest

from sim.cli import main

KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "model_id",
    "num_prompts",
    *(
        f"{kind}_{name}_ms"
        for kind, name in product(("mean", "median", "std", "p99"), ("ttft", "tpot", "itl", "e2el"))
    ),
}
ABSENT = {"date", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times"}
IF_ASKED = {"request_goodput", "request_rate"}
OLD = {"gpu_cache_usage_perc", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits"}


def test_summary_has_the_keys_of_vllm(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", str(samples / "tokens.jsonl"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary.keys() >= KEYS
    assert not summary.keys() & (ABSENT | OLD | IF_ASKED)


def test_keys_that_are_asked_for(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--request-rate", "2", "--goodput", "ttft:500")
    assert main(["run", "--trace", str(samples / "tokens.jsonl"), "--json", *asked]) == 0
    assert json.loads(capsys.readouterr().out).keys() >= KEYS | IF_ASKED
