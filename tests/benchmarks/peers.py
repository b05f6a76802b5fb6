"""kvsim and other simulators on the same workload, in the same run, one after another.

Run `python -m tests.benchmarks.peers --sched-sim PYTHON --aisimulate PYTHON --vidur PYTHON`, each
the interpreter of an environment that has the peer; those not given are left out. All run equal
requests that arrive at once, under equal limits and with a step time that costs next to nothing to
compute; time is that of each one's loop. They take turns, and the best of each one's turns counts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from tests.benchmarks.workloads import REPOSITORY

SCRIPTS = Path(__file__).parent / "peer_scripts"
SETTINGS: Mapping[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "num_blocks": 12_001,
    "max_model_len": 4096,
    "step_seconds": 0.012,
}


class Contender(NamedTuple):
    """One simulator in one setting: its script, interpreter and what is set beside `SETTINGS`."""

    name: str
    script: str
    package: str
    python: str
    settings: Mapping[str, Any]


class PeerTime(NamedTuple):
    """The best of a contender's turns; *seconds* is None if it failed or did not end in time."""

    name: str
    package: str
    version: str
    requests: int
    seconds: float | None

    @property
    def requests_per_s(self) -> float | None:
        return self.requests / self.seconds if self.seconds else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag a peer: the interpreter that has it."""
    for peer in ("sched-sim", "aisimulate", "vidur"):
        parser.add_argument(f"--{peer}", metavar="PYTHON", help=f"interpreter that has {peer}")


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Answer kvsim and the peers whose interpreters were given."""
    found = [
        Contender("kvsim paged", "run_kvsim", "kvsim", sys.executable, {"allocator": "paged"}),
        Contender("kvsim prefix", "run_kvsim", "kvsim", sys.executable, {"allocator": "prefix"}),
    ]
    if python := arguments.aisimulate:
        for name, records in (("aisimulate", False), ("aisimulate, request records", True)):
            found.append(
                Contender(name, "run_aisimulate", "aisimulate", python, {"records": records})
            )
    if python := arguments.sched_sim:
        found.append(Contender("sched-sim", "run_sched_sim", "sched-sim", python, {}))
    if python := arguments.vidur:
        found.append(Contender("vidur", "run_vidur", "vidur", python, {}))
    return found


def write_trace(file: Path, num_requests: int, prompt: int, output: int) -> None:
    """Write equal requests that arrive at once, in kvsim's own format."""
    with file.open("w") as lines:
        for row in range(num_requests):
            record = {"request_id": f"r{row}", "arrival_time": 0.0}
            lines.write(json.dumps(record | {"input_length": prompt, "output_len": output}) + "\n")


def _version(contender: Contender) -> str:
    code = f"from importlib.metadata import version; print(version({contender.package!r}))"
    command = [contender.python, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _turn(contender: Contender, trace: Path, num_requests: int, timeout: float) -> float | None:
    """Answer the seconds of one turn, None (and why, on stderr) if it did not finish."""
    settings = json.dumps({**SETTINGS, **contender.settings})
    if contender.package == "kvsim":
        command = [contender.python, "-m", f"tests.benchmarks.peer_scripts.{contender.script}"]
    else:
        command = [contender.python, str(SCRIPTS / f"{contender.script}.py")]
    command += [str(trace), settings]
    options: Any = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": timeout}
    try:
        done = subprocess.run(command, check=True, **options)
    except subprocess.TimeoutExpired:
        print(f"{contender.name}: did not end within {timeout:g} s", file=sys.stderr)
        return None
    except subprocess.CalledProcessError as error:
        print(f"{contender.name}: failed: {error.stderr.splitlines()[-1:]}", file=sys.stderr)
        return None
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["done"] != num_requests:
        print(f"{contender.name}: finished {answer['done']} requests only", file=sys.stderr)
        return None
    return float(answer["seconds"])


def race(
    entered: Sequence[Contender],
    num_requests: int,
    *,
    prompt: int = 512,
    output: int = 128,
    repeats: int = 3,
    timeout: float = 300,
) -> list[PeerTime]:
    """Let all run the same trace in turns, *repeats* times; answer the best of each."""
    waiting = list(entered)
    best: dict[str, float | None] = {contender.name: None for contender in waiting}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace, num_requests, prompt, output)
        for _ in range(repeats):
            for contender in list(waiting):
                seconds = _turn(contender, trace, num_requests, timeout)
                if seconds is None:
                    waiting.remove(contender)
                    continue
                before = best[contender.name]
                best[contender.name] = min(seconds, before or seconds)
    return [
        PeerTime(each.name, each.package, _version(each), num_requests, best[each.name])
        for each in entered
    ]


def ratio(times: Sequence[PeerTime], peer: str, ours: str = "kvsim paged") -> float | None:
    """Answer how many times as many requests a second *ours* does as *peer*, if both ended."""
    rate = {got.name: got.requests_per_s for got in times}
    mine, other = rate.get(ours), rate.get(peer)
    return mine / other if mine and other else None


def table(times: Sequence[PeerTime]) -> str:
    """Answer requests a second of each contender, and how many times each is kvsim's."""
    rows = [
        (got.name, got.version, got.seconds, got.requests_per_s, ratio(times, got.name))
        for got in times
    ]
    headers = ("simulator", "version", "seconds", "requests/s", "kvsim paged is faster by")
    formats = ("", "", ".3f", ",.0f", ".1f")
    return tabulate(rows, headers, "simple", floatfmt=formats, missingval="-")


def main() -> None:
    """Print requests a second of each contender, and how many times each peer's kvsim's is."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300, help="seconds a turn")
    arguments = parser.parse_args()
    times = race(
        contenders(arguments),
        arguments.requests,
        prompt=arguments.prompt,
        output=arguments.output,
        repeats=arguments.repeats,
        timeout=arguments.timeout,
    )
    print(table(times))


if __name__ == "__main__":
    main()
