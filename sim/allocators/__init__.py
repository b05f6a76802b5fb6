"""Allocators of KV memory. To add one: write its file, and register it in `ALLOCATORS`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.allocators.base import Allocator
    from sim.config import CacheConfig, SchedulerConfig
    from sim.kv_pool import KVPool

    Factory = Callable[[CacheConfig, SchedulerConfig, KVPool, int], Allocator]


def _lazy(name: str) -> Factory:
    """Answer what imports the class ``module.name`` of this package when it first makes one."""
    module, _, class_name = name.partition(".")

    def make(
        cache: CacheConfig, scheduler: SchedulerConfig, pool: KVPool, max_model_len: int
    ) -> Allocator:
        allocator = getattr(import_module(f"{__name__}.{module}"), class_name)
        made: Allocator = allocator.from_config(cache, scheduler, pool, max_model_len)
        return made

    return make


ALLOCATORS: dict[str, Factory] = {
    "contiguous": _lazy("contiguous.ContiguousAllocator"),
    "paged": _lazy("paged.PagedAllocator"),
    "prefix": _lazy("prefix.PrefixCachingAllocator"),
}
"""``--allocator`` by name: what makes it of cache and scheduler settings, pool, max_model_len."""
