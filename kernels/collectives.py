"""All-reduce over several GPUs, in processes of its own: ``python -m kernels.collectives N KIND``.

Prints one JSON object: microseconds of one call by bytes of the message, median and spread.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kernels.clock import Timing, timing_of
from kernels.grid import MESSAGES

LIMIT_S = 120
"""A library that hangs is given up after so long."""

CALLS, REPEATS = 20, 9


def all_reduce_times(
    num_ranks: int, kind: str, sizes: Sequence[int] = MESSAGES
) -> dict[int, Timing]:
    """Answer the time of an all-reduce of each of *sizes* bytes over *num_ranks* devices of *kind*.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    command = [sys.executable, "-m", "kernels.collectives", str(num_ranks), kind, *map(str, sizes)]
    root = str(Path(__file__).parents[1])
    # Ranks are on one machine: nobody else is listened to.
    local = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, env=os.environ | local, start_new_session=True, **pipes
    ) as process:
        try:
            out, said = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"all-reduce over {num_ranks} took more than {LIMIT_S} s") from None
        finally:
            if process.poll() is None:  # late or interrupted: the ranks go too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        raise RuntimeError(f"all-reduce over {num_ranks}: {last}")
    times = json.loads(out.strip().splitlines()[-1])
    return {int(size): Timing(us, spread, how) for size, (us, spread, how) in times.items()}


def _rank(rank: int, num_ranks: int, kind: str, sizes: Sequence[int], folder: str) -> None:
    """Take part as *rank*; rank 0 prints."""
    is_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
    )
    times = {size: _time(size, num_ranks, device) for size in sizes}
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(times))


def _time(size: int, num_ranks: int, device: torch.device) -> tuple[float, float, str]:
    """Answer the time of the slowest rank, whose sums are checked."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    buffer = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    dist.all_reduce(buffer)
    if not bool((buffer == num_ranks).all()):
        raise RuntimeError("an all-reduce did not answer the sum")
    buffer.zero_()
    elapsed = _gpu_us if device.type == "cuda" else _wall_us
    elapsed(buffer, CALLS)  # warm-up
    times = torch.tensor([elapsed(buffer, CALLS) for _ in range(REPEATS)], device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    timing: tuple[float, float, str] = timing_of(
        times.tolist(), "events" if device.type == "cuda" else "wall"
    )
    return timing


def _gpu_us(buffer: torch.Tensor, calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        dist.all_reduce(buffer)
    stop.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(stop)) / calls


def _wall_us(buffer: torch.Tensor, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(buffer)
    return 1e6 * (time.perf_counter() - start) / calls


def main(arguments: Sequence[str]) -> None:
    """Run the ranks; *arguments* are their number, ``cuda`` or ``cpu``, and bytes."""
    num_ranks, kind, *sizes = arguments
    spawn: Callable[..., object] = mp.spawn
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (int(num_ranks), kind, [int(s) for s in sizes], folder), nprocs=int(num_ranks))


if __name__ == "__main__":
    main(sys.argv[1:])
