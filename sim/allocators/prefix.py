"""Paged allocation with prefix sharing: full blocks stay findable by the prefix they end.

vLLM 0.33.0 with prefix caching on: ``v1/core/block_pool.py`` (``cache_full_blocks``,
``get_cached_block``, ``touch``, ``free_blocks``, ``_maybe_evict_cached_block``) and
``v1/core/single_type_kv_cache_manager.py`` (``find_longest_cache_hit``). The key of a block is
`Request.prefix_key`, which names the whole prefix as vLLM's chained hash does.
"""

from collections import OrderedDict

from sim.allocators.base import require_equal
from sim.allocators.paged import PagedAllocator
from sim.kv_spec import KVPool
from sim.request import Request


class PrefixCachingAllocator(PagedAllocator):
    """Paged blocks with hashes, reference counts and least-recently-used eviction.

    A block is entered under its key when the step that fills it is scheduled, and stays findable
    after its last holder frees it, at the back of the free list, until it is taken for something
    else. Blocks with equal keys are not merged: look-up answers the first one entered.
    """

    enable_caching = True

    def __init__(self, pool: KVPool, max_model_len: int, watermark: float = 0.0) -> None:
        super().__init__(pool, max_model_len, watermark)
        self._ref_cnt: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._num_hashed: dict[Request, int] = {}
        self._keys: dict[Request, list[int]] = {}

    def find_longest_cache_hit(self, request: Request) -> int:
        """Answer the leading tokens in cached full blocks (see `Allocator`).

        The last token is always computed, so at most ``(num_tokens - 1) // block_size`` blocks.
        """
        num_blocks = (request.num_tokens - 1) // self.block_size
        keys = self._prefix_keys(request, num_blocks)
        block_of = self._block_of
        num_hits = 0
        while num_hits < num_blocks and keys[num_hits] in block_of:
            num_hits += 1
        return num_hits * self.block_size

    def check_integrity(self) -> None:
        """Recount as plain paging does, and the hashes and reference counts."""
        super().check_integrity()
        for request, table in self._tables.items():
            num_full = request.num_computed_tokens // self.block_size
            require_equal(
                f"hashed blocks of {request.request_id}", self._num_hashed[request], num_full
            )
            for position, block in enumerate(table[:num_full]):
                key = request.prefix_key((position + 1) * self.block_size)
                require_equal(f"key of block {block}", self._key_of[block], key)
        entered = sorted([*self._block_of.values(), *(b for c in self._copies.values() for b in c)])
        require_equal("entries of the cache", len(entered), len(set(entered)))
        require_equal("blocks without their entry", 0, len(self._key_of.keys() ^ set(entered)))
        for key, block in self._block_of.items():
            require_equal(f"key of the cached block {block}", key, self._key_of[block])

    def _prefix_keys(self, request: Request, num_blocks: int) -> list[int]:
        """Answer the keys of at least the first *num_blocks* blocks, each computed once."""
        keys = self._keys.setdefault(request, [])
        for position in range(len(keys), num_blocks):
            keys.append(request.prefix_key((position + 1) * self.block_size))
        return keys

    def _hit_blocks(self, request: Request, num_tokens: int) -> list[int]:
        if not num_tokens:
            return []
        keys = self._prefix_keys(request, num_tokens // self.block_size)
        return [self._block_of[key] for key in keys[: num_tokens // self.block_size]]

    def _num_unheld(self, blocks: list[int]) -> int:
        return sum(block in self._evictable for block in blocks)

    def _hold(self, request: Request, blocks: list[int]) -> None:
        self._num_hashed[request] = len(blocks)
        for block in blocks:
            if block in self._evictable:
                del self._evictable[block]
                self._num_free -= 1
                self._live += self.block_size
            self._ref_cnt[block] = self._ref_cnt.get(block, 0) + 1

    def _take(self, num_blocks: int) -> list[int]:
        blocks = super()._take(num_blocks)
        while len(blocks) < num_blocks:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            self._ref_cnt[block] = 1
        return blocks

    def _after_grant(self, request: Request, num_tokens: int) -> None:
        """Enter the blocks that this step fills.

        Before it runs: later requests of the same step can hit them already.
        """
        num_full = num_tokens // self.block_size
        num_hashed = self._num_hashed[request]
        if num_hashed == num_full:
            return
        self._num_hashed[request] = num_full
        keys = self._prefix_keys(request, num_full)
        table = self._tables[request]
        for position in range(num_hashed, num_full):
            key, block = keys[position], table[position]
            self._key_of[block] = key
            if self._block_of.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)

    def _release(self, request: Request, table: list[int]) -> None:
        del self._num_hashed[request]
        self._keys.pop(request, None)
        num_tokens = request.num_computed_tokens - (len(table) - 1) * self.block_size
        for block in reversed(table):
            self._ref_cnt[block] -= 1
            if not self._ref_cnt[block]:
                del self._ref_cnt[block]
                self._num_free += 1
                self._live -= num_tokens
                if block in self._key_of:
                    self._evictable[block] = None
                else:
                    self._returned.append(block)
            num_tokens = self.block_size  # all blocks before the tail are full

    def _forget(self, block: int) -> None:
        """Drop the entry of an evicted block; the next copy of its content takes its place."""
        key = self._key_of.pop(block)
        copies = self._copies.get(key)
        if self._block_of[key] != block:
            assert copies is not None
            copies.remove(block)
        elif copies:
            self._block_of[key] = copies.pop(0)
        else:
            del self._block_of[key]
        if copies is not None and not copies:
            del self._copies[key]

    def _check_free_list(self, holders: dict[int, int]) -> set[int]:
        for block, owners in holders.items():
            require_equal(f"owners of block {block}", self._ref_cnt[block], owners)
        require_equal("blocks with owners", len(self._ref_cnt), len(holders))
        unused = range(self._next_unused, self._num_usable_blocks + 1)
        entries = [*self._returned, *unused, *self._evictable]
        free = set(entries)
        require_equal("entries of the free list", len(free), len(entries))
        return free

    def _num_cached_blocks(self) -> int:
        return len(self._evictable)
