"""Traces of agents: sessions whose calls follow each other.

Sources: https://github.com/callanjfox/kv-cache-tester (``docs/trace_replay_tester.md``), its
sessions one a line with runs of ids, and https://github.com/casys-kaist/LLMServingSim
(``docs/docs/workloads/jsonl-format.md``).
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from workloads.errors import TraceError
from workloads.readers.hashed import HashIds, runs
from workloads.readers.jsonlines import Count, Nanoseconds, Seconds, rows
from workloads.readers.source import Source
from workloads.readers.text import no_arrivals
from workloads.readers.tokens import TokenTree
from workloads.record import MAX_TOKENS, PS_PER_S, RequestRecord, Segment

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class _Call(msgspec.Struct, gc=False, rename={"prompt": "in", "output": "out"}):
    """A call of a model, or, with requests, a sub-agent."""

    t: Seconds
    prompt: Count | None = None
    output: Tokens | None = None
    hash_ids: msgspec.Raw = msgspec.Raw()
    runs: Annotated[list[tuple[int, Count]], Meta(max_length=1 << 20)] | None = None
    think_time: Seconds | None = None
    agent_id: str | None = None
    requests: "list[_Call] | None" = None


class _Session(msgspec.Struct, gc=False):
    id: str
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    requests: list[_Call]
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0


_IDS = msgspec.json.Decoder(HashIds)
_MAX_DEPTH = 20


class _ClaudeCode:
    """Reads the calls of one session after the other."""

    def __init__(self, prefix: str, *, shared_prefix: bool) -> None:
        self._prefix = prefix
        self._shared_prefix = shared_prefix
        self._known: dict[str, int] = {}
        self.num_empty = 0

    def session(self, number: int, session: _Session, start_ps: int) -> Iterator[RequestRecord]:
        """Yield the calls of *session*, which starts at *start_ps*."""
        name = self._prefix + session.id
        again = self._known.get(name, 0)
        self._known[name] = again + 1
        if again:
            name = f"{name}#{again + 1}"
        yield from self._calls(number, session, session.requests, name, name, start_ps)

    def _calls(
        self,
        number: int,
        session: _Session,
        calls: list[_Call],
        scope: str,
        name: str,
        start_ps: int,
        depth: int = 0,
    ) -> Iterator[RequestRecord]:
        if depth > _MAX_DEPTH:
            raise TraceError(f"sub-agents within each other: expected up to {_MAX_DEPTH}")
        for index, call in enumerate(calls):
            arrival = start_ps + round(call.t * PS_PER_S)
            if call.requests is not None:
                agent = f"{name}/{call.agent_id or index}"
                yield from self._calls(
                    number, session, call.requests, scope, agent, arrival, depth + 1
                )
                continue
            if call.prompt is None or call.output is None:
                missing = "in" if call.prompt is None else "out"
                raise TraceError(f"requests[{index}].{missing} is missing: expected tokens")
            self.num_empty += not call.output
            yield RequestRecord(
                number,
                arrival,
                call.prompt,
                call.output or 1,
                f"{name}/{index}",
                self._segments(session, call, scope),
                name,
                None if call.think_time is None else round(call.think_time * PS_PER_S),
            )

    def _segments(self, session: _Session, call: _Call, scope: str) -> list[Segment]:
        size, length = session.block_size, call.prompt or 0
        pieces = call.runs
        if pieces is None and bytes(call.hash_ids) not in {b"", b"null"}:
            try:
                pieces = runs(_IDS.decode(call.hash_ids))
            except (msgspec.DecodeError, RecursionError) as error:
                raise TraceError(f"hash_ids: {error}") from error
        num_blocks = sum(count for _, count in pieces or ())
        if num_blocks != length // size and pieces is not None:
            raise TraceError(
                f"hash_ids has {num_blocks} ids: expected {length // size}, one for each full "
                f"block of {size} tokens of in {length}"
            )
        segments: list[Segment] = [((scope, first), count * size) for first, count in pieces or ()]
        head = (session.tool_tokens + session.system_tokens) // size * size
        if self._shared_prefix and segments and 0 < head < segments[0][1] and pieces:
            same: Segment = (("head", session.tool_tokens, session.system_tokens), head)
            segments[:1] = [same, (segments[0][0], segments[0][1] - head)]
        rest = length - num_blocks * size
        return [*segments, (None, rest)] if rest else segments


def read_claude_code(
    source: Source, *, gap: Seconds = 0.0, shared_prefix: bool = False
) -> Iterator[RequestRecord | str]:
    """Yield the calls of Claude Code sessions, a JSON object each, or a line each with runs of ids.

    Ids are local to a session and cover full blocks only: what remains of a prompt is taken for its
    own. Sub-agents are sessions of their own, from when they are called, with the ids of their
    parent. Sessions say no date: they start *gap* seconds apart. With *shared_prefix*, the first
    ``tool_tokens + system_tokens`` of a prompt (whole blocks) are the same in all sessions with
    equal numbers of both, which is a guess.

    Raises:
        TraceError: on a value that is missing or of another type, or ids that do not fit.
    """
    reader = _ClaudeCode(source.prefix, shared_prefix=shared_prefix)
    for index, (number, session) in enumerate(rows(_Session, source), source.part):
        yield from reader.session(number, session, round(index * gap * PS_PER_S))
    yield no_arrivals(gap, "sessions")
    if reader.num_empty:
        yield f"{reader.num_empty} calls without output generate 1 token"


class _Request(msgspec.Struct, gc=False):
    input_toks: Count | None = None
    output_toks: Count | None = None
    arrival_time_ns: Nanoseconds | None = None
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None
    tool_duration_ns: Nanoseconds = 0
    session_id: str | None = None
    sub_requests: "list[_Request] | None" = None


_PS_PER_NS = 1000


def read_llmservingsim(source: Source) -> Iterator[RequestRecord | str]:
    """Yield the requests of LLMServingSim; prompts with token ids share what they start with.

    Of a line with ``sub_requests``, each is asked its predecessor's ``tool_duration_ns`` after that
    one ended, and repeats its output if the ids say so. When it was asked is not recorded: as if
    every answer had taken no time. The output ids of single requests are not what a server would
    generate, and nobody repeats them.

    Raises:
        TraceError: on a value that is missing or of another type, or ids that do not fit.
    """
    tree = TokenTree()
    num_later = 0
    for row, (number, line) in enumerate(rows(_Request, source)):
        if line.arrival_time_ns is None:
            raise TraceError("arrival_time_ns is missing: expected nanoseconds")
        arrival = line.arrival_time_ns * _PS_PER_NS
        if line.sub_requests is None:
            length, segments = _tokens(line, tree)
            yield RequestRecord(number, arrival, length, _output(line), None, segments)
            continue
        session = source.prefix + (line.session_id or f"session-{row}")
        think = None
        for index, call in enumerate(line.sub_requests):
            name = f"{session}/{index}"
            length, segments = _tokens(call, tree)
            output = _output(call)
            if call.output_tok_ids and segments:
                tree.output(call.output_tok_ids, name)
            yield RequestRecord(number, arrival, length, output, name, segments, session, think)
            num_later += index > 0
            think = call.tool_duration_ns * _PS_PER_NS
            arrival += think
    if num_later:
        yield f"{num_later} later calls of sessions arrive as if answers took no time"


def _tokens(request: _Request, tree: TokenTree) -> tuple[int, list[Segment] | None]:
    """Answer length and segments of a prompt."""
    length, ids = request.input_toks, request.input_tok_ids
    if length is None:
        raise TraceError("input_toks is missing: expected 1 or more tokens")
    if ids is None:
        return length, None
    if len(ids) != length:
        raise TraceError(f"input_tok_ids has {len(ids)} ids: expected input_toks, {length}")
    return length, [*tree.prompt(ids)]


def _output(request: _Request) -> int:
    if request.output_toks is None:
        raise TraceError("output_toks is missing: expected 1 or more tokens")
    ids = request.output_tok_ids
    if ids is not None and len(ids) != request.output_toks:
        raise TraceError(
            f"output_tok_ids has {len(ids)} ids: expected output_toks, {request.output_toks}"
        )
    return request.output_toks
