"""What a model keeps in memory for a sequence: which layers, how much a token, and how much in all.

A model is a tuple of `LayerCache`, each some layers alike. What a layer keeps grows with the
context (full attention, latents, an indexer's keys), stops growing at a window, or is of one size
(the state of linear attention). Sizes are those of one GPU of a tensor-parallel group; latents are
on every GPU. `cache_groups` answers the same in vLLM's blocks.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Literal, NamedTuple

import msgspec

from sim.errors import ConfigError

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one element, by ``--kv-cache-dtype`` or ``torch_dtype``."""

CacheKind = Literal["full", "latent", "index", "compressed", "sliding", "chunked", "cross", "state"]

WINDOWED: frozenset[CacheKind] = frozenset({"sliding", "chunked", "cross"})
"""Kinds that hold at most `LayerCache.window` entries."""

ALIGNMENT = 16
"""Attention blocks beside states are a multiple of this many tokens (vLLM 0.33.0,
``platforms/interface.py``, FlashAttention's kernels)."""

FULL_GROUP_RATIO = Fraction(3, 2)
"""With layer counts closer than this the larger is the size of all groups (vLLM 0.33.0,
``v1/core/kv_cache_utils.py``; 1.25 in vLLM 0.11)."""


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """What layers of one kind keep for a sequence.

    Attributes:
        kind: ``full``: keys and values of every token; ``latent``: one latent a token (MLA);
            ``index``: one key of an indexer a token; ``compressed``: one latent for
            tokens_per_entry tokens; ``sliding``, ``chunked``: keys and values of a window;
            ``cross``: those of an image, window entries; ``state``: one size, whatever the length.
        num_layers: layers of this kind.
        num_kv_heads: KV heads of a layer, shared by the ranks or copied; of a state the groups that
            shared_bytes is made of.
        head_elements: elements of key and value of one head together.
        window: most entries held; 0 is no bound.
        tokens_per_entry: tokens that one entry stands for.
        fp8_bytes: bytes of an entry in vLLM's own fp8 layout; 0: one byte an element.
        stored_bytes: bytes of an entry in vLLM whatever the cache's dtype; 0: as the others.
        state_bytes: of one layer's state, what the ranks share equally.
        shared_bytes: of one layer's state, what is shared by num_kv_heads ranks at most.
    """

    kind: CacheKind
    num_layers: int
    num_kv_heads: int = 1
    head_elements: int = 0
    window: int = 0
    tokens_per_entry: int = 1
    fp8_bytes: int = 0
    stored_bytes: int = 0
    state_bytes: int = 0
    shared_bytes: int = 0

    @property
    def grows(self) -> bool:
        """Whether it gets larger with every token, however many there are."""
        return self.kind != "state" and not self.window

    def entry_bytes(self, dtype: str, tensor_parallel_size: int, *, stored: bool = True) -> int:
        """Answer the bytes of one layer's entry on one GPU; a state's are those of all of it.

        *stored*: an indexer's keys as vLLM stores them; else in *dtype*, as papers count them.
        """
        tp = tensor_parallel_size
        if self.kind == "state":
            return self.state_bytes // tp + self.shared_bytes // min(tp, self.num_kv_heads)
        if stored and self.stored_bytes:
            return self.stored_bytes
        if self.fp8_bytes and dtype.startswith("fp8"):
            return self.fp8_bytes
        heads = max(1, self.num_kv_heads // tp)
        return heads * self.head_elements * ELEMENT_BYTES[dtype]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps for a sequence.

    Attributes:
        caches: what its layers keep; layers that keep nothing are left out.
        auto_dtype: element of the cache under ``--kv-cache-dtype auto``: of `ELEMENT_BYTES`.
    """

    caches: tuple[LayerCache, ...]
    auto_dtype: str

    def dtype(self, kv_cache_dtype: str = "auto") -> str:
        """Answer the element that ``--kv-cache-dtype`` means for this model.

        Raises:
            ConfigError: it is none.
        """
        if kv_cache_dtype == "auto":
            return self.auto_dtype
        if kv_cache_dtype not in ELEMENT_BYTES:
            known = ", ".join(("auto", *ELEMENT_BYTES))
            raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype!r} is not one of {known}")
        return kv_cache_dtype

    @property
    def is_uniform(self) -> bool:
        """Whether all there is grows with the context: one block table serves every layer."""
        return all(cache.grows for cache in self.caches)

    @property
    def is_plain(self) -> bool:
        """Whether all layers have the same full or latent attention and nothing beside it."""
        return len(self.caches) == 1 and self.caches[0].kind in {"full", "latent"}

    @property
    def longest_window(self) -> int:
        """Tokens of the longest window; 0 without any. To this length all attention is full."""
        return max((c.window for c in self.caches if c.kind in {"sliding", "chunked"}), default=0)

    def describe(self) -> str:
        """Answer the layers in words: "12 full, 12 sliding (128)"."""
        return ", ".join(
            f"{cache.num_layers} {cache.kind}" + (f" ({cache.window})" if cache.window else "")
            for cache in self.caches
        )


def kv_bytes_per_token_longctx(
    layout: KVLayout,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    stored_index: bool = True,
) -> int:
    """Answer the bytes that each further token of a long sequence takes on one GPU.

    Windows are full and states are of one size, so they add nothing. *stored_index*: keys of an
    indexer take what vLLM gives them (132 bytes: 128 in fp8 and a scale,
    ``models/deepseek_v2.py``), not an element of the cache each.
    """
    dtype = layout.dtype(kv_cache_dtype)
    total = Fraction(0)
    for cache in layout.caches:
        if cache.grows:
            entry = cache.entry_bytes(dtype, tensor_parallel_size, stored=stored_index)
            total += Fraction(cache.num_layers * entry, cache.tokens_per_entry)
    return round(total)


def kv_bytes_per_token(
    layout: KVLayout,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    stored_index: bool = True,
) -> int:
    """Answer the bytes that a token takes on one GPU while it is within every window.

    *stored_index*: as in `kv_bytes_per_token_longctx`.
    """
    dtype = layout.dtype(kv_cache_dtype)
    windows = sum(
        cache.num_layers * cache.entry_bytes(dtype, tensor_parallel_size)
        for cache in layout.caches
        if cache.kind in {"sliding", "chunked"}
    )
    return windows + kv_bytes_per_token_longctx(
        layout,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
        stored_index=stored_index,
    )


def fixed_bytes_per_request(
    layout: KVLayout, *, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto"
) -> int:
    """Answer the bytes that a long sequence takes on one GPU whatever its length.

    Full windows, states, and the keys and values of one image where layers attend to it.
    """
    dtype = layout.dtype(kv_cache_dtype)
    return sum(
        cache.num_layers * cache.entry_bytes(dtype, tensor_parallel_size) * max(1, cache.window)
        for cache in layout.caches
        if not cache.grows
    )


def fixed_state_bytes(layout: KVLayout, tensor_parallel_size: int = 1) -> int:
    """Answer the bytes of a sequence's states on one GPU."""
    return sum(
        cache.num_layers * cache.entry_bytes(layout.auto_dtype, tensor_parallel_size)
        for cache in layout.caches
        if cache.kind == "state"
    )


def sequence_bytes(
    layout: KVLayout,
    num_tokens: int,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    stored_index: bool = True,
    images: bool = False,
) -> int:
    """Answer the bytes that *num_tokens* of a sequence take on one GPU, not rounded to blocks.

    *images*: layers that attend to an image hold one.
    """
    dtype = layout.dtype(kv_cache_dtype)
    total = 0
    for cache in layout.caches:
        if cache.kind == "state":
            entries = 1
        elif cache.kind == "cross":
            entries = cache.window * images
        else:
            entries = num_tokens // cache.tokens_per_entry
            entries = min(entries, cache.window) if cache.window else entries
        size = cache.entry_bytes(dtype, tensor_parallel_size, stored=stored_index)
        total += cache.num_layers * size * entries
    return total


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
    """

    groups: tuple[CacheGroup, ...]
    bytes_per_block: int

    @property
    def block_size(self) -> int:
        """Tokens of a block of the attention that grows, or of the largest."""
        full = [group.block_size for group in self.groups if not group.window and group.block_size]
        return max(full or [group.block_size for group in self.groups])

    def blocks_for(
        self,
        num_tokens: int,
        *,
        max_num_batched_tokens: int,
        in_flight: int = 1,
        enable_prefix_caching: bool = True,
    ) -> int:
        """Answer the blocks that vLLM counts for one request of *num_tokens*, over all groups.

        A window needs one block more than it has, and room for the tokens of *in_flight* batches
        (vLLM 0.33.0, ``v1/kv_cache_interface.py:918-944``). A state takes one block, two with
        prefix caching (ibid., ``MambaSpec``; ``mamba_cache_mode`` ``align``).
        """
        total = 0
        for group in self.groups:
            if group.kind == "state":
                total += 1 + enable_prefix_caching
            elif group.window:
                held = min(group.window - 1 + in_flight * max_num_batched_tokens, num_tokens)
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

    Raises:
        ConfigError: pages that do not divide each other, or entries that stand for several tokens:
            vLLM has rules of its own for those, which are not modelled.
    """
    if any(cache.tokens_per_entry > 1 for cache in layout.caches):
        raise ConfigError(f"layers {layout.describe()}: blocks of compressed KV are not modelled")
    dtype = layout.dtype(kv_cache_dtype)
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
