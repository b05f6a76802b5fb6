"""The run state of one request, in vLLM's words (vLLM 0.33.0, ``v1/request.py``)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_LENGTH_CAPPED = "FINISHED_LENGTH_CAPPED"
    FINISHED_IGNORED = "FINISHED_IGNORED"


UNSET = -1
"""A step, time or count that has not happened yet."""


@dataclass(slots=True, eq=False)
class Request:
    """One request while it is alive. The scheduler owns it and changes it; others read it.

    Attributes:
        index: row in the trace.
        request_id: its name there.
        arrival_ps: picoseconds.
        num_prompt_tokens: length of the prompt.
        max_tokens: tokens it will generate: the trace's output length, cut so that prompt and
            output fit max_model_len. It decides when the request finishes; of the allocators only
            statistics and the oracle reservation may look ahead at it.
        segment_nodes: prefix node of each prompt segment (see `workloads.record`).
        segment_ends: prompt tokens up to and including each segment.
        output_node: prefix node of the output.
        num_tokens: prompt tokens plus tokens sampled so far.
        num_computed_tokens: tokens whose KV is in memory once the current step has run.
        num_output_tokens: tokens sampled so far.
        num_cached_tokens: prefix-cache hit at first admission, in tokens.
        num_preemptions: how often it lost its memory.
        max_num_computed_tokens: the most it had computed when it was preempted; up to there, what
            it computes is recomputed.
        scheduled_step, scheduled_ps: when it was first scheduled.
        first_token_step, first_token_ps: when its first token came (time: the end of that step).
        last_token_ps: when its latest token came.
    """

    index: int
    request_id: str
    arrival_ps: int
    num_prompt_tokens: int
    max_tokens: int
    segment_nodes: Sequence[int] = ()
    segment_ends: Sequence[int] = ()
    output_node: int = UNSET
    status: RequestStatus = RequestStatus.WAITING
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = UNSET
    num_preemptions: int = 0
    max_num_computed_tokens: int = 0
    scheduled_step: int = UNSET
    scheduled_ps: int = UNSET
    first_token_step: int = UNSET
    first_token_ps: int = UNSET
    last_token_ps: int = UNSET

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def final_num_computed_tokens(self) -> int:
        """Tokens computed when it finishes: the last sampled token is never fed back."""
        return self.num_prompt_tokens + self.max_tokens - 1

    def prefix_key(self, num_tokens: int) -> int:
        """Answer an integer that names the first *num_tokens* tokens of prompt and output.

        Two requests of one trace give equal keys exactly when those tokens are equal.
        """
        prompt = self.num_prompt_tokens
        if num_tokens > prompt:
            return self.output_node << 32 | (num_tokens - prompt)
        segment = bisect_left(self.segment_ends, num_tokens)
        start = self.segment_ends[segment - 1] if segment else 0
        return self.segment_nodes[segment] << 32 | (num_tokens - start)
