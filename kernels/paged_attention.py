"""Paged attention in Triton: decode of MHA, GQA, MQA and latent attention, and prefill of chunks.

One kernel for all: a program has the queries of one kv head (a decode's are the query heads that
share it), walks through the tokens they see, a tile at a time, and keeps a running softmax.
Decodes of small batches are split over the context (Flash-Decoding); a second kernel merges the
parts. The same kernel without a block table is `kernels.contiguous`: the two differ by the
indirection alone.
"""

import math
import os
from typing import NamedTuple, TypedDict, Unpack

import torch
import triton
import triton.language as tl

from kernels.reference import LATENT_DIM
from kernels.tiles import Tile, default_tile, power_of_two, split_count

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on"}
"""Whether kernels run in Triton's interpreter, on a CPU: then 16-bit values are upcast."""

CONTIGUOUS = 0
"""The block size of memory without a block table."""

MAX_BLOCK_SIZE = 256

_NEVER_SPECIALIZED = ("table_stride", "num_splits")


class Workspace(NamedTuple):
    """Parts of a split context: outputs [num_splits, total_queries, num_heads, width], log-sums."""

    partial: torch.Tensor
    lse: torch.Tensor


@triton.jit(do_not_specialize=_NEVER_SPECIALIZED)
def attention_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    seq_lens: tl.tensor,
    query_starts: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_splits: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Attend to the tokens of one part of one sequence, with the queries of one kv head.

    Rows are (query token, query head of the group), so that prefill and decode are the same.
    Without blocks (BLOCK_SIZE 0) *key* and *value* are [num_seqs, max_len, num_kv_heads, head_dim].
    LATENT: values are the first VALUE_DIM elements of the keys. UPCAST: compute in fp32.
    """
    tiles = tl.num_programs(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tiles - 1 - tl.program_id(0) // NUM_KV_HEADS  # those that see most tokens first
    part = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - start
    seq_len = tl.load(seq_lens + seq)
    if tile * BLOCK_M >= num_queries * GROUP:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_queries * GROUP
    head = kv_head * GROUP + row % GROUP
    token = (start + row // GROUP).to(tl.int64)
    position = seq_len - num_queries + row // GROUP
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < VALUE_DIM
    query_place = query + token * query_stride + head * HEAD_DIM
    q = tl.load(query_place[:, None] + dims[None, :], is_row[:, None] & is_dim[None, :], 0.0)
    if UPCAST:
        q = q.to(tl.float32)
    rope = VALUE_DIM + tl.arange(0, BLOCK_R)
    is_rope = rope < HEAD_DIM
    if LATENT:
        q_rope = tl.load(
            query_place[:, None] + rope[None, :], is_row[:, None] & is_rope[None, :], 0.0
        )
        if UPCAST:
            q_rope = q_rope.to(tl.float32)

    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, num_queries * GROUP) - 1
    seen = seq_len - num_queries + last_row // GROUP + 1
    part_len = tl.cdiv(tl.cdiv(seen, BLOCK_N), num_splits) * BLOCK_N
    first = part * part_len
    stop = tl.minimum(seen, first + part_len)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for offset in range(first, stop, BLOCK_N):
        where = offset + tl.arange(0, BLOCK_N)
        inside = where < stop
        if BLOCK_SIZE == 0:
            place = seq.to(tl.int64) * block_stride + where.to(tl.int64) * token_stride
        else:
            entry = table + seq.to(tl.int64) * table_stride + where // BLOCK_SIZE
            block = tl.load(entry, inside, 0).to(tl.int64)
            place = block * block_stride + (where % BLOCK_SIZE) * token_stride
        place += kv_head * head_stride
        if VALUE_DIM == BLOCK_D:
            wanted = inside[:, None]
        else:
            wanted = inside[:, None] & is_dim[None, :]
        k = tl.load(key + place[:, None] + dims[None, :], wanted, 0.0)
        k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATENT:
            k_rope = tl.load(
                key + place[:, None] + rope[None, :], inside[:, None] & is_rope[None, :], 0.0
            )
            k_rope = k_rope.to(q.dtype)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        visible = inside[None, :] & (where[None, :] <= position[:, None])
        scores = tl.where(visible, scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see nothing yet
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if LATENT:
            v = k
        else:
            v = tl.load(value + place[:, None] + dims[None, :], wanted, 0.0)
            v = v.to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = higher

    total = tl.where(total == 0.0, 1.0, total)  # rows that see nothing: their log-sum is -inf
    acc = acc * (value_scale / total)[:, None]
    num_heads = NUM_KV_HEADS * GROUP
    out_row = token * num_heads + head
    stored = is_row[:, None] & is_dim[None, :]
    if SPLIT:
        all_rows = tl.load(query_starts + tl.num_programs(2)).to(tl.int64) * num_heads
        out_row = part * all_rows + out_row
        tl.store(partial + out_row[:, None] * VALUE_DIM + dims[None, :], acc, stored)
        tl.store(lse + out_row, highest + tl.log2(total), is_row)
    else:
        tl.store(
            out + out_row[:, None] * VALUE_DIM + dims[None, :], acc.to(out.dtype.element_ty), stored
        )


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    num_splits: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge the parts of one row of outputs, weighted by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        parts = first + tl.arange(0, BLOCK_S)
        is_part = parts < num_splits
        sums = tl.load(lse + parts * num_rows + row, is_part, float("-inf"))
        higher = tl.maximum(highest, tl.max(sums, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(sums - finite)
        shrink = tl.exp2(highest - finite)
        places = (parts * num_rows + row) * VALUE_DIM
        outputs = tl.load(
            partial + places[:, None] + dims[None, :],
            is_part[:, None] & (dims < VALUE_DIM)[None, :],
            0.0,
        )
        acc = acc * shrink + tl.sum(outputs * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = higher
    acc = acc / total
    tl.store(out + row * VALUE_DIM + dims, acc.to(out.dtype.element_ty), dims < VALUE_DIM)


def make_workspace(
    num_splits: int, total_queries: int, num_heads: int, width: int, device: torch.device
) -> Workspace:
    """Answer room for the parts of a split context; it is overwritten by every call."""
    shape = (num_splits, total_queries, num_heads)
    return Workspace(
        torch.empty((*shape, width), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


class Options(TypedDict, total=False):
    """What a call may leave out.

    Attributes:
        max_query_len: no sequence has more queries; 1.
        scale: of the scores; 1 / sqrt(head_dim).
        k_scale, v_scale: make the true values of those of an fp8 cache; 1.
        num_splits: parts of every context; `kernels.tiles.split_count`.
        tile: `kernels.tiles.default_tile`.
        out, workspace: are overwritten; new ones.
    """

    max_query_len: int
    scale: float
    k_scale: float
    v_scale: float
    num_splits: int | None
    tile: Tile | None
    out: torch.Tensor | None
    workspace: Workspace | None


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    max_seq_len: int,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Answer causal attention over a paged cache, [total_queries, num_heads, value width].

    Shapes are those of `kernels.reference.paged_attention`: *query* is bf16, fp16 or fp32 and
    contiguous; *key_cache* and *value_cache* the same, or fp8 (e4m3), with equal strides, the last
    1, and *value_cache* None for latent attention; *block_table*, *seq_lens* and *query_starts*
    int32, of which entries beyond a sequence's length are not read. No sequence has more than
    *max_seq_len* tokens. Nothing is read back from the device.

    Raises:
        ValueError: shapes that the kernel does not take.
    """
    block_size = key_cache.shape[1]
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size {block_size}; expected 1 to {MAX_BLOCK_SIZE}")
    sequences = Sequences(block_table, seq_lens, query_starts, max_seq_len)
    return launch(query, key_cache, value_cache, sequences, block_size, options)


class Sequences(NamedTuple):
    """Which tokens and queries belong together; as in `paged_attention`."""

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_seq_len: int


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sequences: Sequences,
    block_size: int,
    options: Options,
) -> torch.Tensor:
    """Run the kernels; as `paged_attention`. *block_size* `CONTIGUOUS`: there is no table.

    Raises:
        ValueError: shapes that the kernel does not take.
    """
    table, seq_lens, query_starts, max_seq_len = sequences
    max_query_len = options.get("max_query_len", 1)
    tile, num_splits = options.get("tile"), options.get("num_splits")
    out, workspace = options.get("out"), options.get("workspace")
    total_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    latent = value is None
    value_dim = LATENT_DIM if latent else head_dim
    _check(query, key, value, table)
    group = num_heads // num_kv_heads
    tile = tile or default_tile(max_query_len * group, value_dim, key.element_size())
    row_tiles = triton.cdiv(max_query_len * group, tile.block_m)
    num_programs = len(seq_lens) * num_kv_heads * row_tiles
    if num_splits is None:
        num_splits = split_count(num_programs, max_seq_len, tile.block_n, query.device)
    if out is None:
        shape = (total_queries, num_heads, value_dim)
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if num_splits > 1 and workspace is None:
        workspace = make_workspace(num_splits, total_queries, num_heads, value_dim, query.device)
    partial, lse = (out, out) if num_splits == 1 or workspace is None else workspace
    scale, k_scale = options.get("scale", head_dim**-0.5), options.get("k_scale", 1.0)
    attention_kernel[(num_kv_heads * row_tiles, num_splits, len(seq_lens))](
        out,
        partial,
        lse,
        query,
        key,
        key if value is None else value,
        table,
        seq_lens,
        query_starts,
        scale * k_scale * math.log2(math.e),
        k_scale if latent else options.get("v_scale", 1.0),
        table.stride(0),
        query.stride(0),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        LATENT=latent,
        SPLIT=num_splits > 1,
        UPCAST=INTERPRETED or query.dtype == torch.float32,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=power_of_two(value_dim),
        BLOCK_R=power_of_two(head_dim - value_dim) if latent else 16,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        merge_kernel[(total_queries * num_heads,)](
            out,
            partial,
            lse,
            num_splits,
            VALUE_DIM=value_dim,
            BLOCK_S=16,
            BLOCK_D=power_of_two(value_dim),
            num_warps=4,
        )
    return out


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, table: torch.Tensor
) -> None:
    """Refuse what the kernel would read wrongly."""
    num_heads, head_dim = query.shape[1:]
    if num_heads % key.shape[2]:
        raise ValueError(f"{num_heads} query heads; expected a multiple of {key.shape[2]} kv heads")
    if key.shape[3] != head_dim or (value is not None and value.shape != key.shape):
        raise ValueError(f"keys {tuple(key.shape)}; expected values alike, head_dim {head_dim}")
    if value is None and head_dim <= LATENT_DIM:
        raise ValueError(f"head_dim {head_dim}; expected more than {LATENT_DIM}, a latent and rope")
    if value is not None and head_dim > 256:
        raise ValueError(f"head_dim {head_dim}; expected at most 256")
    if value is not None and value.stride() != key.stride():
        raise ValueError("keys and values have other strides; expected the same")
    if not query.is_contiguous() or key.stride(3) != 1 or table.stride(-1) != 1:
        raise ValueError("expected contiguous queries, and heads and tables without gaps")
