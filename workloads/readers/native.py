"""kvsim's own format: one JSON object a line, the prompt as segments, token ids or a length."""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from workloads.errors import TraceError
from workloads.readers.jsonlines import Count, decode_line
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, RequestRecord, Segment


class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line. null counts as not given, which is what table libraries write."""

    arrival_time: Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S)]
    request_id: Annotated[str, Meta(min_length=1)] | None = None
    prompt: Annotated[list[tuple[str | int, Count]], Meta(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    input_length: Count | None = None
    output_len: Count | None = None
    output_length: Count | None = None
    session_id: Annotated[str, Meta(min_length=1)] | None = None
    think_time: Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S)] | None = None


_PROMPT = ("prompt", "prompt_token_ids", "input_length")
_OUTPUT = ("output_len", "output_length")


def _exactly_one(keys: tuple[str, ...], *values: object) -> None:
    """Raise `TraceError` unless one of *values*, those of *keys*, is given and no other."""
    if values.count(None) != len(keys) - 1:
        given = [key for key, value in zip(keys, values, strict=True) if value is not None]
        found = f"{' and '.join(given)} are given" if given else f"{keys[0]} is missing"
        raise TraceError(f"{found}: expected exactly one of {', '.join(keys)}")


def read_native(lines: Iterable[tuple[int, str]]) -> Iterator[RequestRecord]:
    """Yield the requests of native *lines*; arrival times are seconds.

    ``input_length`` gives a prompt of unknown content. Requests of one ``session_id`` are turns;
    ``think_time`` is seconds from the end of the turn before.

    Raises:
        TraceError: on an unknown key, or a value that is missing, given twice or out of range.
    """
    for number, line in lines:
        request = decode_line(_Request, line)
        prompt, token_ids = request.prompt, request.prompt_token_ids
        _exactly_one(_PROMPT, prompt, token_ids, request.input_length)
        _exactly_one(_OUTPUT, request.output_len, request.output_length)
        segments: list[Segment] | None = prompt
        if token_ids is not None:
            segments = [(token, 1) for token in token_ids]
        yield RequestRecord(
            line=number,
            arrival_ps=round(request.arrival_time * PS_PER_S),
            num_prompt_tokens=request.input_length or sum(n for _, n in segments or ()),
            num_output_tokens=request.output_len or request.output_length or 0,
            request_id=request.request_id,
            segments=segments,
            session_id=request.session_id,
            think_ps=round((request.think_time or 0) * PS_PER_S),
        )
