"""Traces with a hash id for every block of a prompt: who shares is known to the block.

Equal ids behind equal ids are equal blocks. Ids that count up are one segment, and two prompts
share every token of the blocks that both have, however coarse the blocks. Where the ids part,
nothing is said of the block's start: up to a block less is shared than was. Where a later prompt
repeats an output, ids do not say either.

Sources: https://github.com/kvcache-ai/Mooncake (``FAST25-release/traces``),
https://github.com/ai-dynamo/aiperf (``dataset/loader/mooncake_trace.py``, ``bailian_trace.py``),
https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon, and vLLM 0.33.0
(``benchmarks/datasets/datasets.py``, ``TimedTrace``).
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from workloads.errors import OptionError, TraceError, quote
from workloads.readers.jsonlines import (
    PS_PER_MS,
    Count,
    Milliseconds,
    Multiplier,
    Seconds,
    batches,
    rows,
)
from workloads.readers.source import Source
from workloads.readers.text import BYTES_PER_TOKEN, Texts
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, RequestRecord, Rows, Segment

BLOCK_TOKENS = 512
"""Tokens behind one hash id of Mooncake."""

HashIds = Annotated[list[int], Meta(max_length=1 << 20)]


def runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Answer the runs (first id, number) of *ids* that count up by one."""
    found: list[tuple[int, int]] = []
    start, end = 0, len(ids)
    while start < end:
        first, last = ids[start], ids[-1]
        # Mostly all that is left is one run, which is faster compared than walked through. Few
        # tries: each looks at all that is left.
        is_rest = last - first == end - start - 1 and len(found) < 8
        if is_rest and ids[start:] == [*range(first, last + 1)]:
            found.append((first, end - start))
            break
        at = start + 1
        while at < end and ids[at] - ids[at - 1] == 1:
            at += 1
        found.append((first, at - start))
        start = at
    return found


def block_segments(ids: Sequence[int], num_tokens: int, block_size: int) -> list[Segment]:
    """Answer the segments of a prompt whose last id stands for what remains of it.

    Raises:
        TraceError: there are more or fewer ids than blocks.
    """
    expected = -(-num_tokens // block_size)
    if len(ids) != expected:
        raise TraceError(
            f"hash_ids has {len(ids)} ids: expected {expected}, one for each "
            f"{block_size} tokens of input_length {num_tokens}"
        )
    segments: list[Segment] = [(first, count * block_size) for first, count in runs(ids)]
    rest = expected * block_size - num_tokens
    if rest:
        first, length = segments[-1]
        segments[-1] = (first, length - rest)
    return segments


class _IgnoredKeys:
    """Collects the keys that a format has not, for a note."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self._known = struct.__struct_encode_fields__
        self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._found: set[str] = set()

    def look(self, line: bytes) -> None:
        """Take in the keys of *line*."""
        self._found.update(self._decoder.decode(line))

    def note(self) -> Iterator[str]:
        """Yield the note, if there is anything to say."""
        ignored = self._found.difference(self._known)
        if ignored:
            yield f"ignored keys: {quote(', '.join(sorted(ignored)))}"


class _Mooncake(msgspec.Struct, gc=False):
    timestamp: Milliseconds | None = None
    input_length: Count | None = None
    output_length: Count | None = None
    hash_ids: HashIds | None = None
    session_id: str | int | None = None
    delay: Milliseconds | None = None
    text_input: str | None = None


_NUM_QUOTES = 8
"""In a line of timestamp, lengths and ids, and nothing else."""


class _Turn(NamedTuple):
    """The latest turn of a session."""

    record: RequestRecord
    number: int


def read_mooncake(
    source: Source, *, block_size: Count = BLOCK_TOKENS
) -> Iterator[RequestRecord | Rows | str]:
    """Yield the requests of Mooncake's traces, and of AIPerf's and Dynamo's in the same form.

    Times are milliseconds. Rows of a ``session_id`` are its turns, each ``delay`` after the one
    before ended. A row without timestamp arrives its delay after the turn before, or at 0. A later
    turn without hash ids goes on where the one before and its output ended, and input_length is
    what it adds (what AIPerf sends by default); with hash ids, they are the whole prompt.

    Raises:
        TraceError: on a value that is missing or out of range, or ids that do not fit the length.
    """
    keys, texts = _IgnoredKeys(_Mooncake), Texts(BYTES_PER_TOKEN)
    turns: dict[str, _Turn] = {}
    num_untimed = num_texts = 0
    has_times = False
    for number, row in _each(source, block_size):
        if isinstance(row, Rows):
            has_times = True
            yield row
            continue
        keys.look(source.text)
        session = None if row.session_id is None else f"{source.prefix}{row.session_id}"
        last = turns.get(session) if session is not None else None
        index = last.number + 1 if last else 0
        think = None if row.delay is None else round(row.delay * PS_PER_MS)
        if row.output_length is None:
            raise TraceError("output_length is missing: expected 1 or more tokens")
        num_texts += row.text_input is not None
        length, segments = _prompt(row, last, session, block_size, texts)
        if row.timestamp is not None:
            arrival = round(row.timestamp * PS_PER_MS)
            has_times = True
        else:
            if last is None and has_times:
                raise TraceError("timestamp is missing: expected milliseconds, as before")
            num_untimed += 1
            arrival = last.record.arrival_ps + (think or 0) if last else 0
        name = None if session is None else f"{session}/{index}"
        record = RequestRecord(
            number, arrival, length, row.output_length, name, segments, session, think
        )
        if session is not None:
            turns[session] = _Turn(record, index)
        yield record
    yield from keys.note()
    if num_texts:
        yield texts.note
    if num_untimed:
        yield f"{num_untimed} requests without timestamp: at 0, or a delay after the turn before"


def _each(source: Source, block_size: int) -> Iterator[tuple[int, "_Mooncake | Rows"]]:
    """Yield the rows; where many have timestamp, lengths and ids, and nothing else, as columns."""
    for numbers, texts, found in batches(_Mooncake, source):
        columns = _columns(numbers, texts, found, block_size)
        if columns is not None:
            yield 0, columns
            continue
        for source.number, source.text, row in zip(numbers, texts, found, strict=True):
            yield source.number, row


def _columns(
    numbers: Sequence[int], texts: Sequence[bytes], found: Sequence[_Mooncake], block_size: int
) -> Rows | None:
    """Answer the requests *found* as columns, or None if one of them needs a closer look."""
    if sum([text.count(b'"') for text in texts]) != _NUM_QUOTES * len(texts):
        return None
    plain = [
        (row.timestamp, row.input_length, row.output_length, row.hash_ids)
        for row in found
        if row.timestamp is not None and row.input_length and row.output_length and row.hash_ids
    ]
    if len(plain) < len(found):
        return None
    times, lengths, outputs, ids = zip(*plain, strict=True)
    try:
        segments = [block_segments(i, n, block_size) for i, n in zip(ids, lengths, strict=True)]
    except TraceError:  # told with its line, later
        return None
    arrivals = np.rint(np.array(times) * PS_PER_MS).astype(np.int64)
    return Rows(numbers, arrivals, lengths, outputs, segments=segments)


def _prompt(
    row: _Mooncake, last: _Turn | None, session: str | None, block_size: int, texts: Texts
) -> tuple[int, list[Segment] | None]:
    """Answer length and segments of the prompt of *row*, which comes after the turn *last*."""
    segments: list[Segment] | None = None
    if row.hash_ids is not None and row.input_length is not None:
        return row.input_length, block_segments(row.hash_ids, row.input_length, block_size)
    if row.text_input is not None:
        length, segments = texts.prompt(texts.tokens(row.text_input))
    elif row.input_length is not None:
        length = row.input_length
    else:
        raise TraceError("input_length is missing: expected it, or text_input")
    if session is None:
        return length, segments
    index = last.number + 1 if last else 0
    if segments is None or last:
        segments = [(("turn", session, index), length)]
    if last is None:
        return length, segments
    before, output = last.record.segments or (), last.record.num_output_tokens
    length += last.record.num_prompt_tokens + output
    return length, [*before, (f"out:{last.record.request_id}", output), *segments]


class _Bailian(msgspec.Struct, gc=False):
    chat_id: int | str
    timestamp: Seconds
    input_length: Count
    output_length: Count
    parent_chat_id: int | str = -1
    hash_ids: HashIds | None = None


def read_bailian(source: Source, *, block_size: Count = 16) -> Iterator[RequestRecord]:
    """Yield the requests of Qwen-Bailian traces; times are seconds, each row is a whole prompt.

    A chat and those that name it as parent are one session, named after its first.

    Raises:
        TraceError: on a value that is missing or out of range, or ids that do not fit the length.
    """
    roots: dict[int | str, str] = {}
    for number, row in rows(_Bailian, source):
        session = roots.get(row.parent_chat_id, f"{source.prefix}{row.chat_id}")
        roots[row.chat_id] = session
        segments = None
        if row.hash_ids is not None:
            segments = block_segments(row.hash_ids, row.input_length, block_size)
        arrival = round(row.timestamp * PS_PER_S)
        yield RequestRecord(
            number, arrival, row.input_length, row.output_length, None, segments, session
        )


def read_timed_trace(
    source: Source,
    *,
    chunk_hash_size: Count = 16,
    sec_multiplier: Multiplier = 1.0,
    label_timestamp: str = "timestamp",
    label_input_length: str = "input_length",
    label_output_length: str = "output_length",
    label_hash_ids: str = "hash_ids",
) -> Iterator[RequestRecord | str]:
    """Yield the requests as vLLM's ``--dataset-name timed_trace`` sends them.

    The options are its ``--timed-trace-*``. As there, ids beyond input_length are left out, and a
    prompt ends with its ids; a row without ids, of which vLLM makes no prompt, has unknown content.

    Raises:
        TraceError: on a value that is missing or out of range.
    """
    struct = _renamed(label_timestamp, label_input_length, label_output_length, label_hash_ids)
    num_cut = 0
    for number, row in rows(struct, source):
        length, ids = row.input_length, row.hash_ids
        segments = None
        if ids:
            num_cut += length > len(ids) * chunk_hash_size
            length = min(length, len(ids) * chunk_hash_size)
            ids = ids[: -(-length // chunk_hash_size)]
            segments = block_segments(ids, length, chunk_hash_size)
        seconds = min(row.timestamp * sec_multiplier, MAX_ARRIVAL_S + 1)
        yield RequestRecord(
            number, round(seconds * PS_PER_S), length, row.output_length, None, segments
        )
    if num_cut:
        yield f"{num_cut} prompts are cut to the tokens of their ids, as vLLM does"


def _renamed(timestamp: str, input_length: str, output_length: str, hash_ids: str) -> Any:
    """Answer the struct of a timed trace with these keys."""
    labels = {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }
    if len(set(labels.values())) < len(labels):
        raise OptionError(f"options label_*: expected four keys, got {', '.join(labels.values())}")
    fields: list[tuple[str, Any, Any]] = [
        ("timestamp", Annotated[float, Meta(ge=0, le=1e18)], msgspec.NODEFAULT),
        ("input_length", Count, msgspec.NODEFAULT),
        ("output_length", Count, msgspec.NODEFAULT),
        ("hash_ids", HashIds | None, None),
    ]
    try:
        return msgspec.defstruct("TimedTrace", fields, rename=labels, gc=False)
    except ValueError as error:
        raise OptionError(
            "options label_*: expected keys without quotes, backslashes and control characters"
        ) from error
