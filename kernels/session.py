"""Where measurements are made: the device, and everything about it that a table must say."""

import hashlib
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kernels.backends import installed
from kernels.grid import CPU
from sim.errors import ConfigError
from workloads.errors import plain

_SOURCES = (
    "paged_attention",
    "contiguous",
    "attention_calls",
    "layer_calls",
    "calls",
    "clock",
    "tiles",
)
"""Modules that decide what is measured."""


def said(error: Exception) -> str:
    """Answer the first line of what *error* says, and its kind."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text[:200]}"


@contextmanager
def first_use() -> Iterator[None]:
    """Turn what the driver raises before anything is measured into one line.

    Raises:
        ConfigError: the GPU is taken, full, or too old or too new for this PyTorch.
    """
    try:
        yield
    except (RuntimeError, AssertionError, MemoryError) as error:
        raise ConfigError(
            f"the device cannot be used: {plain(said(error))}; expected one that is free, and a "
            "PyTorch built for it"
        ) from None


def open_device(kind: str) -> torch.device:
    """Answer the device to measure.

    Raises:
        ConfigError: there is no GPU, or no Triton to run on it.
    """
    if kind == "cpu":
        torch.set_num_threads(1)  # the calls are small
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"no GPU: PyTorch {torch.__version__} sees none; expected an NVIDIA or AMD GPU and a "
            "PyTorch built for it, or --device cpu, which tests all but the times"
        )
    try:
        import triton  # noqa: PLC0415, F401  # whether it can be imported
    except ImportError:
        raise ConfigError(
            "no Triton: expected pip install triton, or --device cpu, which needs none"
        ) from None
    from kernels.paged_attention import INTERPRETED  # noqa: PLC0415  # a CPU needs no Triton

    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET is set, and would time an interpreter: unset it")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def takes_fp8(device: torch.device) -> bool:
    """Whether the kernels read fp8 (e4m3) here: NVIDIA's from compute capability 8.9."""
    if device.type != "cuda" or torch.version.hip:
        return False
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability >= (8, 9)


def header(device: torch.device) -> dict[str, Any]:
    """Answer what measurements are made with."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        import triton  # noqa: PLC0415  # a CPU needs none

        versions["triton"] = triton.__version__
        for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
            if version:
                versions[name] = version
        for package in installed().values():
            versions[package] = _version(package)
    folder = Path(__file__).parent
    sources = b"".join((folder / f"{name}.py").read_bytes() for name in _SOURCES)
    facts = _properties(device)
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else CPU,
        "versions": versions,
        "driver": facts.pop("driver", ""),
        "code": hashlib.sha256(sources).hexdigest()[:16],
        **facts,
    }


def _version(package: str) -> str:
    """Answer the version of an importable *package*, whose distribution may be called otherwise."""
    names = metadata.packages_distributions().get(package, [package])
    try:
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return "unknown"


_QUERY = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")


def _properties(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"processor": platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {
        "num_sms": properties.multi_processor_count,
        "l2_bytes": int(getattr(properties, "L2_cache_size", 0) or 0),
        "memory_bytes": properties.total_memory,
        "num_gpus": torch.cuda.device_count(),
    }
    asked = smi(device, _QUERY)
    if asked:
        found["driver"] = asked.pop("driver_version")
        found |= asked
    return found


def smi(device: torch.device, names: tuple[str, ...]) -> dict[str, str]:
    """Answer what NVIDIA's tool says of *device*; nothing where it is not at hand."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    for which in (["-i", f"GPU-{uuid}"], []):
        try:
            done = subprocess.run(
                command + which, capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        values = [value.strip() for value in done.stdout.split("\n")[0].split(",")]
        if len(values) == len(names):
            return dict(zip(names, values, strict=True))
    return {}
