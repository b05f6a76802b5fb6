"""How fast the loop is: requests a second from the first arrival to the last row kept.

Run `python -m tests.benchmarks.loop [NAME ...]`; a name is part of a workload's. Reading the trace,
importing and writing result files are left out.
"""

import argparse
import gc
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sim.settings import FLAG_RANK, Given, resolve
from sim.simulation import Simulation
from workloads.readers import read_trace
from workloads.record import PS_PER_S, RequestRecord, Trace, build_trace

LINEAR = "linear:0.012,2e-05,3e-07"
PAGED, PREFIX, RESERVE = "paged", "prefix", "reserve-max"


class Workload(NamedTuple):
    """A trace, the settings it runs under, and the allocators it is for."""

    name: str
    trace: Callable[[int], Trace]
    num_requests: int
    settings: Mapping[str, object]
    allocators: tuple[str, ...]


def fixed(prompt: int, output: int, *, shared: int = 0) -> Callable[[int], Trace]:
    """Answer what makes a trace of equal requests that all arrive at once."""

    def make(num_requests: int) -> Trace:
        return build_trace(
            (
                RequestRecord(
                    row + 1,
                    0,
                    prompt,
                    output,
                    segments=[("system", shared), (row, prompt - shared)] if shared else None,
                )
                for row in range(num_requests)
            ),
            name="fixed",
            trace_format="none",
        )

    return make


def azure_like(rate: float) -> Callable[[int], Trace]:
    """Answer what makes a trace of lognormal lengths, medians and means those of Azure's chats."""

    def make(num_requests: int) -> Trace:
        rng = np.random.default_rng(0)
        arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
        prompts = np.clip(rng.lognormal(np.log(1020), 0.498, num_requests), 2, 14_000)
        outputs = np.clip(rng.lognormal(np.log(129), 0.993, num_requests), 1, 1000)
        rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        return build_trace(
            (
                RequestRecord(row, round(arrival * PS_PER_S), int(prompt), int(output))
                for row, (arrival, prompt, output) in enumerate(rows, 1)
            ),
            name="azure-like",
            trace_format="none",
        )

    return make


def from_file(path: str) -> Callable[[int], Trace]:
    """Answer what reads a real trace beside the repository."""
    shared = Path(__file__).parents[3] / "shared" / "traces"
    return lambda _: read_trace(shared / path)


AT_ONCE = {"num_gpu_blocks_override": 12_001, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
WORKLOADS = [
    Workload("512/128 at once", fixed(512, 128), 20_000, AT_ONCE, (PAGED, PREFIX, RESERVE)),
    Workload("512/256 at once", fixed(512, 256), 20_000, AT_ONCE, (PAGED, PREFIX, RESERVE)),
    Workload("512/128 shared", fixed(512, 128, shared=256), 20_000, AT_ONCE, (PREFIX,)),
    Workload(
        "500/200",
        fixed(500, 200),
        1000,
        {"num_gpu_blocks_override": 12_001, "max_num_batched_tokens": 8192, "max_num_seqs": 256},
        (PAGED, PREFIX),
    ),
    Workload(
        "500/200 pressed",
        fixed(500, 200),
        1000,
        {"num_gpu_blocks_override": 3001, "max_num_batched_tokens": 8192, "max_num_seqs": 256},
        (PAGED, PREFIX),
    ),
    Workload(
        "Azure conversation",
        from_file("azure2023/AzureLLMInferenceTrace_conv.csv"),
        0,
        {"gpu": "H100", "max_model_len": 16_384, "step_time": "roofline"},
        (PAGED, PREFIX, RESERVE, "reserve-pow2", "reserve-oracle"),
    ),
    Workload(
        "Mooncake conversation",
        from_file("mooncake/conversation_trace.jsonl"),
        0,
        {"gpu": "H200", "max_model_len": 131_072, "step_time": "roofline"},
        (PREFIX,),
    ),
    *(
        Workload(
            f"Azure-like {count:,}",
            azure_like(6.5),
            count,
            {"gpu": "H100", "max_model_len": 16_384, "step_time": "roofline"},
            (PAGED, PREFIX),
        )
        for count in (10_000, 100_000, 1_000_000)
    ),
]


def run(workload: Workload, trace: Trace, allocator: str) -> tuple[float, int]:
    """Answer seconds and steps of one run."""
    values: dict[str, object] = {"max_model_len": 4096, "step_time": LINEAR, **workload.settings}
    values["allocator"] = allocator
    given = {name: Given(value, FLAG_RANK, name) for name, value in values.items()}
    simulation = Simulation(resolve(given).run, trace)
    gc.collect()
    start = time.perf_counter()
    result = simulation.run()
    seconds = time.perf_counter() - start
    assert result.recorder.num_done == len(trace)
    return seconds, result.recorder.num_steps


def main() -> None:
    """Print one line a workload and allocator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of workload names [default: all]")
    names = parser.parse_args().names
    print(
        f"{'workload':<24}{'allocator':<16}{'requests':>10}{'seconds':>9}{'requests/s':>12}"
        f"{'steps':>10}{'peak MiB':>10}"
    )
    for workload in WORKLOADS:
        if names and not any(name in workload.name for name in names):
            continue
        trace = workload.trace(workload.num_requests)
        for allocator in workload.allocators:
            seconds, steps = run(workload, trace, allocator)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"{workload.name:<24}{allocator:<16}{len(trace):>10,}{seconds:>9.2f}"
                f"{len(trace) / seconds:>12,.0f}{steps:>10,}{peak:>10,}",
                flush=True,
            )


if __name__ == "__main__":
    main()
