"""Paged allocation: a request holds a table of blocks, anywhere in the pool, taken as it grows.

vLLM 0.33.0 with prefix caching off: ``v1/core/kv_cache_manager.py`` (``allocate_slots``),
``v1/core/block_pool.py`` (``get_new_blocks``, ``free_blocks``); PagedAttention, section 4.2.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from sim.allocators.base import Holding, MemoryMap, require_equal
from sim.allocators.ring import DecodeRing
from sim.allocators.values import NOTHING_TAKEN, Allocation, MemoryStats, Taken
from sim.config import CacheConfig, SchedulerConfig
from sim.kv_pool import NULL_BLOCKS, KVPool, check_max_model_len
from sim.request import Request


class PagedAllocator:
    """Blocks of *block_size* token slots. Block 0 is vLLM's null block and never granted.

    Free blocks are taken from the front of the free list, which is: blocks given back without a
    hash, latest first, then blocks never used, by id. The second part is a counter, so that the
    size of the pool costs nothing.

    A decoding request takes a block every block_size steps, so the batch sits in a ring of
    block_size buckets and a step looks at one of them (`DecodeRing`).

    Args:
        pool: num_gpu_blocks (with the null block) and block_size.
        max_model_len: longest sequence a request may reach, in tokens.
        watermark: share of num_gpu_blocks that an admission must leave free.

    Raises:
        CapacityError: unless one request of *max_model_len* tokens fits.
    """

    enable_caching = False

    def __init__(self, pool: KVPool, max_model_len: int, watermark: float = 0.0) -> None:
        self.block_size = pool.block_size
        self.generation = 0
        self.taken = NOTHING_TAKEN
        self._num_usable_blocks = pool.num_gpu_blocks - NULL_BLOCKS
        self._watermark_blocks = int(watermark * pool.num_gpu_blocks)
        self._tables: dict[Request, list[int]] = {}
        self._returned: list[int] = []
        self._next_unused = NULL_BLOCKS
        self._num_free = self._num_usable_blocks
        self._live = 0
        self._internal = 0
        self._step = 0  # the next one
        self._ring = DecodeRing(self.block_size)
        # By step, the slots never written of the last blocks that requests take in it.
        self._last_blocks: dict[int, int] = {}
        check_max_model_len(
            max_model_len,
            needed=-(-max_model_len // self.block_size),
            available=self._num_usable_blocks,
            unit=f"blocks of {self.block_size} tokens",
            longest=self._num_usable_blocks * self.block_size,
        )

    @classmethod
    def from_config(
        cls, cache: CacheConfig, scheduler: SchedulerConfig, pool: KVPool, max_model_len: int
    ) -> "PagedAllocator":
        """Build it from the resolved configuration (`sim.allocators.ALLOCATORS`)."""
        del cache  # no setting of its own
        return cls(pool, max_model_len, scheduler.watermark)

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
        """Grant ``ceil(tokens / block_size)`` blocks in all (see `Allocator.allocate_slots`)."""
        size = self.block_size
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        num_blocks = -(-num_tokens // size)
        table = self._tables.get(request)
        num_held = len(table) if table else num_new_computed_tokens // size
        num_missing = num_blocks - num_held
        new_blocks: list[int] = []
        if num_missing > 0:
            num_needed = -(-request.num_tokens // size) if full_sequence_must_fit else num_blocks
            room = self._num_free - self._watermark_blocks if keep_watermark else self._num_free
            if num_new_computed_tokens and num_needed > room:
                # Hit blocks that nobody holds leave the free list too: they need room, too.
                room -= self._num_unheld_hits(request, num_new_computed_tokens)
            if num_needed - num_held > room:
                return None
            if table is None:
                table = self._hold_hits(request, num_held) if num_held else []
                self._tables[request] = table
            new_blocks = self._take(num_missing)
            table += new_blocks
            never_written = num_blocks * size - request.final_num_computed_tokens
            if never_written > 0:  # the last block it will ever need
                self._internal += never_written
        self._live += num_new_tokens
        self._after_grant(request, num_tokens)
        return Allocation(new_blocks)

    def free(self, request: Request) -> None:
        """Take back its blocks, tail first (see `Allocator.free`)."""
        table = self._tables.pop(request)
        self._internal -= self._never_written(request, len(table))
        self._release(request, table)
        self.generation += 1

    def stats(self) -> MemoryStats:
        """Answer the split of the pool (see `Allocator.stats`)."""
        size = self.block_size
        held = (self._num_usable_blocks - self._num_free) * size
        cached = self._num_cached_blocks() * size
        live, internal = self._live, self._internal
        return MemoryStats(
            self._num_usable_blocks * size,
            live,
            held - live - internal,
            internal,
            cached,
            self._num_free * size - cached,
        )

    def join(self, requests: Sequence[Request], step: int) -> None:
        """See `DecodeRuns.join`."""
        self._step = step
        size = self.block_size
        self._ring.join(requests, self._tables)
        for request in requests:
            num_tokens = request.final_num_computed_tokens
            never_written = -num_tokens % size
            if never_written:
                at = num_tokens + never_written - size - request.offset
                if at >= step:
                    self._last_blocks[at] = self._last_blocks.get(at, 0) + never_written

    def leave(self, requests: Sequence[Request]) -> None:
        """See `DecodeRuns.leave`."""
        self._ring.leave(requests)
        for request in requests:
            num_tokens = request.final_num_computed_tokens
            if request.num_computed_tokens < num_tokens:
                never_written = -num_tokens % self.block_size
                at = num_tokens + never_written - self.block_size - request.offset
                if never_written and at >= self._step:  # it will not
                    left = self._last_blocks.pop(at) - never_written
                    if left:
                        self._last_blocks[at] = left

    def grant(self, step: int, max_steps: int) -> int:
        """See `DecodeRuns.grant`."""
        return self._grant_run(step, max_steps) if max_steps > 1 else self._grant_step(step)

    def _grant_step(self, step: int) -> int:
        """See `grant`: a single step looks at one bucket."""
        bucket = self._ring.at(step)
        if bucket:
            if len(bucket) > self._num_free:
                return 0
            _deal(self._take(len(bucket)), list(bucket.values()))
            self._internal += self._last_blocks.pop(step, 0)
        self.taken = NOTHING_TAKEN
        self._live += self._ring.num_requests
        self._step = step + 1
        return 1

    def _grant_run(self, step: int, max_steps: int) -> int:
        """See `grant`: the blocks of all steps are taken as one, and dealt out in order."""
        ring, num_steps = self._ring, max_steps
        tables, num_blocks, first, second = ring.needs(step, num_steps)
        if num_blocks > self._num_free:
            num_steps = ring.steps_within(step, max_steps, self._num_free)
            if num_steps <= 1:
                return self._grant_step(step) if num_steps else 0
            tables, num_blocks, first, second = ring.needs(step, num_steps)
        size = self.block_size
        held = (first * size, second * size)
        num_unhashed = self._num_free - self._num_cached_blocks()
        blocks = self._take(num_blocks)
        if num_blocks == len(tables):
            _deal(blocks, tables)
        else:
            for place, table in enumerate(tables):
                table.extend(blocks[place :: len(tables)])
        cached = (0, 0)
        if num_blocks > num_unhashed:
            unhashed = ring.moments_of_first(step, num_unhashed)
            cached = ((first - unhashed[0]) * size, (second - unhashed[1]) * size)
        self.taken = Taken(held, self._count_last_blocks(step, step + num_steps), cached)
        self._live += ring.num_requests * num_steps
        self._step = step + num_steps
        return num_steps

    def _count_last_blocks(self, step: int, end: int) -> tuple[int, int]:
        """Count what is never written of last blocks taken till *end*; answer `Taken.internal`."""
        last_blocks = self._last_blocks
        first = second = 0
        steps: Iterable[int] = range(step, end)
        if end - step > len(last_blocks):
            steps = [at for at in last_blocks if at < end]
        for at in steps:
            slots = last_blocks.pop(at, 0)
            offset = at - step
            self._internal += slots
            first += slots * offset
            second += slots * (offset * (offset - 1) // 2)
        return first, second

    def touched(self, step: int) -> list[Request]:
        """See `DecodeRuns.touched`."""
        return list(self._ring.at(step))

    def serve(self, requests: Sequence[Request], step: int) -> int:
        """See `DecodeRuns.serve`."""
        bucket = self._ring.at(step)
        tables: list[list[int]] = []
        num_served = 0
        for request in requests:
            table = bucket.get(request)
            if table is not None:
                if len(tables) == self._num_free:
                    break
                tables.append(table)
                self._internal += self._never_written(request, len(table) + 1)
            num_served += 1
        _deal(self._take(len(tables)), tables)
        return num_served

    def advance(self, step: int) -> None:
        """See `DecodeRuns.advance`."""
        # Served one by one, last blocks were counted as they were taken.
        self._last_blocks.pop(step, None)
        self._live += self._ring.num_requests
        self._step = step + 1
        self.taken = NOTHING_TAKEN

    def check_integrity(self) -> None:
        """Recount blocks, owners and slots (see `Allocator.check_integrity`)."""
        size = self.block_size
        holders: dict[int, int] = {}
        tokens_in: dict[int, int] = {}
        internal = 0
        for request, table in self._tables.items():
            computed = self._num_computed(request)
            require_equal(f"blocks of {request.request_id}", len(table), -(-computed // size))
            internal += self._never_written(request, len(table))
            for position, block in enumerate(table):
                holders[block] = holders.get(block, 0) + 1
                tokens_in[block] = min(size, computed - position * size)
        free = self._check_free_list(holders)
        require_equal("blocks held + free", self._num_usable_blocks, len(holders) + len(free))
        require_equal("blocks both held and free", 0, len(holders.keys() & free))
        require_equal("free blocks", self._num_free, len(free))
        require_equal("live slots", self._live, sum(tokens_in.values()))
        require_equal("internal slots", self._internal, internal)
        stats = self.stats()
        require_equal("slots", stats.capacity, stats.held + stats.cached + stats.free)

    def block_table(self, request: Request) -> list[int]:
        """Answer a copy of the block ids of *request*, in token order."""
        return list(self._tables[request])

    def memory_map(self) -> MemoryMap:
        """See `HasMemoryMap.memory_map`; a place is a block."""
        holdings = [
            Holding(request, list(table), self._num_computed(request))
            for request, table in self._tables.items()
        ]
        return MemoryMap(
            self.block_size, NULL_BLOCKS, self._num_usable_blocks, holdings, self._cached_blocks()
        )

    def _num_computed(self, request: Request) -> int:
        """Answer the tokens it has computed, decoding or not."""
        # Nobody ever joins an allocator whose decodes are served one by one (`SingleSteps`).
        joined = request.is_decoding and self._ring.num_requests
        return request.offset + self._step if joined else request.num_computed_tokens

    def _never_written(self, request: Request, num_blocks: int) -> int:
        """Answer the slots in its first *num_blocks* blocks that its last token does not reach."""
        return max(0, num_blocks * self.block_size - request.final_num_computed_tokens)

    def _take(self, num_blocks: int) -> list[int]:
        """Remove blocks from the front of the free list; there are enough."""
        self._num_free -= num_blocks
        returned = self._returned
        first_taken = max(0, len(returned) - num_blocks)
        blocks = returned[first_taken:]
        del returned[first_taken:]
        blocks.reverse()
        if len(blocks) < num_blocks:
            first = self._next_unused
            end = min(first + num_blocks - len(blocks), self._num_usable_blocks + NULL_BLOCKS)
            self._next_unused = end
            blocks += range(first, end)
        return blocks

    def _release(self, request: Request, table: list[int]) -> None:
        """Put the blocks of *request* on the free list and take its slots from the live ones."""
        # Offered tail first and put at the front as one run: the tail block is taken next.
        self._returned += table
        self._num_free += len(table)
        self._live -= request.num_computed_tokens

    def _check_free_list(self, holders: dict[int, int]) -> set[int]:
        """Answer the free blocks, recounted; *holders* counts the owners of every held block."""
        require_equal("most owners of a block", 1, max(holders.values(), default=1))
        unused = range(self._next_unused, self._num_usable_blocks + NULL_BLOCKS)
        free = set(self._returned) | set(unused)
        require_equal("entries of the free list", len(free), len(self._returned) + len(unused))
        return free

    # What prefix sharing adds (`sim.allocators.prefix`); plain paging shares and caches nothing.

    def _num_cached_blocks(self) -> int:
        """Answer how many of the free blocks are kept for reuse."""
        return 0

    def _cached_blocks(self) -> list[int]:
        """Answer the blocks that `_num_cached_blocks` counts."""
        return []

    def _num_unheld_hits(self, request: Request, num_tokens: int) -> int:
        """Answer how many blocks of a hit nobody holds."""
        del request, num_tokens
        return 0

    def _hold_hits(self, request: Request, num_blocks: int) -> list[int]:
        """Let *request* hold the blocks of its hit; answer them."""
        del request, num_blocks
        return []

    def _after_grant(self, request: Request, num_tokens: int) -> None:
        pass


def _deal(blocks: list[Any], tables: list[list[Any]]) -> None:  # Any: compiled, int is made anew
    """Append a block to each of *tables*."""
    for place, table in enumerate(tables):
        table.append(blocks[place])
