"""How vLLM lays out what a model keeps (`sim.kv_layout`) in block tables that share one pool."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from sim.errors import ConfigError
from sim.kv_layout import CacheKind, KVLayout, LayerCache

ALIGNMENT = 16
"""Attention blocks beside states are a multiple of this many tokens (vLLM 0.33.0,
``platforms/interface.py``, FlashAttention's kernels)."""

FULL_GROUP_RATIO = Fraction(3, 2)
"""With layer counts closer than this the larger is the size of all groups (vLLM 0.33.0,
``v1/core/kv_cache_utils.py``; 1.25 in vLLM 0.11)."""

PACKED_BLOCKS: dict[tuple[CacheKind, int], int] = {
    ("compressed", 0): 256,
    ("index", 0): 256,
    ("sliding", 128): 64,
    ("compressor", 8): 4,
    ("compressor", 128): 8,
}
"""Tokens a block of DeepSeek-V4's caches, by kind and window (vLLM,
``models/deepseek_v4/{attention,compressor}.py``, ``backends/mla/sparse_swa.py``)."""

PAGE_ALIGNMENT = 576
"""Bytes that their pages are a multiple of (FlashMLA; ibid.)."""


class CacheGroup(NamedTuple):
    """Layers that share a block table.

    Attributes:
        kind: ``full`` for all that grows.
        num_layers: layers, padding left out.
        block_size: tokens a block; of a state 0.
        window: most tokens held; 0 is no bound.
    """

    kind: CacheKind
    num_layers: int
    block_size: int
    window: int


class CacheGroups(NamedTuple):
    """How vLLM lays a model out in blocks; all groups take blocks of one size from one pool.

    Attributes:
        groups: every block table of a request.
        bytes_per_block: on one GPU, over the layers of a group.
        padding_bytes: of a block, which only vLLM's check at start counts (compressed layers).
    """

    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    padding_bytes: int = 0

    @property
    def checked_bytes(self) -> int:
        """Bytes of a block as vLLM's check at start counts them."""
        return self.bytes_per_block + self.padding_bytes

    @property
    def block_size(self) -> int:
        """Tokens of a block of the attention that grows, or of the largest."""
        full = [group.block_size for group in self.groups if not group.window and group.block_size]
        return max(full or [group.block_size for group in self.groups])

    def blocks_for(
        self,
        num_tokens: int,
        *,
        in_flight_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> int:
        """Answer the blocks that vLLM counts for one request of *num_tokens*, over all groups.

        A window needs one block more than it has, and room for *in_flight_tokens*, those of batches
        under way (vLLM 0.33.0, ``v1/kv_cache_interface.py:918-944``). A state takes one block, two
        with prefix caching (ibid., ``MambaSpec``; ``mamba_cache_mode`` ``align``).
        """
        total = 0
        for group in self.groups:
            if group.kind == "state":
                total += 1 + enable_prefix_caching
            elif group.window:
                held = min(group.window - 1 + in_flight_tokens, num_tokens)
                total += -(-held // group.block_size) + 1
            else:
                total += -(-num_tokens // group.block_size)
        return total


def cache_groups(
    layout: KVLayout,
    block_size: int,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    ratio: Fraction = FULL_GROUP_RATIO,
) -> CacheGroups:
    """Answer the groups that vLLM makes of *layout* (0.33.0, ``v1/core/kv_cache_utils.py``).

    All that grows with each token is one group. With windows or states, layers are dealt out to
    groups of as many layers as the rarest kind has, the last filled up with padding; pages of
    different size are made equal by larger blocks of the smaller, and attention beside states by
    a block as large as a state. Chunked attention is full attention to vLLM's block tables (its
    default, ``VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE``).

    Layers that compress have blocks of their own, whatever *block_size* is (`_packed_groups`).

    Raises:
        ConfigError: pages that do not divide each other, or compressed KV that vLLM has no blocks
            for.
    """
    dtype = layout.dtype(kv_cache_dtype)
    if any(cache.kind == "compressed" for cache in layout.caches):
        return _packed_groups(layout, dtype)
    pages: dict[tuple[CacheKind, int, int], int] = {}
    growing = _Growing()
    for cache in layout.caches:
        size = cache.entry_bytes(dtype, tensor_parallel_size)
        if cache.grows or cache.kind == "chunked":
            growing.add(cache, size)
        elif cache.kind != "cross":
            key = (cache.kind, cache.window, size)
            pages[key] = pages.get(key, 0) + cache.num_layers
    if growing.entries and not pages:
        group = CacheGroup("full", growing.num_layers, block_size, 0)
        return CacheGroups((group,), growing.num_bytes * block_size)
    for size, num_layers in growing.by_size():
        pages["full", 0, size] = num_layers
    if not pages:
        raise ConfigError("no layer keeps anything: there is nothing to allocate")
    return _equal_groups(pages, block_size, ratio)


def _packed_groups(layout: KVLayout, dtype: str) -> CacheGroups:
    """Answer the groups of DeepSeek-V4, whose pages differ in size.

    All that grows is one group, and windows are grouped by their blocks. A group is rows of one
    layer a page size; windows are dealt out to groups of as many rows as make the least padding,
    not fewer than the growing group has. A block is as large as the largest group; the check at
    start counts padded rows of all of the growing group's pages (vLLM 0.27.1,
    ``v1/core/kv_cache_utils.py:1283-1358, 1592-1740, 1904-1937``; a log of 0.22 in
    ``tests/validation/test_hf_configs.py`` has blocks of padded rows).

    Raises:
        ConfigError: another compression or type than vLLM's kernels take.
    """
    tables: dict[tuple[CacheKind, int, int], dict[int, int]] = {}
    for cache in layout.caches:
        block_size = PACKED_BLOCKS.get((cache.kind, cache.window))
        if block_size is None or cache.tokens_per_entry not in {1, 4, 128} or dtype[:3] != "fp8":
            raise ConfigError(
                f"layers {layout.describe()} in {dtype}: vLLM has no blocks for them; expected "
                "DeepSeek-V4's compression by 4 and 128, and fp8"
            )
        kind: CacheKind = "compressed" if cache.kind == "index" else cache.kind
        entries = block_size // cache.tokens_per_entry
        page = -(-entries * cache.entry_bytes(dtype, 1) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        pages = tables.setdefault((kind, block_size, cache.window), {})
        pages[page] = pages.get(page, 0) + cache.num_layers
    rows = {table: max(pages.values()) for table, pages in tables.items()}
    growing = next(table for table in tables if not table[2])
    each = _least_padded(list(rows.values()), at_least=rows[growing])
    groups, largest = [], 0
    for table, pages in tables.items():
        kind, block_size, window = table
        num_groups = -(-rows[table] // each)
        for i in range(num_groups):
            dealt = {page: len(range(i, layers, num_groups)) for page, layers in pages.items()}
            groups.append(CacheGroup(kind, max(dealt.values()), block_size, window))
            largest = max(largest, sum(page * layers for page, layers in dealt.items()))
    return CacheGroups(tuple(groups), largest, each * sum(tables[growing]) - largest)


def _least_padded(rows: list[int], *, at_least: int) -> int:
    """Answer the multiple that *rows* are rounded up to with least padding; of equals the most."""
    sizes = range(at_least, max(rows) + 1)
    return min(sizes, key=lambda size: (sum(-number % size for number in rows), -size))


class _Growing:
    """Layers that grow: those of one group if there is nothing else."""

    def __init__(self) -> None:
        self.entries: list[tuple[LayerCache, int]] = []

    def add(self, cache: LayerCache, size: int) -> None:
        """Take in *cache*, whose entries have *size* bytes."""
        self.entries.append((cache, size))

    @property
    def num_layers(self) -> int:
        """Layers with attention; an indexer is a cache more of a layer that is counted."""
        return sum(cache.num_layers for cache, _ in self.entries if cache.kind != "index")

    @property
    def num_bytes(self) -> int:
        """Bytes of a token over all of them."""
        return sum(cache.num_layers * size for cache, size in self.entries)

    def by_size(self) -> Iterator[tuple[int, int]]:
        """Answer the bytes of a token in one layer, and the layers, by size."""
        sizes: dict[int, int] = {}
        for cache, size in self.entries:
            sizes[size] = sizes.get(size, 0) + cache.num_layers
        yield from sizes.items()


def _equal_groups(
    layers: dict[tuple[CacheKind, int, int], int], block_size: int, ratio: Fraction
) -> CacheGroups:
    """Answer groups of equal layer counts and equal pages for layers of several kinds."""
    token_bytes = [size for kind, _, size in layers if kind != "state"]
    states = [size for kind, _, size in layers if kind == "state"]
    if states and token_bytes:
        largest = -(-max(states) // max(token_bytes))
        block_size = max(block_size, -(-largest // ALIGNMENT) * ALIGNMENT)
    page = max([block_size * size for size in token_bytes] + states)
    fewest, most = min(layers.values()), max(layers.values())
    group_size = most if most < fewest * ratio else fewest
    groups: list[CacheGroup] = []
    for (kind, window, size), num_layers in layers.items():
        tokens = _tokens_of(page, size, block_size) if kind != "state" else 0
        groups += (
            CacheGroup(kind, dealt, tokens, window) for dealt in _dealt(num_layers, group_size)
        )
    return CacheGroups(tuple(groups), page * group_size)


def _tokens_of(page: int, size: int, block_size: int) -> int:
    """Answer the tokens of a layer's page, whose tokens have *size* bytes each."""
    if page % (size * block_size):
        raise ConfigError(
            f"pages of {size * block_size} and {page} bytes for {block_size} tokens: "
            "vLLM cannot make blocks of one size of them; expected a multiple"
        )
    return page // size


def _dealt(num_layers: int, group_size: int) -> Iterable[int]:
    """Answer the layers of each group when *num_layers* are dealt out in turn."""
    num_groups = -(-num_layers // group_size)
    return (len(range(i, num_layers, num_groups)) for i in range(num_groups))
