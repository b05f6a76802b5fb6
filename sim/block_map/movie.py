"""The data of the page: every run at the same instants, and the names of who is seen."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sim.block_map.camera import MapCamera
from sim.block_map.film import film
from sim.block_map.repeat import Finished, check_repeats, step_starts
from sim.errors import FileError
from sim.plots.style import looks
from sim.simulation import RunResult, Simulation
from sim.timing.base import PS_PER_US, TICKS_PER_PS
from workloads.record import PS_PER_S

MAX_FRAMES = 300
"""Frames of a page; a run of fewer steps has one of each step."""

MAX_DATA_BYTES = 3_500_000
"""Of a page's data; charts and the rest take about half a megabyte more."""

MAX_SQUARES = 16384
"""Squares of a map; larger pools have several blocks in one."""

DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2")
"""Lines of the series, in the order of the runs: they tell them apart without colour."""


def take_movie(
    finished: Sequence[Finished], simulate: Callable[[Simulation, MapCamera], RunResult]
) -> dict[str, Any]:
    """Repeat the *finished* runs by *simulate* and answer what the page's script reads.

    Raises:
        FileError: a run is another than it was, or the page would be too large.
    """
    instants, of_steps = _instants(finished)
    cameras = []
    for run in finished:
        origin = int(run.simulation.result.trace.arrival_ps[0])
        camera = MapCamera(
            run.simulation, [(origin + instant) * TICKS_PER_PS for instant in instants]
        )
        result = simulate(run.simulation, camera)
        camera.finish()
        check_repeats(run, result)
        cameras.append(camera)
    runs = [
        _about(run) | {"dash": DASHES[place % len(DASHES)]} for place, run in enumerate(finished)
    ]

    def films(frames: Sequence[int]) -> list[dict[str, Any]]:
        return [about | film(camera, frames) for about, camera in zip(runs, cameras, strict=True)]

    frames = fitting(films, len(instants))
    films_of_runs = films(frames)
    trace = finished[0].simulation.result.trace
    seen = sorted({row for each in films_of_runs for row, *_ in each["tenancies"]})
    place = {row: number for number, row in enumerate(seen)}
    for each in films_of_runs:
        for tenancy in each["tenancies"]:
            tenancy[0] = place[tenancy[0]]
    config = finished[0].simulation.result.config
    slots = max(each["places"] * each["unit"] for each in films_of_runs)
    block_size = config.cache.block_size
    return {
        "block_size": block_size,
        "grain": block_size * -(-slots // (block_size * MAX_SQUARES)),
        "times": [instants[frame] / PS_PER_S for frame in frames],
        "all_frames": len(instants),
        "of_steps": of_steps and len(frames) == len(instants),
        "requests": [trace.request_ids[row] for row in seen],
        "prompts": trace.num_prompt_tokens[seen].tolist(),
        "runs": films_of_runs,
    }


def _instants(finished: Sequence[Finished]) -> tuple[list[int], bool]:
    """Answer when frames are taken, in ps after the first arrival, and whether at every step."""
    num_steps = sum(run.files.summary["num_steps"] for run in finished)
    end = int(max(run.files.summary["duration"] for run in finished) * PS_PER_S)
    instants = [end * frame // (MAX_FRAMES - 1) for frame in range(MAX_FRAMES - 1)]
    of_steps = num_steps < MAX_FRAMES
    if of_steps:
        starts: set[int] = set()
        for run in finished:
            result = run.simulation.result
            starts |= step_starts(Simulation(result.config, result.trace))
        if len(starts) <= num_steps:  # else the summary is of another run: `check_repeats`
            instants = sorted(starts)
    return [*instants, end + PS_PER_US], of_steps


def _about(run: Finished) -> dict[str, Any]:
    summary = run.files.summary
    look = looks([run.files.label])[run.files.label]
    return {
        "label": run.files.label,
        "color": look.color,
        "end": summary["duration"],
        "capacity": summary["kv_cache_slots"],
    }


def fitting(films: Callable[[Sequence[int]], Any], num_frames: int) -> list[int]:
    """Answer as many of *num_frames* frames as fit a page, spread evenly; the last is one of them.

    *films* answers the data of given frames.

    Raises:
        FileError: two are too many.
    """
    every = 1
    while True:
        frames = sorted({*range(0, num_frames, every), num_frames - 1})
        size = len(msgspec.json.encode(films(frames)))
        if size <= MAX_DATA_BYTES:
            return frames
        if len(frames) <= 2:
            raise FileError(
                f"block tables of {size:,} bytes are too large for a page: expected at most "
                f"{MAX_DATA_BYTES:,}; a larger --block-size or fewer allocators make less"
            )
        every *= 2
