"""FlashAttention 3's decode over pages of any size (Hopper)."""

from collections.abc import Callable

from flash_attn_interface import flash_attn_with_kvcache

from kernels.backends import AttentionBatch


def decode(batch: AttentionBatch) -> Callable[[], object]:
    """Answer a call."""
    query = batch.query[:, None]

    def call() -> object:
        out = flash_attn_with_kvcache(
            query,
            batch.key,
            batch.value,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            causal=True,
        )
        return (out[0] if isinstance(out, tuple) else out)[:, 0]

    return call
