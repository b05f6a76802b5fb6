"""Run a trace on sched-sim with its own interpreter, as `tests.benchmarks.peers` asks.

Its FCFS policy is the one that keeps max_num_seqs; it prefills whole prompts and has no token
budget. (Its chunked policy has the budget and no limit of sequences.)
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

BYTES = 1024**3


def _part(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"sched_sim.{module}"), name)


def main() -> None:
    settings: dict[str, int] = json.loads(sys.argv[2])
    block_size = settings["block_size"]
    hardware = _part("hardware.profile", "HardwareProfile")()
    block_gib = block_size * hardware.kv_bytes_per_token / BYTES
    # The number of blocks follows from the memory; half a block guards against rounding.
    kv_gib = (settings["num_blocks"] + 0.5) * block_gib
    hardware.vram_gb = hardware.model_weights_gb + 0.5 + kv_gib
    blocks = _part("memory.block_manager", "BlockManager")(hardware, block_size=block_size)
    assert blocks.total_gpu_blocks == settings["num_blocks"]
    latency = _part("hardware.latency_model", "RooflineLatencyModel")(hardware)
    preemption = _part("memory.preemption", "PreemptionHandler")(blocks, latency)
    scheduler = _part("schedulers.fcfs", "FCFSScheduler")(
        blocks, latency, preemption, max_batch_size=settings["max_num_seqs"]
    )
    simulator = _part("core.event_engine", "Simulator")(hardware, scheduler, block_size=block_size)
    make = _part("core.request", "Request")
    requests = [
        make(
            request_id=row["request_id"],
            arrived_at=row["arrival_time"],
            prompt_tokens=row["input_length"],
            output_tokens=row["output_len"],
        )
        for row in map(json.loads, Path(sys.argv[1]).read_text().splitlines())
    ]
    start = time.perf_counter()
    simulator.submit_workload(requests)
    simulator.run()
    seconds = time.perf_counter() - start
    done = sum(request.completed_at is not None for request in requests)
    print(json.dumps({"seconds": seconds, "done": done}))


main()
