"""Allocators of KV memory. To add one: write its file, and register it in `ALLOCATORS`."""

from collections.abc import Callable

from sim.allocators.base import Allocator
from sim.allocators.contiguous import ContiguousAllocator
from sim.allocators.paged import PagedAllocator
from sim.allocators.prefix import PrefixCachingAllocator
from sim.config import CacheConfig
from sim.kv_spec import KVPool

ALLOCATORS: dict[str, Callable[[CacheConfig, KVPool, int, float], Allocator]] = {
    "contiguous": ContiguousAllocator.from_config,
    "paged": PagedAllocator.from_config,
    "prefix": PrefixCachingAllocator.from_config,
}
"""``--allocator`` by name: what makes it of cache settings, pool, max_model_len and watermark."""
