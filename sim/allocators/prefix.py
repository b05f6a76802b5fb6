"""Paged allocation with prefix sharing: full blocks stay findable by the prefix they end.

vLLM 0.33.0 with prefix caching on: ``v1/core/block_pool.py`` (``cache_full_blocks``) and
``v1/core/single_type_kv_cache_manager.py`` (``find_longest_cache_hit``).

vLLM hashes every full block. A block whose content no other request has can only be found by its
own request, after a preemption; so it needs no key while its request runs, and none at all when its
request has finished: the private blocks of a finished request enter the free list as one entry.
"""

from collections.abc import Sequence

import numpy as np

from sim.allocators.base import require_equal
from sim.allocators.block_cache import (
    FEW,
    NO_KEY,
    BlockCache,
    Keys,
    PrefixKeys,
    as_array,
    key_at,
    place_of,
)
from sim.allocators.paged import PagedAllocator
from sim.allocators.values import Allocation
from sim.config import CacheConfig, SchedulerConfig
from sim.kv_pool import NULL_BLOCKS, KVPool
from sim.request import Request, RequestStatus
from workloads.record import IntArray

ANY_KEY = -2
"""Not a key: stands for every one."""


class PrefixCachingAllocator(PagedAllocator):
    """Paged blocks with keys, reference counts and least-recently-used eviction.

    A block is entered under its key when the step that fills it is scheduled, and stays findable
    after its last holder frees it, at the back of the free list, until it is taken for something
    else (`BlockCache`).

    Under asynchronous scheduling a step is decided before the token is known that the step before
    it samples. A decoding request fills a block with just that token, so the block is entered one
    step later, when the request takes its next block; or when the request finishes.

    Args:
        pool: see `PagedAllocator`, as of the next two.
        max_model_len: see there.
        watermark: see there.
        async_scheduling: whether it is so.
        enable_chunked_prefill: without it the head of the queue may be refused for its length, of
            which an allocator is not told.
    """

    enable_caching = True

    def __init__(
        self,
        pool: KVPool,
        max_model_len: int,
        watermark: float = 0.0,
        *,
        async_scheduling: bool = False,
        enable_chunked_prefill: bool = True,
    ) -> None:
        super().__init__(pool, max_model_len, watermark)
        self._lag = int(async_scheduling)
        self._cache = BlockCache()
        self._prefix_keys = PrefixKeys(self.block_size)
        self._keys: dict[Request, list[Keys]] = {}
        self._num_keyed: dict[Request, int] = {}
        self._keyed: dict[Request, list[IntArray]] = {}  # `_as_arrays`
        # Decoding requests that enter keys when they fill blocks, or *_lag* steps later: by step
        # modulo block_size.
        self._fill_ring: dict[int, dict[Request, None]] = {}
        self._evictions_matter = False
        # The key that lets the refused head of the queue find more when it is entered; `NO_KEY` if
        # nothing does or nobody was refused, `ANY_KEY` if it is not known.
        self._none_awaited = NO_KEY if enable_chunked_prefill else ANY_KEY
        self._awaited = self._none_awaited

    @classmethod
    def from_config(
        cls, cache: CacheConfig, scheduler: SchedulerConfig, pool: KVPool, max_model_len: int
    ) -> "PrefixCachingAllocator":
        """Build it from the resolved configuration (`sim.allocators.ALLOCATORS`)."""
        del cache  # no setting of its own
        return cls(
            pool,
            max_model_len,
            scheduler.watermark,
            async_scheduling=scheduler.async_scheduling,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
        )

    def find_longest_cache_hit(self, request: Request) -> int:
        """Answer the leading tokens in cached full blocks (see `Allocator`).

        The last token is always computed, so at most ``(num_tokens - 1) // block_size`` blocks.
        """
        size = self.block_size
        num_blocks = min((request.num_tokens - 1) // size, self._num_findable(request))
        if not num_blocks:
            return 0
        return self._cache.num_found(self._keys_of(request), num_blocks) * size

    def join(self, requests: Sequence[Request], step: int) -> None:
        """See `DecodeRuns.join`."""
        super().join(requests, step)
        for request in requests:
            if self._num_findable(request) > self._num_keyed.get(request, 0):
                # It fills a block in the step before it takes the next.
                phase = (self._lag - 1 - request.offset) % self.block_size
                self._fill_ring.setdefault(phase, {})[request] = None

    def leave(self, requests: Sequence[Request]) -> None:
        """See `DecodeRuns.leave`."""
        super().leave(requests)
        if self._fill_ring:
            for request in requests:
                self._drop_filler(request)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = False,
    ) -> Allocation | None:
        """See `PagedAllocator.allocate_slots`."""
        is_admission = request not in self._tables
        allocation = super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            keep_watermark=keep_watermark,
        )
        if is_admission:
            self._awaited = self._none_awaited
            if allocation is None:
                # Without the gate a shorter hit can leave a chunk that needs less room.
                self._evictions_matter = not full_sequence_must_fit
                self._awaited = self._key_after(request, num_new_computed_tokens)
        return allocation

    def grant(self, step: int, max_steps: int) -> int:
        """See `DecodeRuns.grant`."""
        if not self._fill_ring and not self._evictions_matter:
            return super().grant(step, max_steps)
        # A step that enters the key awaited, or evicts one that matters, is the first of a run or
        # in none.
        if max_steps > 1:
            max_steps = min(max_steps, self._steps_to_awaited(step, max_steps) or 1)
        if self._evictions_matter:
            num_unhashed = self._num_free - self._num_cached_blocks()
            max_steps = self._ring.steps_within(step, max_steps, num_unhashed) or 1
        granted = super().grant(step, max_steps)
        # When the others are entered makes no difference: nobody looks them up, and nobody can
        # evict a block that is held.
        for at in range(step, step + granted):
            if not self._fill_ring:
                break
            self._fill(list(self._fill_ring.get(at % self.block_size, ())), at)
        return granted

    def _fill(self, fillers: list[Request], step: int) -> None:
        """Enter the blocks that *fillers* fill in *step*."""
        for request in fillers:
            self._after_grant(request, request.offset + step + 1)

    def _steps_to_awaited(self, step: int, max_steps: int) -> int:
        """Answer how many steps from *step* on pass before one enters the key awaited."""
        size, awaited = self.block_size, self._awaited
        if awaited == NO_KEY:
            return max_steps
        if awaited == ANY_KEY:
            return min([max_steps, *((phase - step) % size for phase in self._fill_ring)])
        for fillers in self._fill_ring.values():
            for request in fillers:
                place = place_of(self._keys_of(request), awaited)
                if place >= self._num_keyed.get(request, 0):
                    filled_at = (place + 1) * size - 1 + self._lag - request.offset
                    max_steps = min(max_steps, max(0, filled_at - step))
        return max_steps

    def _key_after(self, request: Request, num_hit_tokens: int) -> int:
        """Answer the key of the block after the hit of *request*; `NO_KEY` if none is looked up."""
        size = self.block_size
        place = num_hit_tokens // size
        if place >= min((request.num_tokens - 1) // size, self._num_findable(request)):
            return NO_KEY
        return key_at(self._keys_of(request), place)

    def touched(self, step: int) -> list[Request]:
        """See `DecodeRuns.touched`."""
        fillers = self._fill_ring.get(step % self.block_size, ())
        requests = dict.fromkeys([*super().touched(step), *fillers])
        return sorted(requests, key=lambda request: request.order)

    def serve(self, requests: Sequence[Request], step: int) -> int:
        """See `DecodeRuns.serve`."""
        num_served = super().serve(requests, step)
        fillers = self._fill_ring.get(step % self.block_size)
        if fillers:
            self._fill([request for request in requests[:num_served] if request in fillers], step)
        return num_served

    def check_integrity(self) -> None:
        """Recount as plain paging does, and the keys and reference counts."""
        super().check_integrity()
        names: dict[int, int] = {}
        for request, table in self._tables.items():
            num_full = self._num_known_full(request, self._num_computed(request))
            num_keyed = min(num_full, self._num_findable(request))
            require_equal(
                f"keyed blocks of {request!r}", self._num_keyed.get(request, 0), num_keyed
            )
            for position, block in enumerate(table[:num_keyed]):
                # Its key stands for one prefix, and the prefix for one key.
                name = request.prefix_key((position + 1) * self.block_size)
                key = self._cache.key_of(block)
                require_equal(f"prefix of block {block}", names.setdefault(key, name), name)
        require_equal("prefixes", len(names), len(set(names.values())))

    def _num_findable(self, request: Request) -> int:
        """Answer how many leading blocks of *request* can be looked up by anybody."""
        if request.num_preemptions:
            return request.final_num_computed_tokens // self.block_size
        return request.num_shareable_tokens // self.block_size

    def _keys_of(self, request: Request) -> list[Keys]:
        """Answer the keys of all that can be looked up of *request*."""
        keys = self._keys.get(request)
        if keys is None:
            keys = self._prefix_keys.of(request, self._num_findable(request))
            self._keys[request] = keys
            self._cache.reserve(self._prefix_keys.num_keys, self._next_unused)
        return keys

    def _num_cached_blocks(self) -> int:
        return self._cache.num_evictable

    def _cached_blocks(self) -> list[int]:
        return self._cache.evictable()

    def _num_unheld_hits(self, request: Request, num_tokens: int) -> int:
        blocks = self._cache.find(self._keys_of(request), num_tokens // self.block_size)
        return self._cache.num_unheld(blocks)

    def _hold_hits(self, request: Request, num_blocks: int) -> list[int]:
        self._num_keyed[request] = num_blocks
        blocks = self._cache.find(self._keys_of(request), num_blocks)
        self._keyed[request] = [blocks]
        num_unheld = self._cache.hold(blocks)
        self._num_free -= num_unheld
        self._live += num_unheld * self.block_size
        held: list[int] = blocks.tolist()
        return held

    def _take(self, num_blocks: int) -> list[int]:
        blocks = super()._take(num_blocks)
        missing = num_blocks - len(blocks)
        if missing:
            evicted, num_keyed = self._cache.evict(missing)
            blocks += evicted
            if num_keyed and self._evictions_matter:
                self.generation += 1
        return blocks

    def _after_grant(self, request: Request, num_tokens: int) -> None:
        """Enter the blocks that this step fills, those that others can find.

        Before it runs: later requests of the same step can hit them already.
        """
        num_keyed = self._num_keyed.get(request, 0)
        num_full = num_tokens // self.block_size
        if num_keyed >= num_full:
            return
        if self._lag:
            num_full = self._num_known_full(request, num_tokens)
        num_findable = self._num_findable(request)
        num_full = min(num_full, num_findable)
        if num_keyed < num_full:
            self._enter(request, self._tables[request], num_keyed, num_full)
            if self._awaited == ANY_KEY or (
                self._awaited != NO_KEY
                and num_keyed <= place_of(self._keys_of(request), self._awaited) < num_full
            ):
                self.generation += 1
                self._awaited = self._none_awaited
            if num_full == num_findable and request.is_decoding:
                self._drop_filler(request)

    def _enter(self, request: Request, table: list[int], first: int, end: int) -> None:
        """Enter blocks *first* to *end* of its *table* under their keys."""
        self._num_keyed[request] = end
        keys = self._keys_of(request)
        self._cache.reserve(0, self._next_unused)
        if end - first <= FEW:
            self._cache.enter_few(keys, first, table[first:end])
            return
        self._cache.enter(keys, first, self._as_arrays(request, table, end)[-1][first - end :])

    def _as_arrays(self, request: Request, table: list[int], end: int) -> list[IntArray]:
        """Answer the blocks before *end* as arrays; what came a few at a time is made one now."""
        arrays = self._keyed.setdefault(request, [])
        first = sum(map(len, arrays))
        if first < end:
            arrays.append(as_array(table[first:end]))
        return arrays

    def _enter_rest(self, request: Request, table: list[int], end: int) -> None:
        """Enter the blocks before *end* that have no key yet."""
        num_keyed = self._num_keyed.get(request, 0)
        if num_keyed < end:
            self._enter(request, table, num_keyed, end)

    def _num_known_full(self, request: Request, num_computed: int) -> int:
        """Answer its full blocks of known tokens when it has computed so many, the next included.

        All, but that of what it has decoded since it last computed a prompt, the last token is not
        known yet under asynchronous scheduling.
        """
        # What it had sampled when it was preempted was part of that prompt.
        prompt = max(request.num_prompt_tokens, request.max_num_computed_tokens + 1)
        if num_computed > prompt:
            num_computed -= self._lag
        return num_computed // self.block_size

    def _drop_filler(self, request: Request) -> None:
        phase = (self._lag - 1 - request.offset) % self.block_size
        fillers = self._fill_ring.get(phase)
        if fillers and request in fillers:
            del fillers[request]
            if not fillers:
                del self._fill_ring[phase]

    def _release(self, request: Request, table: list[int]) -> None:
        self._awaited = self._none_awaited
        size = self.block_size
        num_full = request.num_computed_tokens // size
        if request.status is RequestStatus.PREEMPTED:
            num_full = self._num_known_full(request, request.num_computed_tokens)
            if request.num_preemptions == 1:
                # It will look for its own blocks: give those private until now their keys.
                self._keys.pop(request, None)
                self._enter_rest(request, table, num_full)
        elif self._lag:  # its last token is known now
            self._enter_rest(request, table, min(num_full, self._num_findable(request)))
        num_keyed = self._num_keyed.pop(request, 0)
        if num_full < len(table):
            self._returned.append(table[num_full])
        num_unheld = len(table) - num_keyed
        if num_keyed < num_full:
            self._cache.enter_private(table[num_keyed:num_full])
        self._live -= request.num_computed_tokens - num_keyed * size
        if num_keyed:
            keyed = self._as_arrays(request, table, num_keyed)
            del self._keyed[request]
            blocks = np.concatenate(keyed) if len(keyed) > 1 else keyed[0]
            num_freed = self._cache.release(blocks[::-1])
            self._live -= num_freed * size
            num_unheld += num_freed
        self._num_free += num_unheld
        if request.num_computed_tokens == request.final_num_computed_tokens:
            self._keys.pop(request, None)

    def _check_free_list(self, holders: dict[int, int]) -> set[int]:
        self._cache.check_integrity(holders)
        cached = self._cache.evictable()
        unused = range(self._next_unused, self._num_usable_blocks + NULL_BLOCKS)
        entries = [*self._returned, *unused, *cached]
        require_equal("entries of the free list", len(set(entries)), len(entries))
        return set(entries)
