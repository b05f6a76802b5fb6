"""GPUs by name: memory that a program sees, the two peaks of the roofline, caches and links."""

import functools
import math
import re
import tomllib
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import ConfigError, FileError
from sim.files import read_small
from sim.tables import load_table
from workloads.errors import MAX_QUOTE, did_you_mean, plain, quote

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
        num_sms: streaming multiprocessors; None if not known.
        usd_per_hour: a rough price; None if not known.
    """

    name: str
    memory_visible_bytes: int
    hbm_bandwidth: float
    bf16_flops: float
    source: str
    l2_bytes: int | None = None
    nvlink_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    num_sms: int | None = None
    usd_per_hour: float | None = None


def _gpu(name: str, row: dict[str, Any]) -> GpuSpec:
    """Answer the GPU of one row of ``sim/data/gpus.toml``."""
    fields = dict(row)
    visible = round(fields.pop("memory_visible_gib") * GIB)
    return msgspec.convert({"name": name, "memory_visible_bytes": visible, **fields}, GpuSpec)


MAX_FILE_BYTES = 100_000
"""Longest TOML file of a GPU."""

MOST = {"memory_visible_gib": 65_536.0, "hbm_bandwidth": 1e15, "bf16_flops": 1e18}
"""Beyond any card, and far from overflow: GiB, bytes/s, FLOP/s."""


def read_gpu_file(path: str) -> GpuSpec:
    """Answer the GPU that a TOML file describes, as an entry of ``sim/data/gpus.toml`` does.

    Needed are ``memory_visible_gib``, ``hbm_bandwidth`` and ``bf16_flops``; ``name`` is the file's
    unless given.

    Raises:
        FileError: it cannot be read.
        ConfigError: it is no TOML, or a key is missing, unknown or of the wrong kind.
    """
    shown = f"--gpu {plain(path)}"
    try:
        row = tomllib.loads(read_small(Path(path), MAX_FILE_BYTES).decode())
    except OSError as error:
        raise FileError(f"{shown}: {error.strerror or error}; expected a TOML file") from None
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply; expected keys and values") from None
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{shown}: not TOML: {reason}") from None
    known = {"memory_visible_gib", *GpuSpec.__struct_fields__} - {"memory_visible_bytes"}
    tables = [value for value in row.values() if isinstance(value, dict)]
    if len(row) == len(tables) == 1:
        raise ConfigError(
            f"{shown}: the keys are in a table [{plain(next(iter(row)))}]; expected them at the top"
        )
    name = row.get("name", Path(path).stem)
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_QUOTE:
        raise ConfigError(f"{shown}: key 'name': expected a short line of text, got {quote(name)}")
    for key in row:
        if key not in known:
            raise ConfigError(f"{shown}: key {quote(key)} is unknown; {did_you_mean(key, known)}")
    for key in ("memory_visible_gib", "hbm_bandwidth", "bf16_flops"):
        value = row.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= MOST[key]
        ):
            got = "nothing" if value is None else quote(value)
            expected = f"a number above 0, at most {MOST[key]:g}"
            raise ConfigError(f"{shown}: key {key!r}: expected {expected}, got {got}")
    for key, number in row.items():
        if isinstance(number, int | float) and not 0 <= number < math.inf:
            raise ConfigError(f"{shown}: key {key!r}: expected 0 or more, got {quote(number)}")
    try:
        row.pop("name", None)
        return _gpu(name, {"source": "user's file", **row})
    except msgspec.ValidationError as error:
        what, _, key = str(error).partition(" - at `$.")
        what = what.replace("Expected", "expected", 1).replace("`", "").replace(" | null", "")
        raise ConfigError(f"{shown}: key {quote(key.rstrip('`'))}: {what}") from None


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


def get_gpu(name: str, memory_gib: float | None = None) -> GpuSpec:
    """Answer the GPU called *name*, or of the file where *name* ends in ``.toml``.

    Case, blanks, hyphens, underscores, ``GB`` after a number, ``SXM`` and ``NVIDIA`` do not matter.
    *memory_gib* is its visible memory instead, in GiB (``--gpu-memory-gib``).

    Raises:
        ConfigError: no such GPU, with the nearest name and all of them; or several, with those.
    """
    gpu = read_gpu_file(name) if name.lower().endswith(".toml") else _named_gpu(name)
    if memory_gib is None:
        return gpu
    return msgspec.structs.replace(gpu, memory_visible_bytes=round(memory_gib * GIB))


def _named_gpu(name: str) -> GpuSpec:
    """Answer the GPU called *name*; see `get_gpu`."""
    wanted = re.sub(r"(sxm\d?|(?<=\d)gb)$", "", "".join(_words(name)))
    for known, gpu in _gpus().items():
        if wanted == "".join(_words(known)):
            return gpu
    meant = [known for known in _gpus() if wanted in accumulate(_words(known))]
    if len(meant) > 1:
        raise ConfigError(f"--gpu {name!r} is ambiguous; expected one of {', '.join(meant)}")
    raise ConfigError(f"--gpu {name!r} is unknown; {did_you_mean(name, gpu_names())}")
