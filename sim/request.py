"""The run state of one request, in vLLM's words (vLLM 0.33.0, ``v1/request.py``)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

import numpy as np

from workloads.record import Trace


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FINISHED_LENGTH_CAPPED = "FINISHED_LENGTH_CAPPED"
    FINISHED_IGNORED = "FINISHED_IGNORED"


UNSET: Final = -1
"""A step, time or count that has not happened yet."""


class Request:
    """One request while it is alive. The scheduler owns it and changes it; others read it.

    While a request decodes, one token a step, nobody counts for it: it has computed ``offset +
    step`` tokens before a step, and *num_tokens*, *num_computed_tokens* and *num_output_tokens*
    stand still from the step after which it joined the decodes to the step in which it leaves them
    (finished, preempted), and are right again then.

    Attributes:
        index: row in the trace.
        request_id: its name there.
        arrival_ps: picoseconds.
        num_prompt_tokens: length of the prompt.
        max_tokens: tokens it will generate: the trace's output length, cut so that prompt and
            output fit max_model_len. It decides when the request finishes; of the allocators only
            statistics and the oracle reservation may look ahead at it.
        final_num_computed_tokens: tokens computed when it finishes: the last sampled token is never
            fed back.
        segment_nodes: prefix node of each prompt segment (see `workloads.record`).
        segment_ends: prompt tokens up to and including each segment.
        output_node: prefix node of the output.
        num_shareable_tokens: leading tokens of prompt and output that another prompt has too.
        num_tokens: prompt tokens plus tokens sampled so far.
        num_computed_tokens: tokens whose KV is in memory once the current step has run.
        num_output_tokens: tokens sampled so far.
        order: place among all admissions; the scheduler's running order.
        is_decoding: whether it is one of the decodes.
        offset: of a decoding request, see above.
        num_cached_tokens: prefix-cache hit at first admission, in tokens.
        num_preemptions: how often it lost its memory.
        max_num_computed_tokens: the most it had computed when it was preempted; up to there, what
            it computes is recomputed.
        scheduled_step, scheduled_ps: when it was first scheduled.
        first_token_step, first_token_ps: when its first token was taken in: at the end of the step
            that computed it, and, under asynchronous scheduling, as part of the step after.
        last_token_step, last_token_ps: of a preempted request, when its latest token came.
    """

    # What most requests never set, or set later, costs nothing when a request is made.
    num_preemptions = 0
    max_num_computed_tokens = 0
    is_decoding = False
    offset = 0
    order = UNSET
    num_cached_tokens = UNSET
    scheduled_step = UNSET
    scheduled_ps = UNSET
    first_token_step = UNSET
    first_token_ps = UNSET
    last_token_step = UNSET
    last_token_ps = UNSET

    def __init__(
        self,
        index: int,
        request_id: str,
        arrival_ps: int,
        num_prompt_tokens: int,
        max_tokens: int,
        segment_nodes: Sequence[int] = (),
        segment_ends: Sequence[int] = (),
        output_node: int = UNSET,
        num_shareable_tokens: int = 0,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.arrival_ps = arrival_ps
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.final_num_computed_tokens = num_prompt_tokens + max_tokens - 1
        self.segment_nodes = segment_nodes
        self.segment_ends = segment_ends
        self.output_node = output_node
        self.num_shareable_tokens = num_shareable_tokens
        self.num_computed_tokens = self.num_output_tokens = 0
        self.status = RequestStatus.WAITING

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value})"

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

    def segments(self) -> Iterator[tuple[int, int]]:
        """Answer (node, tokens up to its end) of the prompt's segments and of the output's."""
        yield from zip(self.segment_nodes, self.segment_ends, strict=True)
        yield self.output_node, self.num_prompt_tokens + self.max_tokens


CHUNK = 4096
"""Rows of a trace that are turned into Python numbers at a time."""


def make_requests(trace: Trace, max_model_len: int) -> Iterator[Request]:
    """Answer the requests of *trace* one by one, in arrival order, each made when it is asked for.

    Their outputs are cut so that prompt and output fit *max_model_len*.
    """
    for start in range(0, len(trace), CHUNK):
        chunk = slice(start, start + CHUNK)
        offsets = trace.segment_offsets[start : start + CHUNK + 1]
        used = slice(offsets[0], offsets[-1])
        nodes: list[int] = trace.segment_nodes[used].tolist()
        ends: list[int] = trace.segment_ends[used].tolist()
        firsts = (offsets - offsets[0]).tolist()
        columns = zip(
            trace.request_ids[chunk],
            trace.arrival_ps[chunk].tolist(),
            trace.num_prompt_tokens[chunk].tolist(),
            np.minimum(
                trace.num_output_tokens[chunk], max_model_len - trace.num_prompt_tokens[chunk]
            ).tolist(),
            firsts,
            firsts[1:],
            trace.output_nodes[chunk].tolist(),
            trace.num_shareable_tokens[chunk].tolist(),
            strict=False,  # one first more than rows
        )
        for index, row in enumerate(columns, start):
            name, arrival, prompt, output, first, end, output_node, shareable = row
            yield Request(
                index,
                name,
                arrival,
                prompt,
                output,
                nodes[first:end],
                ends[first:end],
                output_node,
                shareable,
            )


def make_request(trace: Trace, index: int, arrival_ps: int, max_model_len: int) -> Request:
    """Answer the request in row *index* of *trace*, as `make_requests` does, at *arrival_ps*."""
    segments = slice(trace.segment_offsets[index], trace.segment_offsets[index + 1])
    num_prompt_tokens = int(trace.num_prompt_tokens[index])
    return Request(
        index,
        trace.request_ids[index],
        arrival_ps,
        num_prompt_tokens,
        min(int(trace.num_output_tokens[index]), max_model_len - num_prompt_tokens),
        trace.segment_nodes[segments].tolist(),
        trace.segment_ends[segments].tolist(),
        int(trace.output_nodes[index]),
        int(trace.num_shareable_tokens[index]),
    )
