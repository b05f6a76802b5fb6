"""Every setting as a user sees it: its flag, what it can be, its help. Read off `sim.config`."""

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from sim.allocators import ALLOCATORS
from sim.config import CONCERNS, Reservation
from workloads.formats import READERS, SPEC_FORMAT

RESERVING = {f"reserve-{name}": name for name in typing.get_args(Reservation)}
"""Names of the contiguous allocator that also say what it reserves."""

_REGISTERED: dict[str, tuple[str, ...]] = {
    "allocator": (*ALLOCATORS, *RESERVING),
    "trace_format": (*READERS, SPEC_FORMAT),
}
"""Settings whose values are names in a registry."""

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text (not empty)"}
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


class Setting(NamedTuple):
    """One field of one concern, as the command line and the configuration file see it."""

    name: str
    concern: str
    annotation: Any
    default: Any
    help: str

    @property
    def type(self) -> Any:
        """The bare type: bool, int, float, str or a Literal."""
        kind = _bare(self.annotation)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            kind = next(_bare(a) for a in typing.get_args(kind) if a is not type(None))
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that it can have, nothing where there is no list of them."""
        if typing.get_origin(self.type) is Literal:
            return typing.get_args(self.type)
        return _REGISTERED.get(self.name, ())

    @property
    def expected(self) -> str:
        """What it can be, in words for a refusal."""
        limits = [
            f"{words} {bound}"
            for meta in _metas(self.annotation)
            for limit, words in _BOUNDS
            if (bound := getattr(meta, limit)) is not None
        ]
        return ", ".join([_KINDS[self.type], *limits, *(["or inf"] if self.has_inf else [])])

    @property
    def has_inf(self) -> bool:
        """Whether it can also be the text ``inf``, for which JSON has no number."""
        return Literal["inf"] in typing.get_args(_bare(self.annotation))

    @property
    def flag(self) -> str:
        """As it is written on the command line."""
        return "--" + self.name.replace("_", "-")


def as_flags(values: Mapping[str, Any]) -> Iterator[str]:
    """Answer settings by name as the words of a command line; None is left out."""
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield from (f"--{flag}", str(value))


def _bare(annotation: Any) -> Any:
    """Answer a type without its msgspec constraints."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _metas(annotation: Any) -> Iterator[msgspec.Meta]:
    """Answer the msgspec constraints of a type, those inside a union too."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from annotation.__metadata__
        yield from _metas(typing.get_args(annotation)[0])
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for part in typing.get_args(annotation):
            yield from _metas(part)


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Answer every setting, concern by concern."""
    return tuple(_settings())


def _settings() -> Iterator[Setting]:
    for concern, model in CONCERNS.items():
        hints = typing.get_type_hints(model, include_extras=True)
        for field in msgspec.structs.fields(model):
            annotation = hints[field.name]
            description = annotation.__metadata__[-1].description
            yield Setting(field.name, concern, annotation, field.default, description)
