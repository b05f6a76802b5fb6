"""A workload described, not recorded: arrivals, and classes of requests, in a small TOML file."""

import math
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from workloads.distributions import AnyDistribution, ByInput, NonNegative, inside
from workloads.errors import TraceError, did_you_mean, plain, quote
from workloads.processes import AllAtOnce, AnyProcess, Seconds, Vllm

MAX_BYTES = 10_000_000
"""Longest specification."""

MAX_REQUESTS = 10_000_000

_TOML = {
    "Expected": "expected",
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}
"""Words of msgspec for a user of TOML."""

Count = Annotated[int, Meta(ge=1, le=1_000_000)]

Name = Annotated[str, Meta(min_length=1, max_length=80)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class Prefix(_Table, frozen=True, kw_only=True):
    """What the prompts of a class have in common, at the front; several stand in a row.

    Attributes:
        tokens: how many, drawn once a variant.
        variants: how many there are; each session has one.
        zipf: exponent of their popularity; 0 is equally popular.
        equal: each variant as often as the others, in random order, as vLLM's prefix_repetition
            (``benchmarks/datasets``, vLLM 0.33.0), instead of as often as chance has it.
        depth: that many in a row: a tree, in which each node has *variants* children.
        name: classes that use one name share the texts; without one, they are the class's own.
    """

    tokens: AnyDistribution
    variants: Count = 1
    zipf: Annotated[float, Meta(ge=0, le=100)] = 0.0
    equal: bool = False
    depth: Annotated[int, Meta(ge=1, le=64)] = 1
    name: Name | None = None

    def __post_init__(self) -> None:
        """Refuse two popularities."""
        if self.equal and self.zipf:
            raise ValueError("equal and zipf contradict each other: leave one of them out")


class Perturbation(_Table, frozen=True, kw_only=True):
    """A unique text in front of prompts, a time of day say: nothing behind it is shared.

    Attributes:
        share: of the requests that arrive from *start* on.
        tokens: of the text, added to the prompt.
        start: seconds.
    """

    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    tokens: Count = 16
    start: NonNegative = 0.0


class RequestClass(_Table, frozen=True, kw_only=True):
    """Requests of one kind.

    Attributes:
        name: of its requests and of its random streams; without one, its place.
        weight: share of the sessions, relative to the other classes.
        prefix: what prompts have in common, at the front.
        input_len: tokens of the prompt behind the prefix that no other session has.
        output_len: tokens generated; a table of kind ``by_input`` lets them go with input_len (or
            turn_len); the name of another class, as there.
        turns: requests of a session. Turn k + 1 repeats prompt and output of turn k.
        turn_len: new tokens of a later turn; without it, as *input_len*.
        think_time: seconds from the end of a turn to the next one.
        perturbation: what breaks the common prefix.
        correlation: of the ranks of input_len (or turn_len) and output_len, by a normal copula.
        stratified: draws are spread evenly over the distribution, in random order, so that totals
            hardly depend on the seed; more requests are then not the same ones and others.
        start: seconds, from which sessions are of this class.
        end: seconds, before which they are.
    """

    input_len: AnyDistribution
    output_len: AnyDistribution | ByInput | Name
    name: Name | None = None
    weight: NonNegative = 1.0
    prefix: list[Prefix] = []
    turns: AnyDistribution = 1
    turn_len: AnyDistribution | None = None
    think_time: AnyDistribution = 0
    perturbation: Perturbation | None = None
    correlation: Annotated[float, Meta(ge=-1, le=1)] = 0.0
    stratified: bool = False
    start: NonNegative = 0.0
    end: Seconds | None = None

    def __post_init__(self) -> None:
        """Refuse a time that never is."""
        if self.end is not None and self.start >= self.end:
            raise ValueError(f"start {self.start:g} is not before end {self.end:g}")

    @property
    def is_timed(self) -> bool:
        """Whether there are times without it."""
        return self.start > 0 or self.end is not None


class Workload(_Table, frozen=True, kw_only=True):
    """The file: how many requests, when they start, and of which classes.

    Attributes:
        arrivals: of sessions; a class without turns has one request a session.
        classes: at least one.
        num_requests: how many; the last session is cut short to get there.
        duration: seconds within which sessions start, instead.
    """

    arrivals: AnyProcess
    classes: Annotated[list[RequestClass], Meta(min_length=1, max_length=1000)]
    num_requests: Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] | None = None
    duration: Seconds | None = None

    def __post_init__(self) -> None:
        """Refuse what no workload can be."""
        if (self.num_requests is None) == (self.duration is None):
            raise ValueError("expected one of num_requests and duration")
        if self.duration is not None and isinstance(self.arrivals, Vllm | AllAtOnce):
            kind = self.arrivals.__struct_config__.tag
            raise ValueError(f"arrivals of kind {kind} need num_requests instead of duration")
        if not any(each.weight for each in self.classes):
            raise ValueError("the weights of all classes are 0; expected one above 0")
        if isinstance(self.arrivals, Vllm) and any(each.is_timed for each in self.classes):
            raise ValueError("arrivals of kind vllm know no start and end of classes")
        names = [self.name_of(place) for place in range(len(self.classes))]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two classes are called {quote(name)}; expected names that differ"
                )

        for each in self.classes:
            other = each.output_len
            if isinstance(other, str) and (
                other not in names or isinstance(self.classes[names.index(other)].output_len, str)
            ):
                raise ValueError(
                    f"output_len {quote(other)}: expected lengths, or the name of a class that "
                    "has some"
                )

    def output_len_of(self, place: int) -> AnyDistribution | ByInput:
        """Answer the output lengths of the class at *place*."""
        found = self.classes[place].output_len
        if isinstance(found, str):
            names = [self.name_of(other) for other in range(len(self.classes))]
            found = self.classes[names.index(found)].output_len
        assert not isinstance(found, str), "checked"
        return found

    def name_of(self, place: int) -> str:
        """Answer the name of the class at *place*."""
        return self.classes[place].name or f"class{place + 1}"


class Spec(typing.NamedTuple):
    """A specification and where it came from.

    Attributes:
        workload: what it says.
        folder: where files that it names are.
        name: the file, for messages.
        sources: contents that decide what is generated: of the file, and of those that it names.
    """

    workload: Workload
    folder: Path
    name: str
    sources: tuple[bytes, ...]


def read_spec(path: str | Path) -> Spec:
    """Answer the specification in the file *path*.

    Raises:
        TraceError: one line that names the file, the key and what was expected.
    """
    name = plain(str(path))
    try:
        if not Path(path).is_file():
            raise TraceError(f"{name}: no such file: expected the path of a specification")
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise TraceError(f"{name}: cannot be read ({reason}): expected a readable file") from error
    if len(content) > MAX_BYTES:
        raise TraceError(f"{name}: more than {MAX_BYTES:,} bytes: expected a small TOML file")
    try:
        workload = parse_spec(content)
        folder = Path(path).parent
        files = [inside(folder, file) for file in _files(msgspec.to_builtins(workload))]
        sources = (content, *(file.read_bytes() for file in files))
    except (TraceError, OSError) as error:
        raise TraceError(f"{name}: {error}") from error
    return Spec(workload, folder, name, sources)


def parse_spec(content: bytes) -> Workload:
    """Answer the workload that the TOML text *content* describes.

    Raises:
        TraceError: naming the key and what was expected.
    """
    try:
        table = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise TraceError(f"not TOML: {reason}: expected tables like [arrivals]") from error
    try:
        _refuse_infinite(table, "")
        return msgspec.convert(table, Workload)
    except msgspec.ValidationError as error:
        raise TraceError(_words(str(error), table)) from error
    except RecursionError as error:
        raise TraceError("nested too deeply: expected tables like [arrivals]") from error


def _refuse_infinite(value: Any, path: str) -> None:
    """Refuse nan and inf, which TOML has and bounds let through."""
    if isinstance(value, float) and not math.isfinite(value):
        raise TraceError(f"{path}: {value}: expected a finite number")
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_infinite(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for place, inner in enumerate(value, 1):
            _refuse_infinite(inner, f"{path} {place}")


def _files(value: Any) -> list[str]:
    """Answer the files that *value*, of plain tables and lists, names."""
    if isinstance(value, list):
        return [name for inner in value for name in _files(inner)]
    if not isinstance(value, dict):
        return []
    own = [value["file"]] if "file" in value else []
    return list(dict.fromkeys([*own, *(n for inner in value.values() for n in _files(inner))]))


def _words(reason: str, table: dict[str, Any]) -> str:
    """Answer what msgspec has against *table* as one line: key, value, expected, nearest choice."""
    reason, _, path = reason.partition(" - at `$")
    value: Any = table
    kind: Any = Workload
    shown = ""
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if key == "kind" and (choices := _kinds(kind)):
            found = value.get("kind")
            return f"{shown}.kind {quote(found)}: {did_you_mean(str(found), choices)}"
        kind = _inner(kind, key, value)
        value = value[key] if key else value[int(index)]
        shown = f"{shown}.{key}".lstrip(".") if key else f"{shown} {int(index) + 1}"
    where = f"{shown}: " if shown else ""
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL):
        nearest = did_you_mean(unknown[1], _keys(kind, value))
        return f"{where}unknown key {quote(unknown[1])}: {nearest}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
        keys = tuple(_kinds(kind)) if missing[1] == "kind" else _keys(kind, value)
        return f"{where}{missing[1]} is missing: expected {', '.join(sorted(keys))}"
    reason = re.sub(r"\w+", lambda word: _TOML.get(word[0], word[0]), reason.replace("`", ""))
    reason = reason.replace(" | null", "").replace(" | ", " or ")
    got = f" {quote(value)}" if shown and not isinstance(value, dict) else ""
    return f"{shown}{got}: {reason}" if shown else reason


def _variants(kind: Any) -> list[Any]:
    """Answer the types that *kind* may be, without their constraints."""
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return [inner for each in typing.get_args(kind) for inner in _variants(each)]
    return [kind]


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    found = _variants(kind)
    return [each for each in found if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def _kinds(kind: Any) -> dict[str, type[msgspec.Struct]]:
    """Answer the structs that *kind* may be, by their ``kind``."""
    return {
        str(each.__struct_config__.tag): each
        for each in _structs(kind)
        if each.__struct_config__.tag is not None
    }


def _keys(kind: Any, value: Any) -> tuple[str, ...]:
    """Answer the keys that the table *value* may have."""
    kinds = _kinds(kind)
    if kinds:
        chosen = kinds.get(value.get("kind"))
        return ("kind", *chosen.__struct_encode_fields__) if chosen else ("kind",)
    return tuple(f for each in _structs(kind) for f in each.__struct_encode_fields__)


def _inner(kind: Any, key: str, value: Any) -> Any:
    """Answer the type of what is at *key* of *value*, of type *kind*, or of its elements."""
    if not key:
        lists = [each for each in _variants(kind) if typing.get_origin(each) is list]
        return typing.get_args(lists[0])[0] if lists else None
    kinds = _kinds(kind)
    struct = kinds.get(value.get("kind")) if kinds else next(iter(_structs(kind)), None)
    return None if struct is None else typing.get_type_hints(struct, include_extras=True).get(key)
