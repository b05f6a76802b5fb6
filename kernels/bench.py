"""Measure kernels and write timing tables: ``python -m kernels.bench --out DIR``."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels.grid import CPU, Case, cpu_grid, gpu_grid
from kernels.journal import Journal, Record, read
from sim.errors import ConfigError, FileError
from workloads.errors import plain

PROGRAM = "python -m kernels.bench"
INTERRUPTED = 130
MAX_BUDGET_S = 1e6

_DESCRIPTION = """\
Measure attention (by block_size, batch, context, heads and dtype), products, experts, sampling and
all-reduces of this machine's GPU, and write the timing table of `kvsim run --timing-table`. The
most useful calls come first: a table that can be used after about a minute, nearly all of it after
eight. Killed or interrupted, what was measured stays; the same command again goes on."""


def parser() -> argparse.ArgumentParser:
    """Answer what reads the command line."""
    made = argparse.ArgumentParser(PROGRAM, description=_DESCRIPTION, allow_abbrev=False)
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for all files")
    made.add_argument(
        "--budget-s",
        type=_seconds,
        metavar="SECONDS",
        help="stop in time to end after so long; 0 measures nothing and writes the tables of what "
        "DIR has, which needs no GPU [default: measure everything]",
    )
    made.add_argument(
        "--plot", action="store_true", help="draw bandwidth.png and block_size.png as well"
    )
    made.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs a few small calls by plain PyTorch to test the program; its table says so "
        "and prices nothing [default: cuda, AMD's too]",
    )
    made.add_argument(
        "--gpu", metavar="NAME", help="name of the GPU in sim/data/gpus.toml [default: found]"
    )
    made.add_argument("--seed", type=_seed, default=0, help="of random inputs [default: 0]")
    return made


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_BUDGET_S:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}; expected seconds, 0 to {MAX_BUDGET_S:,.0f}"
        )
    return value


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected a whole number below 2**63")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; answer the exit code: 0, 1 failed, 2 usage, 130 interrupted."""
    started = time.monotonic()
    made = parser()
    options = made.parse_args(arguments)
    if options.gpu is not None and options.device == "cpu":
        made.error("--gpu has no effect on --device cpu: leave it out")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options, started)
    except ConfigError as error:
        _say(f"{PROGRAM}: {error}")
        return 1
    except KeyboardInterrupt:
        _say(f"{PROGRAM}: interrupted")
        return INTERRUPTED


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _run(options: argparse.Namespace, started: float) -> int:
    folder: Path = options.out
    if options.budget_s == 0:
        header, records = read(folder)
        if not header:
            raise FileError(f"--out {plain(str(folder))} has no measurements; expected a journal")
        cases = cpu_grid() if header["device"] == "cpu" else _all_cases(header)
        return _finish(options, header, records, cases)
    try:
        import torch  # noqa: PLC0415  # --help needs none
    except ImportError:
        raise ConfigError(
            "PyTorch is not installed: expected pip install '.[kernels]' (see docs/timing.md)"
        ) from None
    from kernels import session  # noqa: PLC0415

    with session.first_use():
        device = session.open_device(options.device)
        torch.manual_seed(options.seed)
        header = {
            "date": datetime.now(UTC).date().isoformat(),
            "seed": options.seed,
            **session.header(device),
        }
    if options.device == "cuda":
        _check_name(options.gpu, header)
    cases = cpu_grid() if options.device == "cpu" else _all_cases(header)
    with Journal(folder, header) as journal:
        code = _measure(options, device, journal, cases, started)
        done = _finish(options, header, journal.records, cases)
    return code or done


def _all_cases(header: Record) -> list[Case]:
    """Answer the cases of the GPU and of the libraries that *header* names."""
    from kernels.backends.names import PACKAGES  # noqa: PLC0415

    names = [name for name, package in PACKAGES.items() if package in header["versions"]]
    return gpu_grid(names, int(header.get("num_gpus", 1)))


def _check_name(name: str | None, header: Record) -> None:
    """Say before anything is measured if no table can come of it; refuse a wrong --gpu."""
    try:
        from kernels.tables import table_name  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _say(f"note: no table will be written: {_without(error)}")
        return
    try:
        table_name(header, name)
    except ConfigError as error:
        if name is not None:
            raise
        _say(f"note: no table will be written yet: {error}")


def _without(error: ModuleNotFoundError) -> str:
    return (
        f"kvsim's own packages are not all here ({error.name}); with them, {PROGRAM} --out DIR "
        "--budget-s 0 --plot makes it of what was measured, and the charts"
    )


def _measure(
    options: argparse.Namespace, device: Any, journal: Journal, cases: list[Case], started: float
) -> int:
    """Measure until all is done, the budget is spent or somebody interrupts; answer the code."""
    from kernels.measure import Bench, Clock, DeadGpuError  # noqa: PLC0415
    from kernels.session import first_use  # noqa: PLC0415

    with first_use():
        bench = Bench(device, journal, options.seed, Clock(started, options.budget_s))
    code = 0
    with _progress(len(cases)) as progress:
        try:
            bench.run(cases, progress)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except DeadGpuError as error:
            _say(f"{PROGRAM}: {error}")
            code = 1
    if code == INTERRUPTED:
        _say(f"{PROGRAM}: interrupted; what was measured stays, the same command goes on")
    if bench.wrong:
        _say(f"{PROGRAM}: {len(bench.wrong)} calls gave wrong results: {bench.wrong[0]}")
        code = code or 1
    return code


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    try:
        from tqdm import tqdm  # noqa: PLC0415
    except ImportError:
        yield _Silent()
        return
    is_terminal = sys.stderr.isatty()
    with tqdm(
        total=total,
        unit="call",
        file=sys.stderr,
        mininterval=0.5 if is_terminal else 10,
        dynamic_ncols=is_terminal,
    ) as bar:
        yield bar


class _Silent:
    def update(self, n: int) -> object:
        """Count nothing."""


def _finish(
    options: argparse.Namespace, header: Record, records: list[Record], cases: list[Case]
) -> int:
    """Write tables and charts of *records*, say what they show; answer the code.

    1 if nothing was measured.
    """
    from kernels import summary  # noqa: PLC0415

    print(summary.describe(header, records))
    tried = {record["key"] for record in records if "key" in record}
    left = sum(case.key not in tried for case in cases)
    if left:
        print(f"{left} of {len(cases)} calls are left: the same command again goes on")
    if not any("us" in record for record in records):
        _say(f"{PROGRAM}: nothing was measured: no table")
        return 1
    try:
        from kernels import tables  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _say(f"note: no table was written: {_without(error)}")
        return 0
    written = tables.write(options.out, header, records, cases, options.gpu)
    paths = list(written.paths)
    for note in written.notes:
        _say(f"note: {note}")
    if options.plot:
        from kernels import charts  # noqa: PLC0415  # only who draws pays

        paths += charts.draw(options.out, header, records, _peak(options.gpu, header))
    for path in paths:
        _say(f"wrote {plain(str(path))}")
    if written.paths and header["device"] != "cpu":
        name, shown = written.paths[0].stem, plain(str(written.paths[0]))
        print(f"use it: kvsim run --gpu {name} --timing-table {shown}")
    return 0


def _peak(name: str | None, header: Record) -> float | None:
    from kernels.tables import table_name  # noqa: PLC0415
    from sim.hardware import get_gpu  # noqa: PLC0415

    found = table_name(header, name)
    return None if found == CPU else get_gpu(found).hbm_bandwidth


if __name__ == "__main__":
    sys.exit(main())
