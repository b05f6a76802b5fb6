"""The trace formats by name, and how to know them.

Names what reads each: it is imported when a trace is read, so that a list of formats is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from workloads.record import RequestRecord

SPEC_FORMAT = "workload"
"""Name of the format that is no trace: `workloads.spec`."""

AZURE2023_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Reader(NamedTuple):
    """A format: its reader, and how to know it.

    Attributes:
        function: the reader, ``module.function`` under `workloads.readers`.
        marks: strings that its first line holds, all of them, and no other format's.
        hints: any of these in a line without all marks of any format: of this one, with a fault
            that its reader can name.
    """

    function: str
    marks: tuple[str, ...]
    hints: tuple[str, ...] = ()

    @property
    def read(self) -> Callable[[Iterable[tuple[int, str]]], Iterator[RequestRecord | str]]:
        """The reader itself."""
        module, _, name = self.function.partition(".")
        return getattr(import_module(f"workloads.readers.{module}"), name)  # type: ignore[no-any-return]


READERS = {
    "azure2023": Reader("azure.read_azure2023", (AZURE2023_HEADER,)),
    "mooncake": Reader(
        "mooncake.read_mooncake", ('"timestamp"', '"hash_ids"'), ('"timestamp"', '"hash_ids"')
    ),
    "native": Reader(
        "native.read_native",
        ('"arrival_time"',),
        ('"output_len"', '"prompt"', '"prompt_token_ids"'),
    ),
}
"""The formats by name. Where the marks of several fit, the first is taken."""


def is_spec(path: str | Path, trace_format: str | None = None) -> bool:
    """Answer whether *path*, read as *trace_format*, is a specification.

    The end of its name says so: no trace is TOML.
    """
    if trace_format is not None:
        return trace_format == SPEC_FORMAT
    return Path(path).suffix.lower() == ".toml"
