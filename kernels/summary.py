"""What measurements say, in a few lines: achieved bandwidth, and what block sizes cost."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kernels.grid import PYTORCH, TRITON
from kernels.journal import Record
from workloads.errors import plain

LARGE_BYTES = 1e9
"""Keys and values from which launches and splits do not count."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_LATENT = 512


class Decode(NamedTuple):
    """One measured decode step: its heads, its kernel, and what it moved in how long."""

    heads: tuple[int, int, int, str]
    kernel: str
    block_size: int
    batch: int
    context: int
    kv_bytes: int
    us: float

    @property
    def bytes_per_s(self) -> float:
        """What it read of keys and values, a second."""
        return self.kv_bytes / (self.us * 1e-6)

    @property
    def is_ours(self) -> bool:
        """Whether it is by the kernel that is also measured without blocks."""
        return self.kernel in {TRITON, PYTORCH}


def decodes(records: Sequence[Record]) -> list[Decode]:
    """Answer the decode steps among *records*."""
    found = []
    for record in records:
        row = record.get("row", {})
        if "us" in record and row.get("op") == "decode_attention":
            heads = (row["num_heads"], row["num_kv_heads"], row["head_dim"], row["kv_dtype"])
            width = row["head_dim"] * (1 if row["head_dim"] > _LATENT else 2)
            token_bytes = row["num_kv_heads"] * width * _BYTES.get(row["kv_dtype"], 1)
            tokens = row["batch"] * (row["context"] + 1)
            found.append(
                Decode(
                    heads,
                    row["kernel"],
                    row.get("block_size", 0),
                    row["batch"],
                    row["context"],
                    tokens * token_bytes,
                    record["us"],
                )
            )
    return found


def main_heads(steps: Sequence[Decode]) -> tuple[int, int, int, str]:
    """Answer the heads with most of *steps*, which are some."""
    counts: dict[tuple[int, int, int, str], int] = defaultdict(int)
    for step in steps:
        counts[step.heads] += 1
    return max(counts, key=lambda heads: counts[heads])


def copy_bytes_per_s(records: Sequence[Record]) -> float | None:
    """Answer the copy bandwidth that was measured last; None if none was."""
    found = [float(r["copy_bytes_per_s"]) for r in records if "copy_bytes_per_s" in r]
    return found[-1] if found else None


def penalties(steps: Sequence[Decode]) -> dict[int, list[tuple[Decode, float]]]:
    """Answer steps of our kernel with their time over that of contiguous memory, by block size."""
    ours = [step for step in steps if step.is_ours]
    alone = {(s.heads, s.batch, s.context): s.us for s in ours if not s.block_size}
    found: dict[int, list[tuple[Decode, float]]] = defaultdict(list)
    for step in ours:
        base = alone.get((step.heads, step.batch, step.context))
        if step.block_size and base is not None:
            found[step.block_size].append((step, step.us / base))
    return dict(sorted(found.items()))


def skipped(records: Sequence[Record]) -> dict[str, list[str]]:
    """Answer the keys of the calls that have no time to this day, by the reason."""
    measured = {record["key"] for record in records if "us" in record}
    last = {r["key"]: r["skip"] for r in records if "skip" in r and r["key"] not in measured}
    reasons: dict[str, list[str]] = defaultdict(list)
    for key, reason in last.items():
        reasons[reason].append(key)
    return dict(reasons)


def describe(header: Record, records: Sequence[Record]) -> str:
    """Answer all of it as text."""
    lines = _lines(header, records)
    return "\n".join(line if line.isprintable() else plain(line) for line in lines)


def _lines(header: Record, records: Sequence[Record]) -> Iterator[str]:
    measured = {record["key"] for record in records if "us" in record}
    yield f"{header['gpu']}: {len(measured)} calls measured"
    copy = copy_bytes_per_s(records)
    steps = decodes(records)
    if copy is not None:
        yield f"copy bandwidth {_rate(copy)}, read and written"
    if steps:
        yield from _attention_lines(steps, copy)
    for reason, keys in skipped(records).items():
        yield f"not measured: {len(keys)} x {reason}: {keys[0]}{', ...' if len(keys) > 1 else ''}"


def _attention_lines(steps: Sequence[Decode], copy: float | None) -> Iterator[str]:
    heads = main_heads(steps)
    mine = [step for step in steps if step.heads == heads]
    large = [step for step in mine if step.kv_bytes > LARGE_BYTES]
    sizes = "KV above 1 GB"
    if not large:
        large, sizes = mine, "all sizes (none has KV above 1 GB)"
    shown = "{} query and {} kv heads of {}, KV {}".format(*heads)
    yield f"decode attention, {shown}, {sizes}:"
    names = sorted({(step.kernel, step.block_size) for step in large})
    rates = {
        name: statistics.median(s.bytes_per_s for s in large if (s.kernel, s.block_size) == name)
        for name in names
    }
    for (kernel, block_size), rate in rates.items():
        where = f"block_size {block_size}" if block_size else "contiguous"
        share = "" if copy is None else f", {rate / copy:.0%} of the copy bandwidth"
        yield f"  {kernel}, {where}: {_rate(rate)}{share}"
    for block_size, pairs in penalties(large).items():
        ratios = [ratio for _, ratio in pairs]
        yield (
            f"  block_size {block_size} takes {statistics.median(ratios):.3f} times as long as "
            f"contiguous ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def _rate(bytes_per_s: float) -> str:
    gigabytes = bytes_per_s / 1e9
    return f"{gigabytes:,.0f} GB/s" if gigabytes >= 10 else f"{gigabytes:.2g} GB/s"
