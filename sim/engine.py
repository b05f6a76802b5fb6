"""The event loop: requests arrive, the engine steps. The only file that imports SimPy.

Two processes, never one a request: `Engine._arrivals` walks the trace, `Engine._steps` runs the
scheduler (vLLM 0.33.0, ``v1/engine/core.py``, ``step``). The clock is an integer number of ticks,
so that an arrival and the end of a step are at the same instant exactly or not at all.

The engine decides steps ahead of SimPy's clock while no arrival is due: it waits for that clock
only where an arrival could be seen.
"""

from collections.abc import Callable, Generator
from math import isqrt
from typing import Any

import simpy

from sim.allocators.base import Allocator
from sim.metrics import Recorder, StepTimes
from sim.request import make_requests
from sim.scheduler import Scheduler, SchedulerOutput
from sim.timing.base import TICKS_PER_PS, StepTimeModel
from workloads.record import Trace

_Process = Generator[simpy.Event, Any, None]

UNBOUNDED = 1 << 62
"""More steps than any run has."""


class EngineStuckError(RuntimeError):
    """Requests wait, none runs, none can be admitted: an allocator breaks its contract."""


class Engine:
    """One GPU (or tensor-parallel group) that serves a trace from first arrival to last token.

    Args:
        trace: what arrives.
        scheduler: decides each step.
        allocator: the one that *scheduler* asks; read here for statistics only.
        step_time: prices each step.
        recorder: told of every step and every request that ends.
        max_model_len: prompt and output together are cut to this many tokens.
        single_step: decide every step by itself, never a run of steps.
        save_names: tell the recorder who was in every step; implies *single_step*.
        on_scheduled: called with what each step decided, before it runs.
        on_step: called after each step or run of steps.
    """

    def __init__(
        self,
        *,
        trace: Trace,
        scheduler: Scheduler,
        allocator: Allocator,
        step_time: StepTimeModel,
        recorder: Recorder,
        max_model_len: int,
        single_step: bool = False,
        save_names: bool = False,
        on_scheduled: Callable[[SchedulerOutput], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._allocator = allocator
        self._step_time = step_time
        self._recorder = recorder
        self._max_model_len = max_model_len
        self._single_step = single_step or save_names
        self._save_names = save_names
        self._on_scheduled = on_scheduled
        self._on_step = on_step
        self._env = simpy.Environment()
        self._next_arrival: int | None = None  # ticks; None once all have arrived
        self._wake: simpy.Event | None = None

    def run(self) -> None:
        """Run until every request has finished or been refused.

        Raises:
            EngineStuckError: if the requests left can never run.
        """
        self._env.process(self._arrivals())
        self._env.process(self._steps())
        self._env.run()

    def _arrivals(self) -> _Process:
        for request in make_requests(self._trace, self._max_model_len):
            arrival = request.arrival_ps * TICKS_PER_PS
            now = int(self._env.now)
            if arrival > now:
                self._next_arrival = arrival
                self._wake_engine()
                yield self._env.timeout(arrival - now)
            reason = self._scheduler.add_request(request)
            if reason is not None:
                self._recorder.on_refused(request, reason)
        self._next_arrival = None
        self._wake_engine()

    def _wake_engine(self) -> None:
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _steps(self) -> _Process:
        scheduler, recorder = self._scheduler, self._recorder
        clock = 0
        was_idle = False
        while True:
            if not scheduler.running and not scheduler.waiting:
                if self._next_arrival is None:
                    return
                yield from self._sleep()
                clock = int(self._env.now)
                was_idle = True
                continue
            if was_idle:  # told only now: idle time after the last step is nobody's
                recorder.on_idle(clock, self._allocator.stats())
                was_idle = False
            start = clock
            output = scheduler.schedule(1 if self._single_step else self._max_steps(clock))
            stats = self._allocator.stats()
            num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
            scheduled = scheduler.scheduled(output) if self._save_names else ()
            if self._on_scheduled is not None:
                self._on_scheduled(output)
            times = self._times(output)
            clock += times.total
            if self._next_arrival is not None and self._next_arrival <= clock:
                yield self._env.timeout(clock - int(self._env.now))
                # Arrivals due at this very instant join the next step, whoever scheduled first.
                yield self._env.timeout(0)
            finished = scheduler.update_from_output(output)
            recorder.on_step(
                start=start,
                times=times,
                num_running=num_running,
                num_waiting=num_waiting,
                output=output,
                stats=stats,
                taken=scheduler.taken,
                finished=finished,
            )
            if self._save_names:
                recorder.on_names(output, scheduled, finished, self._allocator.stats())
            if self._on_step is not None:
                self._on_step()
            if output.is_empty and not output.preempted:
                if self._next_arrival is None:
                    raise EngineStuckError(
                        f"{len(scheduler.waiting)} requests wait and none can be admitted: "
                        f"{scheduler.waiting[0].request_id} is at the head"
                    )
                yield from self._sleep()
                clock = int(self._env.now)
                was_idle = True

    def _sleep(self) -> _Process:
        """Wait for the next arrival."""
        self._wake = self._env.event()
        yield self._wake

    def _max_steps(self, clock: int) -> int:
        """Answer how many decode steps may pass before an arrival has to be looked at."""
        scheduler = self._scheduler
        if self._next_arrival is None or not scheduler.admits_arrivals:
            return UNBOUNDED
        if not scheduler.num_decodes:
            return 1
        line = self._step_time.decode_line(scheduler.num_decodes)
        first = line.fixed + line.per_context * scheduler.decode_context
        return steps_until(
            self._next_arrival - clock, first, line.per_context * scheduler.num_decodes
        )

    def _times(self, output: SchedulerOutput) -> StepTimes:
        """Price the steps of *output*."""
        if output.prefills:
            return StepTimes(self._step_time.step_time(output.batch), 0, 1)
        if not output.num_decodes:
            return StepTimes(0, 0, 1)
        line = self._step_time.decode_line(output.num_decodes)
        return StepTimes(
            line.fixed + line.per_context * output.decode_context,
            line.per_context * output.num_decodes,
            output.num_steps,
        )


def steps_until(ticks: int, first: int, increment: int) -> int:
    """Answer the fewest steps that last *ticks* or longer, at least 1.

    Step j lasts ``first + j * increment``; n steps last ``n * first + increment * n (n - 1) / 2``.
    """
    if ticks <= first:
        return 1
    if not increment:
        return -(-ticks // first)
    # The root of increment / 2 n^2 + (first - increment / 2) n - ticks, then mend the rounding.
    b = 2 * first - increment
    n = max(1, (isqrt(b * b + 8 * increment * ticks) - b) // (2 * increment))
    while n * first + increment * n * (n - 1) // 2 < ticks:
        n += 1
    return n
