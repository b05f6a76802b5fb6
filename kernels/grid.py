"""What is measured, in which order: a table that can be used first, then a finer one, then others.

A case is one call of one kernel: the columns of its row in a timing table (`sim.timing.table`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

CPU = "CPU"
"""The name of the GPU in tables that are none's."""

TRITON = "kvsim_triton"
ORDERED = "kvsim_triton_ordered"
"""The same with the block ids of a sequence in a row, as they never are for long."""

SDPA = "torch_sdpa"
PYTORCH = "pytorch"
"""The reference, timed with ``--device cpu``."""

BLOCK_SIZES = (16, 0, 64, 1, 32, 128, 8, 256)
"""Tokens in a block, the most asked for first; 0 is contiguous memory."""

MAX_TOKENS = 2**21
"""Most tokens of KV cache of a decode step: 8 GiB of Llama-3.1-8B's in bf16."""

BATCHES, MORE_BATCHES = (1, 4, 16, 64, 256), (2, 8, 32, 128, 512)
CONTEXTS = (127, 511, 2047, 8191, 32_767, 131_071)
"""Tokens of history: with the new one a power of two, whole blocks of any size."""

CHUNKS, HISTORIES = (16, 128, 512, 2048, 8192), (0, 2048, 8192, 32_768, 122_880)
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Heads(NamedTuple):
    """Query and kv heads of one rank, and their width; 576: latent attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = Heads(32, 8, 128)
OTHER_HEADS = (Heads(64, 8, 128), Heads(8, 1, 128), Heads(32, 32, 128), Heads(28, 4, 128))
"""Llama-3.1-70B on one GPU, on eight; Llama-2-7B; Qwen2.5-7B."""

LATENT_HEADS = (Heads(128, 1, 576), Heads(16, 1, 576))
"""DeepSeek-V3 on one GPU, on eight."""

PRODUCTS = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096))
"""(n, k) of Llama-3.1-8B: qkv, o, gate and up, down, logits."""

MORE_PRODUCTS = ((10_240, 8192), (8192, 8192), (57_344, 8192), (8192, 28_672), (128_256, 8192))
"""Of Llama-3.1-70B."""

EXPERTS = ((768, 2048, 128, 8), (14_336, 4096, 8, 2))
"""(n, k, num_experts, top_k) of Qwen3-30B-A3B and Mixtral-8x7B."""

VOCAB_SIZE = 128_256
MESSAGES = tuple(2**power for power in range(13, 29, 3))
"""Bytes of an all-reduce: 8 KiB to 128 MiB."""


class Case(NamedTuple):
    """One call: columns of a timing table, and *group*, the cases that make sense together only."""

    op: str
    kernel: str
    group: str
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    block_size: int = 0
    batch: int = 0
    context: int = 0
    query_len: int = 0
    query_context: int = 0
    n: int = 0
    k: int = 0
    num_experts: int = 0
    top_k: int = 0
    num_gpus: int = 0
    num_tokens: int = 0
    message_bytes: int = 0

    def row(self) -> dict[str, Any]:
        """Answer what identifies the call: columns that are not empty or 0."""
        return {name: value for name, value in self._asdict().items() if value and name != "group"}

    @property
    def key(self) -> str:
        """The same as text."""
        return " ".join(f"{name}={value}" for name, value in self.row().items())


def decodes(
    kernel: str,
    heads: Heads,
    block_sizes: Iterable[int],
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
) -> Iterator[Case]:
    """Answer decode steps, a group a batch."""
    for block_size in block_sizes:
        for batch in batches:
            group = f"{kernel} {heads} {kv_dtype} {block_size} {batch}"
            for context in contexts:
                if batch * (context + 1) <= MAX_TOKENS:
                    yield Case(
                        "decode_attention",
                        kernel,
                        group,
                        dtype,
                        kv_dtype,
                        *heads,
                        block_size,
                        batch,
                        context,
                    )


def prefills(
    kernel: str,
    heads: Heads,
    block_sizes: Iterable[int],
    *,
    chunks: Sequence[int] = CHUNKS,
    histories: Sequence[int] = HISTORIES,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
) -> Iterator[Case]:
    """Answer chunks of one prompt behind a cached prefix."""
    for block_size in block_sizes:
        for chunk in chunks:
            for history in histories:
                yield Case(
                    "prefill_attention",
                    kernel,
                    f"{kernel} {heads} {kv_dtype} {block_size} prefill",
                    dtype,
                    kv_dtype,
                    *heads,
                    block_size,
                    batch=1,
                    query_len=chunk,
                    query_context=history,
                )


def products(
    shapes: Iterable[tuple[int, int]], tokens: Sequence[int] = TOKENS, dtype: str = "bfloat16"
) -> Iterator[Case]:
    """Answer products [num_tokens, k] x [k, n]; all of a model are one group."""
    shapes = list(shapes)
    for n, k in shapes:
        for count in tokens:
            yield Case("gemm", "torch", f"gemm {shapes}", dtype, n=n, k=k, num_tokens=count)


def experts(
    shapes: Iterable[tuple[int, int, int, int]],
    tokens: Sequence[int] = TOKENS,
    dtype: str = "bfloat16",
) -> Iterator[Case]:
    """Answer routed experts, all on one GPU, with random routing."""
    for n, k, count, top_k in shapes:
        for num_tokens in tokens:
            yield Case(
                "moe",
                "torch_grouped_mm",
                f"moe {n} {k} {count} {top_k}",
                dtype,
                n=n,
                k=k,
                num_experts=count,
                top_k=top_k,
                num_gpus=1,
                num_tokens=num_tokens,
            )


def samplers(tokens: Sequence[int], dtype: str = "bfloat16") -> Iterator[Case]:
    """Answer sampling of one token each from logits of Llama 3's vocabulary."""
    return (Case("sampler", "torch", "sampler", dtype, num_tokens=count) for count in tokens)


def all_reduces(num_gpus: int, kernel: str = "nccl") -> Iterator[Case]:
    """Answer all-reduces over two GPUs, four, ... and all."""
    counts = {2**power for power in range(1, 5) if 2**power <= num_gpus} | {num_gpus} - {1}
    for count in sorted(counts):
        for size in MESSAGES:
            group = f"all_reduce {count}"
            yield Case("all_reduce", kernel, group, num_gpus=count, message_bytes=size)


def gpu_grid(backends: Iterable[str] = (), num_gpus: int = 1) -> list[Case]:
    """Answer all cases of a GPU, the most useful first; *backends* are names of other kernels."""
    others = [case for name in backends for case in decodes(name, LLAMA_8B, (16, 64, 1, 256))]
    cases = [
        *decodes(TRITON, LLAMA_8B, BLOCK_SIZES[:2]),
        *products(PRODUCTS),
        *prefills(TRITON, LLAMA_8B, (16,)),
        *decodes(TRITON, LLAMA_8B, BLOCK_SIZES[2:]),
        # All by the same chunks and histories: else interpolation would tell sizes apart.
        *prefills(TRITON, LLAMA_8B, BLOCK_SIZES[1:]),
        *others,
        *decodes(SDPA, LLAMA_8B, (0,)),
        *decodes(ORDERED, LLAMA_8B, (16, 1)),
        *decodes(TRITON, LLAMA_8B, BLOCK_SIZES, kv_dtype="fp8"),
        *prefills(TRITON, LLAMA_8B, BLOCK_SIZES[:1], kv_dtype="fp8"),
        *decodes(TRITON, LATENT_HEADS[0], (64, 0, 16, 1)),
        *experts(EXPERTS),
        *all_reduces(num_gpus),
        *decodes(TRITON, OTHER_HEADS[0], (16, 0)),
        *products(MORE_PRODUCTS),
        *samplers(TOKENS[:8]),
        *decodes(TRITON, LLAMA_8B, BLOCK_SIZES, batches=MORE_BATCHES),
        *(case for heads in OTHER_HEADS[1:] for case in decodes(TRITON, heads, (16, 0, 64, 1))),
        *decodes(TRITON, LATENT_HEADS[1], (64, 0, 16, 1)),
        *decodes(TRITON, LLAMA_8B, (16, 0), dtype="float16", kv_dtype="float16"),
    ]
    return list(dict.fromkeys(cases))


def cpu_grid() -> list[Case]:
    """Answer a few small cases, for tests of all but the times."""
    heads = Heads(4, 2, 64)
    small = {"dtype": "float32"}
    return [
        *decodes(
            PYTORCH,
            heads,
            BLOCK_SIZES,
            batches=(1, 4),
            contexts=(127, 511),
            kv_dtype="float32",
            **small,
        ),
        *prefills(
            PYTORCH,
            heads,
            (16,),
            chunks=(16, 64),
            histories=(0, 64),
            kv_dtype="float32",
            **small,
        ),
        *products([(256, 128)], (1, 64), **small),
        *experts([(32, 64, 4, 2)], (1, 16), **small),
        *samplers((1, 4), **small),
    ]
