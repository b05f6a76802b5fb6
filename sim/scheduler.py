"""Continuous batching as vLLM 0.33.0's V1 scheduler does it (``v1/core/sched/scheduler.py``).

There is no prefill phase and no decode phase: every request wants ``num_tokens -
num_computed_tokens`` tokens, and each step gives out one token budget, to the running requests
first, then to the head of the waiting queue. The scheduler knows no bytes, no blocks and no clock;
the allocator answers whether there is room.
"""

from collections import deque
from dataclasses import dataclass, field

from sim.allocators.base import Allocator
from sim.config import SchedulerConfig
from sim.request import Request, RequestStatus
from sim.timing.base import NO_WORK, StepBatch


@dataclass(slots=True)
class SchedulerOutput:
    """What one `Scheduler.schedule` decided.

    Attributes:
        scheduled: (request, tokens) in scheduling order; every request at most once.
        batch: the same work as a step time needs it.
        sampled: requests that sample a token at the end of the step, in scheduling order.
        admitted: requests that run for the first time.
        resumed: requests that run again after a preemption.
        preempted: requests that lost their memory, in order.
        num_refusals: allocations refused; each preempts somebody or blocks the head of the queue.
        prefix_cache_queries: prompt tokens looked up by the admissions of this step.
        prefix_cache_hits: of those, found.
        preempted_cache_queries: tokens looked up by resumed requests, which vLLM counts apart.
        preempted_cache_hits: of those, found.
        recomputed_tokens: tokens of this step that were computed before, and lost by preemption.
    """

    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    batch: StepBatch = NO_WORK
    sampled: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_refusals: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preempted_cache_queries: int = 0
    preempted_cache_hits: int = 0
    recomputed_tokens: int = 0


class Scheduler:
    """Decides, step by step, who runs and how many tokens each gets.

    Attributes:
        running: requests that hold memory, in order of admission; the last one is the next victim.
        waiting: requests that do not, first come first served; preempted ones in front.
    """

    def __init__(self, config: SchedulerConfig, max_model_len: int, allocator: Allocator) -> None:
        assert config.max_num_seqs is not None, "resolved"
        assert config.max_num_batched_tokens is not None, "resolved"
        self._config = config
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_model_len = max_model_len
        self._allocator = allocator
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def add_request(self, request: Request) -> str | None:
        """Queue *request*; or answer why it can never be served, and leave it out.

        The rule of vLLM's front end (``v1/engine/input_processor.py``): a prompt must leave room
        for one output token. That the whole sequence fits the pool is checked at start-up.
        """
        if request.num_prompt_tokens >= self._max_model_len:
            request.status = RequestStatus.FINISHED_IGNORED
            return "prompt_too_long"
        self.waiting.append(request)
        return None

    def schedule(self) -> SchedulerOutput:
        """Give out one step's token budget; the tokens count as computed when this returns."""
        output = SchedulerOutput()
        # A cap on one request's chunk lets others in; vLLM drops it while only one is alive.
        alone = len(self.running) + len(self.waiting) <= 1
        threshold = 0 if alone else self._config.long_prefill_token_threshold
        budget = self._schedule_running(output, self._max_num_batched_tokens, threshold)
        if not output.preempted:
            self._schedule_waiting(output, budget, threshold)
        self._count_as_computed(output)
        return output

    def update_from_output(self, output: SchedulerOutput) -> list[Request]:
        """Take in the tokens a step has sampled; free and answer who finished, in order."""
        finished = []
        for request in output.sampled:
            request.num_output_tokens += 1
            request.num_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                self._allocator.free(request)
                finished.append(request)
        if finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return finished

    def _schedule_running(self, output: SchedulerOutput, budget: int, threshold: int) -> int:
        """Schedule the running requests in order; answer the budget left."""
        allocate_slots = self._allocator.allocate_slots
        running = self.running
        position = 0
        while position < len(running) and budget > 0:
            request = running[position]
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            num_new_tokens = min(num_new_tokens, budget)
            while allocate_slots(request, num_new_tokens) is None:
                output.num_refusals += 1
                victim = running.pop()
                self._preempt(victim, output)
                if victim is request:
                    return budget
            output.scheduled.append((request, num_new_tokens))
            budget -= num_new_tokens
            position += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, threshold: int) -> None:
        """Admit from the head of the queue until one does not fit; nobody passes it."""
        config = self._config
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            num_hit_tokens = self._allocator.find_longest_cache_hit(request)
            num_new_tokens = request.num_tokens - num_hit_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            if num_new_tokens > budget:
                if not config.enable_chunked_prefill:
                    break
                num_new_tokens = budget
            allocation = self._allocator.allocate_slots(
                request,
                num_new_tokens,
                num_hit_tokens,
                full_sequence_must_fit=config.scheduler_reserve_full_isl,
                keep_watermark=bool(self.running),
            )
            if allocation is None:
                output.num_refusals += 1
                break
            self.waiting.popleft()
            self._admit(request, num_hit_tokens, output)
            output.scheduled.append((request, num_new_tokens))
            budget -= num_new_tokens

    def _admit(self, request: Request, num_hit_tokens: int, output: SchedulerOutput) -> None:
        self.running.append(request)
        request.num_computed_tokens = num_hit_tokens
        num_looked_up = request.num_tokens if self._allocator.enable_caching else 0
        if request.status is RequestStatus.PREEMPTED:
            output.resumed.append(request)
            output.preempted_cache_queries += num_looked_up
            output.preempted_cache_hits += num_hit_tokens
        else:
            output.admitted.append(request)
            output.prefix_cache_queries += num_looked_up
            output.prefix_cache_hits += num_hit_tokens
            request.num_cached_tokens = num_hit_tokens
        request.status = RequestStatus.RUNNING

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take all memory from *request* and queue it in front; its output so far is kept."""
        self._allocator.free(request)
        request.status = RequestStatus.PREEMPTED
        request.max_num_computed_tokens = max(
            request.max_num_computed_tokens, request.num_computed_tokens
        )
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        output.preempted.append(request)

    @staticmethod
    def _count_as_computed(output: SchedulerOutput) -> None:
        """Advance every scheduled request by its tokens and sum up the work."""
        num_decodes = decode_context = 0
        prefills = []
        sampled = output.sampled
        num_continuing = len(output.scheduled) - len(output.admitted) - len(output.resumed)
        for position, (request, num_new_tokens) in enumerate(output.scheduled):
            before = request.num_computed_tokens
            computed = before + num_new_tokens
            request.num_computed_tokens = computed
            samples = computed >= request.num_tokens  # a chunk that stops short samples nothing
            if samples:
                sampled.append(request)
            # A resumed request may have all but one token cached: that is still its prefill.
            if (
                num_new_tokens == 1
                and samples
                and request.num_output_tokens
                and position < num_continuing
            ):
                num_decodes += 1
                decode_context += computed
            else:
                prefills.append((num_new_tokens, computed))
                if before < request.max_num_computed_tokens:
                    again = min(computed, request.max_num_computed_tokens)
                    output.recomputed_tokens += again - before
        output.batch = StepBatch(num_decodes, decode_context, tuple(prefills), len(sampled))
