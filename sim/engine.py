"""The event loop: requests arrive, the engine steps. The only file that imports SimPy.

Two processes, never one a request: `Engine._arrivals` walks the trace, `Engine._steps` runs the
scheduler (vLLM 0.33.0, ``v1/engine/core.py``, ``step``). The clock is an integer number of
picoseconds, so that an arrival and the end of a step are at the same instant exactly or not at all.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import simpy

from sim.allocators.base import Allocator
from sim.metrics import Recorder
from sim.request import Request
from sim.scheduler import Scheduler, SchedulerOutput
from sim.timing.base import StepTimeModel
from workloads.record import Trace

_Process = Generator[simpy.Event, Any, None]


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
        on_scheduled: called with what each step decided, before it runs.
        on_step: called after each step.
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
        on_scheduled: Callable[[SchedulerOutput], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._allocator = allocator
        self._step_time = step_time
        self._recorder = recorder
        self._max_model_len = max_model_len
        self._on_scheduled = on_scheduled
        self._on_step = on_step
        self._env = simpy.Environment()
        self._all_arrived = False
        self._wake: simpy.Event | None = None

    def run(self) -> None:
        """Run until every request has finished or been refused.

        Raises:
            EngineStuckError: if the requests left can never run.
        """
        self._env.process(self._arrivals())
        self._env.process(self._steps())
        self._env.run()

    def _requests(self) -> Iterator[Request]:
        trace = self._trace
        offsets = trace.segment_offsets.tolist()
        columns = zip(
            trace.request_ids,
            trace.arrival_ps.tolist(),
            trace.num_prompt_tokens.tolist(),
            trace.num_output_tokens.tolist(),
            trace.output_nodes.tolist(),
            strict=True,
        )
        for index, (request_id, arrival, prompt, output, output_node) in enumerate(columns):
            segments = slice(offsets[index], offsets[index + 1])
            yield Request(
                index=index,
                request_id=request_id,
                arrival_ps=arrival,
                num_prompt_tokens=prompt,
                max_tokens=min(output, self._max_model_len - prompt),
                segment_nodes=trace.segment_nodes[segments].tolist(),
                segment_ends=trace.segment_ends[segments].tolist(),
                output_node=output_node,
            )

    def _arrivals(self) -> _Process:
        for request in self._requests():
            if request.arrival_ps > self._env.now:
                yield self._env.timeout(request.arrival_ps - int(self._env.now))
            reason = self._scheduler.add_request(request)
            if reason is not None:
                self._recorder.on_refused(request, reason)
            self._wake_engine()
        self._all_arrived = True
        self._wake_engine()

    def _wake_engine(self) -> None:
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _steps(self) -> _Process:
        scheduler, env = self._scheduler, self._env
        while True:
            if not scheduler.running and not scheduler.waiting:
                if self._all_arrived:
                    return
                yield from self._sleep()
                continue
            output = scheduler.schedule()
            start_ps = int(env.now)
            stats = self._allocator.stats()
            num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
            if self._on_scheduled is not None:
                self._on_scheduled(output)
            if output.scheduled:
                yield env.timeout(self._step_time.step_time_ps(output.batch))
            # Arrivals due at this very instant join the next step, whoever scheduled first.
            yield env.timeout(0)
            finished = scheduler.update_from_output(output)
            self._recorder.on_step(
                start_ps=start_ps,
                end_ps=int(env.now),
                num_running=num_running,
                num_waiting=num_waiting,
                output=output,
                stats=stats,
                finished=finished,
                stats_after=self._allocator.stats(),
            )
            if self._on_step is not None:
                self._on_step()
            if not output.scheduled and not output.preempted:
                if self._all_arrived:
                    raise EngineStuckError(
                        f"{len(scheduler.waiting)} requests wait and none can be admitted: "
                        f"{scheduler.waiting[0].request_id} is at the head"
                    )
                yield from self._sleep()

    def _sleep(self) -> _Process:
        """Wait for the next arrival, in no time if the trace has ended."""
        self._wake = self._env.event()
        yield self._wake
