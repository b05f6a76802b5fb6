"""Paged allocation: a request holds a table of blocks, anywhere in the pool, taken as it grows.

vLLM 0.33.0 with prefix caching off: ``v1/core/kv_cache_manager.py`` (``allocate_slots``),
``v1/core/block_pool.py`` (``get_new_blocks``, ``free_blocks``); PagedAttention, section 4.2.
"""

from sim.allocators.base import NOTHING_NEW, Allocation, MemoryStats, require_equal
from sim.config import CacheConfig
from sim.kv_spec import KVPool, check_max_model_len
from sim.request import Request


class PagedAllocator:
    """Blocks of *block_size* token slots. Block 0 is vLLM's null block and never granted.

    Free blocks are taken from the front of the free list, which is: blocks given back without a
    hash, latest first, then blocks never used, by id. The second part is a counter, so that the
    size of the pool costs nothing.

    Args:
        pool: num_gpu_blocks (with the null block) and block_size.
        max_model_len: longest sequence a request may reach, in tokens.
        watermark: share of num_gpu_blocks that an admission must leave free.

    Raises:
        ConfigError: unless one request of *max_model_len* tokens fits.
    """

    enable_caching = False

    def __init__(self, pool: KVPool, max_model_len: int, watermark: float = 0.0) -> None:
        self.block_size = pool.block_size
        self._max_model_len = max_model_len
        self._num_usable_blocks = pool.num_gpu_blocks - 1
        self._watermark_blocks = int(watermark * pool.num_gpu_blocks)
        self._tables: dict[Request, list[int]] = {}
        self._returned: list[int] = []
        self._next_unused = 1
        self._num_free = self._num_usable_blocks
        self._live = 0
        self._internal = 0
        check_max_model_len(
            max_model_len,
            needed=-(-max_model_len // self.block_size),
            available=self._num_usable_blocks,
            unit=f"blocks of {self.block_size} tokens",
            longest=self._num_usable_blocks * self.block_size,
        )

    @classmethod
    def from_config(
        cls, cache: CacheConfig, pool: KVPool, max_model_len: int, watermark: float
    ) -> "PagedAllocator":
        """Build it from the resolved configuration (`sim.allocators.ALLOCATORS`)."""
        del cache  # no setting of its own
        return cls(pool, max_model_len, watermark)

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
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        table = self._tables.get(request)
        num_held = len(table) if table is not None else 0
        if num_tokens <= num_held * self.block_size:
            self._live += num_new_tokens
            self._after_grant(request, num_tokens)
            return NOTHING_NEW
        hit = self._hit_blocks(request, num_new_computed_tokens)
        # Hit blocks that nobody holds leave the free list too, so they need room like new ones.
        room = self._num_free - self._num_unheld(hit)
        if keep_watermark:
            room -= self._watermark_blocks
        num_new_blocks = self._blocks_for(num_tokens) - num_held - len(hit)
        full_length = min(request.num_tokens, self._max_model_len)
        if num_new_blocks > room or (
            full_sequence_must_fit and self._blocks_for(full_length) - len(hit) > room
        ):
            return None
        if table is None:
            table = self._tables[request] = hit
            self._hold(request, hit)
        new_blocks = self._take(num_new_blocks)
        self._internal -= self._never_written(request, num_held)
        table += new_blocks
        self._internal += self._never_written(request, len(table))
        self._live += num_new_tokens
        self._after_grant(request, num_tokens)
        return Allocation(tuple(new_blocks))

    def free(self, request: Request) -> None:
        """Take back its blocks, tail first (see `Allocator.free`)."""
        table = self._tables.pop(request)
        self._internal -= self._never_written(request, len(table))
        self._release(request, table)

    def stats(self) -> MemoryStats:
        """Answer the split of the pool (see `Allocator.stats`)."""
        size = self.block_size
        held = (self._num_usable_blocks - self._num_free) * size
        cached = self._num_cached_blocks() * size
        return MemoryStats(
            capacity=self._num_usable_blocks * size,
            live=self._live,
            reserved=held - self._live - self._internal,
            internal=self._internal,
            cached=cached,
            free=self._num_free * size - cached,
        )

    def check_integrity(self) -> None:
        """Recount blocks, owners and slots (see `Allocator.check_integrity`)."""
        size = self.block_size
        holders: dict[int, int] = {}
        tokens_in: dict[int, int] = {}
        internal = 0
        for request, table in self._tables.items():
            computed = request.num_computed_tokens
            require_equal(f"blocks of {request.request_id}", len(table), self._blocks_for(computed))
            internal += max(0, len(table) * size - request.final_num_computed_tokens)
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

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _never_written(self, request: Request, num_blocks: int) -> int:
        """Answer the slots in its first *num_blocks* blocks that its last token does not reach."""
        return max(0, num_blocks * self.block_size - request.final_num_computed_tokens)

    def _take(self, num_blocks: int) -> list[int]:
        """Remove blocks from the front of the free list; there are enough."""
        self._num_free -= num_blocks
        returned = self._returned
        blocks = [returned.pop() for _ in range(min(num_blocks, len(returned)))]
        first_unused = self._next_unused
        num_unused = min(num_blocks - len(blocks), self._num_usable_blocks + 1 - first_unused)
        self._next_unused += num_unused
        blocks += range(first_unused, first_unused + num_unused)
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
        unused = range(self._next_unused, self._num_usable_blocks + 1)
        free = set(self._returned) | set(unused)
        require_equal("entries of the free list", len(free), len(self._returned) + len(unused))
        return free

    # What prefix sharing adds (`sim.allocators.prefix`); plain paging shares and caches nothing.

    def _hit_blocks(self, request: Request, num_tokens: int) -> list[int]:
        del request, num_tokens
        return []

    def _num_unheld(self, blocks: list[int]) -> int:
        del blocks
        return 0

    def _hold(self, request: Request, blocks: list[int]) -> None:
        pass

    def _after_grant(self, request: Request, num_tokens: int) -> None:
        pass

    def _num_cached_blocks(self) -> int:
        return 0
