"""What the compiler makes of the kernels, without a GPU: ``python -m kernels.facts``.

Registers and stack (what is spilled) of `kernels.paged_attention`, shared memory, and how many of
the copies from memory are 16 bytes wide, for a GPU of each compute capability. Needs Triton, whose
ptxas and cuobjdump run.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import paged_attention as paged
from kernels.grid import LATENT_HEADS, LLAMA_8B, Heads
from kernels.reference import LATENT_DIM
from kernels.tiles import default_tile, power_of_two

CAPABILITIES = (80, 90, 100)

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8e4nv": 1}
_POINTERS = ("query_starts", "seq_lens", "table", "value", "key", "query", "lse", "partial", "out")
_STRIDES = ("query_stride", "block_stride", "token_stride", "head_stride")


class Variant(NamedTuple):
    """A kernel as it is compiled: types are Triton's names; *rows* of queries a kv head."""

    heads: Heads
    block_size: int
    rows: int
    split: bool
    kv_type: str = "bf16"


class Facts(NamedTuple):
    """Of one kernel: registers and bytes of stack of a thread, shared memory, copies from memory.

    *narrow* are copies of keys and values of fewer than 16 bytes, *wide* those of 16.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    wide: int
    narrow: int


VARIANTS = (
    Variant(LLAMA_8B, 16, 4, split=True),
    Variant(LLAMA_8B, 16, 4, split=False),
    Variant(LLAMA_8B, 1, 4, split=True),
    Variant(LLAMA_8B, 0, 4, split=True),
    Variant(LLAMA_8B, 16, 4, split=True, kv_type="fp8e4nv"),
    Variant(LLAMA_8B, 16, 8192, split=False),
    Variant(LATENT_HEADS[0], 64, 128, split=True),
)
"""Decodes of GQA, in parts and whole, by block size; of fp8; a chunk; latent attention."""


def compiled(variant: Variant, capability: int) -> Facts:
    """Answer what Triton makes of *variant* for a GPU of *capability*, 90 for 9.0.

    Raises:
        RuntimeError: Triton's cuobjdump is not at hand.
    """
    num_heads, num_kv_heads, head_dim = variant.heads
    latent = head_dim > LATENT_DIM
    value_dim = LATENT_DIM if latent else head_dim
    tile = default_tile(variant.rows, value_dim, _ELEMENT_BYTES[variant.kv_type])
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": variant.block_size,
        "LATENT": latent,
        "SPLIT": variant.split,
        "UPCAST": False,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": power_of_two(value_dim),
        "BLOCK_R": power_of_two(head_dim - value_dim) if latent else 16,
    }
    names = paged.attention_kernel.arg_names
    source = ASTSource(
        paged.attention_kernel,
        signature={name: _type(name, variant, constants) for name in names},
        constexprs=constants,
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name in _POINTERS + _STRIDES
        },
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = kernel.asm["ptx"]
    registers, stack = _resources(kernel.asm["cubin"])
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, (?:0x)?(\w+),", ptx)
    wide = sum(int(size, 16) == 16 for size in copies)
    return Facts(registers, stack, kernel.metadata.shared, wide, len(copies) - wide)


def _type(name: str, variant: Variant, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("scale", "value_scale"):
        return "fp32"
    if name not in _POINTERS:
        return "i32"
    if name in ("key", "value"):
        return f"*{variant.kv_type}"
    if name in ("table", "seq_lens", "query_starts"):
        return "*i32"
    return "*fp32" if variant.split and name in ("partial", "lse") else "*bf16"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Answer registers a thread, and bytes of its stack, where what is spilled lies."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            raise RuntimeError("Triton's cuobjdump is not at hand") from None
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump: {(done.stderr.splitlines() or ['nothing said'])[0]}")
    return int(found[1]), int(found[2])


def _lines(capabilities: Sequence[int]) -> Iterator[str]:
    yield (
        "sm   heads         block_size  queries  parts  KV       registers  stack  shared  "
        "16-byte copies"
    )
    for capability in capabilities:
        for variant in VARIANTS:
            if variant.kv_type.startswith("fp8") and capability < 89:
                continue
            facts = compiled(variant, capability)
            heads = "/".join(map(str, variant.heads))
            yield (
                f"{capability:<4} {heads:<13} {variant.block_size:<11} {variant.rows:<8} "
                f"{'yes' if variant.split else 'no':<6} {variant.kv_type:<8} "
                f"{facts.registers:<10} {facts.stack_bytes:<6} {facts.shared_bytes:<7} "
                f"{facts.wide} of {facts.wide + facts.narrow}"
            )


def main() -> int:
    """Print a line a kernel; answer the exit code."""
    if paged.INTERPRETED:
        print(
            "python -m kernels.facts: TRITON_INTERPRET is set: nothing is compiled", file=sys.stderr
        )
        return 1
    try:
        for line in _lines(CAPABILITIES):
            print(line, flush=True)
    except RuntimeError as error:
        print(f"python -m kernels.facts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
