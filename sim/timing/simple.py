"""Step times that are assumed: a constant, and a linear function of tokens and context."""

from sim.columns import Columns
from sim.errors import ConfigError
from sim.timing.base import TICKS_PER_S, DecodeLine, StepBatch, TableFile, TimeSource

MAX_S = 1_000_000
"""Longest step in seconds; it stays far below the 106 days that int64 picoseconds can hold."""


def _to_ticks(what: str, seconds: float) -> int:
    """Answer *seconds* in ticks; ConfigError, naming *what*, unless it is a usable time."""
    if not 0 <= seconds <= MAX_S:  # NaN is not, either
        raise ConfigError(f"--step-time: {what} is {seconds}, expected seconds, 0 to {MAX_S}")
    ticks = round(seconds * TICKS_PER_S)
    if seconds > 0 and ticks == 0:
        raise ConfigError(f"--step-time: {what} is {seconds} s, below the resolution of 1e-16 s")
    return ticks


class _Assumed:
    """A time of whole steps that nobody measured."""

    table: TableFile | None = None

    def __init__(self, description: str) -> None:
        self.num_outside = 0
        self.sources: tuple[TimeSource, ...] = (TimeSource("step", "assumed", description),)

    def split(self, rows: Columns) -> dict[str, float]:  # noqa: ARG002  # part of the contract
        """Answer no terms."""
        return {}

    def steps_outside(self, rows: Columns) -> int:  # noqa: ARG002  # part of the contract
        """Answer none: the time holds for any step."""
        return 0


class ConstantStepTime(_Assumed):
    """Every step lasts equally long, whatever it computes."""

    def __init__(self, seconds: float) -> None:
        """Take the time of a step in seconds.

        Raises:
            ConfigError: *seconds* is negative, zero or not finite.
        """
        super().__init__(f"constant, {seconds} s a step")
        self._line = DecodeLine(_to_ticks("constant:SECONDS", seconds), 0)
        if self._line.fixed == 0:
            raise ConfigError(
                "--step-time constant:0 would freeze the clock, expected more than 0 seconds"
            )

    def step_time(self, batch: StepBatch) -> int:  # noqa: ARG002  # part of the contract
        """Answer the constant, in ticks."""
        return self._line.fixed

    def decode_line(self, num_decodes: int, decode_context: int) -> DecodeLine:  # noqa: ARG002
        """Answer a level line."""
        return self._line


class LinearStepTime(_Assumed):
    """A step lasts base + per_token * tokens + per_context_token * context.

    Tokens are those computed in the step. Context is the sum, over scheduled requests, of the
    tokens attended by the last one computed: computed before plus computed now. In integers, so
    that the time of a run of steps has an exact closed form.
    """

    def __init__(self, base: float, per_token: float, per_context_token: float) -> None:
        """Take the coefficients in seconds; each is rounded to ticks once, here.

        Raises:
            ConfigError: a coefficient is negative or not finite, or all are zero.
        """
        super().__init__(
            f"linear, {base} s + {per_token} s a token + {per_context_token} s a context token"
        )
        self.base = _to_ticks("linear's BASE", base)
        self.per_token = _to_ticks("linear's PER_TOKEN", per_token)
        self.per_context_token = _to_ticks("linear's PER_CONTEXT_TOKEN", per_context_token)
        self._lines: dict[int, DecodeLine] = {}
        if self.base == self.per_token == self.per_context_token == 0:
            raise ConfigError(
                "--step-time linear:0,0,0 would freeze the clock, expected a coefficient above 0"
            )

    def step_time(self, batch: StepBatch) -> int:
        """Answer the time of *batch*, in ticks."""
        context = batch.decode_context
        for _, attended in batch.prefills:
            context += attended
        return self.base + self.per_token * batch.num_tokens + self.per_context_token * context

    def decode_line(self, num_decodes: int, decode_context: int) -> DecodeLine:  # noqa: ARG002
        """Answer the line of *num_decodes* tokens; each is computed once."""
        line = self._lines.get(num_decodes)
        if line is None:
            fixed = self.base + self.per_token * num_decodes
            line = self._lines[num_decodes] = DecodeLine(fixed, self.per_context_token)
        return line
