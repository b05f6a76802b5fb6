"""The time of a step as the sum of its kernels.

Step = host overhead + layers * (kernels of every token + attention) + kernels of every request. No
gap between kernels: vLLM replays CUDA graphs and decides the next step while the GPU works.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sim.columns import Columns, FloatArray
from sim.errors import TimingRangeError
from sim.timing.attention import AttentionCost, Cost, Segment, decode_times
from sim.timing.base import TICKS_PER_PS, UNLIMITED, DecodeLine, StepBatch, TableFile, TimeSource
from sim.timing.layers import PER_SEQUENCE, Term
from workloads.record import PS_PER_S, IntArray


class PricedCall:
    """A kernel that a step launches *launches* times.

    Attributes:
        term: what of a step it belongs to.
        name: for messages.
        launches: how often a step runs it.
        cost: of one launch.
        fallback: of sizes that *cost* does not know; None refuses them.
    """

    __slots__ = ("cost", "fallback", "launches", "name", "term")

    def __init__(
        self, term: Term, name: str, launches: int, cost: Cost, fallback: Cost | None = None
    ) -> None:
        self.term, self.name, self.launches = term, name, launches
        self.cost, self.fallback = cost, fallback

    def time(self, size: float) -> float:
        """Answer the time of all launches in a step of *size* tokens or requests.

        Raises:
            TimingRangeError: nothing is known of that size.
        """
        time = self.cost.at(size)
        return self.launches * (self.time_outside(size) if time is None else time)

    def time_outside(self, size: float) -> float:
        """Answer the time of one launch of a *size* that *cost* does not know; raises as `time`."""
        time = None if self.fallback is None else self.fallback.at(size)
        if time is None:
            what = "requests" if self.term == PER_SEQUENCE else "tokens"
            last = getattr(self.cost, "last", math.inf)
            raise TimingRangeError(
                f"the timing table has {self.name} for up to {last:.0f} {what}, and a step has "
                f"{size:.0f}: {_WHAT_HELPS}"
            )
        return time


_WHAT_HELPS = (
    "expected a step within the table; --timing-fallback roofline prices such steps by the fit"
)


class CudaGraphs:
    """Numbers of tokens that CUDA graphs were captured for, ascending.

    A step of no more than the last runs as the next of them, padded with tokens that count for
    nothing (vLLM 0.33.0, ``config/compilation.py``). Attention is not padded.
    """

    __slots__ = ("_last", "sizes")

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.sizes = sizes
        self._last = sizes[-1] if sizes else 0

    @classmethod
    def default(cls, max_num_seqs: int) -> "CudaGraphs":
        """Answer vLLM's sizes: 1, 2, 4, by 8 up to 256, by 16 up to twice max_num_seqs or 512."""
        most = min(2 * max_num_seqs, 512)
        sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
        return cls(tuple(size for size in sizes if size <= most))

    def padded(self, num_tokens: int) -> int:
        """Answer the tokens that a step of *num_tokens* runs as."""
        if num_tokens > self._last:
            return num_tokens
        return self.sizes[bisect_left(self.sizes, num_tokens)]


class KernelStepTime:
    """Prices a step kernel by kernel.

    Args:
        num_layers: of the model, each with one call of *attention*.
        calls: every other kernel.
        attention: of one layer.
        sources: where the times come from.
        graphs: what numbers of tokens are padded to.
        fallback: of batches that *attention* does not know; None refuses them.
        table: the timing table among them, if there is one.
        host_overhead_ps: of every step, in picoseconds.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        calls: Sequence[PricedCall],
        attention: AttentionCost,
        sources: tuple[TimeSource, ...],
        graphs: CudaGraphs,
        fallback: AttentionCost | None = None,
        table: TableFile | None = None,
        host_overhead_ps: float = 0.0,
    ) -> None:
        self.sources, self.table = sources, table
        self.num_outside = 0
        self._num_layers = num_layers
        self._token_calls = [call for call in calls if call.term != PER_SEQUENCE]
        self._sequence_calls = [call for call in calls if call.term == PER_SEQUENCE]
        self._attention, self._fallback = attention, fallback
        self._graphs = graphs
        self._overhead = host_overhead_ps
        self._of_tokens: dict[int, float] = {}
        self._of_sequences: dict[int, float] = {}
        self._tokens_outside: set[int] = set()
        self._sequences_outside: set[int] = set()
        self._lines: dict[int, list[DecodeLine]] = {}

    def step_time(self, batch: StepBatch) -> int:
        """Answer the time of *batch*, in ticks."""
        num_decodes, decode_context = batch.num_decodes, batch.decode_context
        prefills = batch.prefills
        if not prefills:
            fixed, per_context, _ = self.decode_line(num_decodes, decode_context)
            return fixed + per_context * decode_context
        is_outside = False
        attention = self._attention.step_time(prefills, num_decodes, decode_context)
        if attention is None and self._fallback is not None:
            attention = self._fallback.step_time(prefills, num_decodes, decode_context)
            is_outside = True
        if attention is None:
            raise self._outside(batch)
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        step = self._fixed(num_tokens, num_seqs) + self._num_layers * attention
        is_outside |= num_tokens in self._tokens_outside or num_seqs in self._sequences_outside
        self.num_outside += is_outside
        return round(step * TICKS_PER_PS)

    def decode_line(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """Answer the line of *num_decodes* requests at *decode_context*; each is computed once."""
        lines = self._lines.get(num_decodes)
        if lines is None:
            lines = self._lines[num_decodes] = self._decode_lines(num_decodes)
        for line in lines:  # the first, mostly
            if decode_context <= line.max_context:
                return line
        raise self._outside(StepBatch(num_decodes, decode_context, ()))

    def _decode_lines(self, num_decodes: int) -> list[DecodeLine]:
        fixed = self._fixed(num_decodes, num_decodes)
        segments = self._attention.decode_segments(num_decodes)
        if self._fallback is not None and (not segments or segments[-1].max_context < UNLIMITED):
            segments = segments + self._fallback.decode_segments(num_decodes)
        return [self._decode_line(fixed, segment) for segment in segments]

    def _decode_line(self, fixed: float, segment: Segment) -> DecodeLine:
        """Answer *segment* in whole ticks, exact at its end."""
        end = segment.max_context if segment.max_context < UNLIMITED else 0
        per_context = round(self._num_layers * segment.per_context * TICKS_PER_PS)
        attention = segment.fixed + segment.per_context * end
        at_end = round((fixed + self._num_layers * attention) * TICKS_PER_PS)
        return DecodeLine(at_end - per_context * end, per_context, segment.max_context)

    def _fixed(self, num_tokens: int, num_seqs: int) -> float:
        """Answer the time of all but attention, in picoseconds; each size is computed once."""
        of_tokens = self._of_tokens.get(num_tokens)
        if of_tokens is None:
            padded = self._graphs.padded(num_tokens)
            of_tokens, is_known = _add_times(self._overhead, self._token_calls, padded)
            self._of_tokens[num_tokens] = of_tokens
            if not is_known:
                self._tokens_outside.add(num_tokens)
        of_sequences = self._of_sequences.get(num_seqs)
        if of_sequences is None:
            of_sequences, is_known = _add_times(0.0, self._sequence_calls, num_seqs)
            self._of_sequences[num_seqs] = of_sequences
            if not is_known:
                self._sequences_outside.add(num_seqs)
        return of_tokens + of_sequences

    def _outside(self, batch: StepBatch) -> TimingRangeError:
        size = f"{batch.num_decodes} decodes with {batch.decode_context} tokens of context in all"
        if batch.prefills:
            longest = max(batch.prefills)
            size += (
                f" and {len(batch.prefills)} chunks, one of {longest[0]} tokens up to {longest[1]}"
            )
        limit = ""
        segments = self._attention.decode_segments(batch.num_decodes) if batch.num_decodes else []
        if segments and segments[-1].max_context < UNLIMITED:
            limit = f", of that many decodes up to {segments[-1].max_context} tokens of context"
        return TimingRangeError(
            f"the timing table has attention for {self._attention.covers}{limit}; a step has "
            f"{size}: {_WHAT_HELPS}"
        )

    def split(self, rows: Columns) -> dict[str, float]:
        """Answer the seconds that each term took over *rows*, in the order of a step.

        Attention is what is left of a row when all else is priced; in a step with chunks and
        decodes, what it takes beyond its decodes alone is the chunks'.
        """
        num_steps = rows["num_steps"].astype(np.int64)
        chunk_tokens = rows["num_prefill_tokens"].astype(np.int64)
        num_decodes = (rows["num_decodes"] + rows["num_late_decodes"]).astype(np.int64)
        num_seqs = (rows["num_decodes"] + rows["num_prefills"]).astype(np.int64)
        busy = num_seqs > 0
        padded = _each(num_decodes + chunk_tokens, self._graphs.padded).astype(np.int64)
        terms: dict[str, float] = {}
        left = np.where(busy, rows["duration_ps"], 0).astype(np.float64)
        for calls, sizes in ((self._token_calls, padded), (self._sequence_calls, num_seqs)):
            for call in calls:
                times = num_steps * np.where(busy, _each(sizes, call.time), 0.0)
                terms[call.term] = terms.get(call.term, 0.0) + float(times.sum())
                left -= times
        if self._overhead:
            terms["host overhead"] = self._overhead * float(num_steps[busy].sum())
            left -= np.where(busy, num_steps * self._overhead, 0.0)
        mixed = chunk_tokens > 0
        contexts = rows["decode_context"].astype(np.int64)
        decodes = np.where(mixed, 0.0, left)
        beside = decode_times(self._attention, num_decodes[mixed], contexts[mixed])
        if self._fallback is not None:
            instead = decode_times(self._fallback, num_decodes[mixed], contexts[mixed])
            beside = np.where(np.isnan(beside), instead, beside)
        # One call for all may take less than the decodes alone, where one of them was measured so.
        alone = self._num_layers * np.nan_to_num(beside)
        decodes[mixed] = np.clip(alone, 0, np.maximum(left[mixed], 0))
        terms["decode attention"] = float(decodes.sum())
        terms["prefill attention"] = float((left - decodes).sum())
        return {term: time / PS_PER_S for term, time in terms.items()}

    def steps_outside(self, rows: Columns) -> int:
        """Answer the steps of *rows* without chunks that the fallback priced, a kernel or all."""
        pure = (rows["num_prefill_tokens"] == 0) & (rows["num_steps"] > 0)
        num_decodes = (rows["num_decodes"] + rows["num_late_decodes"]).astype(np.int64)[pure]
        contexts = rows["decode_context"].astype(np.int64)[pure]
        unknown = np.isnan(decode_times(self._attention, num_decodes, contexts))
        unknown |= np.isin(num_decodes, list(self._tokens_outside | self._sequences_outside))
        return int(rows["num_steps"].astype(np.int64)[pure][unknown].sum())


def _add_times(start: float, calls: Iterable[PricedCall], size: int) -> tuple[float, bool]:
    """Answer *start* and the times of *calls* at *size*; and whether no fallback priced any."""
    total, is_known = start, True
    for call in calls:
        time = call.cost.at(size)
        if time is None:
            time, is_known = call.time_outside(size), False
        total += call.launches * time
    return total, is_known


def _each(sizes: IntArray, of: Callable[[int], float]) -> FloatArray:
    """Answer *of* every one of *sizes*, computed once for each that occurs; 0 stays 0."""
    values, places = np.unique(sizes, return_inverse=True)
    answers = [of(size) if size else 0 for size in values.tolist()]
    times: FloatArray = np.array(answers)[places]
    return times
