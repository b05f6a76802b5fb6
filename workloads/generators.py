"""Make the requests that a specification describes.

Each concern draws from a stream of its own, seeded by the seed and the concern's name, so that a
change of one moves no other: other arrivals, the same lengths; another class, the same requests of
those that stay. Equal specification and seed give equal requests under one version of numpy.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workloads.build import MAX_SEGMENTS, build_trace
from workloads.distributions import AnyDistribution, ByInput, Floats, correlated, draw, ranks
from workloads.errors import TraceError
from workloads.formats import SPEC_FORMAT
from workloads.processes import AllAtOnce
from workloads.record import (
    MAX_ARRIVAL_S,
    MAX_TOKENS,
    PS_PER_S,
    IntArray,
    RequestRecord,
    Segment,
    Trace,
)
from workloads.spec import MAX_REQUESTS, Prefix, RequestClass, Spec, Workload, read_spec

MAX_TURNS = 10_000
"""Most requests of a session."""


class _Streams:
    """Random numbers by the name of what they decide."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, *names: str) -> np.random.Generator:
        """Answer a generator of its own for *names*."""
        key = tuple("/".join(names).encode())
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=key))


class _Class:
    """One class of a workload, which draws what its requests need."""

    def __init__(self, spec: Spec, place: int, streams: _Streams) -> None:
        self.name = spec.workload.name_of(place)
        self.table: RequestClass = spec.workload.classes[place]
        self._output_len = spec.workload.output_len_of(place)
        self.moved: dict[str, tuple[int, int]] = {}
        self._folder = spec.folder
        self._streams = streams

    def shares(self, concern: str, num: int) -> Floats:
        """Answer *num* uniform draws for *concern*."""
        random = self._streams.of(self.name, concern)
        if self.table.stratified:
            return (random.permutation(num) + random.random(num)) / max(num, 1)
        return random.random(num)

    def values(
        self, concern: str, shares: Floats, distribution: AnyDistribution, least: float = 1
    ) -> Floats:
        """Answer the value of *distribution* at each of *shares*: whole numbers from *least*."""
        return self._values(concern, shares, distribution, least, whole=True)

    def outputs(self, inputs: Floats, shares: Floats) -> Floats:
        """Answer the output length at each of *shares*, of requests with these *inputs*."""
        lengths = self._output_len
        if not isinstance(lengths, ByInput):
            return self.values("output_len", shares, lengths)
        found = np.empty(len(inputs))
        kinds = np.searchsorted(lengths.bounds, inputs)
        for kind in np.unique(kinds).tolist():
            own = kinds == kind
            found[own] = self.values("output_len", shares[own], lengths.of[kind])
        return found

    def seconds(self, concern: str, shares: Floats, distribution: AnyDistribution) -> Floats:
        """Answer the value of *distribution* at each of *shares*: times."""
        return self._values(concern, shares, distribution, 0, whole=False)

    def _values(
        self,
        concern: str,
        shares: Floats,
        distribution: AnyDistribution,
        least: float,
        *,
        whole: bool,
    ) -> Floats:
        try:
            found, moved = draw(distribution, shares, least=least, whole=whole, folder=self._folder)
        except TraceError as error:
            raise TraceError(f"class {self.name}, {concern}: {error}") from error
        before = self.moved.get(concern, (0, 0))
        self.moved[concern] = (before[0] + moved, before[1] + len(shares))
        return found

    def prefixes(self, num: int) -> list[list[Segment]]:
        """Answer the prefix of each of *num* sessions."""
        found: list[list[Segment]] = [[] for _ in range(num)]
        for place, part in enumerate(self.table.prefix, 1):
            whose = f"{self.name}:prefix {place}" if part.name is None else part.name
            for level in range(1, part.depth + 1):
                text = whose if part.depth == 1 else f"{whose}.{level}"
                # Not of this class: another one may have the same texts.
                shares = self._streams.of("texts", text).random(part.variants)
                lengths = self.values("prefix tokens", shares, part.tokens, least=0).tolist()
                chosen = self._variants(part, f"prefix {place}.{level}", num)
                for prefix, variant in zip(found, chosen.tolist(), strict=True):
                    if lengths[variant]:
                        prefix.append((f"{text}:{variant + 1}", int(lengths[variant])))
        return found

    def _variants(self, part: Prefix, concern: str, num: int) -> IntArray:
        if part.equal:
            dealt = np.arange(num, dtype=np.int64) % part.variants
            self._streams.of(self.name, concern).shuffle(dealt)
            return dealt
        weights = np.arange(1, part.variants + 1, dtype=np.float64) ** -part.zipf
        return ranks(self.shares(concern, num), weights)


class _Session(NamedTuple):
    """Requests of one user; the lists have an element a turn."""

    name: str
    prefix: list[Segment]
    arrivals: list[float]
    inputs: list[int]
    outputs: list[int]
    thinks: list[float]
    perturbed: list[int]


def generate(path: str | Path, seed: int = 0) -> Trace:
    """Answer the requests that the specification in the file *path* describes, drawn by *seed*.

    `Trace.sha256` is of the specification and the files that it names; the seed is not in it.

    Raises:
        TraceError: one line that names the file, the key or class, and what was expected.
    """
    spec = read_spec(path)
    digest = hashlib.sha256()
    for source in spec.sources:
        digest.update(source)
    try:
        records, notes = make_records(spec, seed)
    except TraceError as error:
        raise TraceError(f"{spec.name}: {error}") from error
    # Stable: of two at one instant, the earlier session is first.
    records.sort(key=lambda record: record.arrival_ps)
    return build_trace(
        records,
        name=spec.name,
        trace_format=SPEC_FORMAT,
        sha256=digest.hexdigest(),
        notes=notes,
    )


def make_records(spec: Spec, seed: int) -> tuple[list[RequestRecord], list[str]]:
    """Answer the requests of *spec*, session by session, and what the user should know of them.

    Raises:
        TraceError: more requests than can be, or values that no request can have.
    """
    streams = _Streams(seed)
    classes = [_Class(spec, place, streams) for place in range(len(spec.workload.classes))]
    starts, chosen, turns = _sessions(spec.workload, classes, streams)
    own = [chosen == place for place in range(len(classes))]
    made = [
        iter(_sessions_of(each, starts[rows], turns[rows]))
        for each, rows in zip(classes, own, strict=True)
    ]
    records = [record for place in chosen.tolist() for record in _records(next(made[place]))]
    notes = [
        f"class {each.name}, {concern}: {moved:,} of {num:,} values were moved to a bound"
        for each in classes
        for concern, (moved, num) in each.moved.items()
        if moved
    ]
    if turns.max() > 1:
        notes.append(
            "turns arrive their think time after the turn before has arrived; with --closed-loop, "
            "after it has ended"
        )
    return records, notes


def _records(session: _Session) -> Iterator[RequestRecord]:
    """Answer the requests of *session*: each repeats all that was said before."""
    said = session.prefix
    has_turns = len(session.inputs) > 1
    for turn, (arrival, tokens, output, think, perturbed) in enumerate(
        zip(
            session.arrivals,
            session.inputs,
            session.outputs,
            session.thinks,
            session.perturbed,
            strict=True,
        )
    ):
        request_id = f"{session.name}-{turn}" if has_turns else session.name
        said = [*said, (f"{request_id}:in", tokens)]
        front: list[Segment] = [(f"{request_id}:front", perturbed)] if perturbed else []
        num_prompt_tokens = perturbed + sum(length for _, length in said)
        if num_prompt_tokens > MAX_TOKENS:
            raise TraceError(
                f"request {request_id}: a prompt of {num_prompt_tokens:,} tokens: expected at most "
                f"{MAX_TOKENS:,}; shorten its class, or add max to turns"
            )
        yield RequestRecord(
            line=turn + 1,
            arrival_ps=round(arrival * PS_PER_S),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=output,
            request_id=request_id,
            segments=front + said,
            session_id=session.name if has_turns else None,
            think_ps=round(think * PS_PER_S),
        )
        said = [*said, (f"out:{request_id}", output)]


def _sessions(
    workload: Workload, classes: list[_Class], streams: _Streams
) -> tuple[Floats, IntArray, IntArray]:
    """Answer when each session starts, its class and its number of turns."""
    process = workload.arrivals
    if workload.duration is not None:
        if not isinstance(process, AllAtOnce) and (
            process.expected(workload.duration) > MAX_REQUESTS
        ):
            raise TraceError(
                f"{process.expected(workload.duration):.6g} sessions are expected in "
                f"{workload.duration:g} s: expected at most {MAX_REQUESTS:,}"
            )
        starts = process.until(streams.of("arrivals"), workload.duration)
        if not len(starts):
            raise TraceError(
                f"no session starts in {workload.duration:g} s: expected a longer duration, "
                "a higher rate, or num_requests"
            )
    else:
        assert workload.num_requests is not None, "checked by the specification"
        starts = process.first(streams.of("arrivals"), workload.num_requests)
    chosen = _chosen(workload, starts, streams.of("classes").random(len(starts)))
    turns = np.ones(len(starts), dtype=np.int64)
    for place, each in enumerate(classes):
        own = np.flatnonzero(chosen == place)
        turns[own] = each.values("turns", each.shares("turns", len(own)), each.table.turns)
    if workload.num_requests is not None:
        ends = np.cumsum(turns)
        num = int(np.searchsorted(ends, workload.num_requests)) + 1
        chosen, turns = chosen[:num], turns[:num]
        turns[-1] -= ends[num - 1] - workload.num_requests
        # Drawn again: as many as there are, which `Vllm` spreads over the time of so many.
        starts = process.first(streams.of("arrivals"), num)
    _refuse_too_much(starts, turns)
    return starts, chosen, turns


def _chosen(workload: Workload, starts: Floats, shares: Floats) -> IntArray:
    """Answer the class of each session: of those that there are at its start, by their weights."""
    classes = workload.classes
    edges = sorted({each.start for each in classes} | {each.end or 0.0 for each in classes} | {0.0})
    chosen = np.zeros(len(starts), dtype=np.int64)
    pieces = np.searchsorted(np.array(edges), starts, side="right") - 1
    for piece in np.unique(pieces).tolist():
        time = edges[piece]
        weights = [
            each.weight if each.start <= time < (each.end or math.inf) else 0.0 for each in classes
        ]
        if not any(weights):
            raise TraceError(
                f"no class has weight from {time:g} s on, when a session starts: expected one "
                "whose start and end include it"
            )
        inside = pieces == piece
        chosen[inside] = ranks(shares[inside], np.array(weights))
    return chosen


def _refuse_too_much(starts: Floats, turns: IntArray) -> None:
    if turns.max() > MAX_TURNS:
        raise TraceError(
            f"turns: a session of {turns.max():,}: expected at most {MAX_TURNS:,}; add max"
        )
    if turns.sum() > MAX_REQUESTS or (turns * (turns + 1)).sum() > MAX_SEGMENTS:
        raise TraceError(
            f"{turns.sum():,} requests in {len(turns):,} sessions, of up to {turns.max():,} turns: "
            f"expected at most {MAX_REQUESTS:,}, or {MAX_SEGMENTS:,} segments in all prompts"
        )
    if starts[-1] > MAX_ARRIVAL_S:
        raise TraceError(
            f"the last session starts after {starts[-1]:.6g} s: expected at most "
            f"{MAX_ARRIVAL_S:,}; raise the rate, or ask for fewer"
        )


def _sessions_of(each: _Class, starts: Floats, turns: IntArray) -> list[_Session]:
    """Answer the sessions of one class."""
    table, total = each.table, int(turns.sum())
    ends = np.cumsum(turns)
    is_first = np.zeros(total, dtype=bool)
    is_first[ends - turns] = True
    shares = each.shares("input_len", total)
    turn_len = table.input_len if table.turn_len is None else table.turn_len
    inputs = np.empty(total)
    inputs[is_first] = each.values("input_len", shares[is_first], table.input_len)
    inputs[~is_first] = each.values("turn_len", shares[~is_first], turn_len)
    bent = correlated(shares, each.shares("output_len", total), table.correlation)
    outputs = each.outputs(inputs, bent)
    thinks = each.seconds("think_time", each.shares("think_time", total), table.think_time)
    thinks[is_first] = 0
    waited = np.cumsum(thinks)
    arrivals = np.repeat(starts - waited[ends - turns], turns) + waited
    if arrivals.max(initial=0) > MAX_ARRIVAL_S:
        raise TraceError(
            f"class {each.name}: a turn arrives after {arrivals.max():.6g} s: expected at most "
            f"{MAX_ARRIVAL_S:,}; shorten think_time or the arrivals"
        )
    perturbed = _perturbed(each, arrivals)
    rows = [slice(end - num, end) for num, end in zip(turns.tolist(), ends.tolist(), strict=True)]
    return [
        _Session(
            f"{each.name}-{place}",
            prefix,
            arrivals[row].tolist(),
            inputs[row].astype(np.int64).tolist(),
            outputs[row].astype(np.int64).tolist(),
            thinks[row].tolist(),
            perturbed[row].tolist(),
        )
        for place, (prefix, row) in enumerate(zip(each.prefixes(len(starts)), rows, strict=True))
    ]


def _perturbed(each: _Class, arrivals: Floats) -> IntArray:
    """Answer the tokens in front of each request's prompt."""
    what = each.table.perturbation
    if what is None:
        return np.zeros(len(arrivals), dtype=np.int64)
    hit = (each.shares("perturbation", len(arrivals)) < what.share) & (arrivals >= what.start)
    return np.where(hit, what.tokens, 0).astype(np.int64)
