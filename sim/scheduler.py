"""Continuous batching as vLLM 0.33.0's V1 scheduler does it (``v1/core/sched/scheduler.py``).

There is no prefill phase and no decode phase: every request wants ``num_tokens -
num_computed_tokens`` tokens, and each step gives out one token budget, to the running requests
first, then to the head of the waiting queue. The scheduler knows no bytes, no blocks and no clock;
the allocator answers whether there is room.

Most running requests decode: one token a step until their last. They are kept as one group, whose
step costs the same for any number of them, and several steps are decided at once while nothing but
the group changes.
"""

import heapq
from collections import deque

from sim.allocators.base import Allocator, Taken
from sim.allocators.runs import decode_runs
from sim.config import SchedulerConfig
from sim.request import Request, RequestStatus
from sim.timing.base import NO_WORK, StepBatch


class SchedulerOutput:
    """What one `Scheduler.schedule` decided: one step, or a run of steps that only decode.

    Attributes:
        num_steps: steps decided; more than one only without prefills, admissions and preemptions.
        num_decodes: requests that decode one token in every step.
        decode_context: tokens they attend in the first step, the new ones included; grows by
            num_decodes a step.
        prefills: (request, tokens) of everybody else, in scheduling order.
        batch: the work of a step with prefills.
        sampled: of the prefills, requests that sample a token at the end of the step.
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

    __slots__ = (
        "admitted",
        "batch",
        "decode_context",
        "num_decodes",
        "num_refusals",
        "num_steps",
        "preempted",
        "preempted_cache_hits",
        "preempted_cache_queries",
        "prefills",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "recomputed_tokens",
        "resumed",
        "sampled",
    )

    def __init__(self) -> None:
        self.num_steps = 1
        self.num_decodes = self.decode_context = self.num_refusals = self.recomputed_tokens = 0
        self.prefills: list[tuple[Request, int]] = []
        self.batch = NO_WORK
        self.sampled: list[Request] = []
        self.admitted: list[Request] = []
        self.resumed: list[Request] = []
        self.preempted: list[Request] = []
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.preempted_cache_queries = self.preempted_cache_hits = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was scheduled: such a step takes no time."""
        return not self.num_decodes and not self.prefills


class Scheduler:
    """Decides, step by step, who runs and how many tokens each gets.

    Attributes:
        step: index of the next step.
        running: requests that hold memory, in order of admission; the last one is the next victim.
        waiting: requests that do not, first come first served; preempted ones in front.
        num_decodes: running requests that decode.
    """

    def __init__(self, config: SchedulerConfig, max_model_len: int, allocator: Allocator) -> None:
        assert config.max_num_seqs is not None, "resolved"
        assert config.max_num_batched_tokens is not None, "resolved"
        self._config = config
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_model_len = max_model_len
        self._allocator = allocator
        self._runs = decode_runs(allocator)
        self.step = 0
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.num_decodes = 0
        # A decoding request has computed offset + step tokens before a step.
        self._offset_sum = 0
        self._offsets: dict[Request, int] = {}
        self._prefilling: list[Request] = []
        self._finishing: dict[int, list[Request]] = {}
        self._finish_steps: list[int] = []
        self._last_decode_order = -1
        self._num_admissions = 0
        # Where the head of the queue was refused: it stays refused until the allocator's
        # generation changes or less budget is left (a shorter chunk needs less room).
        self._refused: Request | None = None
        self._refused_generation = 0
        self._refused_budget = 0
        self._refused_length = 0

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

    @property
    def decode_context(self) -> int:
        """Tokens that the decoding requests attend in the next step, the new ones included."""
        return self._offset_sum + self.num_decodes * (self.step + 1)

    @property
    def taken(self) -> list[Taken]:
        """What the decodes of the step just decided took."""
        return self._runs.taken

    @property
    def admits_arrivals(self) -> bool:
        """Whether a request that arrives now could be admitted in the next step."""
        return not self.waiting and len(self.running) < self._max_num_seqs

    def schedule(self, max_steps: int = 1) -> SchedulerOutput:
        """Decide the next step; or several, up to *max_steps*, while nothing but decodes goes on.

        Their tokens count as computed when this returns; `update_from_output` must follow.
        """
        output = SchedulerOutput()
        # A cap on one request's chunk lets others in; vLLM drops it while only one is alive.
        alone = len(self.running) + len(self.waiting) <= 1
        threshold = 0 if alone else self._config.long_prefill_token_threshold
        budget = self._schedule_running(output, max_steps, threshold)
        if not output.preempted:
            self._schedule_waiting(output, budget, threshold)
        output.num_decodes = self.num_decodes
        output.decode_context = self.decode_context
        if output.prefills:
            self._count_prefills(output)
        return output

    def scheduled(self, output: SchedulerOutput) -> list[tuple[Request, int]]:
        """Answer (request, tokens) of a step in scheduling order, before it is updated from."""
        prefills = dict(output.prefills)
        return [
            (request, prefills.get(request, 1))
            for request in self.running
            if request in prefills or request in self._offsets
        ]

    def update_from_output(self, output: SchedulerOutput) -> list[Request]:
        """Take in the tokens that the steps sampled; free and answer who finished, in order."""
        self.step += output.num_steps
        finished = self._finishing.pop(self.step - 1, [])
        for request in finished:
            self._leave(request)
        for request in output.sampled:
            request.num_output_tokens += 1
            request.num_tokens += 1
            self._prefilling.remove(request)
            if request.num_output_tokens < request.max_tokens:
                self._join(request)
            else:
                finished.append(request)
        if len(finished) > 1:
            finished.sort(key=lambda request: request.order)
        for request in finished:
            del self.running[request]
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self._allocator.free(request)
        return finished

    def _schedule_running(self, output: SchedulerOutput, max_steps: int, threshold: int) -> int:
        """Schedule the running requests in order; answer the budget left.

        A decode is never short of budget: max_num_batched_tokens is at least max_num_seqs, and of
        the prompts only the last running request is ever cut by the budget.
        """
        budget = self._max_num_batched_tokens - self.num_decodes
        prefilling = self._prefilling
        if not self.num_decodes:
            return self._serve(output, list(prefilling), budget, threshold)
        if not prefilling or prefilling[0].order > self._last_decode_order:
            if prefilling or self._queue_can_move(budget):
                max_steps = 1
            granted = self._runs.grant(min(max_steps, self._steps_to_finish()))
            if granted:
                output.num_steps = granted
                return self._serve(output, list(prefilling), budget, threshold)
        in_order = [*self._runs.touched(), *prefilling]
        in_order.sort(key=lambda request: request.order)
        budget = self._serve(output, in_order, budget, threshold)
        self._runs.advance()
        return budget

    def _serve(
        self, output: SchedulerOutput, requests: list[Request], budget: int, threshold: int
    ) -> int:
        """Serve running *requests* one by one, preempting from the end; answer the budget left."""
        for request in requests:
            if request not in self.running:
                continue  # an earlier one has taken its memory
            num_new_tokens = 0
            if request not in self._offsets:
                num_new_tokens = request.num_tokens - request.num_computed_tokens
                if 0 < threshold < num_new_tokens:
                    num_new_tokens = threshold
                num_new_tokens = min(num_new_tokens, budget)
                if not num_new_tokens:
                    continue
            while not self._has_room(request, num_new_tokens):
                output.num_refusals += 1
                victim = next(reversed(self.running))
                self._preempt(victim, output)
                if victim is request:
                    return budget
            if num_new_tokens:
                output.prefills.append((request, num_new_tokens))
                budget -= num_new_tokens
        return budget

    def _has_room(self, request: Request, num_new_tokens: int) -> bool:
        """Take the memory of *num_new_tokens*, or, of a decoding request, of its next one."""
        if num_new_tokens:
            return self._allocator.allocate_slots(request, num_new_tokens) is not None
        return self._runs.serve(request)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, threshold: int) -> None:
        """Admit from the head of the queue until one does not fit; nobody passes it."""
        config = self._config
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            if self._is_refused(budget):
                output.num_refusals += output.num_steps * (not self._refused_length)
                break
            request = self.waiting[0]
            num_hit_tokens = self._allocator.find_longest_cache_hit(request)
            num_new_tokens = request.num_tokens - num_hit_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            if num_new_tokens > budget:
                if not config.enable_chunked_prefill:
                    self._refuse(request, budget, num_new_tokens)
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
                self._refuse(request, budget)
                break
            self.waiting.popleft()
            self._admit(request, num_hit_tokens, output)
            output.prefills.append((request, num_new_tokens))
            budget -= num_new_tokens

    def _refuse(self, request: Request, budget: int, length: int = 0) -> None:
        """Remember why the head of the queue stays where it is: no room, or no budget."""
        self._refused = request
        self._refused_generation = self._runs.generation
        self._refused_budget = budget
        self._refused_length = length

    def _is_refused(self, budget: int) -> bool:
        """Whether the head of the queue would be refused again.

        For memory: as long as none came free, and with no less budget (a shorter chunk needs less
        room). For budget: as long as its whole prompt is longer.
        """
        if (
            self._refused is not self.waiting[0]
            or self._refused_generation != self._runs.generation
        ):
            return False
        if self._refused_length:
            return self._refused_length > budget
        return self._refused_budget <= budget

    def _queue_can_move(self, budget: int) -> bool:
        """Whether an admission may succeed in the next step."""
        return bool(
            self.waiting
            and budget > 0
            and len(self.running) < self._max_num_seqs
            and not self._is_refused(budget)
        )

    def _admit(self, request: Request, num_hit_tokens: int, output: SchedulerOutput) -> None:
        self.running[request] = None
        self._prefilling.append(request)
        request.order = self._num_admissions
        self._num_admissions += 1
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
        if request in self._offsets:
            last_step = self._last_step(request)
            self._finishing[last_step].remove(request)
            self._leave(request)
            request.last_token_step = self.step - 1
        else:
            self._prefilling.remove(request)
        del self.running[request]
        request.status = RequestStatus.PREEMPTED
        self._allocator.free(request)
        request.max_num_computed_tokens = max(
            request.max_num_computed_tokens, request.num_computed_tokens
        )
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        output.preempted.append(request)

    def _join(self, request: Request) -> None:
        """Let *request* decode from the next step on."""
        offset = request.num_computed_tokens - self.step
        self._offsets[request] = offset
        self._offset_sum += offset
        self.num_decodes += 1
        self._last_decode_order = max(self._last_decode_order, request.order)
        self._runs.join(request)
        last_step = self._last_step(request)
        if last_step not in self._finishing:
            self._finishing[last_step] = []
            heapq.heappush(self._finish_steps, last_step)
        self._finishing[last_step].append(request)

    def _leave(self, request: Request) -> None:
        """Take *request* out of the decodes and bring its counters up to date."""
        self._offset_sum -= self._offsets.pop(request)
        self.num_decodes -= 1
        self._runs.leave(request)
        request.num_tokens = request.num_computed_tokens + 1
        request.num_output_tokens = request.num_tokens - request.num_prompt_tokens

    def _last_step(self, request: Request) -> int:
        """Answer the step in which a decoding request samples its last token."""
        return request.final_num_computed_tokens - 1 - self._offsets[request]

    def _steps_to_finish(self) -> int:
        """Answer the steps up to and including the first in which a decoding request finishes."""
        steps = self._finish_steps
        while not self._finishing.get(steps[0]):
            self._finishing.pop(heapq.heappop(steps), None)
        return steps[0] - self.step + 1

    @staticmethod
    def _count_prefills(output: SchedulerOutput) -> None:
        """Advance every request that does not decode by its tokens; sum up the step's work."""
        num_decodes, decode_context = output.num_decodes, output.decode_context
        chunks = []
        num_continuing = len(output.prefills) - len(output.admitted) - len(output.resumed)
        for position, (request, num_new_tokens) in enumerate(output.prefills):
            before = request.num_computed_tokens
            computed = before + num_new_tokens
            request.num_computed_tokens = computed
            samples = computed >= request.num_tokens  # a chunk that stops short samples nothing
            if samples:
                output.sampled.append(request)
            if before < request.max_num_computed_tokens:
                output.recomputed_tokens += min(computed, request.max_num_computed_tokens) - before
            # A resumed request whose last chunk is one token does what a decode does.
            again = samples and num_new_tokens == 1 and request.num_output_tokens > 0
            if again and position < num_continuing:
                num_decodes += 1
                decode_context += computed
            else:
                chunks.append((num_new_tokens, computed))
        num_sampled = output.num_decodes + len(output.sampled)
        output.batch = StepBatch(num_decodes, decode_context, tuple(chunks), num_sampled)
