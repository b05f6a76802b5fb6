"""Timing tables from measurements: one file a source, registered in `IMPORTERS`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from sim.errors import FileError

if TYPE_CHECKING:
    from sim.timing.table import TimingTable


class Importer(NamedTuple):
    """Whose measurements, and what reads them.

    Attributes:
        function: ``module.function`` of this package; it takes SOURCE and *options* by name.
        source: what SOURCE is, in words.
        options: settings that it takes.
    """

    function: str
    source: str
    options: tuple[str, ...] = ()

    @property
    def read(self) -> Callable[..., TimingTable]:
        """The function itself.

        Raises:
            FileError: what it needs is not installed.
        """
        module, _, name = self.function.partition(".")
        try:
            return getattr(import_module(f"{__name__}.{module}"), name)  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            raise FileError(
                f"importer {module} needs {error.name}, which is not installed"
            ) from None


IMPORTERS = {
    "aiconfigurator": Importer(
        "aiconfigurator.read_aiconfigurator",
        "a system of NVIDIA's aiconfigurator-core, like h200_sxm",
        ("backend", "backend_version", "model", "tensor_parallel_size"),
    ),
    "llmservingsim": Importer(
        "llmservingsim.read_profile",
        "a profile folder of LLMServingSim, with its meta.yaml",
        ("gpu", "model", "tensor_parallel_size"),
    ),
    "native": Importer(
        "native.read_native",
        "a Parquet or CSV file with our columns, and its JSON file beside it",
    ),
}
"""The sources by name."""
