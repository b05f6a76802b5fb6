"""The pool of KV blocks that a GPU has room for, and what vLLM says of it at start.

`sim.pool_sizing` makes it.
"""

import msgspec

from sim.errors import CapacityError
from sim.hardware import GIB
from sim.kv_groups import CacheGroup, CacheGroups
from sim.memory import MemoryShare

NULL_BLOCKS = 1
"""Block 0 is never handed out (vLLM 0.33.0, ``v1/core/block_pool.py:188-192``)."""


class KVPool(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the KV cache gets.

    Attributes:
        num_gpu_blocks: blocks, vLLM's null block included: usable are one fewer.
        block_size: tokens a block.
        contiguous_slots: token slots that a contiguous allocator gets from the same memory.
        kv_cache_bytes: bytes the pool was sized from; None when the blocks were given.
        breakdown: parts of the card's visible memory, adding up to it; fewer or none without a GPU.
        provenance: one line for the report: where the size comes from.
        groups: block tables of a request; None is one for all layers.
        in_flight_tokens: of batches under way, for which windows have room.
        counts_a_group: the tokens that are printed are those of one group, as before vLLM 0.21.
    """

    num_gpu_blocks: int
    block_size: int
    contiguous_slots: int
    kv_cache_bytes: int | None
    breakdown: tuple[MemoryShare, ...]
    provenance: str
    groups: CacheGroups | None = None
    in_flight_tokens: int = 0
    counts_a_group: bool = False

    @property
    def tables(self) -> tuple[CacheGroup, ...]:
        """The block tables of a request."""
        if self.groups is not None:
            return self.groups.groups
        return (CacheGroup("full", 0, self.block_size, 0),)

    def blocks_for(self, num_tokens: int) -> int:
        """Answer the blocks that vLLM counts for a request of *num_tokens* at start."""
        if self.groups is None:
            return -(-num_tokens // self.block_size)
        return self.groups.blocks_for(num_tokens, in_flight_tokens=self.in_flight_tokens)

    def longest_request(self, num_blocks: int) -> int:
        """Answer the tokens of the longest request that *num_blocks* hold; 0 if none does."""
        low, high = 0, num_blocks * max(table.block_size for table in self.tables)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


def gib(num_bytes: int) -> str:
    """Answer *num_bytes* for a message: GiB with two digits."""
    return f"{num_bytes / GIB:.2f} GiB"


def kv_cache_figures(pool: KVPool, max_model_len: int) -> tuple[int, float]:
    """Answer tokens and concurrency as `kv_cache_lines` has them."""
    max_concurrency = pool.num_gpu_blocks / pool.blocks_for(max_model_len)
    if pool.counts_a_group:
        least = min(table.block_size for table in pool.tables if table.block_size)
        return pool.num_gpu_blocks // len(pool.tables) * least, max_concurrency
    return int(max_concurrency * max_model_len), max_concurrency


def kv_cache_lines(pool: KVPool, max_model_len: int) -> str:
    """Answer vLLM's start-up line about the size of the KV cache.

    vLLM 0.33.0, ``v1/core/kv_cache_utils.py:1061-1153``: all blocks count, the null block too, and
    tokens follow from the rounded-up blocks of a longest request, so a *max_model_len* that is no
    multiple of the block size shows fewer tokens than blocks * block size. Before 0.21 tokens are
    those of one block table, of all that a request has.
    """
    num_tokens, max_concurrency = kv_cache_figures(pool, max_model_len)
    return (
        f"GPU KV cache size: {num_tokens:,} tokens, "
        f"Maximum concurrency for {max_model_len:,} tokens per request: {max_concurrency:.2f}x"
    )


def check_max_model_len(
    max_model_len: int, *, needed: int, available: int, unit: str, longest: int
) -> None:
    """Check at start that one request of *max_model_len* tokens can ever be served.

    vLLM 0.33.0 refuses to start otherwise (``v1/core/kv_cache_utils.py:151-184``).

    Args:
        max_model_len: tokens of the longest request.
        needed: units of memory that such a request takes from the allocator that asks.
        available: units that the allocator can hand out; for blocks the null block does not count.
        unit: name of the unit in the plural, e.g. ``blocks of 16 tokens`` or ``slots``.
        longest: tokens of the longest request that *available* holds.

    Raises:
        CapacityError: *needed* is more than *available*.
    """
    if needed > available:
        raise CapacityError(
            f"max_model_len {max_model_len} needs {needed} {unit}, the pool has {available}: "
            f"lower --max-model-len to at most {longest} or enlarge the pool "
            "(--gpu-memory-utilization, --num-gpu-blocks-override)"
        )
