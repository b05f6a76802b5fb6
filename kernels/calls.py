"""What is timed of a case: calls on memory that is not in the L2 cache, and their error."""

from collections.abc import Callable
from typing import NamedTuple

import torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
TOLERANCE = {"bfloat16": 1e-2, "float16": 5e-3, "float32": 1e-4}
"""Relative error (Frobenius norm) from which a result is wrong: outputs and weights are rounded."""

MAX_ROTATION = 512
"""Most copies among which calls rotate."""


AMD_CACHE_BYTES = 256_000_000
"""Infinity Cache of an MI300X, which stands between its small L2 caches and memory."""


class Skip(Exception):  # noqa: N818  # not an error: the reason is listed
    """A case that cannot be measured here; the message says why."""


class Calls(NamedTuple):
    """The same work again and again, each of *calls* on other memory.

    Attributes:
        calls: what is timed, one after the other.
        error: answers the relative error of the first, whose outputs it poisons before.
        tolerance: the error that is right.
        cold: whether what the calls read between two uses of the same memory exceeds the L2 cache.
    """

    calls: list[Callable[[], object]]
    error: Callable[[], float]
    tolerance: float
    cold: bool


def l2_bytes(device: torch.device) -> int:
    """Answer the size of the L2 cache; 0 on a CPU, where nothing is rotated."""
    if device.type != "cuda":
        return 0
    if torch.version.hip:
        return AMD_CACHE_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0) or 128_000_000)


def rotation(num_bytes: int, device: torch.device) -> int:
    """Answer among how many copies of *num_bytes* calls rotate: three times the L2 cache."""
    return max(1, min(MAX_ROTATION, 1 + 3 * l2_bytes(device) // max(num_bytes, 1)))


def is_cold(num_bytes: int, copies: int, device: torch.device) -> bool:
    """Whether *copies* of *num_bytes* are more than the L2 cache holds, with room to spare."""
    return num_bytes * copies > 2 * l2_bytes(device)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Answer the norm of the difference over that of *expected*; infinite if a number is none."""
    got = output.to(expected.dtype)
    error = float((got - expected).norm() / expected.norm())
    return error if bool(torch.isfinite(got).all()) else float("inf")


def fill_random(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill *tensor* with normal numbers, the same 16 Mi of them again and again.

    An odd number of them, so that no two tokens are alike.
    """
    flat = tensor.view(-1)
    size = max(1, min(2**24 - 1, flat.numel()))
    pattern = torch.randn(size, device=tensor.device, generator=generator).to(tensor.dtype)
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        part.copy_(pattern[: part.numel()])
