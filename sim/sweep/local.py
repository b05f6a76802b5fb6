"""Cells in processes of this machine.

Every worker is a pool of one process: whose process dies is known, and nobody else is affected.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import NamedTuple

from sim.sweep.cells import Cell, Inputs
from sim.sweep.folder import uninterrupted
from sim.sweep.work import Files, Results, failure, run_cell

MAX_TRIES = 3
"""Workers that may die of one cell. The first may have been killed for what another one did."""

_inputs: list[Inputs] = []
"""Of this process, if it is a worker."""


class _Task(NamedTuple):
    cell: Cell
    tries: int


class _Worker:
    """One process, started with the first cell, that ends as soon as this one does."""

    def __init__(self, inputs: Inputs) -> None:
        context = multiprocessing.get_context("spawn")  # forking a process with threads may hang
        watched, self._lifeline = context.Pipe(duplex=False)
        self._watched = watched
        self._pool = ProcessPoolExecutor(1, context, _start, (watched, inputs))

    def submit(self, cell: Cell) -> "Future[Files]":
        """Start *cell*."""
        with uninterrupted():  # an interruption is this process's affair, not the workers'
            return self._pool.submit(_run, cell)

    def stop(self) -> None:
        """End the process at once, whatever it does."""
        self._lifeline.close()
        self._watched.close()
        self._pool.shutdown(cancel_futures=True)


def run_local(cells: Sequence[Cell], inputs: Inputs, jobs: int) -> Results:
    """Yield every cell with its files as it finishes, *jobs* at a time.

    A cell whose worker dies is tried again, `MAX_TRIES` times in all; then that is its failure.
    """
    todo = deque(_Task(cell, 1) for cell in cells)
    idle = [_Worker(inputs) for _ in range(min(jobs, len(todo)))]
    running: dict[Future[Files], tuple[_Worker, _Task]] = {}
    try:
        while todo or running:
            while todo and idle:
                worker, task = idle.pop(), todo.popleft()
                try:
                    running[worker.submit(task.cell)] = (worker, task)
                except BrokenProcessPool:  # died while it had nothing to do
                    worker.stop()
                    idle.append(_Worker(inputs))
                    todo.appendleft(task)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, (cell, tries) = running.pop(future)
                try:
                    files = future.result()
                except BrokenProcessPool:
                    worker.stop()
                    idle.append(_Worker(inputs))
                    if tries < MAX_TRIES:
                        todo.appendleft(_Task(cell, tries + 1))
                        continue
                    files = failure(cell, f"its process died {tries} times; was memory short?")
                else:
                    idle.append(worker)
                yield cell, files
    finally:
        for worker in [*idle, *(worker for worker, _ in running.values())]:
            worker.stop()


def _start(watched: Connection, inputs: Inputs) -> None:
    """Make this process a worker: keep *inputs*, and die when the other end of *watched* does."""

    def watch() -> None:
        try:
            watched.recv_bytes()
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _inputs.append(inputs)


def _run(cell: Cell) -> Files:
    return run_cell(cell, _inputs[0])
