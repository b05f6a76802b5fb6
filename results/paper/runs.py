"""What the experiments of this folder run: systems, engines, workloads, and host time.

The paper: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, SOSP 2023 (arXiv 2309.06180).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.arrivals import arriving
from sim.settings import FLAG_RANK, Given, resolve
from sim.simulation import RunResult, Simulation
from sim.timing.base import TICKS_PER_S, DecodeLine, StepBatch, StepTimeModel, TimeSource
from workloads.build import build_trace
from workloads.generators import make_records
from workloads.record import PS_PER_S, RequestRecord, Trace
from workloads.spec import read_spec

HERE = Path(__file__).parent
GIB = 2**30
SEEDS = (0, 1, 2)
WARM_UP_S = 300
"""Left out of means over time."""

SYSTEMS: dict[str, dict[str, Any]] = {
    "Orca (Max)": {"allocator": "contiguous", "reservation": "max", "placement": "buddy"},
    "Orca (Pow2)": {"allocator": "contiguous", "reservation": "pow2", "placement": "buddy"},
    "Orca (Oracle)": {"allocator": "contiguous", "reservation": "oracle", "placement": "buddy"},
    "vLLM": {"allocator": "paged", "watermark": 0.01},
}
"""The watermark is not in the paper; vLLM's code of the time has it."""

ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2560,
    "enable_chunked_prefill": False,
    "enforce_eager": True,
}
"""Defaults of vLLM 0.1: whole prompts, together with decodes, and no CUDA graphs."""


class Server(NamedTuple):
    """Model and GPUs of the paper's Table 1: *kv_gib* of KV memory over *gpus* GPUs."""

    model: str
    gpu: str
    gpus: int
    kv_gib: int
    slots: float

    def settings(self) -> dict[str, Any]:
        """Answer what `resolve` takes; the pool is that of one GPU."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "tensor_parallel_size": self.gpus,
            "kv_cache_memory_bytes": self.kv_gib * GIB // self.gpus,
        }


SERVERS = {
    "OPT-13B": Server("facebook/opt-13b", "A100-40", 1, 12, 15_700),
    "OPT-66B": Server("facebook/opt-66b", "A100-40", 4, 21, 9_700),
    "OPT-175B": Server("facebook/opt-175b", "A100-80", 8, 264, 60_100),
}
LLAMA_13B = Server("meta-llama/Llama-2-13b-hf", "A100-40", 1, 12, 15_700)
"""The shapes, and the bytes of a token, are those of LLaMA-13B."""

# ---- host time

VIDUR_HOST_MS = {
    8: 2.983, 16: 4.753, 24: 6.138, 32: 7.800, 40: 9.218, 48: 10.663, 56: 11.368, 64: 12.558,
}  # fmt: skip
"""Host time of a step by running requests: means of scheduling, preparing inputs, sampling and
processing outputs, added up; measured on an A100 with Llama-2-7B by Vidur (MIT,
github microsoft/vidur, data/profiling/a100/cpu_overheads.csv), for the engine of 2023."""

_LINE = linear_regression(list(VIDUR_HOST_MS), list(VIDUR_HOST_MS.values()))
HOST_S, HOST_PER_REQUEST_S = _LINE.intercept / 1e3, _LINE.slope / 1e3
"""The line through these: 2.0 ms a step and 0.17 ms a request."""


class HostWork:
    """A step time with host work for every request of a step on top."""

    def __init__(self, kernels: StepTimeModel, seconds: float) -> None:
        self._kernels, self._ticks = kernels, round(seconds * TICKS_PER_S)
        text = f"{seconds} s a request: line through Vidur's profile of an A100"
        self.sources = (*kernels.sources, TimeSource("host work", "fitted", text))
        self.table, self.num_outside = kernels.table, 0
        self.split, self.steps_outside = kernels.split, kernels.steps_outside

    def step_time(self, batch: StepBatch) -> int:
        """See `StepTimeModel`."""
        return self._kernels.step_time(batch) + self._ticks * batch.num_seqs

    def decode_line(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """See `StepTimeModel`."""
        line = self._kernels.decode_line(num_decodes, decode_context)
        return line._replace(fixed=line.fixed + self._ticks * num_decodes)


# ---- runs


@functools.cache
def requests(lengths: str, seed: int) -> list[RequestRecord]:
    """Answer the requests of the specification *lengths*, filtered as vLLM's benchmark does."""
    records, _ = make_records(read_spec(HERE / f"{lengths}.toml"), seed)
    return [
        record
        for record in records
        if record.num_prompt_tokens < 1024
        and record.num_prompt_tokens + record.num_output_tokens < 2048
    ]


class Load(NamedTuple):
    """So many *seconds* of requests with these *lengths*, *rate* of them a second."""

    lengths: str
    rate: float
    seconds: int
    seed: int = 0
    prefix: int = 0
    """Tokens of the one prefix, of lengths that have one."""

    def records(self) -> list[RequestRecord]:
        """Answer the requests; those of a lower rate are the first of a higher one."""
        count = round(self.rate * self.seconds)
        found = requests(self.lengths, self.seed)[:count]
        if len(found) < count:
            raise ValueError(f"{self.lengths}.toml has too few requests for {self}")
        return [_behind(record, self.prefix) for record in found] if self.prefix else found

    def trace(self) -> Trace:
        """Answer the requests as a trace, at the rate of the specification."""
        name = f"{self.lengths}.toml"
        return build_trace(self.records(), name=name, trace_format="workload", sha256="")


def _behind(record: RequestRecord, prefix: int) -> RequestRecord:
    """Answer *record* with a first segment of *prefix* tokens."""
    assert record.segments is not None
    (name, length), *rest = record.segments
    num_prompt_tokens = record.num_prompt_tokens - length + prefix
    return record._replace(num_prompt_tokens=num_prompt_tokens, segments=[(name, prefix), *rest])


def run(
    trace: Trace, settings: Mapping[str, Any], rate: float | None = None, host: float = 1.0
) -> RunResult:
    """Answer the run of *trace* at *rate*, with *host* times the host time of 2023."""
    values = {**ENGINE, "host_overhead": host * HOST_S, **settings}
    if rate is not None:
        values["request_rate"] = rate
    given = {name: Given(value, FLAG_RANK, f"--{name}") for name, value in values.items()}
    config = resolve(given).run
    simulation = Simulation(config, arriving(trace, config.load))
    if host and "step_time" not in values:
        priced = HostWork(simulation.result.step_time, host * HOST_PER_REQUEST_S)
        simulation.result = replace(simulation.result, step_time=priced)
    return simulation.run()


# ---- what is measured


def steps(result: RunResult) -> dict[str, npt.NDArray[np.float64]]:
    """Answer the rows of steps of *result*."""
    chunks = list(result.recorder.step_chunks())
    return {
        name: np.concatenate([chunk[name] for chunk in chunks]).astype(np.float64)
        for name in chunks[0]
    }


def means(result: RunResult, start_s: float = WARM_UP_S) -> dict[str, float]:
    """Answer requests running, shares of the pool (%), and milliseconds a step.

    Means over time from *start_s* to the last arrival.
    """
    rows = steps(result)
    begin, duration = rows["start_ps"] / PS_PER_S, rows["duration_ps"] / PS_PER_S
    end_s = float(result.recorder.arrival_ps[-1]) / PS_PER_S
    inside = np.minimum(begin + duration, end_s) - np.maximum(begin, start_s)
    inside = np.clip(inside, 0, None)

    def over_time(name: str) -> float:
        return float((rows[name] * inside).sum()) / (end_s - start_s)

    states = ("live", "reserved", "internal", "external")
    capacity = result.recorder.capacity
    with np.errstate(invalid="ignore"):
        parts = np.where(duration > 0, inside / duration, 0) * rows["num_steps"]
    return {
        "running": over_time("running"),
        **{state: 100 * over_time(f"kv_{state}_slots") / capacity for state in states},
        "step_ms": 1e3 * float(inside.sum() / parts.sum()),
    }


def normalized_latency(result: RunResult) -> float:
    """Answer the mean over requests of latency over output tokens, in seconds."""
    columns, arrival = result.recorder.request_columns(), result.recorder.arrival_ps
    latency = (columns["finish_ps"] - arrival) / PS_PER_S
    return float((latency / columns["num_output_tokens"]).mean())


def duration_s(result: RunResult) -> float:
    """Answer the seconds from the first arrival to the last token."""
    finish = result.recorder.request_columns()["finish_ps"]
    return float(finish.max() - result.recorder.arrival_ps[0]) / PS_PER_S
