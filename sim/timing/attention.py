"""The time of one layer's attention, from a table of measured calls or from a fitted roofline.

Decodes are priced by their number and the sum of their contexts: a batch of mixed lengths as one of
equal lengths (measured by LLMServingSim on an RTX 4090, the latter takes 1.02 times as long at the
median).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sim.columns import FloatArray
from sim.timing.base import UNLIMITED
from workloads.record import IntArray

Prefills = Sequence[tuple[int, int]]
"""(chunk, context) as `sim.timing.base.StepBatch` has them."""


class Segment(NamedTuple):
    """Decode attention, in picoseconds: ``fixed + per_context * context`` up to *max_context*."""

    max_context: int
    fixed: float
    per_context: float


class Cost(Protocol):
    """Prices one kernel by a size: tokens, requests. Times in picoseconds."""

    def at(self, size: float) -> float | None:
        """Answer the time of *size*; None if nothing is known of it."""
        ...


class AttentionCost(Protocol):
    """Prices the attention of one layer in one step. Times in picoseconds."""

    covers: str
    """The range of sizes that it prices, in words."""

    def decode_segments(self, num_decodes: int) -> list[Segment]:
        """Answer the time of *num_decodes* decodes by the sum of their contexts, ascending.

        Empty, or short of `UNLIMITED`, where nothing more is known. No per_context is negative.
        """
        ...

    def step_time(self, prefills: Prefills, num_decodes: int, decode_context: int) -> float | None:
        """Answer the time of a step with one or more *prefills*; None if nothing is known of it."""
        ...


def decode_time(segments: Sequence[Segment], context: int) -> float | None:
    """Answer the time of decodes that attend *context* tokens in all; None beyond *segments*."""
    for segment in segments:
        if context <= segment.max_context:
            return segment.fixed + segment.per_context * context
    return None


class WithProducts:
    """Attention and the products around it: what stands in for a measured block of them."""

    def __init__(self, attention: AttentionCost, products: Sequence[Cost]) -> None:
        """Take *products* of one layer, priced by tokens."""
        self._attention, self._products = attention, products
        self.covers = attention.covers

    def decode_segments(self, num_decodes: int) -> list[Segment]:
        """Answer those of attention, each longer by the products."""
        more = self._of_products(num_decodes)
        return [
            segment._replace(fixed=segment.fixed + more)
            for segment in self._attention.decode_segments(num_decodes)
        ]

    def step_time(self, prefills: Prefills, num_decodes: int, decode_context: int) -> float | None:
        """Answer the time of attention and of the products over all tokens of the step."""
        time = self._attention.step_time(prefills, num_decodes, decode_context)
        num_tokens = num_decodes + sum(chunk for chunk, _ in prefills)
        return None if time is None else time + self._of_products(num_tokens)

    def _of_products(self, num_tokens: int) -> float:
        return sum((product.at(num_tokens) or 0.0 for product in self._products), start=0.0)


class RooflineAttention:
    """Attention by a roofline: linear in batch, context, and pairs of query and key.

    Args:
        t0: of the call for the decodes, of the call for the chunks.
        decode: a decode; per_context: a token of their contexts.
        pair, chunk, context: a pair of query and key; a token of a chunk; a token of its context.
        fill: behind a history, a chunk of fewer queries takes as long as of this many.
    """

    covers = "any size"

    def __init__(
        self,
        *,
        t0: tuple[float, float],
        decode: float,
        per_context: float,
        pair: float,
        chunk: float,
        context: float,
        fill: float = 0.0,
    ) -> None:
        self._fill = fill
        self._decode_t0, self._prefill_t0 = t0
        self._decode, self._per_context = decode, per_context
        self._pair, self._chunk, self._context = pair, chunk, context

    def decode_segments(self, num_decodes: int) -> list[Segment]:
        """Answer one line for any context."""
        fixed = self._decode_t0 + self._decode * num_decodes if num_decodes else 0.0
        return [Segment(UNLIMITED, fixed, self._per_context)]

    def step_time(self, prefills: Prefills, num_decodes: int, decode_context: int) -> float:
        """Answer the time of two calls.

        A chunk of n tokens that ends at context c attends n * (c - n) + n * n / 2 pairs, reads the
        keys and values of c tokens, reads queries and writes outputs of n tokens. At c = n this is
        the fitted formula: 2 * heads * head_dim * n * n FLOPs, and
        n * head_dim * (2 * heads + 2 * kv_heads) elements moved.
        """
        pairs = 0.0
        chunks = contexts = 0
        for chunk, context in prefills:
            pairs += 0.5 * chunk * chunk + max(chunk, self._fill) * (context - chunk)
            chunks += chunk
            contexts += context
        time = (
            self._prefill_t0 + self._pair * pairs + self._chunk * chunks + self._context * contexts
        )
        if num_decodes:
            time += (
                self._decode_t0 + self._decode * num_decodes + self._per_context * decode_context
            )
        return time


def decode_times(attention: AttentionCost, num_decodes: IntArray, contexts: IntArray) -> FloatArray:
    """Answer the time of every batch of decodes [n]; NaN where nothing is known, 0 without any."""
    times = np.zeros(len(num_decodes))
    for count in np.unique(num_decodes[num_decodes > 0]).tolist():
        segments = attention.decode_segments(count)
        chosen = np.flatnonzero(num_decodes == count)
        ends = np.array([segment.max_context for segment in segments])
        place = np.searchsorted(ends, contexts[chosen])
        fixed, slope = (
            np.array([*(getattr(segment, name) for segment in segments), np.nan])[place]
            for name in ("fixed", "per_context")
        )
        times[chosen] = fixed + slope * contexts[chosen]
    return times
