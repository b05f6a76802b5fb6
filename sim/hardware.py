"""GPUs by name: memory that a program sees, the two peaks of the roofline, caches and links."""

import functools
import re
from itertools import accumulate
from typing import Any

import msgspec

from sim.errors import ConfigError
from sim.tables import load_table
from workloads.errors import did_you_mean

GIB = 2**30
"""Bytes in a GiB, the unit of every memory size shown to the user."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        name: as the user writes it, e.g. ``H100``.
        memory_visible_bytes: memory that a program sees in all (``torch.cuda.mem_get_info``), which
            is less than the nominal size; vLLM takes its fraction of this.
        hbm_bandwidth: peak memory bandwidth, bytes/s.
        bf16_flops: peak dense bf16 rate, FLOP/s.
        source: where the row was read.
        l2_bytes: L2 cache, bytes; None if not known.
        nvlink_bandwidth: of one GPU to the others, one direction, bytes/s; None without NVLink.
        pcie_bandwidth: of one GPU, one direction, bytes/s; None if not known.
    """

    name: str
    memory_visible_bytes: int
    hbm_bandwidth: float
    bf16_flops: float
    source: str
    l2_bytes: int | None = None
    nvlink_bandwidth: float | None = None
    pcie_bandwidth: float | None = None


def _gpu(name: str, row: dict[str, Any]) -> GpuSpec:
    """Answer the GPU of one row of ``sim/data/gpus.toml``."""
    fields = dict(row)
    visible = round(fields.pop("memory_visible_gib") * GIB)
    return msgspec.convert({"name": name, "memory_visible_bytes": visible, **fields}, GpuSpec)


@functools.cache
def _gpus() -> dict[str, GpuSpec]:
    """Answer every GPU of ``sim/data/gpus.toml`` by its name."""
    return {name: _gpu(name, row) for name, row in load_table("gpus").items()}


def gpu_names() -> list[str]:
    """Answer the names that `get_gpu` knows, in alphabetical order."""
    return sorted(_gpus())


_LEFT_OUT = re.compile(r"sxm\d?|nvidia|geforce")
"""Words of a name that say nothing here: every GPU that has an SXM form is that one."""


def _words(name: str) -> list[str]:
    """Answer the words of *name* that tell GPUs apart, in lower case; of memory the number."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    return [re.sub(r"^(\d+)gb$", r"\1", word) for word in words if not _LEFT_OUT.fullmatch(word)]


def get_gpu(name: str) -> GpuSpec:
    """Answer the GPU called *name*.

    Case, blanks, hyphens, underscores, ``GB`` after a number, ``SXM`` and ``NVIDIA`` do not matter.

    Raises:
        ConfigError: no such GPU, with the nearest name and all of them; or several, with those.
    """
    wanted = re.sub(r"(sxm\d?|(?<=\d)gb)$", "", "".join(_words(name)))
    for known, gpu in _gpus().items():
        if wanted == "".join(_words(known)):
            return gpu
    meant = [known for known in _gpus() if wanted in accumulate(_words(known))]
    if len(meant) > 1:
        raise ConfigError(f"--gpu {name!r} is ambiguous; expected one of {', '.join(meant)}")
    raise ConfigError(f"--gpu {name!r} is unknown; {did_you_mean(name, gpu_names())}")
