"""Contiguous allocation: a request reserves one extent for its whole life when it is admitted.

The systems before PagedAttention: the Orca baselines of the vLLM paper (arXiv 2309.06180, sections
3.1 and 6.1), which reserve for the model's maximum (``max``), for the prompt and the next power of
two of what will be generated (``pow2``), or for exactly what will be written (``oracle``).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Protocol

from sim.allocators.base import Holding, MemoryMap, require_equal
from sim.allocators.values import NOTHING_NEW, NOTHING_TAKEN, Allocation, MemoryStats
from sim.config import CacheConfig, SchedulerConfig
from sim.kv_pool import KVPool, check_max_model_len
from sim.request import Request


class _Placement(Protocol):
    """Where in the pool an extent goes."""

    def take(self, size: int) -> int | None:
        """Answer the first slot of an extent of *size* slots, now taken, or None."""

    def give_back(self, start: int, size: int) -> None:
        """Free the extent that `take` answered for *size*."""

    def extent(self, size: int) -> int:
        """Answer the slots that a reservation of *size* occupies, rounding included."""

    def num_fitting(self, extent: int) -> int:
        """Answer how many extents of *extent* slots go into the holes."""

    def holes(self) -> list[tuple[int, int]]:
        """Answer (start, size) of every free extent, by start."""


class FirstFit:
    """The lowest hole that is large enough; neighbouring holes merge."""

    def __init__(self, capacity: int) -> None:
        self._holes = [(0, capacity)]

    def take(self, size: int) -> int | None:
        """See `_Placement`."""
        for position, (start, hole) in enumerate(self._holes):
            if hole >= size:
                if hole == size:
                    del self._holes[position]
                else:
                    self._holes[position] = (start + size, hole - size)
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """See `_Placement`."""
        holes = self._holes
        position = bisect_left(holes, (start, 0))
        if position < len(holes) and holes[position][0] == start + size:
            size += holes.pop(position)[1]
        if position and sum(holes[position - 1]) == start:
            start, size = holes[position - 1][0], holes[position - 1][1] + size
            holes[position - 1] = (start, size)
        else:
            holes.insert(position, (start, size))

    def extent(self, size: int) -> int:
        """See `_Placement`."""
        return size

    def num_fitting(self, extent: int) -> int:
        """See `_Placement`."""
        return sum([hole // extent for _, hole in self._holes])

    def holes(self) -> list[tuple[int, int]]:
        """See `_Placement`."""
        return list(self._holes)


class Buddy:
    """Extents of a power of two slots, split in halves and merged with their buddy (Knuth 2.5).

    A pool that is no power of two starts as its binary pieces, largest first, so that every piece
    is aligned to its size and the buddy of an extent is always ``start ^ size``.
    """

    def __init__(self, capacity: int) -> None:
        self._starts: dict[int, list[int]] = {1 << bit: [] for bit in range(capacity.bit_length())}
        start = 0
        for size in reversed(self._starts):
            if capacity & size:
                self._starts[size].append(start)
                start += size

    def take(self, size: int) -> int | None:
        """See `_Placement`; the lowest extent of the smallest size that is large enough."""
        wanted = found = self.extent(size)
        while not self._starts.get(found):
            found *= 2
            if found not in self._starts:
                return None
        start = self._starts[found].pop(0)
        while found > wanted:
            found //= 2
            insort(self._starts[found], start + found)
        return start

    def give_back(self, start: int, size: int) -> None:
        """See `_Placement`."""
        size = self.extent(size)
        while (buddy := start ^ size) in self._starts[size]:
            self._starts[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        insort(self._starts[size], start)

    def extent(self, size: int) -> int:
        """See `_Placement`; the next power of two."""
        return next_power_of_two(size)

    def num_fitting(self, extent: int) -> int:
        """See `_Placement`."""
        return sum([len(starts) * (size // extent) for size, starts in self._starts.items()])

    def holes(self) -> list[tuple[int, int]]:
        """See `_Placement`."""
        return sorted((start, size) for size, starts in self._starts.items() for start in starts)


PLACEMENTS: dict[str, type[FirstFit] | type[Buddy]] = {"first_fit": FirstFit, "buddy": Buddy}


def next_power_of_two(number: int) -> int:
    """Answer the smallest power of two that is at least *number* (≥ 1)."""
    return 1 << (number - 1).bit_length()


class ContiguousAllocator:
    """One reservation a request, at admission; it never grows and so never preempts.

    External fragmentation counts the free slots that the next reservation cannot use: what is left
    of every hole after fitting as many reservations as go in. Their size is max_model_len under
    ``max``; otherwise that of the last refused reservation, until one succeeds. Slots lost to the
    buddy allocator's rounding are free but belong to no hole, so they always count as external
    (the paper's "gaps from the buddy allocator").

    Args:
        pool: gives `KVPool.contiguous_slots`.
        max_model_len: longest sequence, in tokens.
        watermark: share of the slots that an admission must leave free.
        reservation: ``max``, ``pow2`` or ``oracle``.
        placement: ``first_fit`` or ``buddy``.

    Raises:
        ConfigError: unless one reservation for *max_model_len* tokens fits.
    """

    enable_caching = False

    def __init__(
        self,
        pool: KVPool,
        max_model_len: int,
        watermark: float = 0.0,
        *,
        reservation: str = "max",
        placement: str = "first_fit",
    ) -> None:
        self.generation = 0
        self.taken = NOTHING_TAKEN
        self._step = 0  # the next one
        self._num_decoding = 0
        self._capacity = pool.contiguous_slots
        self._max_model_len = max_model_len
        self._watermark_slots = int(watermark * self._capacity)
        self._reservation = reservation
        self._placement: _Placement = PLACEMENTS[placement](self._capacity)
        self._extents: dict[Request, tuple[int, int]] = {}
        self._reserved_slots = 0
        self._live = 0
        self._internal = 0
        self._wanted = max_model_len if reservation == "max" else None
        self._external = self._count_external()
        largest = max((size for _, size in self._placement.holes()), default=0)
        check_max_model_len(
            max_model_len,
            needed=self._placement.extent(max_model_len),
            available=largest,
            unit="contiguous slots",
            longest=largest,
        )

    @classmethod
    def from_config(
        cls, cache: CacheConfig, scheduler: SchedulerConfig, pool: KVPool, max_model_len: int
    ) -> "ContiguousAllocator":
        """Build it from the resolved configuration (`sim.allocators.ALLOCATORS`)."""
        return cls(
            pool,
            max_model_len,
            scheduler.watermark,
            reservation=cache.reservation,
            placement=cache.placement,
        )

    def find_longest_cache_hit(self, request: Request) -> int:
        """Answer 0: nothing is shared."""
        del request
        return 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = False,
    ) -> Allocation | None:
        """Reserve at the first call, grant from the reservation later (see `Allocator`).

        The reservation covers the whole sequence, so *full_sequence_must_fit* adds nothing.
        """
        del num_new_computed_tokens, full_sequence_must_fit
        if request in self._extents:
            self._live += num_new_tokens
            return NOTHING_NEW
        size = self._reservation_of(request)
        free = self._capacity - self._reserved_slots
        room = free - self._watermark_slots if keep_watermark else free
        start = self._placement.take(size) if size <= room else None
        if start is None:
            if self._reservation != "max" and self._wanted != size:
                self._wanted = size
                self._external = self._count_external()
            return None
        self._extents[request] = (start, size)
        self._reserved_slots += size
        self._live += num_new_tokens
        self._internal += size - request.final_num_computed_tokens
        if self._reservation != "max":
            self._wanted = None
        self._external = self._count_external()
        return Allocation(start=start, size=size)

    def free(self, request: Request) -> None:
        """Give up the reservation (see `Allocator.free`)."""
        start, size = self._extents.pop(request)
        self._placement.give_back(start, size)
        self._reserved_slots -= size
        self._live -= request.num_computed_tokens
        self._internal -= size - request.final_num_computed_tokens
        self._external = self._count_external()
        self.generation += 1

    def join(self, requests: Sequence[Request], step: int) -> None:
        """See `DecodeRuns.join`; all they will need is reserved."""
        self._step = step
        self._num_decoding += len(requests)

    def leave(self, requests: Sequence[Request]) -> None:
        """See `DecodeRuns.leave`."""
        self._num_decoding -= len(requests)

    def grant(self, step: int, max_steps: int) -> int:
        """Answer *max_steps* (see `DecodeRuns.grant`)."""
        self._live += self._num_decoding * max_steps
        self._step = step + max_steps
        return max_steps

    def touched(self, step: int) -> list[Request]:
        """Answer nobody (see `DecodeRuns.touched`)."""
        del step
        return []

    def serve(self, requests: Sequence[Request], step: int) -> int:
        """Answer how many there are (see `DecodeRuns.serve`): all they need is reserved."""
        del step
        return len(requests)

    def advance(self, step: int) -> None:
        """See `DecodeRuns.advance`."""
        self.grant(step, 1)

    def stats(self) -> MemoryStats:
        """Answer the split of the pool (see `Allocator.stats`)."""
        capacity, reserved, live, internal = (
            self._capacity,
            self._reserved_slots,
            self._live,
            self._internal,
        )
        return MemoryStats(
            capacity,
            live,
            reserved - live - internal,
            internal,
            0,
            capacity - reserved,
            self._external,
        )

    def check_integrity(self) -> None:
        """Recount slots and walk the pool from end to end (see `Allocator.check_integrity`)."""
        extents = [
            (start, self._placement.extent(size), size) for start, size in self._extents.values()
        ]
        pieces = sorted([(start, size) for start, size, _ in extents] + self._placement.holes())
        end = 0
        for start, size in pieces:
            require_equal("start of an extent or hole", start, end)
            end += size
        require_equal("slots", self._capacity, end)
        require_equal("reserved slots", self._reserved_slots, sum(size for _, _, size in extents))
        live = sum(self._num_computed(request) for request in self._extents)
        require_equal("live slots", self._live, live)
        written = sum(request.final_num_computed_tokens for request in self._extents)
        require_equal("internal slots", self._internal, self._reserved_slots - written)
        require_equal("external slots", self._external, self._count_external())

    def memory_map(self) -> MemoryMap:
        """See `HasMemoryMap.memory_map`; a place is a slot."""
        holdings, unusable = [], []
        for request, (start, size) in self._extents.items():
            holdings.append(
                Holding(request, range(start, start + size), self._num_computed(request))
            )
            if rounding := self._placement.extent(size) - size:
                unusable.append(range(start + size, start + size + rounding))
        wanted = self._wanted or 1
        extent = self._placement.extent(wanted)
        for start, size in self._placement.holes():
            usable = size // extent * wanted
            if usable < size:
                unusable.append(range(start + usable, start + size))
        return MemoryMap(1, 0, self._capacity, holdings, unusable=unusable)

    def _num_computed(self, request: Request) -> int:
        # Nobody ever joins an allocator whose decodes are served one by one (`SingleSteps`).
        joined = self._num_decoding > 0 and request.is_decoding
        return request.offset + self._step if joined else request.num_computed_tokens

    def _reservation_of(self, request: Request) -> int:
        if self._reservation == "oracle":
            return request.final_num_computed_tokens
        if self._reservation == "pow2":
            size = request.num_prompt_tokens + next_power_of_two(request.max_tokens)
            return min(size, self._max_model_len)
        return self._max_model_len

    def _count_external(self) -> int:
        free = self._capacity - self._reserved_slots
        wanted = self._wanted or 1
        return free - self._placement.num_fitting(self._placement.extent(wanted)) * wanted
