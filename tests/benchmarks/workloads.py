"""What is measured: traces, the settings they run under, and the allocators they are for."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workloads.build import build_trace
from workloads.readers import read_trace
from workloads.record import PS_PER_S, RequestRecord, Trace

REPOSITORY = Path(__file__).parents[2]
SHARED = Path(os.environ.get("KVSIM_SHARED", REPOSITORY.parent / "shared"))
"""The folder of real traces, which the repository does not contain."""

LINEAR = "linear:0.012,2e-05,3e-07"
PAGED, PREFIX, RESERVE = "paged", "prefix", "reserve-max"
ALL = (PAGED, PREFIX, RESERVE, "reserve-pow2", "reserve-oracle")
OUTPUT_LENGTHS = (32, 64, 128, 256, 512, 1024)

MakeTrace = Callable[[int], Trace]


class Workload(NamedTuple):
    """A trace of *num_requests*, the settings it runs under, and the allocators it is for.

    *file* is the real trace it needs, below `SHARED`; *num_requests* is then the whole of it.
    """

    name: str
    make_trace: MakeTrace
    num_requests: int
    settings: Mapping[str, object]
    allocators: tuple[str, ...]
    file: Path | None = None

    @property
    def is_here(self) -> bool:
        """Whether the trace can be had on this machine."""
        return self.file is None or self.file.exists()


def fixed(prompt: int, output: int, *, shared: int = 0) -> MakeTrace:
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


def azure_like(rate: float) -> MakeTrace:
    """Answer what makes a trace of lognormal lengths, medians and means those of Azure's chats.

    Arrivals are Poisson, *rate* a second.
    """

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


def from_file(file: Path) -> MakeTrace:
    """Answer what reads the whole real trace in *file*."""
    return lambda _: read_trace(file)


def pool(num_blocks: int, num_batched_tokens: int = 2048) -> dict[str, object]:
    """Answer settings with a pool of *num_blocks* and vLLM's limits of 256 sequences."""
    return {
        "num_gpu_blocks_override": num_blocks,
        "max_num_batched_tokens": num_batched_tokens,
        "max_num_seqs": 256,
        "max_model_len": 4096,
        "block_size": 16,
        "step_time": LINEAR,
    }


AT_ONCE = "512/128 at once"
SHARED_PREFIX = "512/128, 256 shared"
UNPRESSED = "500/200"
PRESSED = "500/200, pressed"
AZURE = "Azure conversation"
MOONCAKE = "Mooncake conversation"
AZURE_LIKE = "Azure-like"


def roomy(output: int) -> str:
    """Answer the name of the workload with *output* tokens a request and no pressure."""
    return f"512/{output:,}, roomy"


NEAR_SATURATION = 23.0
"""Requests a second: 97 % of the 23.7 that are served while more of them wait (H100, below)."""
H100 = {"gpu": "H100", "max_model_len": 16_384, "step_time": "roofline"}
H200 = {"gpu": "H200", "max_model_len": 131_072, "step_time": "roofline"}
AZURE_FILE = SHARED / "traces/azure2023/AzureLLMInferenceTrace_conv.csv"
MOONCAKE_FILE = SHARED / "traces/mooncake/conversation_trace.jsonl"
WORKLOADS = [
    *(
        Workload(AT_ONCE, fixed(512, 128), count, pool(12_001), (PAGED, PREFIX, RESERVE))
        for count in (1_000, 20_000, 100_000)
    ),
    Workload(SHARED_PREFIX, fixed(512, 128, shared=256), 20_000, pool(12_001), (PREFIX,)),
    Workload(UNPRESSED, fixed(500, 200), 1_000, pool(12_001, 8192), (PAGED, PREFIX)),
    Workload(PRESSED, fixed(500, 200), 1_000, pool(3_001, 8192), (PAGED, PREFIX)),
    *(
        # 256 requests of 1,536 tokens fit in 24,576 blocks: nobody waits for memory.
        Workload(roomy(output), fixed(512, output), 20_000, pool(24_577), (PAGED, PREFIX))
        for output in OUTPUT_LENGTHS
    ),
    Workload(AZURE, from_file(AZURE_FILE), 0, H100, ALL, AZURE_FILE),
    Workload(MOONCAKE, from_file(MOONCAKE_FILE), 0, H200, (PREFIX,), MOONCAKE_FILE),
    *(
        Workload(AZURE_LIKE, azure_like(NEAR_SATURATION), count, H100, (PAGED, PREFIX))
        for count in (1_000, 10_000, 100_000, 1_000_000)
    ),
]


QUICK = [
    workload._replace(num_requests=max(workload.num_requests // 10, 100))
    for workload in WORKLOADS
    if workload.file is None and workload.num_requests <= 20_000
]
"""A tenth of the requests, without real traces and the largest sizes."""
