"""Where prompts that hold the same text stop sharing it: the first token in which they differ.

A prefix cache finds what is equal from the first token on. A time of day in front, another order of
documents or one more space makes all that follows another prefix, though its text is the same. So
prompts are compared as content, and not by prefix nodes, which differ behind the first difference.
"""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from workloads.errors import quote
from workloads.formats import is_spec
from workloads.record import ContentId, RequestRecord

MAX_PROMPTS = 400
"""Prompts that are compared: an evenly spaced sample tells shares within a few per cent."""

NEIGHBOURS = 8
"""Earlier prompts of the sample that each one is compared with."""

LEAST_TOKENS = 64
"""Fewer tokens that agree again are no loss: four of vLLM's usual blocks."""

LEAST_BYTES = 256
"""The same of text, of which a token has about four."""

_ANCHOR = 32
"""Tokens, or bytes of text, that must agree again in a row to be called the same."""

_MAX_SKIPPED = 4096
"""How far into an earlier prompt the same text is looked for, in tokens or bytes."""

Runs = Sequence[tuple[ContentId, int]]


class Prompt(NamedTuple):
    """A prompt as content: named runs of tokens, or what it is made of.

    Attributes:
        data: bytes of token ids or text; None where there are *runs*.
        width: bytes a token of *data*, 1 for text.
    """

    request_id: str
    runs: Runs
    data: bytes | None = None
    width: int = 1

    @property
    def is_text(self) -> bool:
        """Whether its unit is a byte."""
        return self.data is not None and self.width == 1

    @property
    def length(self) -> int:
        """Tokens, or bytes of text."""
        if self.data is not None:
            return len(self.data) // self.width
        return sum(length for _, length in self.runs)

    def shown(self, position: int) -> str:
        """Answer what stands at *position*, for a message."""
        if self.data is None:
            start = 0
            for content, length in self.runs:
                if position < start + length:
                    return f"token {position - start} of {quote(content)}"
                start += length
            return "its end"
        if position >= self.length:
            return "its end"
        start = position * self.width
        if self.width > 1:
            token = array("q", self.data[start : start + self.width])[0]
            return f"token id {token}"
        return quote(self.data[start : start + 24].decode(errors="replace"))


class Pair(NamedTuple):
    """How two prompts agree, in tokens or bytes of text.

    Attributes:
        common: from the start on; the first difference is there.
        resumes: where each goes on to agree, (first, second).
        again: for how long.
    """

    common: int
    resumes: tuple[int, int]
    again: int


class PrefixBreak(NamedTuple):
    """Prompts that would share more if they were equal from the start on.

    Attributes:
        earlier, later: ids of two requests that show it.
        position: where they differ first. unit: of it: token, or byte of text.
        earlier_shown, later_shown: what each has there.
        resumes: where they agree again, in the earlier and the later one. again: for how long.
        lost: share of the compared prompts that would be shared but for such differences.
    """

    earlier: str
    later: str
    position: int
    unit: str
    earlier_shown: str
    later_shown: str
    resumes: tuple[int, int]
    again: int
    lost: float


def find_break(prompts: Sequence[Prompt]) -> PrefixBreak | None:
    """Answer the difference that costs most among *prompts*, in the order of arrival.

    None where nothing agrees again behind a difference, or too little.
    """
    lost, total = 0, 0
    worst: tuple[int, Prompt, Prompt, Pair] | None = None
    for place, prompt in enumerate(prompts):
        total += prompt.length
        shared, best = 0, None
        for earlier in prompts[max(0, place - NEIGHBOURS) : place]:
            pair = compare(earlier, prompt)
            shared = max(shared, pair.common)
            if best is None or pair.common + pair.again >= best[1].common + best[1].again:
                best = (earlier, pair)
        if best is None:
            continue
        more = best[1].common + best[1].again - shared
        if min(more, best[1].again) < (LEAST_BYTES if prompt.is_text else LEAST_TOKENS):
            continue
        lost += more
        if worst is None or more > worst[0]:
            worst = (more, best[0], prompt, best[1])
    if worst is None:
        return None
    _, earlier, later, pair = worst
    return PrefixBreak(
        earlier.request_id,
        later.request_id,
        pair.common,
        "byte" if later.is_text else "token",
        earlier.shown(pair.common),
        later.shown(pair.common),
        pair.resumes,
        pair.again,
        lost / total,
    )


def compare(first: Prompt, second: Prompt) -> Pair:
    """Answer where two prompts differ first, and where they agree again for longest."""
    if first.data is not None and second.data is not None and first.width == second.width:
        return _compare_data(first.data, second.data, first.width)
    return _compare_runs(first.runs, second.runs)


def _compare_runs(first: Runs, second: Runs) -> Pair:
    common = 0
    for (content, length), (other, other_length) in zip(first, second, strict=False):
        if content is None or content != other:
            break
        common += min(length, other_length)
        if length != other_length:
            break
    starts = _starts(first)
    best = Pair(common, (common, common), 0)
    position = 0
    for content, length in second:
        place = starts.get(content) if content is not None else None
        # A run that agrees from the start on is in common already.
        if place is not None and (position >= common or place[0] >= common):
            again = min(length, place[1])
            if again > best.again:
                best = Pair(common, (place[0], position), again)
        position += length
    return best


def _starts(runs: Runs) -> dict[ContentId, tuple[int, int]]:
    """Answer where each content starts, and its length."""
    starts: dict[ContentId, tuple[int, int]] = {}
    position = 0
    for content, length in runs:
        starts.setdefault(content, (position, length))
        position += length
    return starts


def _compare_data(first: bytes, second: bytes, width: int) -> Pair:
    common = _agreeing(first, second, 0, 0) // width
    size = _ANCHOR * width
    # Whatever agrees for `LEAST_TOKENS` holds a whole anchor, wherever it starts.
    for start in range(common * width, min(len(first) - size, _MAX_SKIPPED * width) + 1, size):
        found = second.find(first[start : start + size], common * width)
        if found < 0 or found % width:
            continue
        back = 0
        while (
            min(start, found) - back > common * width
            and first[start - back - 1] == second[found - back - 1]
        ):
            back += 1
        back -= back % width
        places = ((start - back) // width, (found - back) // width)
        again = _agreeing(first, second, start - back, found - back) // width
        return Pair(common, places, again)
    return Pair(common, (common, common), 0)


def _agreeing(first: bytes, second: bytes, start: int, other: int) -> int:
    """Answer how many bytes agree from *start* and *other* on."""
    most = min(len(first) - start, len(second) - other)
    low, high = 0, most
    # Equal slices are compared by the machine: bisection reads each byte a few times only.
    while low < high:
        middle = (low + high + 1) // 2
        if first[start + low : start + middle] == second[other + low : other + middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _Line(msgspec.Struct, gc=False):
    """What a line of a trace may say of its prompt in full."""

    prompt_token_ids: list[int] | None = None
    input_tok_ids: list[int] | None = None  # LLMServingSim's
    messages: list["_Message"] | None = None


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | None = None


def sampled_prompts(
    path: str | Path, trace_format: str | None, seed: int, num_requests: int
) -> list[Prompt]:
    """Answer an even sample of the prompts of a trace or specification of *num_requests*.

    Empty where a trace tells lengths or hashes only: of these nothing can be said behind the first
    difference.

    Raises:
        TraceError: as `workloads.sources.read_workload`.
    """
    every = max(1, num_requests // MAX_PROMPTS)
    prompts = []
    for row, (record, text) in enumerate(_records(path, trace_format, seed)):
        prompt = _prompt(record, text, row) if row % every == 0 else None
        if prompt is not None:
            prompts.append(prompt)
    return prompts


def _records(
    path: str | Path, trace_format: str | None, seed: int
) -> Iterator[tuple[RequestRecord, bytes]]:
    """Yield the requests of a trace in its order, each with the text of its line."""
    if is_spec(path, trace_format):
        from workloads.generators import make_records  # noqa: PLC0415  # who replays draws nothing
        from workloads.spec import read_spec  # noqa: PLC0415  # as above

        records, _ = make_records(read_spec(path), seed)
        for record in sorted(records, key=lambda record: record.arrival_ps):
            yield record, b""
        return
    from workloads.readers import read_records  # noqa: PLC0415  # as above

    yield from read_records(path, trace_format)


def _prompt(record: RequestRecord, text: bytes, row: int) -> Prompt | None:
    """Answer the prompt of *record*, which *text* is the line of; None if it is not there."""
    name = record.request_id or f"r{row}"
    if not record.segments:
        return None
    if any(isinstance(content, str) for content, _ in record.segments):
        return Prompt(name, list(record.segments))
    # Hashes of prefixes, and pieces of a tree of prompts: behind a difference all have other names.
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, RecursionError):
        return None
    ids = line.input_tok_ids if line.prompt_token_ids is None else line.prompt_token_ids
    if ids is not None:
        return Prompt(name, (), array("q", ids).tobytes(), 8)
    if line.messages is not None:
        said = "".join(f"{each.role}\n{each.content or ''}" for each in line.messages)
        return Prompt(name, (), said.encode("utf-8", "replace"), 1)
    return None
