"""Cells on a Ray cluster. The only file that imports Ray.

Workers need kvsim of the same version, and no shared file system: inputs go out as one object, once
a node, and results come back as bytes. Ray itself retries a cell whose worker or node is lost.
"""

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from sim.errors import ConfigError, FileError
from sim.files import reason
from sim.sweep.cells import Cell, Inputs
from sim.sweep.work import Files, Results, failure, run_cell
from workloads.errors import plain

CONNECT_SECONDS = 15
"""How long a cluster may take to answer."""

MAX_RETRIES = 3
"""Times that Ray runs a cell again whose worker is lost."""

_EXPECTED = "expected the address of a running Ray cluster (ray start --head)"

_fetched: dict[str, Inputs] = {}
"""Of this process, if it is a worker: inputs by the name of Ray's object."""


def run_ray(cells: Sequence[Cell], inputs: Inputs, address: str | None) -> Results:
    """Connect, and yield every cell as it finishes, as many at a time as the cluster has CPUs.

    *address* of the cluster: ``HOST:PORT`` on one of its nodes, ``ray://HOST:PORT`` from outside,
    None for the one that runs here (or ``RAY_ADDRESS``).

    Raises:
        ConfigError: Ray is not installed.
        FileError: the cluster does not answer, or has no CPU.
    """
    ray = _connected(address)
    num_cpus = int(ray.cluster_resources().get("CPU", 0))
    if num_cpus < 1:
        raise FileError("--executor ray: the cluster has no CPU; expected at least one")
    return _results(ray, cells, inputs, num_cpus)


def _results(ray: Any, cells: Sequence[Cell], inputs: Inputs, num_cpus: int) -> Results:
    try:
        shared = [ray.put(inputs)]  # in a list: Ray would fetch it for every call otherwise
        run = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_run)
        todo = deque(cells)
        running: dict[Any, Cell] = {}
        while todo or running:
            while todo and len(running) < 2 * num_cpus:  # the next one waits at its worker
                cell = todo.popleft()
                running[run.remote(shared, cell)] = cell
            for done in ray.wait(list(running), num_returns=1)[0]:
                cell = running.pop(done)
                try:
                    files = ray.get(done)
                except ray.exceptions.RayError as error:
                    why = str(error).strip().partition("\n")[0]
                    files = failure(cell, f"lost by Ray {MAX_RETRIES + 1} times: {why}")
                yield cell, files
    finally:
        ray.shutdown()


def _run(shared: Sequence[Any], cell: Cell) -> Files:
    """Be the task: runs in a worker."""
    import ray  # noqa: PLC0415  # a worker has it

    name = shared[0].hex()
    if name not in _fetched:
        _fetched.clear()
        _fetched[name] = ray.get(shared[0])
    return run_cell(cell, _fetched[name])


def _connected(address: str | None) -> Any:
    """Answer the module ``ray``, connected to the cluster at *address*."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # one line says what is wrong, ours
    try:
        import ray  # noqa: PLC0415  # an extra
    except ImportError:
        raise ConfigError("--executor ray needs Ray: pip install 'kvsim[ray]'") from None
    where = "--executor ray" if address is None else f"--address {plain(address)}"
    if address is not None:
        _check_reachable(address, where)
    problem: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:  # of a thread, for the caller
            problem.append(error)

    # In a thread, because Ray tries for minutes; it also leaves signals alone there.
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    signal.signal(signal.SIGTERM, before)
    if thread.is_alive():
        raise FileError(f"{where}: no Ray cluster answers within {CONNECT_SECONDS} s")
    if problem:
        why = str(problem[0]).strip().partition("\n")[0]
        raise FileError(f"{where}: {why}; {_EXPECTED}")
    return ray


def _check_reachable(address: str, where: str) -> None:
    """Refuse an *address* at which nobody listens: Ray itself takes more than a minute to say so.

    Raises:
        ConfigError: no address.
        FileError: no answer.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{where}: expected HOST:PORT or ray://HOST:PORT, like 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, UnicodeError) as error:
        why = reason(error)
        raise FileError(f"{where}: {why}; {_EXPECTED}") from None
