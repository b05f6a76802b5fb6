"""Other people's kernels, where they are installed: one module each, of a few lines.

A backend takes a batch and answers a call; what it prepares on the host (a plan) is not timed. To add
one: a module with ``decode(batch)``, and one line in `_MODULES`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch


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

_MODULES = {
    "flashinfer": ("flashinfer", "kernels.backends.with_flashinfer"),
    "flash_attn": ("flash_attn", "kernels.backends.with_flash_attn"),
    "flash_attn_3": ("flash_attn_interface", "kernels.backends.with_flash_attn_3"),
    "vllm_flash_attn": ("vllm", "kernels.backends.with_vllm"),
}
"""The package that a backend needs, and the module of ours, by the name of its kernel."""


def _lazy(module: str) -> Backend:
    def decode(batch: AttentionBatch) -> Callable[[], object]:
        call: Callable[[], object] = importlib.import_module(module).decode(batch)
        return call

    return decode


BACKENDS: dict[str, Backend] = {name: _lazy(module) for name, (_, module) in _MODULES.items()}
"""Every backend, installed or not."""


def installed() -> dict[str, str]:
    """Answer the package of each backend that is installed, by the name of its kernel."""
    return {
        name: package
        for name, (package, _) in _MODULES.items()
        if importlib.util.find_spec(package) is not None
    }
