"""Paged attention in plain PyTorch, slow and obvious: what every kernel here is held to.

The KV cache is vLLM's ("NHD": ``[num_blocks, block_size, num_kv_heads, head_dim]``): token *i* of a
sequence lies in block ``block_table[seq, i // block_size]``, slot ``i % block_size``.
"""

import math

import torch

LATENT_DIM = 512
"""Elements of a latent that are value as well as key (DeepSeek-V2, section 2.1)."""


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Answer the first *length* tokens of one sequence, [length, num_kv_heads, head_dim].

    *cache* is [num_blocks, block_size, num_kv_heads, head_dim], *table* [max_blocks].
    """
    positions = torch.arange(length, device=cache.device)
    block_size = cache.shape[1]
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # fp8 is moved as bytes
    return raw[table[positions // block_size].long(), positions % block_size].view(cache.dtype)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Answer causal attention of tokens of one sequence, [num_queries, num_heads, width].

    *query* is [num_queries, num_heads, head_dim], *key* and *value* [seq_len, num_kv_heads, width];
    the queries stand at *positions* of the sequence, by default its last. All is computed in
    *dtype*. Each kv head serves
    num_heads / num_kv_heads query heads in a row.
    """
    (num_queries, num_heads, head_dim), (seq_len, num_kv_heads) = query.shape, key.shape[:2]
    if positions is None:
        positions = torch.arange(seq_len - num_queries, seq_len, device=query.device)
    group = num_heads // num_kv_heads
    by_head = query.to(dtype).view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    queries = by_head.reshape(num_kv_heads, group * num_queries, head_dim)
    scores = queries @ key.to(dtype).permute(1, 2, 0) * scale
    hidden = torch.arange(seq_len, device=query.device) > positions.repeat(group)[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    outputs = (weights @ value.to(dtype).transpose(0, 1)).view(num_kv_heads, group, num_queries, -1)
    return outputs.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Answer attention over a paged cache, [total_queries, num_heads, value width], in *dtype*.

    Args:
        query: [total_queries, num_heads, head_dim], sequence after sequence.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        value_cache: the same; None for latent attention, whose values are the first `LATENT_DIM`
            elements of the keys.
        block_table: [num_seqs, max_blocks], block ids.
        seq_lens: [num_seqs], tokens in the cache, those of the queries among them.
        query_starts: [num_seqs + 1], where the queries of each begin; None: one each (decode).
        scale: of the scores; None: 1 / sqrt(head_dim).
        dtype: in which all is computed.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    starts = list(range(len(seq_lens) + 1)) if query_starts is None else query_starts.tolist()
    outputs = []
    for seq, length in enumerate(seq_lens.tolist()):
        key = gather(key_cache, block_table[seq], length)
        value = (
            key[..., :LATENT_DIM]
            if value_cache is None
            else gather(value_cache, block_table[seq], length)
        )
        queries = query[starts[seq] : starts[seq + 1]]
        outputs.append(attention(queries, key, value, scale, dtype))
    return torch.cat(outputs)
