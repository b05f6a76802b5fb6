"""What ``--live`` draws on a terminal, and that it changes nothing."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sim.columns import SLOT_STATES
from sim.simulation import Simulation
from sim.watch.board import Board
from tests.cli.conftest import Kvsim
from tests.cli.test_watch import FLAGS, SMALL
from tests.conftest import REPOSITORY
from tests.strategies import PREFIX, make_config, random_trace


@pytest.mark.parametrize("command", ["run", "compare"])
def test_without_a_terminal_live_changes_nothing(
    kvsim: Kvsim, busy_trace: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.plots.figures.write_comparison_charts", lambda *_: [])
    flags = ("--trace", busy_trace, *SMALL, "--step-time", "constant:0.1", "-o", tmp_path / "out")
    plain = kvsim(command, *flags)
    assert kvsim(command, *flags, "--live") == plain


def _in_terminal(
    *arguments: str | Path, interrupt: str = "", **variables: str
) -> tuple[int, bytes, bytes]:
    """Answer exit code, stdout and what a terminal on stderr receives.

    *interrupt*: send SIGINT once the terminal has received this.
    """
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-c", "import sys; from sim.cli import console; sys.exit(console())"]
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"} | variables,
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := os.read(ours, 4096):
                shown += part
                if interrupt and interrupt.encode() in shown:
                    process.send_signal(signal.SIGINT)
                    interrupt = ""
        os.close(ours)
        out, _ = process.communicate(timeout=60)
    return process.returncode, out, shown


def test_the_board(kvsim: Kvsim, busy_trace: Path, tmp_path: Path) -> None:
    run = ("run", "--trace", busy_trace, *FLAGS, "-o", tmp_path / "out")
    plain = kvsim(*run)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    code, out, shown = _in_terminal(*run, "--live")
    assert (code, out.decode()) == (0, plain.out)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    board = shown.decode()
    summary = json.loads(files["summary.json"])
    last = board[board.rindex("12 of 12 requests") :]
    assert f"{summary['duration']:,.1f} s " in last
    assert f" 0  running, 0 waiting, {summary['num_preemptions']} preemptions" in last
    for label in ("KV usage", "failed allocations", "prefix hit rate"):
        assert label in board
    assert board.count("\x1b[?25l") == board.count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_the_board_keeps_to_its_width(width: int) -> None:
    simulation = Simulation(make_config(PREFIX), random_trace(seed=5, num_requests=10))
    recorder = simulation.run().recorder
    board = Board("prefix", 10, recorder)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(board.show(recorder.now_ps, 1.0, width))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width - len("^C")  # else an interruption moves the board
    assert len(lines) == (9 if width == 80 else 8 if width == 120 else 7)
    if width >= 80:  # each share with its state
        legend = re.findall(r"(\S) (\w+) +\d+%", "\n".join(lines[4:-3]))
        assert [state for _, state in legend] == list(SLOT_STATES)


def test_no_board_where_its_letters_cannot_be_shown(busy_trace: Path) -> None:
    run = ("run", "--trace", busy_trace, *FLAGS, "--live")
    code, _, shown = _in_terminal(*run, PYTHONIOENCODING="ascii")
    assert (code, shown) == (0, b"")


def test_an_interrupted_board_gives_the_cursor_back(busy_trace: Path) -> None:
    run = ("run", "--trace", busy_trace, *FLAGS, "--live", "--speed", "0.001x")
    code, out, shown = _in_terminal(*run, interrupt="prefix hit rate")
    assert (code, out) == (130, b"")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.decode().endswith("\r\nkvsim: interrupted\r\n")
