from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sim.cli import main


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def notes(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("note: ")]

    @property
    def refusal(self) -> str:
        """The one line that says what is wrong."""
        lines = [line for line in self.err.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("kvsim: ")
        assert self.out == ""
        return lines[0]


Kvsim = Callable[..., Outcome]


@pytest.fixture
def kvsim(capsys: pytest.CaptureFixture[str]) -> Kvsim:
    """Run the command line in this process."""

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def busy_trace(tmp_path: Path) -> Path:
    """Twelve requests, more than `SMALL` holds at once; pairs share a prompt."""
    path = tmp_path / "busy.jsonl"
    path.write_text(
        "".join(
            f'{{"arrival_time": {row // 3 * 0.4}, "prompt": [["s{row // 2}", {20 + 3 * row}], '
            f'["u{row}", {1 + row}]], "output_len": {1 + 17 * row % 60}}}\n'
            for row in range(12)
        )
    )
    return path
