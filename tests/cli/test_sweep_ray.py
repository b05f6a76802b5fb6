"""Sweeps on a real Ray runtime that this module starts and stops: the bytes are the local ones."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweeps import contents, descendants, finished, start, wait_for, write_spec

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

HEAD = """
import logging, sys, ray
ray.init(
    num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], object_store_memory=80 * 2**20,
    log_to_driver=False, logging_level=logging.ERROR,
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder for all that Ray writes, whose path is short because of sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")  # it listens on more than the loopback interface
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[tuple[str, int]]:
    """The address of a runtime with two CPUs on ports of its own choice, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip(), process.pid
    process.communicate()  # closes its standard input, and it ends with all that it started


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spec(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def local(spec: Path) -> dict[str, bytes]:
    out = spec.parent / "local"
    _run(spec, out)
    return contents(out)


def _run(spec: Path, out: Path, *flags: str, code: int = 0) -> str:
    process = start(spec, out, *flags)
    _, err = process.communicate()
    assert process.returncode == code, err
    return err


def test_same_bytes(spec: Path, cluster: tuple[str, int], local: dict[str, bytes]) -> None:
    out = spec.parent / "ray"
    _run(spec, out, "--executor", "ray", "--address", cluster[0])
    assert contents(out) == local


def test_lost_workers_and_a_lost_driver(
    spec: Path, cluster: tuple[str, int], local: dict[str, bytes]
) -> None:
    """What was lost is run again, by Ray or by the next driver; what has finished is not."""
    out, flags = spec.parent / "lost", ("--executor", "ray", "--address", cluster[0])
    process = start(spec, out, *flags)
    wait_for(lambda: len(finished(out)) >= 2, process)
    for worker in descendants(cluster[1], ("ray::_run",)):
        os.kill(worker, signal.SIGKILL)
    count = len(finished(out))
    wait_for(lambda: len(finished(out)) > count, process)
    process.kill()
    process.communicate()
    before = finished(out)
    _run(spec, out, *flags)
    assert finished(out).items() >= before.items()
    assert contents(out) == local


def test_files_travel(spec: Path, cluster: tuple[str, int], tmp_path: Path) -> None:
    """A worker finds models and GPUs without the driver's file system: here they go meanwhile."""
    (tmp_path / "own.toml").write_text(
        "memory_visible_gib = 40\nhbm_bandwidth = 1.5e12\nbf16_flops = 3e14\n"
    )
    path = tmp_path / "spec.toml"
    path.write_text(
        '[fixed]\nmax_model_len = 4096\nstep_time = "constant:0.01"\n'
        '[grid]\ngpu = ["own.toml", "A100-40"]\n'
    )
    _run(path, tmp_path / "local")
    _run(path, tmp_path / "ray", "--executor", "ray", "--address", cluster[0])
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert b'"own.toml"' in contents(tmp_path / "ray")["summary.csv"]


def test_nobody_there(spec: Path, home: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    err = _run(spec, spec.parent / "no", "--executor", "ray", "--address", address, code=1)
    assert err.splitlines() == [
        f"kvsim: --address {address}: Connection refused; expected the address of a running Ray "
        "cluster (ray start --head)"
    ]


def test_somebody_else_there(spec: Path, home: Path) -> None:
    """What listens is no Ray cluster: an end with one line at last, not a wait without one."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        err = _run(spec, spec.parent / "other", "--executor", "ray", "--address", address, code=1)
    assert err.splitlines()[-1].startswith(f"kvsim: --address {address}: no Ray cluster answers")


def test_no_address(spec: Path, home: Path) -> None:
    err = _run(spec, spec.parent / "bad", "--executor", "ray", "--address", "here", code=2)
    assert "--address here: expected HOST:PORT or ray://HOST:PORT" in err
