"""Mooncake traces (FAST'25): a JSON object a line with the hash id of every 512-token block.

Source: https://github.com/kvcache-ai/Mooncake, ``FAST25-release/traces``.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from workloads.errors import TraceError, quote
from workloads.readers.jsonlines import Count, decode_line
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, RequestRecord, Segment

BLOCK_TOKENS = 512
"""Tokens behind one hash id; the last id of a prompt stands for what remains of it."""

_PS_PER_MS = PS_PER_S // 1000


class _Request(msgspec.Struct, gc=False):
    timestamp: Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S * 1000)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]


def _segments(request: _Request) -> list[Segment]:
    """Answer the blocks of the prompt; raise `TraceError` if their number does not fit it."""
    full, rest = divmod(request.input_length, BLOCK_TOKENS)
    expected = full + (rest > 0)
    if len(request.hash_ids) != expected:
        raise TraceError(
            f"hash_ids has {len(request.hash_ids)} ids: expected {expected}, one for each "
            f"{BLOCK_TOKENS} tokens of input_length {request.input_length}"
        )
    segments: list[Segment] = [(hash_id, BLOCK_TOKENS) for hash_id in request.hash_ids]
    if rest:
        segments[-1] = (request.hash_ids[-1], rest)
    return segments


def read_mooncake(lines: Iterable[tuple[int, str]]) -> Iterator[RequestRecord | str]:
    """Yield the requests of Mooncake *lines*; timestamps are milliseconds.

    Keys beyond the four of the format are ignored; a note at the end names them.

    Raises:
        TraceError: on a value that is missing or out of range, or ids that do not fit the length.
    """
    keys_only = msgspec.json.Decoder(dict[str, msgspec.Raw])
    ignored: set[str] = set()
    for number, line in lines:
        request = decode_line(_Request, line)
        ignored.update(keys_only.decode(line))
        yield RequestRecord(
            line=number,
            arrival_ps=round(request.timestamp * _PS_PER_MS),
            num_prompt_tokens=request.input_length,
            num_output_tokens=request.output_length,
            segments=_segments(request),
        )
    ignored.difference_update(_Request.__struct_fields__)
    if ignored:
        yield f"ignored keys: {quote(', '.join(sorted(ignored)))}"
