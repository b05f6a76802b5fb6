"""Paged allocation with prefix sharing: full blocks stay findable by the prefix they end.

vLLM 0.33.0 with prefix caching on: ``v1/core/block_pool.py`` (``cache_full_blocks``,
``get_cached_block``, ``touch``, ``free_blocks``, ``_maybe_evict_cached_block``) and
``v1/core/single_type_kv_cache_manager.py`` (``find_longest_cache_hit``). The key of a block is
`Request.prefix_key`, which names the whole prefix as vLLM's chained hash does.

vLLM hashes every full block. A block whose content no other request has can only be found by its
own request, after a preemption; so it needs no key while its request runs, and none at all when its
request has finished: the private blocks of a finished request enter the free list as one entry.
"""

from collections import OrderedDict, defaultdict

from sim.allocators.base import require_equal
from sim.allocators.paged import PagedAllocator
from sim.kv_spec import NULL_BLOCKS, KVPool
from sim.request import Request, RequestStatus


class PrefixCachingAllocator(PagedAllocator):
    """Paged blocks with hashes, reference counts and least-recently-used eviction.

    A block is entered under its key when the step that fills it is scheduled, and stays findable
    after its last holder frees it, at the back of the free list, until it is taken for something
    else. Blocks with equal keys are not merged: look-up answers the first one entered.
    """

    enable_caching = True

    def __init__(self, pool: KVPool, max_model_len: int, watermark: float = 0.0) -> None:
        super().__init__(pool, max_model_len, watermark)
        self._key_of: dict[int, int] = {}
        self._ref_cnt: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        # Hashed blocks that nobody holds, oldest first: a block with a key, or, under a negative
        # number, the private blocks of a finished request in table order, taken from the end.
        self._evictable: OrderedDict[int, list[int] | None] = OrderedDict()
        self._num_private_entries = 0
        self._keys: dict[Request, list[int]] = {}
        self._num_keyed: dict[Request, int] = {}
        self._was_preempted: set[Request] = set()
        self._fill_ring: defaultdict[int, dict[Request, None]] = defaultdict(dict)
        self._evictions_matter = False

    def find_longest_cache_hit(self, request: Request) -> int:
        """Answer the leading tokens in cached full blocks (see `Allocator`).

        The last token is always computed, so at most ``(num_tokens - 1) // block_size`` blocks.
        """
        num_blocks = min((request.num_tokens - 1) // self.block_size, self._num_findable(request))
        keys = self._prefix_keys(request, num_blocks)
        block_of = self._block_of
        num_hits = 0
        while num_hits < num_blocks and keys[num_hits] in block_of:
            num_hits += 1
        return num_hits * self.block_size

    def join(self, request: Request) -> None:
        """See `DecodeRuns.join`."""
        super().join(request)
        if self._num_findable(request) > self._num_keyed[request]:
            # It fills a block in the step before it takes the next.
            ring = self._fill_ring[(-self._offsets[request] - 1) % self.block_size]
            ring[request] = None

    def leave(self, request: Request) -> None:
        """See `DecodeRuns.leave`."""
        ring = self._fill_ring[(-self._offsets[request] - 1) % self.block_size]
        ring.pop(request, None)
        super().leave(request)

    def touched(self) -> list[Request]:
        """See `DecodeRuns.touched`."""
        fillers = self._fill_ring.get(self._step % self.block_size, ())
        requests = dict.fromkeys([*super().touched(), *fillers])
        return sorted(requests, key=lambda request: request.order)

    def serve(self, request: Request) -> bool:
        """See `DecodeRuns.serve`."""
        if not super().serve(request):
            return False
        if request in self._fill_ring.get(self._step % self.block_size, ()):
            self._after_grant(request, self._offsets[request] + self._step + 1)
        return True

    def check_integrity(self) -> None:
        """Recount as plain paging does, and the hashes and reference counts."""
        super().check_integrity()
        for request, table in self._tables.items():
            num_full = self._num_computed(request) // self.block_size
            num_keyed = min(num_full, self._num_findable(request))
            require_equal(f"keyed blocks of {request!r}", self._num_keyed[request], num_keyed)
            for position, block in enumerate(table[:num_keyed]):
                key = request.prefix_key((position + 1) * self.block_size)
                require_equal(f"key of block {block}", self._key_of[block], key)
        entered = sorted([*self._block_of.values(), *(b for c in self._copies.values() for b in c)])
        require_equal("entries of the cache", len(entered), len(set(entered)))
        require_equal("blocks without their entry", 0, len(self._key_of.keys() ^ set(entered)))
        for key, block in self._block_of.items():
            require_equal(f"key of the cached block {block}", key, self._key_of[block])

    def _num_findable(self, request: Request) -> int:
        """Answer how many leading blocks of *request* can be looked up by anybody."""
        if request in self._was_preempted:
            return request.final_num_computed_tokens // self.block_size
        return request.num_shareable_tokens // self.block_size

    def _prefix_keys(self, request: Request, num_blocks: int) -> list[int]:
        """Answer the keys of at least the first *num_blocks* blocks, each computed once."""
        keys = self._keys.get(request)
        if keys is None:
            keys = self._keys[request] = []
        if len(keys) < num_blocks:
            keys += request.prefix_keys(self.block_size, len(keys), num_blocks)
        return keys

    def _hit_blocks(self, request: Request, num_tokens: int) -> list[int]:
        num_blocks = num_tokens // self.block_size
        if not num_blocks:
            return []
        block_of = self._block_of
        return [block_of[key] for key in self._prefix_keys(request, num_blocks)[:num_blocks]]

    def _num_unheld(self, blocks: list[int]) -> int:
        ref_cnt = self._ref_cnt
        return sum(not ref_cnt[block] for block in blocks)

    def _hold(self, request: Request, blocks: list[int]) -> None:
        self._num_keyed[request] = len(blocks)
        ref_cnt = self._ref_cnt
        for block in blocks:
            if not ref_cnt[block]:
                del self._evictable[block]
                self._num_evictable -= 1
                self._num_free -= 1
                self._live += self.block_size
            ref_cnt[block] += 1

    def _take(self, num_blocks: int) -> list[int]:
        blocks = super()._take(num_blocks)
        missing = num_blocks - len(blocks)
        if missing:
            self._num_evictable -= missing
            self._evict(missing, blocks)
        return blocks

    def _evict(self, num_blocks: int, blocks: list[int]) -> None:
        """Move *num_blocks* from the oldest evictable ones to *blocks*; there are enough."""
        evictable = self._evictable
        num_wanted = len(blocks) + num_blocks
        while len(blocks) < num_wanted:
            entry, private = evictable.popitem(last=False)
            if private is None:
                self._forget(entry)
                blocks.append(entry)
                continue
            missing = num_wanted - len(blocks)
            blocks += private[: -missing - 1 : -1]
            if missing < len(private):
                del private[-missing:]
                evictable[entry] = private
                evictable.move_to_end(entry, last=False)

    def _after_grant(self, request: Request, num_tokens: int) -> None:
        """Enter the blocks that this step fills, those that others can find.

        Before it runs: later requests of the same step can hit them already.
        """
        num_full = num_tokens // self.block_size
        num_keyed = self._num_keyed[request]
        if num_keyed >= num_full:
            return
        num_full = min(num_full, self._num_findable(request))
        if num_keyed < num_full:
            self._enter(request, num_keyed, num_full)
            self.generation += 1

    def _enter(self, request: Request, first: int, end: int) -> None:
        """Enter blocks *first* to *end* of its table under their keys."""
        self._num_keyed[request] = end
        keys = self._prefix_keys(request, end)
        table = self._tables[request]
        for position in range(first, end):
            key, block = keys[position], table[position]
            self._key_of[block] = key
            self._ref_cnt[block] = 1
            if self._block_of.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)

    def _release(self, request: Request, table: list[int]) -> None:
        if request.status is RequestStatus.PREEMPTED and request not in self._was_preempted:
            # It will look for its own blocks: give those that were private until now their keys.
            self._was_preempted.add(request)
            num_full = request.num_computed_tokens // self.block_size
            self._tables[request] = table
            self._enter(request, self._num_keyed[request], num_full)
            del self._tables[request]
        num_keyed = self._num_keyed.pop(request)
        self._keys.pop(request, None)
        num_full = request.num_computed_tokens // self.block_size
        if num_full < len(table):
            self._returned.append(table[num_full])
        private = table[num_keyed:num_full]
        if private:
            self._num_private_entries += 1
            self._evictable[-self._num_private_entries] = private
        self._num_evictable += len(private)
        self._num_free += len(table) - num_keyed
        self._live -= request.num_computed_tokens - num_keyed * self.block_size
        ref_cnt = self._ref_cnt
        for block in reversed(table[:num_keyed]):
            ref_cnt[block] -= 1
            if not ref_cnt[block]:
                self._evictable[block] = None
                self._num_evictable += 1
                self._num_free += 1
                self._live -= self.block_size
        if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
            self._was_preempted.discard(request)

    def _forget(self, block: int) -> None:
        """Drop the entry of an evicted block; the next copy of its content takes its place."""
        key = self._key_of.pop(block)
        del self._ref_cnt[block]
        if self._evictions_matter:
            self.generation += 1
        copies = self._copies.get(key)
        if copies is None:
            del self._block_of[key]
            return
        if self._block_of[key] == block:
            self._block_of[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]

    def _on_refused(self, *, full_sequence_must_fit: bool) -> None:
        # Without the gate a shorter hit can leave a chunk that needs less room.
        self._evictions_matter = not full_sequence_must_fit

    def _changes_generation(self, step: int, num_blocks: int, generation: int) -> bool:
        if self.generation != generation or self._fill_ring.get(step % self.block_size):
            return True
        if not self._evictions_matter:
            return False
        num_unhashed = self._num_free - self._num_evictable
        return num_blocks > num_unhashed

    def _fill(self, step: int) -> None:
        for request in self._fill_ring.get(step % self.block_size, ()):
            self._after_grant(request, self._offsets[request] + step + 1)

    def _check_free_list(self, holders: dict[int, int]) -> set[int]:
        keyed_holders = {block: n for block, n in holders.items() if block in self._key_of}
        for block, owners in keyed_holders.items():
            require_equal(f"owners of block {block}", self._ref_cnt[block], owners)
        require_equal("owners in all", sum(self._ref_cnt.values()), sum(keyed_holders.values()))
        unkeyed = (owners for block, owners in holders.items() if block not in keyed_holders)
        require_equal("most owners of a block without a key", 1, max(unkeyed, default=1))
        cached = [
            block
            for entry, private in self._evictable.items()
            for block in ([entry] if private is None else private)
        ]
        require_equal("cached blocks", self._num_evictable, len(cached))
        unused = range(self._next_unused, self._num_usable_blocks + NULL_BLOCKS)
        entries = [*self._returned, *unused, *cached]
        free = set(entries)
        require_equal("entries of the free list", len(free), len(entries))
        return free
