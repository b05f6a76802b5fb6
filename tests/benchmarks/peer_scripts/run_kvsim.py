"""Run a trace on kvsim as the peers' scripts do: equal settings, time of the loop alone."""

import json
import sys

from tests.benchmarks.measure import run_once
from tests.benchmarks.workloads import Workload
from workloads.readers import read_trace
from workloads.record import Trace


def main() -> None:
    settings = json.loads(sys.argv[2])
    trace: Trace = read_trace(sys.argv[1])
    workload = Workload(
        "peers",
        lambda _: trace,
        len(trace),
        {
            "block_size": settings["block_size"],
            "num_gpu_blocks_override": settings["num_blocks"],
            "max_num_seqs": settings["max_num_seqs"],
            "max_num_batched_tokens": settings["max_num_batched_tokens"],
            "max_model_len": settings["max_model_len"],
            "step_time": f"constant:{settings['step_seconds']}",
        },
        (settings["allocator"],),
    )
    seconds, _ = run_once(workload, trace, settings["allocator"])
    print(json.dumps({"seconds": seconds, "done": len(trace)}))


main()
