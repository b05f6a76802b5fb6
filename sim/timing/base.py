"""What a step of the engine computes, and the contract of whatever says how long it takes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from sim.columns import Columns
from workloads.record import PS_PER_S

TICKS_PER_PS = 10**4
"""Resolution of the engine's clock: 0.1 fs. A step time that is linear in its context is a line in
whole ticks, so that the sum of a run of steps and its closed form are equal; at picoseconds the
rounding of the slope (tens of ps a context token) would show."""

TICKS_PER_S = TICKS_PER_PS * PS_PER_S
PS_PER_US = 10**6


class StepBatch:
    """The work of one engine step, in tokens; all that a step's time may depend on.

    Attributes:
        num_decodes: requests that compute one token, each behind a context already in the cache.
        decode_context: sum over those of the tokens attended, the new one included.
        prefills: ``(chunk, context)`` of every other scheduled request: tokens computed now, and
            tokens attended by the last of them (context ≥ chunk; more behind a cached or earlier
            computed prefix).
        num_prefill_tokens: sum of the chunks.
    """

    __slots__ = ("decode_context", "num_decodes", "num_prefill_tokens", "prefills")

    def __init__(
        self, num_decodes: int, decode_context: int, prefills: Sequence[tuple[int, int]]
    ) -> None:
        self.num_decodes, self.decode_context = num_decodes, decode_context
        self.prefills = prefills
        num_tokens = 0
        for chunk, _ in prefills:
            num_tokens += chunk
        self.num_prefill_tokens = num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_seqs(self) -> int:
        """Requests computed in this step."""
        return self.num_decodes + len(self.prefills)


NO_WORK = StepBatch(0, 0, ())
"""A step that schedules nothing; it takes no time and is never priced."""


UNLIMITED = 1 << 62
"""A context, in tokens, that no step reaches."""


class DecodeLine(NamedTuple):
    """Time of a step that only decodes, in ticks: ``fixed + per_context * decode_context``.

    It holds for any decode_context up to *max_context*.
    """

    fixed: int
    per_context: int
    max_context: int = UNLIMITED


class TimeSource(NamedTuple):
    """Where the time of some terms of a step comes from.

    Attributes:
        terms: what of a step it prices, in the words of the report.
        provenance: ``measured``, ``fitted`` or ``assumed``.
        description: table, fit or numbers; what a reader needs to find them again.
    """

    terms: str
    provenance: str
    description: str

    def __str__(self) -> str:
        return f"{self.terms} {self.provenance} ({self.description})"


class TableFile(NamedTuple):
    """A timing table that steps are priced by.

    Attributes:
        name: of its Parquet file, without folder.
        sha256: of the content of that file.
        info: what the table says of itself (`sim.timing.table.TableInfo`).
    """

    name: str
    sha256: str
    info: msgspec.Struct


class StepTimeModel(Protocol):
    """Prices engine steps. Equal batches take equal time."""

    sources: tuple[TimeSource, ...]
    """Where the times come from, the largest part of a step first."""

    table: TableFile | None
    """The timing table, if there is one."""

    num_outside: int
    """Steps with prefills that were priced beyond what was measured, counted when priced."""

    def step_time(self, batch: StepBatch) -> int:
        """Answer how long *batch* takes, in ticks; at least one token is scheduled.

        A batch without prefills takes what `decode_line` says.

        Raises:
            TimingRangeError: nothing is known of such a batch.
        """
        ...

    def decode_line(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """Answer the time of a step that decodes *num_decodes* requests and does nothing else.

        Raises:
            TimingRangeError: nothing is known of that many requests, or of that much context.
        """
        ...

    def split(self, rows: Columns) -> dict[str, float]:
        """Answer the seconds that each term of a step took over *rows* of steps, largest first.

        *rows* as `sim.metrics.Recorder.step_chunks` answers them. Empty for a time without terms.
        """
        ...

    def steps_outside(self, rows: Columns) -> int:
        """Answer how many steps of *rows* without prefills were priced beyond what was measured."""
        ...
