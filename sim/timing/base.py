"""What a step of the engine computes, and the contract of whatever says how long it takes."""

from typing import NamedTuple, Protocol


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


class StepTimeModel(Protocol):
    """Prices engine steps. Holds no state: equal batches take equal time."""

    provenance: str
    """``measured``, ``fitted`` or ``assumed``: what kind of knowledge the times are."""

    description: str
    """One line for the report: source and parameters."""

    def step_time_ps(self, batch: StepBatch) -> int:
        """Answer how long *batch* takes, in picoseconds; at least one token is scheduled."""
        ...
