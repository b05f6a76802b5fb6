"""How the attention kernel is cut into tiles and parts."""

from typing import NamedTuple

import torch

MAX_SPLITS = 128
"""Most parts of a context."""


class Tile(NamedTuple):
    """How the kernel is cut: tokens and rows of a tile, warps, stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def power_of_two(size: int, least: int = 16) -> int:
    """Answer the smallest power of two that is at least *size* and *least* (16: of `tl.dot`)."""
    return max(least, 1 << (size - 1).bit_length())


def default_tile(rows: int, value_dim: int, kv_bytes: int) -> Tile:
    """Answer a tile for *rows* of queries a kv head: within 99 KB of shared memory, 255 registers.

    *value_dim* elements a token, of *kv_bytes* each. `kernels.bench` times others (`tiles`).
    """
    block_d = power_of_two(value_dim)
    if block_d > 256:  # latent attention
        return Tile(min(32, power_of_two(rows)), 32, 4 if rows <= 16 else 8, 2)
    block_m = min(64, power_of_two(rows))
    if kv_bytes > 2:
        return Tile(min(block_m, 32), 32, 4, 1)
    return Tile(block_m, 64 if block_d <= 128 else 32, 4, 2)


def tiles(rows: int, value_dim: int, kv_bytes: int) -> list[Tile]:
    """Answer tiles worth timing for decodes; the first is the default."""
    first = default_tile(rows, value_dim, kv_bytes)
    m = first.block_m
    if power_of_two(value_dim) > 256:
        more = [Tile(m, 32, 8, 2), Tile(m, 64, 8, 2), Tile(m, 32, 4, 3), Tile(16, 32, 4, 2)]
    else:
        more = [
            Tile(m, 32, 4, 4),
            Tile(m, 64, 4, 3),
            Tile(m, 64, 8, 3),
            Tile(m, 128, 4, 2),
            Tile(m, 128, 8, 3),
        ]
    return list(dict.fromkeys([first, *more]))


def split_count(num_programs: int, max_seq_len: int, block_n: int, device: torch.device) -> int:
    """Answer into how many parts a context is cut: 4 programs a multiprocessor, 4 tiles a part."""
    if device.type != "cuda":
        return 1
    wanted: int = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(MAX_SPLITS, wanted // num_programs, max_seq_len // (4 * block_n)))
