"""FlashInfer's batch decode (`BatchDecodeWithPagedKVCacheWrapper`), any page size."""

from collections.abc import Callable

import flashinfer
import torch

from kernels.backends import AttentionBatch

_WORKSPACE_BYTES = 256 * 2**20
_workspaces: dict[torch.device, torch.Tensor] = {}


def decode(batch: AttentionBatch) -> Callable[[], object]:
    """Answer a planned call."""
    device = batch.query.device
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspaces[device], "NHD", use_tensor_cores=True
    )
    num_seqs, per_seq = batch.block_table.shape
    block_size, num_kv_heads, head_dim = batch.key.shape[1:]
    last = batch.max_seq_len - (per_seq - 1) * block_size
    wrapper.plan(
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * per_seq,
        batch.block_table.flatten(),
        torch.full((num_seqs,), last, dtype=torch.int32, device=device),
        batch.query.shape[1],
        num_kv_heads,
        head_dim,
        block_size,
        q_data_type=batch.query.dtype,
        kv_data_type=batch.key.dtype,
    )
    return lambda: wrapper.run(batch.query, (batch.key, batch.value))
