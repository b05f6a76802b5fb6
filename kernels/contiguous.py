"""Attention over keys and values in one piece: what a block table costs is the difference to this.

`attention` is the kernel of `kernels.paged_attention` with one address less to look up; `sdpa` is
PyTorch's own, for scale.
"""

from typing import Unpack

import torch
from torch.nn import functional

from kernels.paged_attention import CONTIGUOUS, Options, Sequences, launch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    max_seq_len: int,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Answer causal attention over *key* and *value* [num_seqs, max_len, num_kv_heads, head_dim].

    All else is as in `kernels.paged_attention.paged_attention`.

    Raises:
        ValueError: shapes that the kernel does not take.
    """
    never_read = seq_lens[:, None]
    sequences = Sequences(never_read, seq_lens, query_starts, max_seq_len)
    return launch(query, key, value, sequences, CONTIGUOUS, options)


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Answer a decode step of sequences of equal length by PyTorch's own attention.

    *query* is [num_seqs, num_heads, head_dim], *key* and *value* [num_seqs, seq_len, num_kv_heads,
    head_dim]; so is the answer as *query*.
    """
    out = functional.scaled_dot_product_attention(
        query[:, :, None],
        key.transpose(1, 2),
        value.transpose(1, 2),
        enable_gqa=query.shape[1] != key.shape[2],
    )
    return out[:, :, 0]
