"""``kvsim report``: one HTML page of a run or a comparison."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.commands.common import progress, say
from sim.errors import ConfigError
from sim.files import atomic, check_output_file
from workloads.errors import plain

if TYPE_CHECKING:
    from sim.engine import Camera
    from sim.simulation import RunResult, Simulation


def report(values: dict[str, Any]) -> int:
    """Repeat the runs in the folder that *values* name, and write their page; answer the exit code.

    Raises:
        ConfigError, TraceError, FileError: what cannot be used, read, repeated or written.
    """
    from sim.block_map.movie import take_movie  # noqa: PLC0415  # a refused flag need not wait
    from sim.block_map.page import draw_charts, make_page  # noqa: PLC0415  # as above
    from sim.block_map.repeat import (  # noqa: PLC0415  # as above
        EXPECTED,
        read_finished,
        trace_given,
    )

    if not values["folder"]:
        raise ConfigError(f"kvsim report: {EXPECTED}; got none")
    folder = Path(values["folder"])
    given = trace_given(values["trace"], values["timing_table"])
    results, finished = read_finished(folder, given)
    path = Path(values["output"]) if values["output"] is not None else folder / "report.html"
    check_output_file(path, (".html", ".htm"), "--output")
    for trace in (run.simulation.result.config.load.trace for run in finished):
        read = given["trace"].value if "trace" in given else trace
        if read is not None and path.exists() and path.samefile(read):
            raise ConfigError(f"--output {plain(str(path))} is the trace: expected another file")
    data = take_movie(finished, _simulate)
    summaries = [run.files.summary for run in finished]
    page = make_page(summaries, data, draw_charts(results))
    with atomic(path) as temporary:
        temporary.write_bytes(page)
    of_all = f" of {data['all_frames']}" if len(data["times"]) < data["all_frames"] else ""
    say(f"wrote {plain(str(path))}: {len(page) / 1e6:.1f} MB, {len(data['times'])}{of_all} frames")
    return 0


def _simulate(simulation: "Simulation", camera: "Camera") -> "RunResult":
    result = simulation.result
    with progress(result.trace, result.config.label, result.recorder) as update:
        return simulation.run(update, camera=camera)
