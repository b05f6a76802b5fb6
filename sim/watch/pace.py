"""Simulated time held to wall time."""

import time

from sim.metrics import Recorder
from workloads.record import PS_PER_S


class Pace:
    """*speed* simulated seconds a second from now on; a run that is slower is not waited for.

    Args:
        recorder: of the run, which may be ahead by the step that it has decided.
        speed: above 0.
    """

    def __init__(self, recorder: Recorder, speed: float) -> None:
        self._recorder, self._speed = recorder, speed
        self._start = time.monotonic()

    def time_ps(self) -> int:
        """The simulated time of now."""
        elapsed = (time.monotonic() - self._start) * self._speed
        return min(self._recorder.start_ps + round(elapsed * PS_PER_S), self._recorder.now_ps)

    def ahead_s(self) -> float:
        """How many seconds of wall time the run is ahead."""
        simulated = (self._recorder.now_ps - self._recorder.start_ps) / PS_PER_S
        return self._start + simulated / self._speed - time.monotonic()
