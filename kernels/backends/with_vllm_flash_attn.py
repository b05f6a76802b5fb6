"""vLLM's build of FlashAttention, as ``v1/attention/backends/flash_attn.py`` calls it."""

from collections.abc import Callable

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func

from kernels.backends import AttentionBatch


def decode(batch: AttentionBatch) -> Callable[[], object]:
    """Answer a call."""
    out = torch.empty_like(batch.query)

    def call() -> object:
        flash_attn_varlen_func(
            q=batch.query,
            k=batch.key,
            v=batch.value,
            out=out,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            softmax_scale=batch.query.shape[-1] ** -0.5,
            causal=True,
            block_table=batch.block_table,
        )
        return out

    return call
