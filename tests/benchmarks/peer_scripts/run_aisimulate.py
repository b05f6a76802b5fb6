"""Run a trace on AISimulate's compiled loop, as `tests.benchmarks.peers` asks.

Seconds are those the loop reports itself, without reading the specification and writing the report
as JSON. Step time is fixed, so no performance data is looked up.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def _specification(rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    step_ms = 1e3 * settings["step_seconds"]
    rank = {
        "backend": "vllm",
        "block_size": settings["block_size"],
        "num_gpu_blocks": settings["num_blocks"],
        "max_num_seqs": settings["max_num_seqs"],
        "max_num_batched_tokens": settings["max_num_batched_tokens"],
        "max_model_len": settings["max_model_len"],
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "timing_model": {"type": "fixed", "prefill_ms": step_ms, "decode_ms": step_ms},
    }
    return {
        "version": 1,
        "topology": {
            "kind": "aggregated",
            "workers": {"initial_workers": 1, "startup_delay_ms": 0.0},
        },
        "engine": {
            "dp_size": 1,
            "tensor_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "num_gpu_blocks_is_explicit": True,
            "rank": rank,
        },
        "adapters": {
            "placement": {"provider": "round_robin", "config": None},
            "scaling": {"provider": "none", "config": None},
        },
        "max_sim_time_ms": None,
        "max_in_flight": None,
        "record_per_request": settings["records"],
        "sla": {},
        "requests": [
            {
                "id": row["request_id"],
                "arrival_time_ms": 1e3 * row["arrival_time"],
                "input_tokens": row["input_length"],
                "output_tokens": row["output_len"],
                "metadata": None,
            }
            for row in rows
        ],
    }


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    specification = json.dumps(_specification(rows, json.loads(sys.argv[2])))
    runtime = importlib.import_module("aisimulate._runtime")
    report = json.loads(runtime.run_replay_json(specification))
    seconds = report["wall_time_ms"] / 1e3
    print(json.dumps({"seconds": seconds, "done": report["completed_requests"]}))


main()
