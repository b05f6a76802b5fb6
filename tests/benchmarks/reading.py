"""How fast traces are read, beside what parsing the same file takes others.

Run `python -m tests.benchmarks.reading [ROWS]`. A CSV trace is read beside pandas, lines of JSON
beside msgspec's decoder line by line; each in a process of its own, so that its memory is its own
too. Imports are not counted. The target is a third of their speed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

NUM_ROWS = 1_000_000
HEADER = "trace          rows        MB     ours s   theirs s   speed of theirs   peak MB"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def _azure(rows: int) -> Iterable[str]:
    yield AZURE
    for row in range(rows):
        second, fraction = divmod(row * 1_234_567, 10**7)
        minute, second = divmod(second, 60)
        hour, minute = divmod(minute, 60)
        day, hour = divmod(hour, 24)
        at = f"2023-11-{1 + day:02d} {hour:02d}:{minute:02d}:{second:02d}.{fraction:07d}"
        yield f"{at},{1 + row * 397 % 4100},{8 + row * 61 % 590}"


def _lengths(rows: int) -> Iterable[str]:
    for row in range(rows):
        length = {"input_length": 1 + row * 397 % 4100, "output_len": 8 + row * 61 % 590}
        yield json.dumps({"arrival_time": row * 0.125} | length)


def _segments(rows: int) -> Iterable[str]:
    for row in range(rows):
        prompt = [["system", 512], [f"u{row // 2}", 1 + row * 397 % 4100]]
        yield json.dumps({"arrival_time": row * 0.125, "prompt": prompt, "output_len": 100})


def _mooncake(rows: int) -> Iterable[str]:
    """Yield prompts of 24 blocks on average, most of them in long runs, as in the real trace."""
    for row in range(rows):
        blocks = 4 + row % 41
        ids = [0, *range(1 + row // 3 * 50, 1 + row // 3 * 50 + blocks - 1)]
        yield json.dumps(
            {
                "timestamp": row * 10,
                "input_length": blocks * 512 - row % 512,
                "output_length": 1 + row % 700,
                "hash_ids": ids,
            }
        )


def _ours() -> Callable[[Path], int]:
    from workloads.readers import read_trace  # noqa: PLC0415  # measured alone, as what follows

    return lambda path: len(read_trace(path))


def _pandas() -> Callable[[Path], int]:
    import pandas as pd  # noqa: PLC0415

    return lambda path: len(pd.read_csv(path, parse_dates=["TIMESTAMP"]))


def _msgspec() -> Callable[[Path], int]:
    import msgspec  # noqa: PLC0415

    decode = msgspec.json.Decoder().decode

    def read(path: Path) -> int:
        with path.open("rb") as file:
            return len([decode(line) for line in file])

    return read


class Case(NamedTuple):
    """A trace, and who else parses it; *share* of the rows asked for are made."""

    name: str
    lines: Callable[[int], Iterable[str]]
    theirs: Callable[[], Callable[[Path], int]]
    share: float = 1.0


CASES = (
    Case("azure.csv", _azure, _pandas),
    Case("lengths.jsonl", _lengths, _msgspec),
    Case("native.jsonl", _segments, _msgspec, 0.5),
    Case("mooncake.jsonl", _mooncake, _msgspec, 0.1),
)


def _once(path: Path, case: Case, *, ours: bool) -> None:
    """Print CPU seconds and peak memory of one reading; for a process of its own."""
    read = (_ours if ours else case.theirs)()
    head = path.with_name(f"head-{path.name}")
    with path.open("rb") as file:
        head.write_bytes(b"".join(islice(file, 3)))
    read(head)  # imports what the format needs
    start = time.process_time()
    read(path)
    print(time.process_time() - start, getrusage(RUSAGE_SELF).ru_maxrss / 1024)


def _measure(path: Path, number: int, who: str) -> tuple[float, float]:
    """Answer the best of three."""
    command = [sys.executable, "-m", "tests.benchmarks.reading", str(path), str(number), who]
    done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    seconds, memory = min(tuple(map(float, one.stdout.split())) for one in done)
    return seconds, memory


def main(num_rows: int) -> None:
    """Print a row a trace."""
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            path = Path(folder) / case.name
            rows = int(num_rows * case.share)
            with path.open("w") as file:
                file.writelines(line + "\n" for line in case.lines(rows))
            ours, memory = _measure(path, number, "ours")
            theirs, _ = _measure(path, number, "theirs")
            print(
                f"{case.name:14}{rows:9,}{path.stat().st_size / 1e6:9.1f}{ours:10.2f}{theirs:11.2f}"
                f"{theirs / ours:17.0%}{memory:11.0f}",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _once(Path(sys.argv[1]), CASES[int(sys.argv[2])], ours=sys.argv[3] == "ours")
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROWS)
