"""What the terms of a step time are made from: a timing table and fits, and a note of each."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sim.config import TimingConfig
from sim.errors import ConfigError
from sim.hardware import GpuSpec, get_gpu
from sim.kv_spec import dtype_bytes
from sim.models import ModelSpec
from sim.timing.attention import Cost
from sim.timing.base import TableFile, TimeSource
from sim.timing.layers import COLLECTIVES, Call, attention_shape, expert_shape
from sim.timing.roofline import Fits, small_kernel
from sim.timing.table import LAYER_OPS, PROVENANCES, TimingTable
from sim.timing.table_check import check_units
from sim.timing.table_file import load, shipped
from workloads.errors import plain

CONTIGUOUS = 0
"""The block size of memory without blocks."""


class Deployment(NamedTuple):
    """What runs where: all that kernel times depend on.

    Attributes:
        model, gpu: one of *tensor_parallel_size* ranks, all alike.
        enable_expert_parallel: ranks hold whole experts, not slices of all.
        block_size: tokens in a KV block; `CONTIGUOUS` without blocks.
        kv_cache_dtype: as the flag has it.
        max_num_seqs: as the flag has it.
    """

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 256


class Basis:
    """The table and the fits of a deployment.

    Attributes:
        timing, deployment: whose.
        model, shape, experts: of the deployment: its model, and one rank's heads and experts.
        table: measurements, if `read_table` has found any.
        may_fall_back: whether the fit prices what the table has not.
    """

    def __init__(self, timing: TimingConfig, deployment: Deployment) -> None:
        self.timing, self.deployment = timing, deployment
        given = timing.timing_table
        self._path = shipped(deployment.gpu.name) if given is None else Path(given)
        self.model = deployment.model
        self.shape = attention_shape(self.model, deployment.tensor_parallel_size)
        self.experts = expert_shape(
            self.model,
            deployment.tensor_parallel_size,
            enable_expert_parallel=deployment.enable_expert_parallel,
        )
        self._sources: dict[tuple[str, str], list[str]] = {}
        self.table: TimingTable | None = None
        self._fits: Fits | ConfigError
        try:
            self._fits = Fits(deployment.gpu)
        except ConfigError as error:
            self._fits = error
        # Nobody asked for the table that is shipped: what it has not is no reason to refuse.
        by_default = given is None and self._path is not None and isinstance(self._fits, Fits)
        self.may_fall_back = timing.timing_fallback == "roofline" or by_default

    def read_table(self) -> TableFile | None:
        """Read the table, if there is one, and answer its file.

        Raises:
            ConfigError: it is of another GPU, model or size.
            FileError: it cannot be read.
        """
        path = self._path
        if path is None:
            return None
        self.table = load(path)
        check_units(self.table, self._shown)
        self._check(self.table)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return TableFile(plain(path.name), sha256, self.table.info)

    @property
    def has_layers(self) -> bool:
        """Whether the table is of the layers of one model."""
        return self.table is not None and bool(np.isin(self.table.columns["op"], LAYER_OPS).any())

    @property
    def sources(self) -> tuple[TimeSource, ...]:
        """What was noted, in the order of the first note of each source."""
        return tuple(
            TimeSource(", ".join(dict.fromkeys(terms)), provenance, description)
            for (provenance, description), terms in self._sources.items()
        )

    def note(self, terms: str, provenance: str, description: str) -> None:
        """Note what *terms* of the step time rest on."""
        self._sources.setdefault((provenance, description), []).append(terms)

    def note_table(self, terms: str, table: TimingTable, what: str = "") -> None:
        """Note that *terms* come from rows *table*, with *what* to say of them."""
        worth = set(table.columns["provenance"].tolist()) | {table.info.provenance}
        worst = max(worth, key=PROVENANCES.index)
        if worst != table.info.provenance:
            share = np.mean(table.columns["provenance"] == worst)
            what += f", {100 * share:.0f} % of rows {worst}"
        origin = "" if self.timing.timing_table else "shipped table, "
        description = f"{self.deployment.gpu.name}, {origin}{table.describe()}{what}"
        self.note(terms, table.info.provenance, description)

    def note_fit(self, term: str, fits: Fits, section: str) -> None:
        """Note that *term* comes from *section* of *fits*, with its error."""
        self.note(
            f"{term} (±{fits.error(section)})",
            "fitted",
            f"roofline of {fits.tables}, {fits.system}{fits.extrapolated}; p50/p90 error of each, "
            "of decodes whose KV exceeds the L2 cache",
        )

    def needed_fits(self, what: str) -> Fits:
        """Answer the fits, without which *what* has no price; ConfigError if there are none."""
        if isinstance(self._fits, ConfigError):
            if self.table is None:
                raise self._fits
            if self.may_fall_back:
                raise ConfigError(f"--timing-fallback roofline: {self._fits}")
            raise ConfigError(f"the timing table has no {what}, and {self._fits}")
        return self._fits

    def from_fits(self, call: Call) -> Cost:
        """Answer the price of *call* by the fits; ConfigError if there are none."""
        if call.bytes_per_token and call.op not in COLLECTIVES:
            return small_kernel(self.deployment.gpu, call.op, call.bytes_per_token)
        fits = self.needed_fits(call.op)
        num_bytes = dtype_bytes(self.model)
        if call.op in COLLECTIVES:
            return fits.collective(
                call.op, self.deployment.tensor_parallel_size, call.bytes_per_token
            )
        if call.op == "moe":
            return fits.experts(self.experts, call.k, num_bytes)
        return fits.gemm(call.n, call.k, num_bytes)

    @property
    def _shown(self) -> str:
        return f"--timing-table {plain(str(self._path))}"

    def _check(self, table: TimingTable) -> None:
        """Refuse a table of another GPU, or layers of another model or tensor-parallel size."""
        info, tp = table.info, self.deployment.tensor_parallel_size
        shown = self._shown
        gpu = get_gpu(info.gpu).name
        if gpu != self.deployment.gpu.name:
            raise ConfigError(
                f"{shown} was measured on {gpu}, and --gpu is {self.deployment.gpu.name}: "
                f"expected --gpu {gpu}, or a table of that GPU"
            )
        if not self.has_layers:
            return
        if info.model != self.model.name:
            raise ConfigError(
                f"{shown} has layers of {info.model}, and --model is {self.model.name}: "
                f"expected --model {info.model}, or a table of that model"
            )
        if info.tensor_parallel_size != tp:
            raise ConfigError(
                f"{shown} has layers of one of {info.tensor_parallel_size} ranks, and "
                f"--tensor-parallel-size is {tp}: expected a table of that size"
            )
