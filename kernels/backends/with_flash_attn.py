"""FlashAttention 2's decode over pages, whose size must be a multiple of 256."""

from collections.abc import Callable

from flash_attn import flash_attn_with_kvcache

from kernels.backends import AttentionBatch
from kernels.calls import Skip


def decode(batch: AttentionBatch) -> Callable[[], object]:
    """Answer a call.

    Raises:
        Skip: the block size is no multiple of 256.
    """
    if batch.key.shape[1] % 256:
        raise Skip("FlashAttention 2 takes blocks of 256 tokens or multiples")
    query = batch.query[:, None]
    return lambda: flash_attn_with_kvcache(
        query,
        batch.key,
        batch.value,
        cache_seqlens=batch.seq_lens,
        block_table=batch.block_table,
        causal=True,
    )[:, 0]
