"""A sweep that takes seconds, run as a process of its own, so that it can be interrupted."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

NUM_CELLS = 12
SPEC = """
[fixed]
trace = "trace.jsonl"
max_model_len = 2048
num_gpu_blocks_override = 2000
[grid]
allocator = ["reserve-max", "paged", "prefix"]
max_num_seqs = [8, 16]
watermark = [0.0, 0.01]
"""


def write_spec(folder: Path, num_requests: int = 800) -> Path:
    """Write the spec and its trace to *folder*; answer the spec."""
    (folder / "trace.jsonl").write_text(
        "".join(
            f'{{"arrival_time": {row * 0.05}, "prompt": [["s{row % 5}", {100 + row % 7}], '
            f'["u{row}", {1 + 7 * row % 300}]], "output_len": {1 + 11 * row % 90}}}\n'
            for row in range(num_requests)
        )
    )
    path = folder / "spec.toml"
    path.write_text(SPEC)
    return path


def start(spec: Path, out: Path, *flags: str) -> "subprocess.Popen[str]":
    """Start ``kvsim sweep`` in a process group of its own."""
    kvsim = "import sys; from sim.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", kvsim, "sweep", str(spec), "-o", str(out), *flags]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def wait_for(what: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait until *what* is true, as long as *process* runs."""
    while not what():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def finished(out: Path) -> dict[str, int]:
    """Answer the cells of *out* that are there, and when they came, in nanoseconds."""
    return {
        path.parent.name: path.stat().st_mtime_ns for path in out.glob("cells/[!.]*/summary.json")
    }


def contents(out: Path) -> dict[str, bytes]:
    """Answer every file of *out*."""
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def descendants(pid: int, marks: tuple[str, ...]) -> list[int]:
    """Answer the processes below *pid* whose command line has all of *marks*."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc to find processes")
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            todo.append(child)
            if all(mark in _command(child) for mark in marks):
                found.append(child)
    return found


def is_alive(pid: int) -> bool:
    """Whether process *pid* is there, and not only waiting to be looked at."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
