"""The time of one layer's attention, from a table of measured calls or from a fitted roofline.

Decodes are priced by their number and the sum of their contexts: a batch of mixed lengths as one of
equal lengths (measured by LLMServingSim on an RTX 4090, the latter takes 1.02 times as long at the
median).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sim.columns import FloatArray
from sim.errors import ConfigError
from sim.timing.base import UNLIMITED
from sim.timing.curves import Bracket, bracket
from sim.timing.table import TimingTable
from workloads.record import IntArray

PS_PER_US = 10**6

MAX_CELLS = 2_000_000
"""Most combinations of the sizes of one operation; a grid that is measured has some thousands."""

LONG_CHUNK = 512
"""Tokens from which a chunk's time beyond the floor is taken for a line per token: it grows with
tokens and their pairs. Shorter ones fill the GPU in waves, and time itself is the better line."""

LATENT_BLOCK_OPS = ("mla_decode_block", "mla_prefill_block")

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


class TableAttention:
    """Attention as measured: linear between the batches and contexts of a table.

    Decodes and the chunks of a step are one call where the table has such rows, else two. Of
    several chunks, each after the first adds what it takes beyond the shortest chunk measured.
    """

    def __init__(
        self,
        table: TimingTable,
        *,
        decode_factor: float = 1.0,
        warm_tokens: float = 0.0,
        is_block: bool = False,
    ) -> None:
        """Take rows of one shape, one for each size.

        *decode_factor* is for another block size than theirs; *warm_tokens* had their keys and
        values in the L2 cache when decodes were measured; *is_block*: rows of whole blocks of
        latent attention, not of its kernel.
        """
        self._factor = decode_factor
        self._warm_tokens = warm_tokens
        decode, prefill = (
            LATENT_BLOCK_OPS if is_block else ("decode_attention", "prefill_attention")
        )
        self._decode = _Grid(table.where(op=decode), ("batch", "context"))
        one = table.where(op=prefill, batch=1)
        self._prefill = _Grid(one, ("query_len", "query_context"), fill=(1, 0))
        names = ("batch", "context", "query_len", "query_context")
        self._mixed = _Grid(table.where(op="mixed_attention"), names, fill=(1, 3, 2, 0))
        self._segments: dict[int, list[Segment]] = {}
        self.covers = "; ".join(
            f"{what}: {grid.covers}"
            for what, grid in (
                ("decodes", self._decode),
                ("a chunk", self._prefill),
                ("a chunk with decodes", self._mixed),
            )
            if grid
        )

    def decode_segments(self, num_decodes: int) -> list[Segment]:
        """Answer the time between the knots of the table; each *num_decodes* is looked up once."""
        segments = self._segments.get(num_decodes)
        if segments is None:
            histories, times = self._decode_knots(num_decodes)
            segments = _segments(histories + num_decodes, self._factor * times)
            self._segments[num_decodes] = segments
        return segments

    def _decode_knots(self, num_decodes: int) -> tuple[FloatArray, FloatArray]:
        """Answer the total histories, ascending, between which time is linear, and those times."""
        place = bracket(self._decode.knots[0], num_decodes) if self._decode else None
        if place is None:
            return np.array([]), np.array([])
        rows = [self._decode_row(row) for row in place[:2]]
        if place.low == place.high:
            batch, histories, times = rows[0]
            return batch * histories, times
        return _between_batches(num_decodes, rows[0], rows[1], place.weight, self._warm_tokens)

    def _decode_row(self, row: int) -> "_Row":
        batches, histories = self._decode.knots
        times = self._decode.times[row]
        measured = np.isfinite(times)
        return _Row(batches[row], np.array(histories)[measured], growing(times[measured]))

    def step_time(self, prefills: Prefills, num_decodes: int, decode_context: int) -> float | None:
        """Answer the time of one call for all, or of one for the chunks and one for the decodes."""
        extra = 0.0
        grid: npt.NDArray[np.float64] | None = self._prefill.times
        lengths, histories = self._prefill.knots or ([], [])
        if num_decodes:
            decodes = decode_time(self.decode_segments(num_decodes), decode_context)
            if decodes is None:
                return None
            extra = decodes
            if self._mixed:
                mean = (decode_context - num_decodes) / num_decodes
                grid = self._mixed.slice(num_decodes, mean)
                lengths, histories = self._mixed.knots[2:]
                extra = decodes * (1 - 1 / self._factor)
        if grid is None or not lengths:
            return None
        floor = float(grid[0, 0])
        total = floor
        for chunk, context in prefills:
            time = _chunk_time(grid, lengths, histories, chunk, context - chunk)
            if time is None or np.isnan(time):
                return None
            total += time - floor
        return total + extra


class _Row(NamedTuple):
    """Times of *batch* decodes behind *histories* each, ascending."""

    batch: float
    histories: FloatArray
    times: FloatArray


def _between_batches(
    num_decodes: int, low: _Row, high: _Row, weight: float, warm_tokens: float
) -> tuple[FloatArray, FloatArray]:
    """Answer total histories, ascending, and times of a batch between two that were measured.

    At equal mean histories, so that what a batch costs beyond its bytes shows; but where the
    smaller of the two was measured in the L2 cache (*warm_tokens* or fewer in all), or one of them
    was not, at equal totals. (Leaving out batches of public tables, either rule alone misses by
    more: results/timing_fits.)
    """
    means = np.intersect1d(low.histories, high.histories)
    at_means = _mixed(
        np.interp(means, low.histories, low.times),
        np.interp(means, high.histories, high.times),
        weight,
    )
    of_low, of_high = low.batch * low.histories, high.batch * high.histories
    totals = np.union1d(of_low, of_high)
    totals = totals[(totals >= of_high[0]) & (totals <= min(of_low[-1], of_high[-1]))]
    at_totals = _mixed(
        np.interp(totals, of_low, low.times), np.interp(totals, of_high, high.times), weight
    )
    of_means = num_decodes * means
    by_mean = low.batch * means > warm_tokens
    by_mean |= (of_means < of_high[0]) | (of_means > totals.max(initial=0.0))
    last = of_means[by_mean].max(initial=0.0)
    first = of_means[by_mean & (of_means >= of_high[0])].min(initial=np.inf)
    by_total = (totals < first) | (totals > last)
    places = np.concatenate([of_means[by_mean], totals[by_total]])
    order = np.argsort(places)
    return places[order], growing(np.concatenate([at_means[by_mean], at_totals[by_total]])[order])


def _mixed(low: FloatArray, high: FloatArray, weight: float) -> FloatArray:
    return low + weight * (high - low)


class _Grid:
    """Times over the product of some sizes; NaN where nothing was measured.

    Holes between neighbours are filled along the axes *fill*, one after the other: a table may be
    the union of two grids.

    Attributes:
        knots: of each axis, ascending.
        times: in picoseconds, one dimension an axis.
    """

    def __init__(
        self, table: TimingTable, names: tuple[str, ...], fill: tuple[int, ...] = ()
    ) -> None:
        columns = [table.columns[name] for name in names]
        axes = [np.unique(column, return_inverse=True) for column in columns]
        self.names = names
        self.knots: list[list[float]] = (
            [axis.astype(np.float64).tolist() for axis, _ in axes] if len(table) else []
        )
        if math.prod(len(axis) for axis, _ in axes) > MAX_CELLS:
            sizes = " x ".join(str(len(axis)) for axis, _ in axes)
            raise ConfigError(
                f"the timing table has {table.columns['op'][0]} of {sizes} sizes; expected a grid "
                f"of at most {MAX_CELLS} combinations"
            )
        self.times = np.full([len(axis) for axis, _ in axes], np.nan)
        self.times[tuple(place for _, place in axes)] = table.columns["latency_us"] * PS_PER_US
        for axis in fill if len(table) else ():
            self.times = np.apply_along_axis(_filled, axis, self.times, axes[axis][0])

    def __bool__(self) -> bool:
        return bool(self.knots)

    @property
    def covers(self) -> str:
        """The range of every axis."""
        return ", ".join(
            f"{name} {knots[0]:.0f}-{knots[-1]:.0f}"
            for name, knots in zip(self.names, self.knots, strict=True)
        )

    def slice(self, *sizes: float) -> npt.NDArray[np.float64] | None:
        """Answer the times over the remaining axes at *sizes* on the first ones; None above one."""
        times = self.times
        for knots, size in zip(self.knots, sizes, strict=False):
            place = bracket(knots, size)
            if place is None:
                return None
            times = _between(times, place)
        return times


def _filled(times: FloatArray, knots: FloatArray) -> FloatArray:
    known = np.isfinite(times)
    if known.sum() < 2:
        return times
    return np.interp(knots, knots[known], times[known], left=np.nan, right=np.nan)


def _between(times: npt.NDArray[np.float64], place: Bracket) -> npt.NDArray[np.float64]:
    low, high, weight = place
    if low == high:
        return times[low]  # type: ignore[no-any-return]
    return times[low] + weight * (times[high] - times[low])  # type: ignore[no-any-return]


def _chunk_time(
    grid: npt.NDArray[np.float64],
    lengths: Sequence[float],
    histories: Sequence[float],
    chunk: int,
    history: int,
) -> float | None:
    """Answer the time of one chunk behind *history*; None above what was measured."""
    floor = float(grid[0, 0])
    if len(histories) == 1 and history:  # of whole prompts: the share of the pairs of query and key
        whole = _by_length(grid[:, 0], lengths, history + chunk, floor)
        share = 1 - (history / (history + chunk)) ** 2
        return None if whole is None else max(floor, whole * share)
    column = bracket(histories, history)
    if column is None:
        return None
    return _by_length(_between(grid.T, column), lengths, chunk, floor)


def _by_length(
    times: npt.NDArray[np.float64], lengths: Sequence[float], chunk: int, floor: float
) -> float | None:
    """Answer the time of a chunk between *lengths*; None above.

    Between `LONG_CHUNK` and more, what is beyond *floor* is linear per token. (Leaving out lengths
    of public tables, a line through the times misses by four times as much at the median:
    results/timing_fits.)
    """
    place = bracket(lengths, chunk)
    if place is None:
        return None
    low, high, weight = place
    if low == high or lengths[low] < LONG_CHUNK:
        return float(_between(times, place))
    per_token = [(times[knot] - floor) / lengths[knot] for knot in (low, high)]
    return float(floor + chunk * (per_token[0] + weight * (per_token[1] - per_token[0])))


def growing(times: FloatArray) -> FloatArray:
    """Answer *times* without dips: neighbours that fall are both their mean (isotonic regression).

    More context never takes less time; a table says so where a kernel changes its strategy, and
    where the clock was noisy.
    """
    sums: list[float] = []
    counts: list[int] = []
    for time in times:
        sums.append(float(time))
        counts.append(1)
        while len(sums) > 1 and sums[-2] * counts[-1] > sums[-1] * counts[-2]:
            last, count = sums.pop(), counts.pop()
            sums[-1] += last
            counts[-1] += count
    grown: FloatArray = np.repeat(np.array(sums) / counts, counts)
    return grown


def _segments(contexts: FloatArray, times: FloatArray) -> list[Segment]:
    """Answer the straight lines through (contexts, times); level below the first."""
    if not len(contexts):
        return []
    segments = [Segment(int(contexts[0]), float(times[0]), 0.0)]
    for left, right, start, stop in zip(
        contexts[:-1], contexts[1:], times[:-1], times[1:], strict=True
    ):
        slope = float((stop - start) / (right - left))
        segments.append(Segment(int(right), float(start - slope * left), slope))
    return segments


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
