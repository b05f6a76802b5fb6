"""How long a call takes: CUDA graphs between events on a GPU, a wall clock on a CPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

MIN_GRAPH_US = 1000.0
"""A graph lasts at least about this long, so that neither its launch nor the events count."""

MAX_NODES = 1024
MIN_REPEATS, MAX_REPEATS = 5, 25


class Timing(NamedTuple):
    """Time of one call: the median, and the largest less the smallest, in microseconds.

    *how*: ``graph``; ``events`` where the call cannot be captured, so that launches may count;
    ``wall`` on a CPU.
    """

    us: float
    spread_us: float
    how: str


def timing_of(times_us: Sequence[float], how: str) -> Timing:
    """Answer median and spread."""
    return Timing(statistics.median(times_us), max(times_us) - min(times_us), how)


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, seconds: float = 0.1
) -> Timing:
    """Answer the time of one of *calls*, which are run in turn, for about *seconds* in all."""
    if device.type != "cuda":
        return _by_wall_clock(calls, seconds)
    _side_stream(calls[:3])
    estimate = _estimate_us(calls)
    nodes = max(len(calls), min(MAX_NODES, int(MIN_GRAPH_US / max(estimate, 1.0)) + 1))
    nodes = -(-nodes // len(calls)) * len(calls)  # every call equally often
    graph = _captured(calls, nodes)
    how = "events" if graph is None else "graph"

    def run() -> None:
        if graph is not None:
            graph.replay()
            return
        for index in range(nodes):
            calls[index % len(calls)]()

    first = _elapsed_us(run, 2)  # warm-up
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(1e6 * seconds / max(first[-1], 1.0))))
    times = [elapsed / nodes for elapsed in _elapsed_us(run, repeats)]
    return timing_of(times, how)


def _by_wall_clock(calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
    times: list[float] = []
    stop = time.perf_counter() + seconds
    calls[0]()
    while len(times) < MIN_REPEATS or (time.perf_counter() < stop and len(times) < MAX_REPEATS):
        start = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(1e6 * (time.perf_counter() - start))
    return timing_of(times, "wall")


def _side_stream(calls: Sequence[Callable[[], object]]) -> None:
    """Run *calls* on another stream, as a capture will: libraries prepare themselves there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _estimate_us(calls: Sequence[Callable[[], object]]) -> float:
    """Answer about how long a call takes, launch included."""

    def run() -> None:
        for index in range(3):
            calls[index % len(calls)]()

    return _elapsed_us(run, 1)[0] / 3


def _elapsed_us(run: Callable[[], None], repeats: int) -> list[float]:
    """Answer the microseconds that each of *repeats* takes on the GPU."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(stop) for start, stop in events]


def _captured(calls: Sequence[Callable[[], object]], nodes: int) -> "torch.cuda.CUDAGraph | None":
    """Answer a graph of *nodes* calls; None if they cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for index in range(nodes):
                calls[index % len(calls)]()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    finally:
        torch.cuda.set_stream(stream)  # PyTorch leaves that of a capture that failed
    return graph


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Answer bytes/s, read and written, of copying *num_bytes* (less where memory is short)."""
    if device.type == "cuda":
        num_bytes = min(num_bytes, max(2**20, torch.cuda.mem_get_info(device)[0] // 4))
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    source.random_()
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device)
    moved: int = 2 * source.nbytes
    return moved / (timing.us * 1e-6)
