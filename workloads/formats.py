"""The trace formats by name, and how to know them.

Names what reads each: it is imported when a trace is read, so that a list of formats is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from workloads.record import RequestRecord, Rows

    Read = Callable[..., Iterator[RequestRecord | Rows | str]]


class Reader(NamedTuple):
    """A format: its reader, and how to know it.

    Attributes:
        function: the reader, ``module.function`` under `workloads.readers`. What it takes besides
            the source are the options of the format; their defaults say of which type they are.
        marks: strings that its first item (a line, or an element of a JSON array) holds, all of
            them; nothing for a format that has to be named.
        hints: any of these in an item without all marks of any format: of this one, with a fault
            that its reader can name.
    """

    function: str
    marks: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def read(self) -> Read:
        """The reader itself."""
        module, _, name = self.function.partition(".")
        return getattr(import_module(f"workloads.readers.{module}"), name)  # type: ignore[no-any-return]


SPEC_FORMAT = "workload"
"""Name of the format that is no trace: `workloads.spec`."""

READERS = {
    "azure": Reader("lengths.read_azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    "burstgpt": Reader("lengths.read_burstgpt", ("Timestamp", "Request tokens", "Response tokens")),
    "vidur": Reader("lengths.read_vidur", ("num_prefill_tokens", "num_decode_tokens")),
    "parquet": Reader("native.read_native_parquet", ("PAR1",)),
    "native": Reader(
        "native.read_native",
        ('"arrival_time"',),
        ('"output_len"', '"prompt"', '"prompt_token_ids"'),
    ),
    "bench_serve": Reader(
        "bench.read_bench_serve",
        ('"total_input_tokens"', '"input_lens"'),
        ('"request_throughput"',),
    ),
    "claude_code": Reader(
        "sessions.read_claude_code", ('"block_size"', '"tool_tokens"', '"requests"')
    ),
    "llmservingsim": Reader(
        "sessions.read_llmservingsim", ('"arrival_time_ns"',), ('"input_toks"',)
    ),
    "bailian": Reader("hashed.read_bailian", ('"chat_id"', '"parent_chat_id"')),
    "sharegpt": Reader("text.read_sharegpt", ('"conversations"',)),
    "chat": Reader("text.read_chat", ('"messages"',)),
    "mooncake": Reader(
        "hashed.read_mooncake", ('"timestamp"', '"hash_ids"'), ('"timestamp"', '"hash_ids"')
    ),
    "aiperf": Reader(
        "hashed.read_mooncake", ('"output_length"', '"session_id"'), ('"text_input"',)
    ),
    "timed_trace": Reader("hashed.read_timed_trace"),
}
"""The formats by name. Where the marks of several fit, the first is taken."""


def is_spec(path: str | Path, trace_format: str | None = None) -> bool:
    """Answer whether *path*, read as *trace_format*, is a specification.

    The end of its name says so: no trace is TOML.
    """
    if trace_format is not None:
        return trace_format == SPEC_FORMAT
    return Path(path).suffix.lower() == ".toml"
