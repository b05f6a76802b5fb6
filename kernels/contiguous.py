"""Attention over keys and values in one piece: what a block table costs is the difference to this.

`attention` is the kernel of `kernels.paged_attention` with one address less to look up; `sdpa` is
PyTorch's own, for scale.
"""

import torch
import torch.nn.functional as F

from kernels.paged_attention import CONTIGUOUS, Tile, Workspace, launch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    max_seq_len: int,
    query_starts: torch.Tensor,
    max_query_len: int = 1,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Answer causal attention over *key* and *value* [num_seqs, max_len, num_kv_heads, head_dim].

    All else is as in `kernels.paged_attention.paged_attention`.

    Raises:
        ValueError: shapes or types that the kernel does not take.
    """
    return launch(
        query,
        key,
        value,
        seq_lens[:, None],  # never read
        seq_lens,
        CONTIGUOUS,
        max_seq_len=max_seq_len,
        query_starts=query_starts,
        max_query_len=max_query_len,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
        tile=tile,
        out=out,
        workspace=workspace,
    )


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Answer a decode step of sequences of equal length by PyTorch's own attention.

    *query* is [num_seqs, num_heads, head_dim], *key* and *value* [num_seqs, seq_len, num_kv_heads,
    head_dim]; so is the answer as *query*.
    """
    out = F.scaled_dot_product_attention(
        query[:, :, None],
        key.transpose(1, 2),
        value.transpose(1, 2),
        enable_gqa=query.shape[1] != key.shape[2],
    )
    return out[:, :, 0]
