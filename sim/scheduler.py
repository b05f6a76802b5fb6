"""Continuous batching as vLLM 0.33.0's V1 scheduler does it (``v1/core/sched/scheduler.py``).

There is no prefill phase and no decode phase: every request wants ``num_tokens -
num_computed_tokens`` tokens, and each step gives out one token budget, to the running requests
first, then to the head of the waiting queue. The scheduler knows no bytes, no blocks and no clock;
the allocator answers whether there is room.

Most running requests decode: one token a step until their last. They are kept as one group, whose
step costs the same for any number of them, and several steps are decided at once while nothing but
the group changes.

Under asynchronous scheduling (``v1/core/sched/async_scheduler.py``) a step is decided before the
output of the step before it is taken in. A token that will be sampled is counted at once in both
modes: that it comes is known, and nothing here depends on which it is. What is late is the end of a
request: it keeps its memory and its seat for one step after its last. (The prefix cache does depend
on which token it is: `sim.allocators.prefix`.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from operator import attrgetter

from sim.allocators.base import Allocator
from sim.allocators.runs import decode_runs
from sim.allocators.values import Taken
from sim.config import SchedulerConfig
from sim.refusal import HeadRefusal, can_be_served
from sim.request import Request, RequestStatus
from sim.scheduler_output import SchedulerOutput

RUNNING, PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED
FINISHED = RequestStatus.FINISHED_LENGTH_CAPPED
_order = attrgetter("order")
_is_decoding = attrgetter("is_decoding")


class Scheduler:
    """Decides, step by step, who runs and how many tokens each gets.

    Attributes:
        step: index of the next step.
        running: requests that hold memory, in order of admission; the last one is the next victim.
        waiting: requests that do not, first come first served; preempted ones in front.
        num_decodes: running requests that decode.
        is_async: whether a step is decided before the output of the one before it is taken in.
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
        self._threshold = config.long_prefill_token_threshold
        self._find_longest_cache_hit = (
            allocator.find_longest_cache_hit if allocator.enable_caching else None
        )
        self.is_async = config.async_scheduling
        self.step = 0
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.num_decodes = 0
        # A decoding request has computed offset + step tokens before a step.
        self._offset_sum = 0
        self._prefilling: list[Request] = []
        self._finishing: dict[int, list[Request]] = {}
        self._finish_steps: list[int] = []
        self._last_decode_order = -1
        self._num_admissions = 0
        self._refusal = HeadRefusal()
        # Asynchronously: who has computed all, and ends with the next update. They hold memory.
        self._in_flight: list[Request] = []

    def add_request(self, request: Request) -> str | None:
        """Queue *request*; or answer why it can never be served, and leave it out.

        That the whole sequence fits the pool is checked at start-up.
        """
        if not can_be_served(request.num_prompt_tokens, self._max_model_len):
            request.status = RequestStatus.FINISHED_IGNORED
            return "prompt_too_long"
        self.waiting.append(request)
        return None

    @property
    def decode_context(self) -> int:
        """Tokens that the decoding requests attend in the next step, the new ones included."""
        return self._offset_sum + self.num_decodes * (self.step + 1)

    @property
    def taken(self) -> Taken:
        """What the decodes of the run just decided took; of a single step it says nothing."""
        return self._runs.taken

    @property
    def admits_arrivals(self) -> bool:
        """Whether a request that arrives now could be admitted in the next step."""
        return not self.waiting and len(self.running) < self._max_num_seqs

    def schedule(self, max_steps: Callable[[int], int] | None = None) -> SchedulerOutput:
        """Decide the next step; or several, while nothing but decodes goes on.

        *max_steps* is asked how many to decide at most, given how many there are until somebody
        finishes; without it, one. Their tokens count as computed when this returns;
        `update_from_output` must follow.
        """
        output = SchedulerOutput()
        threshold = self._threshold
        if threshold and len(self.running) + len(self.waiting) <= 1:
            # A cap on one request's chunk lets others in; vLLM drops it while only one is alive.
            threshold = 0
        budget = self._schedule_running(output, max_steps, threshold)
        if self.waiting and not output.preempted:
            self._schedule_waiting(output, budget, threshold)
        output.num_decodes = self.num_decodes
        output.decode_context = self.decode_context
        if output.prefills:
            output.count_prefills()
        return output

    def scheduled(self, output: SchedulerOutput) -> list[tuple[Request, int]]:
        """Answer (request, tokens) of a step in scheduling order, before it is updated from."""
        prefills = dict(output.prefills)
        return [
            (request, prefills.get(request, 1))
            for request in self.running
            if request in prefills or request.is_decoding
        ]

    def update_from_output(self, output: SchedulerOutput) -> list[Request]:
        """Take in the tokens that the steps sampled; free and answer who finished, in order.

        Under asynchronous scheduling free and answer those of the update before this one.
        """
        self.step += output.num_steps
        finished = self._finishing.pop(self.step - 1, [])
        if finished:
            self._leave(finished)
        if output.sampled:
            self._take_samples(output.sampled, finished)
        if len(finished) > 1:
            finished.sort(key=_order)
        finished = self._ended(finished)
        for request in finished:
            request.status = FINISHED
            self._release(request)
        return finished

    def _ended(self, finished: list[Request]) -> list[Request]:
        """Answer who ends with this update, given who has got its last token."""
        if self.is_async:
            finished, self._in_flight = self._in_flight, finished
        return finished

    def _release(self, request: Request) -> None:
        """Take seat and memory from *request*, which has got its last token."""
        if request in self.running:
            del self.running[request]
            self._allocator.free(request)
        else:  # preempted while its last token was on its way
            self.waiting.remove(request)

    def _take_samples(self, sampled: Sequence[Request], finished: list[Request]) -> None:
        """Let requests whose prompt is computed decode; add to *finished* who wants no more."""
        prefilling = self._prefilling
        if len(sampled) == len(prefilling):
            prefilling.clear()
        else:
            for request in sampled:
                prefilling.remove(request)
        joining = []
        for request in sampled:
            request.num_output_tokens += 1
            request.num_tokens += 1
            if request.num_output_tokens < request.max_tokens:
                joining.append(request)
            else:
                finished.append(request)
        if joining:
            self._join(joining)

    def _schedule_running(
        self, output: SchedulerOutput, max_steps: Callable[[int], int] | None, threshold: int
    ) -> int:
        """Schedule the running requests in order; answer the budget left.

        A decode is never short of budget: max_num_batched_tokens is at least max_num_seqs, and of
        the prompts only the last running request is ever cut by the budget.
        """
        budget = self._max_num_batched_tokens - self.num_decodes
        prefilling = self._prefilling
        if not self.num_decodes:
            return self._serve(output, prefilling, budget, threshold) if prefilling else budget
        if not prefilling or prefilling[0].order > self._last_decode_order:
            num_steps = 1
            if (
                max_steps is not None
                and not prefilling
                and not self._in_flight
                and not self._queue_can_move(budget)
            ):
                num_steps = max_steps(self._steps_to_finish())
            granted = self._runs.grant(self.step, num_steps)
            if granted:
                output.num_steps = granted
                return self._serve(output, prefilling, budget, threshold) if prefilling else budget
        in_order = [*self._runs.touched(self.step), *prefilling]
        in_order.sort(key=_order)
        budget = self._serve(output, in_order, budget, threshold)
        self._runs.advance(self.step)
        return budget

    def _serve(
        self, output: SchedulerOutput, requests: list[Request], budget: int, threshold: int
    ) -> int:
        """Serve running *requests* in order, preempting from the end; answer the budget left."""
        left = list(requests)
        place = 0
        while place < len(left):
            request = left[place]
            if request.is_decoding:
                decodes = list(takewhile(_is_decoding, left[place:]))
                num_served = self._runs.serve(decodes, self.step)
                place += num_served
                if num_served == len(decodes):
                    continue
            else:
                num_new_tokens = request.num_tokens - request.num_computed_tokens
                if 0 < threshold < num_new_tokens:
                    num_new_tokens = threshold
                num_new_tokens = min(num_new_tokens, budget)
                if not num_new_tokens:
                    place += 1
                    continue
                if self._allocator.allocate_slots(request, num_new_tokens) is not None:
                    output.prefills.append((request, num_new_tokens))
                    budget -= num_new_tokens
                    place += 1
                    continue
            if self._free_ended():
                continue
            output.num_refusals += 1
            victim = next(reversed(self.running))
            self._preempt(victim, output)
            if left[-1] is victim:
                left.pop()
        return budget

    def _free_ended(self) -> bool:
        """Free the memory of a request that needs it no more; answer whether there was one."""
        return False

    def _num_seats(self) -> int:
        """Answer how many may be admitted in this step."""
        return self._max_num_seqs - len(self.running)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int, threshold: int) -> None:
        """Admit from the head of the queue until one does not fit; nobody passes it."""
        waiting, running, config = self.waiting, self.running, self._config
        num_seats = self._num_seats()
        if num_seats <= 0 or budget <= 0:
            return
        if self._refusal.stands(waiting[0], self._runs.generation, budget):
            output.num_refusals += output.num_steps * (not self._refusal.length)
            return
        came: list[Request] = []
        find, allocate = self._find_longest_cache_hit, self._allocator.allocate_slots
        full_sequence_must_fit = config.scheduler_reserve_full_isl
        order, num_hit_tokens = self._num_admissions, 0
        while waiting and budget > 0 and num_seats:
            request = waiting[0]
            if find is not None:
                num_hit_tokens = find(request)
            num_new_tokens = request.num_tokens - num_hit_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            if num_new_tokens > budget:
                if not config.enable_chunked_prefill:
                    self._refusal.note(request, self._runs.generation, budget, num_new_tokens)
                    break
                num_new_tokens = budget
            allocation = allocate(
                request,
                num_new_tokens,
                num_hit_tokens,
                full_sequence_must_fit=full_sequence_must_fit,
                keep_watermark=bool(running),
            )
            if allocation is None:
                output.num_refusals += 1
                self._refusal.note(request, self._runs.generation, budget)
                break
            waiting.popleft()
            running[request] = None
            request.order = order
            order += 1
            request.num_computed_tokens = num_hit_tokens
            came.append(request)
            output.prefills.append((request, num_new_tokens))
            budget -= num_new_tokens
            num_seats -= 1
        if came:
            self._num_admissions = order
            self._prefilling += came
            self._admit(came, output)

    def _queue_can_move(self, budget: int) -> bool:
        """Whether an admission may succeed in the next step."""
        return bool(
            self.waiting
            and budget > 0
            and self._num_seats() > 0
            and not self._refusal.stands(self.waiting[0], self._runs.generation, budget)
        )

    def _admit(self, requests: list[Request], output: SchedulerOutput) -> None:
        """Note who runs from this step on, and what of them was found in the cache."""
        resumed = [request for request in requests if request.status is PREEMPTED]
        output.resumed = resumed
        output.admitted = (
            [request for request in requests if request.status is not PREEMPTED]
            if resumed
            else requests
        )
        for request in requests:
            request.status = RUNNING
        for request in output.admitted:
            request.num_cached_tokens = request.num_computed_tokens
        if self._find_longest_cache_hit is None:
            return
        for request in output.admitted:
            output.prefix_cache_queries += request.num_tokens
            output.prefix_cache_hits += request.num_computed_tokens
        for request in resumed:
            output.preempted_cache_queries += request.num_tokens
            output.preempted_cache_hits += request.num_computed_tokens

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take all memory from *request* and queue it in front; its output so far is kept."""
        if request.is_decoding:
            self._finishing[self._last_step(request)].remove(request)
            self._leave([request])
            request.last_token_step = self.step - 1
        elif request not in self._in_flight:
            self._prefilling.remove(request)
        del self.running[request]
        request.status = PREEMPTED
        request.num_preemptions += 1
        self._allocator.free(request)
        request.max_num_computed_tokens = max(
            request.max_num_computed_tokens, request.num_computed_tokens
        )
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        output.preempted.append(request)

    def _join(self, requests: Sequence[Request]) -> None:
        """Let *requests* decode from the next step on."""
        step, finishing = self.step, self._finishing
        for request in requests:
            request.is_decoding = True
            request.offset = offset = request.num_computed_tokens - step
            self._offset_sum += offset
            last_step = self._last_step(request)
            last = finishing.get(last_step)
            if last is None:
                finishing[last_step] = [request]
                heappush(self._finish_steps, last_step)
            else:
                last.append(request)
        if self._threshold:  # else prompts in the works are always admitted last
            last_order = max(request.order for request in requests)
            self._last_decode_order = max(self._last_decode_order, last_order)
        self.num_decodes += len(requests)
        self._runs.join(requests, step)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Take *requests* out of the decodes and bring their counters up to date."""
        step = self.step
        for request in requests:
            offset = request.offset
            self._offset_sum -= offset
            request.is_decoding = False
            request.num_computed_tokens = num_computed = offset + step
            request.num_tokens = num_computed + 1
            request.num_output_tokens = num_computed + 1 - request.num_prompt_tokens
        self.num_decodes -= len(requests)
        self._runs.leave(requests)

    @staticmethod
    def _last_step(request: Request) -> int:
        """Answer the step in which a decoding request samples its last token."""
        return request.final_num_computed_tokens - 1 - request.offset

    def _steps_to_finish(self) -> int:
        """Answer the steps up to and including the first in which a decoding request finishes."""
        steps, finishing = self._finish_steps, self._finishing
        while not finishing.get(steps[0]):
            finishing.pop(heappop(steps), None)
        return steps[0] - self.step + 1
