"""The map of the KV pool: what allocators show, what is recorded of it, what a page holds."""

import re
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.allocators.base import HasMemoryMap, MemoryMap
from sim.allocators.values import MemoryStats
from sim.block_map.camera import COLUMNS, MapCamera
from sim.block_map.film import film, progressions
from sim.block_map.movie import MAX_DATA_BYTES, fitting
from sim.block_map.page import json_in_html, make_page
from sim.block_map.repeat import step_starts
from sim.clients import NEVER
from sim.columns import SLOT_STATES
from sim.config import RunConfig
from sim.engine import Camera
from sim.errors import FileError
from sim.scheduler_output import SchedulerOutput
from sim.simulation import Simulation
from sim.summary import summarize
from sim.timing.base import TICKS_PER_PS
from tests.checked import plain_run, steps_of
from tests.strategies import (
    PAGED,
    PREFIX,
    VARIANTS,
    Variant,
    make_allocator,
    make_config,
    make_trace,
    random_trace,
)
from workloads.record import Trace

SMALL = {"max_model_len": 256, "num_gpu_blocks_override": 71, "block_size": 8}
DRAWN = [
    variant
    for variant in VARIANTS
    if isinstance(make_allocator(make_config(variant, **SMALL)), HasMemoryMap)
]
every_variant = pytest.mark.parametrize("variant", DRAWN, ids=lambda variant: variant.label)


def test_every_allocator_of_ours_can_be_drawn() -> None:
    assert {variant.allocator for variant in DRAWN} >= {"contiguous", "paged", "prefix"}


def _recount(memory: MemoryMap, external: int) -> MemoryStats:
    """Answer the split of the pool by looking at every place of a map."""
    unit = memory.unit
    live: dict[int, int] = {}
    internal: Counter[int] = Counter()
    held: set[int] = set()
    for request, places, num_computed in memory.holdings:
        for order, place in enumerate(places):
            written = max(0, min(unit, num_computed - order * unit))
            assert live.setdefault(place, written) == written
            internal[place] = max(
                0, min(unit, (order + 1) * unit - request.final_num_computed_tokens)
            )
            held.add(place)
    cached = set(memory.cached)
    assert len(cached) == len(memory.cached)
    unusable = [place for piece in memory.unusable for place in piece]
    assert len(set(unusable)) == len(unusable)
    assert not cached & held
    assert not set(unusable) & (held | cached)
    everything = held | cached | set(unusable)
    assert everything <= set(range(memory.first, memory.first + memory.num_places))
    assert len(unusable) * unit == external
    num_live, num_internal = sum(live.values()), sum(internal.values())
    capacity = memory.num_places * unit
    free = capacity - (len(held) + len(cached)) * unit
    reserved = len(held) * unit - num_live - num_internal
    return MemoryStats(
        capacity, num_live, reserved, num_internal, len(cached) * unit, free, external
    )


class _Recounting:
    """Recounts the map after every decision."""

    def __init__(self, simulation: Simulation) -> None:
        self.next_at = NEVER
        self.allocator = simulation.allocator
        self.num_recounts = 0

    def look(
        self, end: int, num_running: int, num_waiting: int, output: SchedulerOutput | None = None
    ) -> None:
        del end, num_waiting, output
        assert isinstance(self.allocator, HasMemoryMap)
        memory, stats = self.allocator.memory_map(), self.allocator.stats()
        assert _recount(memory, stats.external).as_tuple() == stats.as_tuple()
        assert len(memory.holdings) == num_running
        self.num_recounts += 1


@every_variant
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_map_agrees_with_the_books(variant: Variant, async_scheduling: bool) -> None:
    config = make_config(variant, **SMALL, async_scheduling=async_scheduling)
    for seed in range(3):
        simulation = Simulation(config, random_trace(seed=seed, num_requests=30))
        camera: Camera = _Recounting(simulation)
        simulation.run(camera=camera)
        assert isinstance(camera, _Recounting)
        assert camera.num_recounts > 30


def _filmed(config: RunConfig, trace: Trace, instants: Sequence[int]) -> MapCamera:
    """Run with frames at *instants* (ps after the first arrival)."""
    simulation = Simulation(config, trace)
    origin = int(trace.arrival_ps[0])
    camera = MapCamera(simulation, [(origin + at) * TICKS_PER_PS for at in instants])
    simulation.run(camera=camera)
    camera.finish()
    return camera


LOADS: dict[str, dict[str, Any]] = {
    "open": {},
    "async": {"async_scheduling": True},
    "closed": {"max_concurrency": 25},
    "static": {"batching": "static"},
}


NEEDS = re.compile(r"needs (\d+) [^,;]*(?:, (\d+) of which are cached)?; [^:]*: (\d+)(.*)\.")


@every_variant
@pytest.mark.parametrize("every", [1, 37])
@pytest.mark.parametrize("load", LOADS)
def test_frames_are_the_rows_of_the_step_table(variant: Variant, load: str, every: int) -> None:
    """At any steps of a run that is fast-forwarded between them, the numbers of single steps.

    The pool is overloaded: requests are preempted or refused, and arrive while many wait.
    """
    config = make_config(variant, **SMALL, **LOADS[load])
    trace = random_trace(seed=5, num_requests=100)
    instants = sorted(step_starts(Simulation(config, trace)))
    camera = _filmed(config, trace, instants[::every])
    steps = steps_of(plain_run(config, trace))
    assert sum(step["num_refusals"] for step in steps) > 10
    for ours, theirs in {
        "refusals": "num_refusals",
        "preemptions": "num_preempted",
        "queries": "prefix_cache_queries",
        "hits": "prefix_cache_hits",
    }.items():
        for step, total in zip(steps, accumulate(step[theirs] for step in steps), strict=True):
            step[ours] = total
    for step in steps:
        step |= {state: step[f"kv_{state}_slots"] for state in SLOT_STATES}
    rows = [tuple(step[name] for name in COLUMNS) for step in steps if step["duration"]]
    assert camera.rows == rows[::every]
    assert [bool(why) for why in camera.why] == [row[2] > 0 for row in camera.rows]
    for needs in filter(None, map(NEEDS.search, camera.why)):
        needed, found, free = (int(number or 0) for number in needs.groups()[:3])
        assert needed - found > free or needs[4] in {", in shorter holes", ", with these"}


Arrival = tuple[float, int | Sequence[tuple[str, int]], int]
OTHERS: list[Arrival] = [(0, 40, 20), (0, 40, 20)]
ORACLE = Variant("contiguous", "oracle", "first_fit")
MAX = Variant("contiguous", "max", "first_fit")


@pytest.mark.parametrize(
    ("variant", "arrivals", "values", "why"),
    [
        (PAGED, OTHERS[:1], {}, ""),
        (PAGED, OTHERS, {"max_num_seqs": 1}, "max_num_seqs (1) is reached."),
        (
            PAGED,
            [*OTHERS, *OTHERS],
            {"max_num_batched_tokens": 8},
            "max_num_batched_tokens (8) is used up.",
        ),
        (
            PAGED,
            [(0, 33, 20), (0.004, 32, 9), (0.004, 33, 9)],
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "Next in line computes 33 tokens at once; left of max_num_batched_tokens (64): 31.",
        ),
        (PAGED, [(0, 56, 8), (0, 57, 4)], {}, "Next in line needs 8 blocks; free: 2."),
        (
            PAGED,
            OTHERS,
            {"watermark": 0.3},
            "Next in line needs 5 blocks; free: 4, 3 of which the watermark keeps.",
        ),
        (
            PREFIX,
            [(0, [("a", 40), ("b", 17)], 7), (0.003, [("a", 40), ("c", 23)], 1)],
            {},
            "Next in line needs 8 blocks, 5 of which are cached; free: 2.",
        ),
        (
            PREFIX,
            [(0, [("a", 40)], 1), (0, 35, 9), (0.003, [("a", 40), ("c", 8)], 1)],
            {},
            "Next in line needs 6 blocks, 5 of which are cached; free or cached: 5, with these.",
        ),
        (MAX, OTHERS, {}, "Next in line needs 64 slots in one piece; free: 16."),
        (
            ORACLE,
            [(0, 30, 1), (0, 20, 9), (0, 20, 1), (0.003, 40, 1)],
            {},
            "Next in line needs 40 slots in one piece; free: 52, in shorter holes.",
        ),
        (PAGED, [(0, 37, 20), (0, 37, 20)], {}, "Nobody is admitted in a step that preempts."),
        (
            PAGED,
            [(0, 8, 20), (0.002, 8, 20)],
            {"batching": "static"},
            "Static batching: nobody joins before all of the batch have finished.",
        ),
    ],
)
def test_a_frame_says_why_requests_wait(
    variant: Variant, arrivals: Sequence[Arrival], values: dict[str, Any], why: str
) -> None:
    """In the fifth step of a pool of ten blocks of eight tokens."""
    pool = {"max_model_len": 64, "num_gpu_blocks_override": 11, "block_size": 8}
    config = make_config(variant, **pool | values)
    camera = _filmed(config, make_trace(*arrivals), [45 * 10**8])
    assert camera.rows[0][0] == 4
    assert camera.why == [why]


@every_variant
def test_looking_on_changes_nothing(variant: Variant) -> None:
    config = make_config(variant, **SMALL)
    trace = random_trace(seed=7, num_requests=40)
    plain = Simulation(config, trace).run()
    simulation = Simulation(config, trace)
    camera = MapCamera(simulation, [10**12 * TICKS_PER_PS // 7 * at for at in range(40)])
    filmed = simulation.run(camera=camera)
    before, after = summarize(plain), summarize(filmed)
    assert before.keys() == after.keys()
    for name, value in before.items():
        is_number = isinstance(value, float)
        assert after[name] == (pytest.approx(value, rel=1e-12) if is_number else value), name
    for name, column in plain.recorder.request_columns().items():
        assert np.array_equal(column, filmed.recorder.request_columns()[name])


def test_idle_time_and_the_end_have_frames() -> None:
    config = make_config(PREFIX, max_model_len=64, num_gpu_blocks_override=9)
    trace = make_trace((1, [("a", 32)], 3), (5, [("a", 32)], 3))
    camera = _filmed(config, trace, [0, 2 * 10**12, 4 * 10**12 + 1, 9 * 10**12])
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in camera.rows]
    assert [row["running"] for row in rows] == [1, 0, 1, 0]
    assert [row["step"] for row in rows] == [0, 2, 3, 5]
    assert [row["live"] for row in rows] == [32, 0, 32, 0]
    assert [row["cached"] for row in rows] == [0, 32, 16, 48]  # its second block twice
    assert rows[2]["hits"] == 16
    assert [len(tenancy.held) for tenancy in camera.tenancies] == [1, 1]


@given(st.lists(st.integers(0, 40), max_size=60))
def test_progressions_make_up_the_values(values: list[int]) -> None:
    assert _expanded(progressions(values, base=1)) == [value - 1 for value in values]


def test_progressions_are_few() -> None:
    assert progressions(range(10, 30)) == [10, 1, 20]
    assert progressions([9, 8, 7, 20, 24, 28, 3]) == [9, -1, 3, 20, 4, 3, 3, 0, 1]


def _expanded(flat: list[int]) -> list[int]:
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return [start + step * number for start, step, num in triples for number in range(num)]


@every_variant
@pytest.mark.parametrize("every", [1, 3])
def test_a_film_has_every_table_and_every_cached_place(variant: Variant, every: int) -> None:
    """What the page decodes is what the allocator had, also of a part of the frames."""
    config = make_config(variant, **SMALL)
    trace = random_trace(seed=11, num_requests=30)
    instants = sorted(step_starts(Simulation(config, trace)))
    seen: list[MemoryMap] = []

    class Keeping(MapCamera):
        def _take(self, num_running: int, num_waiting: int) -> None:
            super()._take(num_running, num_waiting)
            seen.append(self.memory)

    simulation = Simulation(config, trace)
    origin = int(trace.arrival_ps[0])
    camera = Keeping(simulation, [(origin + at) * TICKS_PER_PS for at in instants])
    simulation.run(camera=camera)
    frames = range(0, len(instants), every)
    told = msgspec.json.decode(msgspec.json.encode(film(camera, frames)))
    cached: set[int] = set()
    for number, frame in enumerate(frames):
        memory, place = seen[frame], 0
        for gap, length in zip(*[iter(told["changes"][number])] * 2, strict=True):
            cached ^= set(range(place + gap, place + gap + length))
            place += gap + length
        assert cached == {block - memory.first for block in memory.cached}
        expected = {
            holding.request.index: (
                [at - memory.first for at in holding.places],
                holding.num_computed,
            )
            for holding in memory.holdings
        }
        assert _tenants(told, number) == expected
        pieces = [number for piece in memory.unusable for number in (piece.start, len(piece))]
        assert told["unusable"][number] == pieces


def _tenants(told: dict[str, Any], frame: int) -> dict[int, tuple[list[int], int]]:
    tenants = {}
    for index, _, first, held, computed, runs in told["tenancies"]:
        if first <= frame < first + len(held):
            num_held = sum(held[: frame - first + 1])
            tenants[index] = (_expanded(runs)[:num_held], sum(computed[: frame - first + 1]))
    return tenants


def test_a_page_too_large_has_fewer_frames() -> None:
    size = MAX_DATA_BYTES // 10

    def films(frames: Sequence[int]) -> str:
        return "x" * (size * len(frames))

    frames = fitting(films, 33)
    assert frames == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert fitting(films, 9) == list(range(9))
    with pytest.raises(FileError, match="a larger --block-size or fewer allocators"):
        fitting(lambda frames: "x" * (MAX_DATA_BYTES * len(frames)), 33)


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\u2028\"'`${x}\\"


def test_json_in_a_page_ends_no_script() -> None:
    encoded = json_in_html({"name": HOSTILE})
    assert not {"<", ">", "&", "\u2028"} & set(encoded.decode())
    assert msgspec.json.decode(encoded) == {"name": HOSTILE}


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_names_from_files_are_text() -> None:
    config = make_config(PREFIX, **SMALL)
    summary = summarize(plain_run(config, random_trace(seed=1, num_requests=5)))
    summary |= {"model_id": HOSTILE, "gpu": HOSTILE, "allocator": HOSTILE, "timing": [HOSTILE]}
    summary |= {
        "timing_provenance": HOSTILE,
        "kv_pool_provenance": HOSTILE,
        "refused": {HOSTILE: 1},
    }
    page = make_page([summary], {"requests": [HOSTILE], "@@SCRIPT@@": "@@DATA@@"}, {})
    elements = _Elements()
    elements.feed(page.decode())
    tags = Counter(tag for tag, _ in elements.tags)
    assert tags["script"] == 2
    assert tags["img"] == 0
    assert not [
        attrs for _, attrs in elements.tags if any(name.startswith("on") for name, _ in attrs)
    ]
    assert f"KV pool of {HOSTILE} on {HOSTILE}" in elements.texts
    loads = [
        value for _, attrs in elements.tags for name, value in attrs if name in {"src", "href"}
    ]
    assert loads == []
