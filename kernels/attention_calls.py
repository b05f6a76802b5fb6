"""Calls of attention for a case: one pool of keys and values, cut into blocks of any size."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.backends import BACKENDS, AttentionBatch
from kernels.calls import (
    DTYPES,
    TOLERANCE,
    Calls,
    Skip,
    fill_random,
    is_cold,
    relative_error,
    rotation,
)
from kernels.grid import MAX_TOKENS, ORDERED, PYTORCH, SDPA, Case
from kernels.reference import LATENT_DIM, attention, gather
from kernels.reference import paged_attention as paged_reference
from kernels.tiles import Tile

MAX_CHECKED = 3
"""Sequences of a batch, and queries of a chunk, that are checked: the first, middle and last."""

MAX_PLANS = 32
"""Most copies of a batch for other people's kernels, whose plans take memory each."""

_SHARE = 0.7
"""Of the free memory that a pool may take."""


class Pool(NamedTuple):
    """Keys and values of many tokens, [num_slots, num_kv_heads, head_dim]; no values: latent."""

    key: torch.Tensor
    value: torch.Tensor | None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        elements: int = self.key.shape[1] * self.key.shape[2] * (1 if self.value is None else 2)
        return elements * int(self.key.element_size())

    def blocks(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Answer the same memory as blocks, [num_blocks, block_size, num_kv_heads, head_dim]."""
        count = len(self.key) // block_size
        shape = (count, block_size, *self.key.shape[1:])
        key, value = (
            None if part is None else part[: count * block_size].view(shape)
            for part in (self.key, self.value)
        )
        return key, value


class AttentionCalls:
    """Makes calls; keeps the pool of the heads that were asked for last.

    Attributes:
        tiles: how the decode kernel is cut, by `tile_key`; the default where nothing is said.
    """

    def __init__(self, device: torch.device, seed: int, max_tokens: int = MAX_TOKENS) -> None:
        self._device, self._max_tokens = device, max_tokens
        self._generator = torch.Generator(device).manual_seed(seed)
        self._pool: tuple[tuple[object, ...], Pool] | None = None
        self.tiles: dict[str, tuple[int, int, int, int]] = {}

    def release(self) -> None:
        """Give the pool back."""
        self._pool = None

    def pool(self, case: Case) -> Pool:
        """Answer the pool for the heads of *case*, as large as any case needs or memory allows."""
        shape = (case.num_kv_heads, case.head_dim)
        identity = (*shape, case.kv_dtype)
        if self._pool is None or self._pool[0] != identity:
            self._pool = None
            dtype, latent = DTYPES[case.kv_dtype], is_latent(case)
            slots = self._max_tokens
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info(self._device)[0]
                slot_bytes = (1 if latent else 2) * shape[0] * shape[1] * dtype.itemsize
                slots = min(slots, int(_SHARE * free) // slot_bytes // 256 * 256)
            parts = []
            for _ in range(1 if latent else 2):
                part = torch.empty((slots, *shape), dtype=dtype, device=self._device)
                fill_random(part, self._generator)
                parts.append(part)
            self._pool = identity, Pool(parts[0], None if latent else parts[1])
        return self._pool[1]

    def make(self, case: Case) -> Calls:
        """Answer the calls of *case*, on fresh random queries and block ids.

        Raises:
            Skip: it does not fit the pool, or its kernel does not take it.
        """
        query_len = case.query_len or 1
        seq_len = query_len + (case.context or case.query_context)
        pool = self.pool(case)
        num_bytes = case.batch * seq_len * pool.token_bytes
        copies = rotation(num_bytes, self._device)
        if case.kernel in BACKENDS:
            copies = min(copies, MAX_PLANS)
        places = _Places(self, case, pool, seq_len, copies)
        query = torch.randn(
            (case.batch * query_len, case.num_heads, case.head_dim),
            device=self._device,
            generator=self._generator,
        ).to(DTYPES[case.dtype])
        width = LATENT_DIM if is_latent(case) else case.head_dim
        outs = query.new_empty((*query.shape[:2], width))
        calls = [
            _call(self, case, query, places.batch(index, query, seq_len), outs)
            for index in range(places.count)
        ]
        positions = torch.arange(seq_len - query_len, seq_len, device=self._device)
        rows = _few(query_len)

        def error() -> float:
            outs.fill_(float("nan"))
            answer = calls[0]()
            got = answer if isinstance(answer, torch.Tensor) else outs
            got = got.reshape(case.batch, query_len, case.num_heads, width)
            queries = query.view(case.batch, query_len, *query.shape[1:])
            worst = 0.0 if bool(torch.isfinite(got).all()) else float("inf")
            for seq in _few(case.batch):
                key, value = places.tokens(seq, seq_len)
                expected = attention(
                    queries[seq][rows],
                    key,
                    value,
                    case.head_dim**-0.5,
                    torch.float32 if self._device.type == "cuda" else torch.float64,
                    positions[rows],
                )
                worst = max(worst, relative_error(got[seq][rows], expected))
            return worst

        return Calls(
            calls, error, TOLERANCE[case.dtype], is_cold(num_bytes, places.count, self._device)
        )

    def permutation(self, count: int) -> torch.Tensor:
        """Answer the numbers below *count* in random order."""
        return torch.randperm(count, device=self._device, generator=self._generator)


class _Places:
    """Where the sequences of a call lie in the pool: *count* times elsewhere."""

    def __init__(
        self, maker: AttentionCalls, case: Case, pool: Pool, seq_len: int, copies: int
    ) -> None:
        self._case = case
        block_size = case.block_size or seq_len
        per_seq = -(-seq_len // block_size)
        self.key, self.value = pool.blocks(block_size)
        needed, there = case.batch * per_seq, len(self.key)
        if needed > there:
            gib = pool.token_bytes * block_size / 2**30
            raise Skip(
                f"needs {needed * gib:.3g} GiB of KV cache, there is room for {there * gib:.3g}"
            )
        self.count = min(copies, there // needed)
        scattered = case.block_size and case.kernel != ORDERED
        used = self.count * needed
        ids = maker.permutation(there) if scattered else torch.arange(used, device=self.key.device)
        self._tables = ids[:used].int().view(self.count, case.batch, per_seq)
        query_len = case.query_len or 1
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=ids.device)
        self._starts = starts * query_len
        self._seq_lens = torch.full_like(starts[1:], seq_len)

    def batch(self, index: int, query: torch.Tensor, seq_len: int) -> AttentionBatch:
        """Answer what a kernel is given for the *index*-th place."""
        case, table = self._case, self._tables[index]
        key, value = self.key, self.value
        if not case.block_size:  # of a row of sequences, those that are meant
            first = index * case.batch
            key = key[first : first + case.batch]
            value = None if value is None else value[first : first + case.batch]
        return AttentionBatch(
            query, key, value, table, self._seq_lens, self._starts, seq_len, case.query_len or 1
        )

    def tokens(self, seq: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Answer keys and values of a sequence at the first place, in the order of its tokens."""
        key = gather(self.key, self._tables[0, seq], seq_len)
        if self.value is None:
            return key, key[..., :LATENT_DIM]
        return key, gather(self.value, self._tables[0, seq], seq_len)


def is_latent(case: Case) -> bool:
    """Whether keys are values too."""
    return case.head_dim > LATENT_DIM


def tile_key(case: Case) -> str:
    """Answer what the best tile depends on."""
    group = case.num_heads // case.num_kv_heads
    return f"{min(128, max(16, group))} {case.head_dim} {case.dtype} {case.kv_dtype}"


def _few(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})[:MAX_CHECKED]


def _call(
    maker: AttentionCalls, case: Case, query: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
) -> Callable[[], object]:
    """Answer the call of the kernel of *case* on *batch*."""
    if case.kernel == PYTORCH:
        return functools.partial(_by_reference, batch, out, block_size=case.block_size)
    if case.kernel in BACKENDS:
        return BACKENDS[case.kernel](batch)
    # A CPU needs no Triton.
    from kernels import contiguous  # noqa: PLC0415
    from kernels import paged_attention as paged  # noqa: PLC0415

    if case.kernel == SDPA:
        assert batch.value is not None
        return functools.partial(contiguous.sdpa, query, batch.key, batch.value)

    tile = None
    if batch.max_query_len == 1 and tile_key(case) in maker.tiles:
        tile = Tile(*maker.tiles[tile_key(case)])
    options: paged.Options = {"max_query_len": batch.max_query_len, "tile": tile, "out": out}
    cache = (query, batch.key, batch.value)
    if not case.block_size:
        return functools.partial(
            contiguous.attention,
            *cache,
            batch.seq_lens,
            query_starts=batch.query_starts,
            max_seq_len=batch.max_seq_len,
            **options,
        )
    return functools.partial(
        paged.paged_attention,
        *cache,
        batch.block_table,
        batch.seq_lens,
        query_starts=batch.query_starts,
        max_seq_len=batch.max_seq_len,
        **options,
    )


def _by_reference(batch: AttentionBatch, out: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Answer the same by the reference, in the dtype of the queries; without blocks, by rows."""
    table = batch.block_table
    if not block_size:
        table = torch.arange(len(batch.seq_lens), device=out.device)[:, None]
    answer = paged_reference(
        batch.query,
        batch.key,
        batch.value,
        table,
        batch.seq_lens,
        query_starts=batch.query_starts,
        dtype=out.dtype,
    )
    return out.copy_(answer)
