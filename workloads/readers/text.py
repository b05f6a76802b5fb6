"""Traces of text: prompts share what they start with, byte for byte.

Without the tokenizer of a model a token is a number of bytes (option ``bytes_per_token``, 4): a
message is its role and a line end, then its content, each in tokens of their own. The role of the
answer is the end of the prompt. Lengths are therefore estimates, and said to be; who shares with
whom is not.

Sources: ShareGPT (``sg_90k_part*.json``, ``ShareGPT_V3_unfiltered_cleaned_split.json`` and what
vLLM 0.33.0 reads of it, ``benchmarks/datasets/datasets.py``), OpenAI's chat completions.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from workloads.errors import TraceError, quote
from workloads.prefix import ContentTree
from workloads.readers.jsonlines import Count, Multiplier, Seconds, rows
from workloads.readers.source import Source
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, RequestRecord, Segment

BYTES_PER_TOKEN = 4

TokenWidth = Annotated[int, Meta(ge=1, le=64)]


def no_arrivals(gap: float, what: str = "requests") -> str:
    """Answer the note of a trace without arrival times."""
    how = f"{gap:g} s apart" if gap else "all at once"
    return f"no arrival times: {what} come {how} (option gap=SECONDS)"


class Texts:
    """Turns text into tokens and into segments.

    Args:
        bytes_per_token: how many bytes of UTF-8 are taken for a token.
    """

    def __init__(self, bytes_per_token: int) -> None:
        self._width = bytes_per_token
        self._tree = ContentTree(bytes_per_token)
        self.note = (
            f"no tokenizer: a token is {bytes_per_token} bytes of text, the role included "
            "(option bytes_per_token=N)"
        )

    def tokens(self, *texts: str) -> bytes:
        """Answer *texts* as bytes, each filled up to whole tokens by a byte that UTF-8 has not."""
        filled = b""
        for text in texts:
            data = text.encode("utf-8", "replace")
            filled += data + b"\xff" * (-len(data) % self._width)
        return filled

    def prompt(self, tokens: bytes) -> tuple[int, list[Segment]]:
        """Answer length and segments of a prompt of *tokens*."""
        return len(tokens) // self._width, [*self._tree.segments(tokens)]

    def output(self, tokens: bytes, request_id: str) -> int:
        """Answer the length of what the last prompt was answered with; later prompts repeat it."""
        self._tree.add_output(tokens, request_id)
        return len(tokens) // self._width


class _Said(msgspec.Struct, gc=False, rename={"role": "from"}):
    role: str
    value: str


class _Conversation(msgspec.Struct, gc=False):
    conversations: list[_Said]
    id: str | int | None = None


_MAX_TURNS = 1000
"""Most answers of a conversation: each prompt repeats all before it."""

_ANSWERERS = {"gpt", "chatgpt", "assistant", "bing", "bard", "model"}


def read_sharegpt(
    source: Source,
    *,
    turns: Annotated[int, Meta(ge=0)] = 1,
    bytes_per_token: TokenWidth = BYTES_PER_TOKEN,
    gap: Seconds = 0.0,
) -> Iterator[RequestRecord | str]:
    """Yield the requests: the first *turns* answers of each conversation, 0 for all.

    vLLM's ``bench serve`` takes one. The prompt of a turn is the conversation up to there, so it
    repeats the prompts and outputs of the turns before. Conversations start *gap* seconds apart;
    their later turns are asked at once after (closed loop), and arrive with the first (recorded).

    Raises:
        TraceError: on a value that is missing or of another type.
    """
    texts = Texts(bytes_per_token)
    yield texts.note
    yield no_arrivals(gap, "conversations")
    num_left_out = 0
    for index, (number, conversation) in enumerate(rows(_Conversation, source), source.part):
        session = f"{source.prefix}c{index}"
        prompt, turn = b"", 0
        for said in conversation.conversations:
            role = f"{said.role}\n"
            if said.role in _ANSWERERS and prompt:
                name = f"{session}/{turn}"
                length, segments = texts.prompt(prompt + texts.tokens(role))
                output = texts.output(texts.tokens(said.value or " "), name)
                arrival = round(index * gap * PS_PER_S)
                yield RequestRecord(number, arrival, length, output, name, segments, session, 0)
                turn += 1
                if turn == turns:
                    break
                if turn == _MAX_TURNS:
                    raise TraceError(f"more than {_MAX_TURNS:,} answers: expected option turns=N")
            prompt += texts.tokens(role, said.value)
        num_left_out += not turn
    if num_left_out:
        yield f"{num_left_out} conversations without an answer are left out"


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()

    def texts(self) -> tuple[str, str]:
        """Answer role and content; of what is no text, calls of tools count by their JSON."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        return f"{self.role}\n", (content or "") + bytes(self.tool_calls).decode()


class _Choice(msgspec.Struct, gc=False):
    message: _Message


class _Completion(msgspec.Struct, gc=False):
    choices: Annotated[list[_Choice], Meta(min_length=1)]


Time = float | str


class _Chat(msgspec.Struct, gc=False):
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=1 << 16)]
    timestamp: Time | None = None
    created: Time | None = None
    created_at: Time | None = None
    response: str | _Completion | None = None
    choices: Annotated[list[_Choice], Meta(min_length=1)] | None = None
    output_length: Count | None = None
    max_tokens: Count | None = None
    session_id: str | int | None = None

    def answer(self) -> tuple[str, str] | None:
        """Answer role and text of what the model said, None where the log does not say it."""
        if isinstance(self.response, str):
            return "assistant\n", self.response
        choices = self.choices or (self.response.choices if self.response else [])
        return choices[0].message.texts() if choices else None


def _seconds(chat: _Chat, sec_multiplier: float) -> float:
    """Answer when *chat* was asked, in seconds since 1970; numbers are times *sec_multiplier*."""
    named: dict[str, Time | None] = {
        "timestamp": chat.timestamp,
        "created": chat.created,
        "created_at": chat.created_at,
    }
    name, value = next(((n, v) for n, v in named.items() if v is not None), ("timestamp", None))
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            value = quote(value)
    elif value is not None and abs(value * sec_multiplier) < 1e12:
        return value * sec_multiplier
    found = f"{name} is missing" if value is None else f"{name} {value}"
    raise TraceError(f"{found}: expected seconds since 1970, or a time like 2026-01-31T12:00:00Z")


def read_chat(
    source: Source,
    *,
    bytes_per_token: TokenWidth = BYTES_PER_TOKEN,
    sec_multiplier: Multiplier = 1.0,
) -> Iterator[RequestRecord | str]:
    """Yield the requests of a log of chat completions, one a line.

    ``messages`` are the prompt; the answer is ``response`` (text, or a completion), ``choices``, or
    a last message of the assistant; else ``output_length`` or ``max_tokens`` say how long it was.
    Times (``timestamp``, ``created``, ``created_at``) are seconds, multiplied by *sec_multiplier*,
    or ISO 8601, and count from the first line's, the earliest.

    Raises:
        TraceError: on a value that is missing or of another type.
    """
    texts = Texts(bytes_per_token)
    yield texts.note
    start: float | None = None
    for row, (number, chat) in enumerate(rows(_Chat, source)):
        name = f"{source.prefix}chat-{row}"
        said = [message.texts() for message in chat.messages]
        answer = chat.answer()
        if answer is None and len(said) > 1 and chat.messages[-1].role == "assistant":
            answer = said.pop()
        prompt = b"".join(texts.tokens(*message) for message in said)
        role, text = answer or ("assistant\n", "")
        length, segments = texts.prompt(prompt + texts.tokens(role))
        if answer is not None:
            output = texts.output(texts.tokens(text or " "), name)
        else:
            output = chat.output_length or chat.max_tokens or 0
            if not output:
                raise TraceError(
                    "response is missing: expected it, choices, output_length or max_tokens"
                )
        at = _seconds(chat, sec_multiplier)
        if start is None:
            start, source.origin_ps = at, round(at * PS_PER_S)
        if at < start:
            raise TraceError(f"time {at:g} is before the first line's: expected a log in order")
        arrival = round(min(at - start, MAX_ARRIVAL_S + 1) * PS_PER_S)
        session = None if chat.session_id is None else f"{source.prefix}{chat.session_id}"
        yield RequestRecord(number, arrival, length, output, name, segments, session)
