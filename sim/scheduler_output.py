"""What the scheduler hands to the engine (vLLM 0.33.0, ``v1/core/sched/output.py``)."""

from collections.abc import Sequence

from sim.request import Request
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
        self.sampled: Sequence[Request] = ()
        self.admitted: Sequence[Request] = ()
        self.resumed: Sequence[Request] = ()
        self.preempted: list[Request] = []
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.preempted_cache_queries = self.preempted_cache_hits = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was scheduled: such a step takes no time."""
        return not self.num_decodes and not self.prefills

    def count_prefills(self) -> None:
        """Advance every request that does not decode by its tokens; sum up the step's work."""
        num_decodes, decode_context = self.num_decodes, self.decode_context
        chunks, sampled = [], []
        for request, num_new_tokens in self.prefills:
            before = request.num_computed_tokens
            request.num_computed_tokens = computed = before + num_new_tokens
            samples = computed >= request.num_tokens  # a chunk that stops short samples nothing
            if samples:
                sampled.append(request)
            if before < request.max_num_computed_tokens:
                self.recomputed_tokens += min(computed, request.max_num_computed_tokens) - before
            if (
                num_new_tokens == 1
                and samples
                and request.num_output_tokens > 0
                and request not in self.resumed
            ):
                # Resumed before, and its last chunk is one token: it does what a decode does.
                num_decodes += 1
                decode_context += computed
            else:
                chunks.append((num_new_tokens, computed))
        self.sampled = sampled
        self.batch = StepBatch(num_decodes, decode_context, chunks)
