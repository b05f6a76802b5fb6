"""The time of one layer's attention, from a table of measured calls."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.columns import BoolArray, FloatArray
from sim.errors import ConfigError
from sim.timing.attention import AttentionCost, Prefills, Segment, decode_time
from sim.timing.base import PS_PER_US
from sim.timing.curves import Bracket, bracket
from sim.timing.table import TimingTable

MAX_CELLS = 2_000_000
"""Most combinations of the sizes of one operation; a grid that is measured has some thousands."""

LONG_CHUNK = 512
"""Tokens from which a chunk's time beyond the floor is taken for a line per token: it grows with
tokens and their pairs. Shorter ones fill the GPU in waves, and time itself is the better line."""

LATENT_BLOCK_OPS = ("mla_decode_block", "mla_prefill_block")

_CHUNK = ("query_len", "query_context")


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
        other: AttentionCost | None = None,
    ) -> None:
        """Take rows of one shape, one for each size.

        *decode_factor* is for another block size than theirs; *warm_tokens* had their keys and
        values in the L2 cache when decodes were measured; *is_block*: rows of whole blocks of
        latent attention, not of its kernel; *other* prices decodes or chunks if there are no rows
        of them.
        """
        self._factor = decode_factor
        self._warm_tokens = warm_tokens
        self._other = other
        decode, prefill = (
            LATENT_BLOCK_OPS if is_block else ("decode_attention", "prefill_attention")
        )
        self._decode = _Grid(table.where(op=decode), ("batch", "context"))
        one = _Grid(table.where(op=prefill, batch=1), _CHUNK, fill=(1, 0))
        self._prefill = _ChunkTimes(one.knots, one.times) if one else None
        mixed = table.where(op="mixed_attention")
        self._mixed = _Grid(mixed, ("batch", "context", *_CHUNK), fill=(1, 3, 2, 0))
        self._segments: dict[int, list[Segment]] = {}
        self._beside: dict[int, list[_ChunkTimes]] = {}
        self.covers = "; ".join(
            f"{what}: {grid.covers}"
            for what, grid in (
                ("decodes", self._decode),
                ("a chunk", one),
                ("a chunk with decodes", self._mixed),
            )
            if grid
        )

    def decode_segments(self, num_decodes: int) -> list[Segment]:
        """Answer the time between the knots of the table; each *num_decodes* is looked up once."""
        segments = self._segments.get(num_decodes)
        if segments is None:
            if self._decode or self._other is None:
                histories, times = self._decode_knots(num_decodes)
                segments = _segments(histories + num_decodes, self._factor * times)
            else:
                segments = self._other.decode_segments(num_decodes)
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
        """Answer what was measured of one batch, as if nothing had been in the L2 cache."""
        batch, times = self._decode.knots[0][row], self._decode.times[row]
        measured = np.isfinite(times)
        histories, times = np.array(self._decode.knots[1])[measured], times[measured]
        cold = batch * histories > self._warm_tokens
        if self._warm_tokens and cold.sum() > 1 and histories[~cold].any():
            times = times + _from_memory(histories, times, cold)
        return _Row(batch, histories, growing(times))

    def step_time(self, prefills: Prefills, num_decodes: int, decode_context: int) -> float | None:
        """Answer the time of one call for all, or of one for the chunks and one for the decodes."""
        if not num_decodes:
            return self._chunks_alone(prefills)
        decodes = decode_time(self.decode_segments(num_decodes), decode_context)
        if decodes is None:
            return None
        if not self._mixed:
            chunks = self._chunks_alone(prefills)
            return None if chunks is None else chunks + decodes
        mean = (decode_context - num_decodes) / num_decodes
        place = bracket(self._mixed.knots[1], mean)
        planes = self._chunks_beside(num_decodes)
        if place is None or not planes:
            return None
        low, high = (_total(planes[index], prefills) for index in place[:2])
        if low is None or high is None:
            return None
        return low + place.weight * (high - low) + decodes * (1 - 1 / self._factor)

    def _chunks_alone(self, prefills: Prefills) -> float | None:
        if self._prefill is None:
            return None if self._other is None else self._other.step_time(prefills, 0, 0)
        return _total(self._prefill, prefills)

    def _chunks_beside(self, num_decodes: int) -> "list[_ChunkTimes]":
        """Answer the times of chunks beside that many decodes, one for each context measured.

        Empty if that many were not measured. Each *num_decodes* is looked up once.
        """
        planes = self._beside.get(num_decodes)
        if planes is None:
            place = bracket(self._mixed.knots[0], num_decodes)
            times = () if place is None else _between(self._mixed.times, place)
            knots = self._mixed.knots[2:]
            planes = self._beside[num_decodes] = [_ChunkTimes(knots, plane) for plane in times]
        return planes


class _ChunkTimes:
    """Times of one chunk over its length and the history before it, beside given decodes.

    Attributes:
        floor: of the shortest chunk, or whatever took least.
    """

    __slots__ = ("_histories", "_lengths", "_pair", "_times", "floor")

    def __init__(self, knots: Sequence[list[float]], times: FloatArray) -> None:
        self._lengths, self._histories = knots
        self._times: list[list[float]] = times.tolist()
        measured = times[np.isfinite(times)]
        self.floor = float(measured.min()) if len(measured) else math.nan
        # What a pair of query and key adds to the longest prompts.
        shorter, longer = self._lengths[-2:] if len(self._lengths) > 1 else (0.0, 1.0)
        more = self._times[-1][0] - self._times[-2][0] if shorter else 0.0
        self._pair = max(0.0, 2 * more / (longer**2 - shorter**2))

    def at(self, chunk: int, history: int) -> float | None:
        """Answer the time of *chunk* tokens behind *history*; None above what was measured."""
        if len(self._histories) == 1 and history:  # of whole prompts only
            if history + chunk > self._lengths[-1]:
                return None
            alone = self._along(chunk, Bracket(0, 0, 0.0))
            return None if alone is None else alone + self._pair * chunk * history
        column = bracket(self._histories, history)
        return None if column is None else self._along(chunk, column)

    def _along(self, length: int, column: Bracket) -> float | None:
        """Answer the time of *length* tokens at *column*; None above.

        Between `LONG_CHUNK` and more, what is beyond the floor is linear per token. (Leaving out
        lengths of public tables, a line through the times misses by four times as much at the
        median: results/timing_fits.)
        """
        place = bracket(self._lengths, length)
        if place is None:
            return None
        low, high, weight = place
        left, right, share = column
        row = self._times[low]
        time = row[left] + share * (row[right] - row[left]) if share else row[left]
        if weight:
            row = self._times[high]
            other = row[left] + share * (row[right] - row[left]) if share else row[left]
            shorter, longer = self._lengths[low], self._lengths[high]
            if shorter < LONG_CHUNK:
                time += weight * (other - time)
            else:
                per_token = (time - self.floor) / shorter
                per_token += weight * ((other - self.floor) / longer - per_token)
                time = self.floor + length * per_token
        return None if math.isnan(time) else time


def _total(times: _ChunkTimes, prefills: Prefills) -> float | None:
    """Answer the time of one call for all *prefills*; None if one is above what was measured."""
    total = times.floor
    for chunk, context in prefills:
        time = times.at(chunk, context - chunk)
        if time is None:
            return None
        total += time - times.floor
    return total


class _Row(NamedTuple):
    """Times of *batch* decodes behind *histories* each, ascending."""

    batch: float
    histories: FloatArray
    times: FloatArray


def _from_memory(histories: FloatArray, times: FloatArray, cold: BoolArray) -> FloatArray:
    """Answer what reading keys and values from memory adds where they came from the L2 cache.

    A step walks through all layers and finds none of its own in the cache. The last row that fits
    it takes as long as the line through the first two that do not (*cold*); of shorter ones, the
    share of its bytes.
    """
    (near, far), (time, later) = histories[cold][:2], times[cold][:2]
    last = histories[~cold][-1]
    line = time - (near - last) * (later - time) / (far - near)
    added: FloatArray = np.where(cold, 0, max(0.0, line - times[~cold][-1]) * histories / last)
    return added


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
        axes = [np.unique(table.columns[name], return_inverse=True) for name in names]
        self.names = names
        self.knots: list[list[float]] = []
        self.times = np.array([])
        if not len(table):
            return
        sizes = [len(axis) for axis, _ in axes]
        if math.prod(sizes) > MAX_CELLS:
            raise ConfigError(
                f"the timing table has {table.columns['op'][0]} of {' x '.join(map(str, sizes))} "
                f"sizes; expected a grid of at most {MAX_CELLS} combinations"
            )
        self.knots = [axis.astype(np.float64).tolist() for axis, _ in axes]
        self.times = np.full(sizes, np.nan)
        self.times[tuple(place for _, place in axes)] = table.columns["latency_us"] * PS_PER_US
        for axis in fill:
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
