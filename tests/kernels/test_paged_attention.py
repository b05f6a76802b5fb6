"""Kernels, under Triton's interpreter, and the reference agree on fresh random inputs."""

import random
from typing import Any, NamedTuple

import pytest

from tests.kernels.conftest import NEEDS_TORCH

torch: Any = pytest.importorskip("torch", reason=NEEDS_TORCH)
reference: Any = pytest.importorskip("kernels.reference", reason=NEEDS_TORCH)
paged: Any = pytest.importorskip("kernels.paged_attention", reason=NEEDS_TORCH)
contiguous: Any = pytest.importorskip("kernels.contiguous", reason=NEEDS_TORCH)

DEVICE = "cpu" if paged.INTERPRETED else "cuda"
# Inputs in 16 bits are upcast and outputs are kept in 32: what is left is the order of sums. On a
# GPU products are in 16 bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
if not paged.INTERPRETED:
    TOLERANCE |= {"bfloat16": 1e-2, "float16": 5e-3}
NOWHERE = 2**30
"""A block id that no cache has: whoever reads it fails."""


@pytest.fixture
def seed() -> int:
    """Another one in each run; pytest shows it where a test fails."""
    chosen = random.SystemRandom().randrange(2**31)
    torch.manual_seed(chosen)
    return chosen


class Batch(NamedTuple):
    """Inputs whose unused slots, table entries and outputs are poisoned."""

    query: Any
    key: Any
    value: Any
    table: Any
    seq_lens: Any
    query_starts: Any
    max_seq_len: int
    max_query_len: int

    @property
    def poisoned(self) -> Any:
        width = 512 if self.value is None else self.query.shape[2]
        shape = (*self.query.shape[:2], width)
        return torch.full(shape, float("nan"), dtype=torch.float32, device=DEVICE)

    def run(self, **options: Any) -> Any:
        sizes = {"max_seq_len": self.max_seq_len, "max_query_len": self.max_query_len}
        return paged.paged_attention(
            *self[:5],
            query_starts=self.query_starts,
            out=self.poisoned,
            **sizes,
            **options,
        )

    def expected(self, dtype: Any = None) -> Any:
        return reference.paged_attention(
            *self[:5], query_starts=self.query_starts, dtype=dtype or torch.float64
        )

    def error(self, answer: Any) -> float:
        expected = self.expected()
        return float((answer.double() - expected).norm() / expected.norm())


def _batch(
    lengths: list[int],
    heads: tuple[int, int, int] = (8, 2, 64),
    block_size: int = 16,
    dtype: str = "float32",
    *,
    query_lens: list[int] | None = None,
    kv_dtype: Any = None,
    shared_blocks: int = 0,
) -> Batch:
    num_heads, num_kv_heads, head_dim = heads
    query_lens = query_lens or [1] * len(lengths)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks).int()
    table = torch.full((len(lengths), max(counts) + 2), NOWHERE, dtype=torch.int32)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    first = 0
    for seq, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[seq, :count] = ids[first : first + count]
        table[seq, :shared_blocks] = table[0, :shared_blocks]
        first += count
        for token in range(length):
            used[table[seq, token // block_size], token % block_size] = True
    kind = getattr(torch, dtype)
    caches = []
    for _ in range(1 if head_dim > 512 else 2):
        cache = torch.randn(num_blocks, block_size, num_kv_heads, head_dim)
        cache[~used] = float("nan")
        caches.append(cache.to(kv_dtype or kind).to(DEVICE))
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return Batch(
        torch.randn(sum(query_lens), num_heads, head_dim).to(kind).to(DEVICE),
        caches[0],
        caches[1] if len(caches) > 1 else None,
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        starts.to(DEVICE),
        max(lengths),
        max(query_lens),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_ragged_decodes(seed: int, dtype: str, num_splits: int) -> None:
    # One token, a length that ends on a block's last slot, one past it, and a long one.
    batch = _batch([1, 16, 17, 150], dtype=dtype)
    assert batch.error(batch.run(num_splits=num_splits)) <= TOLERANCE[dtype], seed


@pytest.mark.parametrize("block_size", [1, 7, 64, 256])
def test_any_block_size(seed: int, block_size: int) -> None:
    batch = _batch([5, 70], block_size=block_size)
    assert batch.error(batch.run()) <= 1e-5, seed


@pytest.mark.parametrize(
    "heads", [(4, 4, 64), (4, 2, 80), (7, 1, 96), (16, 1, 128), (40, 8, 192), (2, 1, 256)]
)
def test_any_heads(seed: int, heads: tuple[int, int, int]) -> None:
    batch = _batch([33, 16], heads, dtype="bfloat16")
    assert batch.error(batch.run()) <= TOLERANCE["bfloat16"], seed


def test_parts_that_see_nothing(seed: int) -> None:
    batch = _batch([2, 130])
    assert batch.error(batch.run(num_splits=8)) <= 1e-5, seed


def test_shared_prefixes(seed: int) -> None:
    batch = _batch([40, 50, 33], shared_blocks=2)
    assert batch.error(batch.run(num_splits=2)) <= 1e-5, seed


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_chunks_behind_a_cached_prefix(seed: int, dtype: str) -> None:
    # A whole prompt, a chunk behind a prefix, a chunk of one, one longer than a tile of rows.
    batch = _batch([20, 90, 33, 40], dtype=dtype, query_lens=[20, 5, 1, 30])
    assert batch.error(batch.run()) <= TOLERANCE[dtype], seed


@pytest.mark.parametrize("num_heads", [16, 20])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_latent_attention(seed: int, num_heads: int, num_splits: int) -> None:
    batch = _batch([33, 70], (num_heads, 1, 576), dtype="bfloat16")
    assert batch.error(batch.run(num_splits=num_splits)) <= TOLERANCE["bfloat16"], seed


def test_fp8_cache_and_its_scales(seed: int) -> None:
    batch = _batch([33, 70], dtype="bfloat16", kv_dtype=torch.float8_e4m3fn)
    assert batch.error(batch.run()) <= TOLERANCE["bfloat16"], seed
    scaled = batch.run(k_scale=2.0, v_scale=3.0, scale=0.5 * 64**-0.5)
    assert batch.error(scaled / 3) <= TOLERANCE["bfloat16"], seed


@pytest.mark.parametrize("num_splits", [1, 3])
def test_contiguous_is_the_same_arithmetic(seed: int, num_splits: int) -> None:
    batch = _batch([64, 64, 64])
    key, value = (
        torch.stack([reference.gather(cache, row, 64) for row in batch.table])
        for cache in (batch.key, batch.value)
    )
    answer = contiguous.attention(
        batch.query,
        key,
        value,
        batch.seq_lens,
        max_seq_len=64,
        query_starts=batch.query_starts,
        num_splits=num_splits,
        out=batch.poisoned,
    )
    assert torch.equal(answer, batch.run(num_splits=num_splits)), seed
    by_torch = contiguous.sdpa(batch.query, key, value)
    assert batch.error(by_torch) <= 1e-5, seed


@pytest.mark.parametrize("query_len", [1, 5, 40])
def test_the_reference_is_pytorchs_attention(seed: int, query_len: int) -> None:
    query = torch.randn(query_len, 6, 32, dtype=torch.float64)
    key, value = torch.randn(2, 40, 3, 32, dtype=torch.float64)
    visible = torch.ones(query_len, 40, dtype=torch.bool).tril(40 - query_len)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=visible,
        enable_gqa=True,
    )[0].transpose(0, 1)
    answer = reference.attention(query, key, value, 32**-0.5)
    assert torch.allclose(answer, expected, rtol=1e-12, atol=1e-12), seed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(1, 3, 64)}, "3 query heads; expected a multiple of 2"),
        ({"query": torch.zeros(1, 8, 32)}, "expected values alike, head_dim 32"),
        ({"query": torch.zeros(1, 64, 8).transpose(1, 2)}, "expected contiguous queries"),
        ({"value": None}, "expected more than 512"),
        ({"key": torch.zeros(1, 512, 2, 64)}, "block_size 512; expected 1 to 256"),
    ],
)
def test_what_the_kernel_would_misread(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _batch([5])._replace(**change).run()
