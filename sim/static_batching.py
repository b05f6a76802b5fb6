"""Static batching: a batch runs until its last member has finished, and nobody joins meanwhile.

As servers did before Orca (Yu et al., OSDI 2022, section 3.1), and the vLLM paper's baseline,
FasterTransformer (section 6.1): the scheduler takes the earliest requests, as many as there are
seats and memory for, and hands them over as one batch. Answers return together. Members that have
finished keep seat and memory until then, but lose the memory before a member that still computes is
preempted: with reservations, which never preempt, that is FasterTransformer.

Not modelled: padding. A prompt costs its own tokens, and a member that has finished costs no time.
"""

from collections.abc import Callable

from sim.allocators.base import Allocator
from sim.config import SchedulerConfig
from sim.request import Request
from sim.scheduler import Scheduler
from sim.scheduler_output import SchedulerOutput


class StaticScheduler(Scheduler):
    """A `Scheduler` whose requests come and go a batch at a time.

    Who is in the batch is settled when it opens: of those waiting then the first max_num_seqs, as
    far as memory reaches. A token budget too small for all their prompts is no limit: they are
    computed over several steps. Who is preempted waits for another batch, in front.

    A request finishes, and is answered by `update_from_output`, when the last member has all its
    tokens; *running* has those that hold memory.
    """

    def __init__(self, config: SchedulerConfig, max_model_len: int, allocator: Allocator) -> None:
        super().__init__(config, max_model_len, allocator)
        self._num_to_come = 0  # of the batch, not admitted yet
        self._done: list[Request] = []  # of the batch, have all their tokens

    @property
    def admits_arrivals(self) -> bool:
        """Whether a request that arrives now could be admitted in the next step."""
        return not self.waiting and not self.running

    def schedule(self, max_steps: Callable[[int], int] | None = None) -> SchedulerOutput:
        """Decide the next steps (`Scheduler.schedule`), the first of a batch if none runs."""
        if not self.running:
            self._num_to_come = min(len(self.waiting), self._max_num_seqs)
        return super().schedule(max_steps)

    def _num_seats(self) -> int:
        return self._num_to_come

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, threshold: int) -> None:
        num_refusals = output.num_refusals
        super()._schedule_waiting(output, budget, threshold)
        self._num_to_come -= len(output.admitted) + len(output.resumed)
        if output.num_refusals > num_refusals:  # no memory: this is the batch
            self._num_to_come = 0

    def _free_ended(self) -> bool:
        holder = next((done for done in self._done if done in self.running), None)
        if holder is None:
            return False
        self._release(holder)
        return True

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        super()._preempt(request, output)
        self._num_to_come = 0

    def _ended(self, finished: list[Request]) -> list[Request]:
        self._done += finished
        if self.num_decodes or self._prefilling:
            return []
        ended, self._done = self._done, []
        return ended

    def _release(self, request: Request) -> None:
        if request in self.running:  # else its memory was needed before
            super()._release(request)
