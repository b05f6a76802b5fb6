"""The event loop: requests arrive, the engine steps. The only file that imports SimPy.

One process, never one a request. `Engine` takes in the requests that are due, lets the scheduler
decide a step or a run of them (vLLM 0.33.0, ``v1/engine/core.py``, ``step``), and waits for SimPy's
clock only where an arrival may be seen. Time is an integer number of ticks, so that an arrival and
the end of a step are at the same instant exactly or not at all.

Under asynchronous scheduling (``step_with_batch_queue``, a queue of two) step k + 1 is decided as
step k starts: the first step that a request which arrives while k runs can join is k + 2. An idle
engine decides two steps when a request arrives.
"""

from collections.abc import Callable, Generator
from math import sqrt
from typing import Any, Protocol

import simpy

from sim.allocators.base import Allocator
from sim.clients import NEVER, Clients
from sim.errors import EngineStuckError
from sim.metrics import Recorder, StepTimes
from sim.scheduler import Scheduler
from sim.scheduler_output import SchedulerOutput
from sim.timing.base import TICKS_PER_PS, UNLIMITED, StepTimeModel

_Process = Generator[simpy.Event, Any, None]


class Camera(Protocol):
    """Looks at the run at instants of its own choosing."""

    @property
    def next_at(self) -> int:
        """The next of them, in ticks. A run of steps ends with the step that reaches it."""

    def look(
        self, end: int, num_running: int, num_waiting: int, output: SchedulerOutput | None = None
    ) -> None:
        """See what lasts from now to *end* (ticks): what *output* scheduled, None of idle time."""


class Engine:
    """One GPU (or tensor-parallel group) that serves a trace from first arrival to last token.

    Args:
        clients: who send requests.
        scheduler: decides each step.
        allocator: the one that *scheduler* asks; read here for statistics only.
        step_time: prices each step.
        recorder: told of every step and every request that ends.
        single_step: decide every step by itself, never a run of steps.
        save_names: tell the recorder who was in every step; implies *single_step*.
        on_scheduled: called with what each step decided, before it runs.
        on_step: called after each step or run of steps.
        camera: told of every step or run of steps as it is scheduled.
    """

    def __init__(
        self,
        *,
        clients: Clients,
        scheduler: Scheduler,
        allocator: Allocator,
        step_time: StepTimeModel,
        recorder: Recorder,
        single_step: bool = False,
        save_names: bool = False,
        on_scheduled: Callable[[SchedulerOutput], None] | None = None,
        on_step: Callable[[], None] | None = None,
        camera: Camera | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._allocator = allocator
        self._step_time = step_time
        self._recorder = recorder
        self._single_step = single_step or save_names
        self._save_names = save_names
        self._on_scheduled = on_scheduled
        self._on_step = on_step
        self._camera = camera
        self._clients = clients
        self._is_async = scheduler.is_async
        # What the next step takes if it only decodes, and what each after it takes longer.
        self._decode_times = (0, 0)
        self._clock = 0  # when the next step starts
        self._call = 0  # when it is decided: then, or, asynchronously, when the one before starts

    def run(self) -> None:
        """Run until every request has finished or been refused.

        Raises:
            EngineStuckError: if the requests left can never run.
        """
        env = simpy.Environment()
        env.process(self._serve(env))
        env.run()

    def _serve(self, env: simpy.Environment) -> _Process:
        scheduler, recorder, allocator = self._scheduler, self._recorder, self._allocator
        clients = self._clients
        max_steps = None if self._single_step else self._max_steps
        was_idle = True
        while True:
            next_arrival = clients.next_arrival
            if next_arrival == NEVER and not scheduler.running and not scheduler.waiting:
                return
            if was_idle:
                self._call = self._clock = max(self._clock, next_arrival)
            if next_arrival <= self._call:
                yield env.timeout(self._call - env.now)
                self._take_arrivals()
                if not scheduler.waiting and not scheduler.running:
                    continue  # all refused
            if was_idle:  # told only now: idle time after the last step is nobody's
                recorder.on_idle(self._clock, allocator.stats())
                if self._camera is not None:
                    self._camera.look(self._clock, 0, 0)
            was_idle = self._step(max_steps)

    def _take_arrivals(self) -> None:
        """Queue the requests that are due, those of this very instant included."""
        for request in self._clients.due(self._call):
            reason = self._scheduler.add_request(request)
            if reason is not None:
                self._recorder.on_refused(request, reason)

    def _step(self, max_steps: Callable[[int], int] | None) -> bool:
        """Run a step or a run of steps; answer whether the engine is idle after it."""
        scheduler, recorder, clients = self._scheduler, self._recorder, self._clients
        output = scheduler.schedule(max_steps)
        stats = self._allocator.stats()
        num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
        scheduled = scheduler.scheduled(output) if self._save_names else ()
        if self._on_scheduled is not None:
            self._on_scheduled(output)
        times = self._times(output)
        start = self._clock
        self._clock += times.total
        if self._camera is not None:
            self._camera.look(self._clock, num_running, num_waiting, output)
        self._call = self._clock - times.last if self._is_async else self._clock
        finished = scheduler.update_from_output(output)
        recorder.on_step(
            self._clock, times, num_running, num_waiting, output, stats, scheduler.taken, finished
        )
        if finished:
            ended = start if self._is_async else self._clock
            clients.ended(finished, ended // TICKS_PER_PS)
        if self._save_names:
            recorder.on_names(output, scheduled, finished, self._allocator.stats())
        if self._on_step is not None:
            self._on_step()
        if output.is_empty and not output.preempted and not finished:
            if clients.next_arrival == NEVER:
                raise EngineStuckError(
                    f"{len(scheduler.waiting)} requests wait and none can be admitted: "
                    f"{scheduler.waiting[0].request_id} is at the head"
                )
            return True
        return not scheduler.running and not scheduler.waiting

    def _max_steps(self, num_steps: int) -> int:
        """Answer how many of *num_steps* may pass before an arrival has to be looked at.

        No more than last longer and longer evenly: `DecodeLine`.
        """
        if num_steps == 1:
            return 1
        scheduler = self._scheduler
        num_decodes, context = scheduler.num_decodes, scheduler.decode_context
        fixed, per_context, max_context = self._step_time.decode_line(num_decodes, context)
        if max_context < UNLIMITED:  # the next step on another line is another run
            num_steps = min(num_steps, (max_context - context) // num_decodes + 1)
        first = fixed + per_context * context
        increment = per_context * num_decodes
        self._decode_times = first, increment
        if self._camera is not None and self._camera.next_at < NEVER:
            left = self._camera.next_at + 1 - self._clock
            num_steps = min(num_steps, steps_until(left, first, increment))
        next_arrival = self._clients.next_arrival
        if next_arrival == NEVER or not scheduler.admits_arrivals:
            return num_steps
        left = next_arrival - self._clock
        ahead = self._is_async  # what follows the run is decided when its last step starts
        if run_ticks(first, increment, num_steps - ahead) <= left:
            return num_steps
        return steps_until(left, first, increment) + ahead if left > 0 else 1

    def _times(self, output: SchedulerOutput) -> StepTimes:
        """Price the steps of *output*."""
        if output.prefills:
            time = self._step_time.step_time(output.batch)
            return StepTimes(time, 0, 1, time)
        num_steps = output.num_steps
        if not output.num_decodes:
            return StepTimes(0, 0, 1, 0)
        if num_steps == 1:
            num_decodes, context = output.num_decodes, output.decode_context
            fixed, per_context, _ = self._step_time.decode_line(num_decodes, context)
            time = fixed + per_context * context
            return StepTimes(time, 0, 1, time)
        first, increment = self._decode_times  # found when it was asked how many steps
        return StepTimes(first, increment, num_steps, run_ticks(first, increment, num_steps))


def run_ticks(first: int, increment: int, num_steps: int) -> int:
    """Answer how long *num_steps* steps last, of which step j lasts ``first + j * increment``."""
    return num_steps * first + increment * (num_steps * (num_steps - 1) // 2)


def steps_until(ticks: int, first: int, increment: int) -> int:
    """Answer the fewest steps that last *ticks* or longer (`run_ticks`), at least 1."""
    if ticks <= first:
        return 1
    if not increment:
        return -(-ticks // first)
    # The root of increment / 2 n^2 + (first - increment / 2) n - ticks, then mend the rounding.
    b = float(2 * first - increment)
    root = sqrt(b * b + 8.0 * increment * ticks)
    n = int(4.0 * ticks / (root + b) if b > 0.0 else (root - b) / (2.0 * increment))
    while run_ticks(first, increment, n) < ticks:
        n += 1
    while run_ticks(first, increment, n - 1) >= ticks:
        n -= 1
    return n
