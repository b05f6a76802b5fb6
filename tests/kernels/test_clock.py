"""The time of a call on a GPU, by a made-up driver whose calls take 7 microseconds."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.conftest import NEEDS_TORCH

torch: Any = pytest.importorskip("torch", reason=NEEDS_TORCH)

from kernels import clock  # noqa: E402  # needs PyTorch

CALL_US = 7.0
GPU: Any = SimpleNamespace(type="cuda")


class Driver:
    """Counts what is run, and its own time."""

    def __init__(self) -> None:
        self.now_us, self.ran, self.captured = 0.0, Counter[int](), Counter[int]()
        self.is_capturing, self.can_capture = False, True
        self.stream: object = "the first"

    def call(self, index: int) -> None:
        if self.is_capturing:
            self.captured[index] += 1
        else:
            self.ran[index] += 1
            self.now_us += CALL_US

    @contextlib.contextmanager
    def graph(self, _graph: object) -> Iterator[None]:
        self.stream = "of the capture"  # where PyTorch 2.13 stays if a capture fails
        if not self.can_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.is_capturing = True
        yield
        self.is_capturing = False
        self.stream = "the first"

    def replay(self) -> None:
        self.now_us += CALL_US * self.captured.total()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_us = made.now_us

        def elapsed_time(self, later: "Event") -> float:
            return (later.at_us - self.at_us) / 1e3

    stream = made.stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes = {
        "Event": Event,
        "Stream": lambda: stream,
        "current_stream": lambda: made.stream,
        "set_stream": lambda stream: setattr(made, "stream", stream),
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=made.replay),
        "graph": made.graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


@pytest.mark.parametrize("copies", [1, 3, 400])
def test_a_graph_of_calls_in_turn(driver: Driver, copies: int) -> None:
    calls = [lambda index=index: driver.call(index) for index in range(copies)]
    timing = clock.time_calls(calls, GPU)
    assert timing.us == pytest.approx(CALL_US)
    assert timing.how == "graph"
    assert timing.spread_us == pytest.approx(0, abs=1e-6)
    assert len(set(driver.captured.values())) == 1  # every copy equally often
    assert set(driver.captured) == set(range(copies))
    assert driver.captured.total() * CALL_US >= clock.MIN_GRAPH_US


def test_what_cannot_be_captured_is_timed_and_marked(driver: Driver) -> None:
    driver.can_capture, before = False, driver.stream
    timing = clock.time_calls([lambda: driver.call(0)], GPU)
    assert timing.us == pytest.approx(CALL_US)
    assert timing.how == "events"
    assert driver.stream is before
    assert not driver.captured
    assert driver.ran[0] > clock.MIN_REPEATS


def test_median_and_spread() -> None:
    assert clock.timing_of([5.0, 1.0, 2.0], "wall") == clock.Timing(2.0, 4.0, "wall")
