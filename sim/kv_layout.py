"""What a model keeps in memory for a sequence: which layers, how much a token, and how much in all.

A model is a tuple of `LayerCache`, each some layers alike. What a layer keeps grows with the
context (full attention, latents, an indexer's keys), stops growing at a window, or is of one size
(the state of linear attention). Sizes are those of one GPU of a tensor-parallel group; latents are
on every GPU. `sim.kv_groups` answers the same in vLLM's blocks.
"""

from fractions import Fraction
from typing import Literal

import msgspec

from sim.errors import ConfigError

ELEMENT_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_ds_mla": 1,
}  # fmt: skip
"""Bytes of one element, by ``--kv-cache-dtype`` or ``torch_dtype``."""

CacheKind = Literal[
    "full", "latent", "index", "compressed", "compressor", "sliding", "chunked", "cross", "state"
]


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """What layers of one kind keep for a sequence.

    Attributes:
        kind: ``full``: keys and values of every token; ``latent``: one latent a token (MLA);
            ``index``: one key of an indexer a token; ``compressed``: one latent for
            tokens_per_entry tokens; ``compressor``: the sums that the next of those is made of;
            ``sliding``, ``chunked``: keys and values of a window; ``cross``: those of an image,
            window entries; ``state``: one size, whatever the length.
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
        if kv_cache_dtype == "fp8_ds_mla" and not any(cache.fp8_bytes for cache in self.caches):
            raise ConfigError(
                f"--kv-cache-dtype fp8_ds_mla: layers keep {self.describe()}; expected latents of "
                "sparse attention, as of DeepSeek-V3.2"
            )
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
