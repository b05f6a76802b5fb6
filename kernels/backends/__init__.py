"""Other people's kernels, where they are installed: one module each, of a few lines.

A backend takes a batch and answers a call; what it prepares on the host (a plan) is not timed. To
add one: a module with ``decode(batch)``, and one line in `PACKAGES` (`kernels/backends/names.py`).
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.backends.names import PACKAGES


class AttentionBatch(NamedTuple):
    """What a kernel is given; see `kernels.paged_attention.paged_attention` for the shapes.

    Attributes:
        query, key, value, block_table, seq_lens, query_starts: as there, on the device.
        max_seq_len, max_query_len: of every sequence here, which are equally long.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_seq_len: int
    max_query_len: int


Backend = Callable[[AttentionBatch], Callable[[], object]]


def _lazy(module: str) -> Backend:
    def decode(batch: AttentionBatch) -> Callable[[], object]:
        call: Callable[[], object] = importlib.import_module(module).decode(batch)
        return call

    return decode


BACKENDS: dict[str, Backend] = {name: _lazy(f"kernels.backends.with_{name}") for name in PACKAGES}
"""Every backend, installed or not."""


def installed() -> dict[str, str]:
    """Answer the package of each backend that is installed, by the name of its kernel."""
    return {
        name: package
        for name, package in PACKAGES.items()
        if importlib.util.find_spec(package) is not None
    }
