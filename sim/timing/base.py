"""What a step of the engine computes, and the contract of whatever says how long it takes."""

from typing import NamedTuple, Protocol

from workloads.record import PS_PER_S

TICKS_PER_PS = 10**4
"""Resolution of the engine's clock: 0.1 fs. A step time that is linear in its context is a line in
whole ticks, so that the sum of a run of steps and its closed form are equal; at picoseconds the
rounding of the slope (tens of ps a context token) would show."""

TICKS_PER_S = TICKS_PER_PS * PS_PER_S


class StepBatch(NamedTuple):
    """The work of one engine step, in tokens; all that a step's time may depend on.

    Attributes:
        num_decodes: requests that compute one token, each behind a context already in the cache.
        decode_context: sum over those of the tokens attended, the new one included.
        prefills: ``(chunk, context)`` of every other scheduled request: tokens computed now, and
            tokens attended by the last of them (context ≥ chunk; more behind a cached or earlier
            computed prefix).
        num_sampled: requests that sample a token at the end of the step.
    """

    num_decodes: int
    decode_context: int
    prefills: tuple[tuple[int, int], ...]
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.num_decodes + sum(chunk for chunk, _ in self.prefills)


NO_WORK = StepBatch(0, 0, (), 0)
"""A step that schedules nothing; it takes no time and is never priced."""


class DecodeLine(NamedTuple):
    """Time of a step that only decodes, in ticks: ``fixed + per_context * decode_context``."""

    fixed: int
    per_context: int


class StepTimeModel(Protocol):
    """Prices engine steps. Equal batches take equal time."""

    provenance: str
    """``measured``, ``fitted`` or ``assumed``: what kind of knowledge the times are."""

    description: str
    """One line for the report: source and parameters."""

    def step_time(self, batch: StepBatch) -> int:
        """Answer how long *batch* takes, in ticks; at least one token is scheduled.

        A batch without prefills takes what `decode_line` says.
        """
        ...

    def decode_line(self, num_decodes: int) -> DecodeLine:
        """Answer the time of a step that decodes *num_decodes* requests and does nothing else."""
        ...
