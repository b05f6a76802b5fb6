"""Put a step time together: which kernels a deployment runs, and what prices each of them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sim.config import TimingConfig
from sim.errors import ConfigError
from sim.hardware import GpuSpec, get_gpu
from sim.kv_spec import dtype_bytes, kv_element_bytes
from sim.models import ModelSpec
from sim.tables import load_table
from sim.timing.attention import AttentionCost, Cost, WithProducts
from sim.timing.base import TableFile, TimeSource
from sim.timing.kernels import CudaGraphs, KernelStepTime, PricedCall
from sim.timing.layers import (
    COLLECTIVES,
    AttentionShape,
    Call,
    attention_projections,
    attention_shape,
    calls_of,
    expert_shape,
    has_latent_block,
)
from sim.timing.roofline import SMALL_KERNELS, Fits, small_kernel
from sim.timing.table import LAYER_OPS, PROVENANCES, TimingTable
from sim.timing.table_attention import LATENT_BLOCK_OPS, TableAttention
from sim.timing.table_check import check_units
from sim.timing.table_costs import (
    chosen,
    curve_of,
    expert_rows,
    experts_of,
    of_dtype,
    product_of,
    transfer_of,
)
from sim.timing.table_file import load, shipped
from workloads.errors import plain
from workloads.record import PS_PER_S

_NAMES = {"all_gather": "gather of logits", "lm_head": "lm_head", "sampler": "sampler"}
"""Kernels of one term that may have different sources."""

_KV_16_BIT = ("bfloat16", "float16")  # equally fast
FP8_BYTES, KV_16_BIT_BYTES = 1, 2

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


def kernel_step_time(timing: TimingConfig, deployment: Deployment) -> KernelStepTime:
    """Answer the step time of *deployment* from a timing table and, for the rest, from the fits.

    Raises:
        ConfigError: the table is of another GPU, model or size, or has no such heads; or something
            is in neither.
    """
    return _Builder(timing, deployment).build()


class _Builder:
    """Collects costs and what they come from."""

    def __init__(self, timing: TimingConfig, deployment: Deployment) -> None:
        self._timing, self._deployment = timing, deployment
        given = timing.timing_table
        self._path = shipped(deployment.gpu.name) if given is None else Path(given)
        self._model = deployment.model
        self._shape = attention_shape(self._model, deployment.tensor_parallel_size)
        self._experts = expert_shape(
            self._model,
            deployment.tensor_parallel_size,
            enable_expert_parallel=deployment.enable_expert_parallel,
        )
        self._sources: dict[tuple[str, str], list[str]] = {}
        self._table: TimingTable | None = None
        self._in_block: set[str] = set()
        self._fits: Fits | ConfigError
        try:
            self._fits = Fits(deployment.gpu)
        except ConfigError as error:
            self._fits = error
        # Nobody asked for the table that is shipped: what it has not is no reason to refuse.
        by_default = given is None and self._path is not None and isinstance(self._fits, Fits)
        self._may_fall_back = timing.timing_fallback == "roofline" or by_default

    def build(self) -> KernelStepTime:
        file: TableFile | None = None
        if self._path is not None:
            path = self._path
            self._table = load(path)
            check_units(self._table, self._shown)
            self._check(self._table)
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            file = TableFile(plain(path.name), sha256, self._table.info)
        attention, fallback = self._attention()
        calls = [
            priced
            for call in calls_of(
                self._model,
                self._deployment.tensor_parallel_size,
                enable_expert_parallel=self._deployment.enable_expert_parallel,
            )
            if call.op not in self._in_block and (priced := self._priced(call)) is not None
        ]
        overhead = self._timing.host_overhead
        if overhead:
            self._note("host overhead", "assumed", f"{overhead} s a step")
        graphs = CudaGraphs()
        if not self._timing.enforce_eager:
            graphs = CudaGraphs.default(self._deployment.max_num_seqs)
        return KernelStepTime(
            num_layers=self._model.num_hidden_layers,
            calls=calls,
            attention=attention,
            fallback=fallback,
            sources=tuple(
                TimeSource(", ".join(dict.fromkeys(terms)), provenance, description)
                for (provenance, description), terms in self._sources.items()
            ),
            table=file,
            graphs=graphs,
            host_overhead_ps=overhead * PS_PER_S,
        )

    @property
    def _shown(self) -> str:
        return f"--timing-table {plain(str(self._path))}"

    def _check(self, table: TimingTable) -> None:
        """Refuse a table of another GPU, or layers of another model or tensor-parallel size."""
        info, tp = table.info, self._deployment.tensor_parallel_size
        shown = self._shown
        gpu = get_gpu(info.gpu).name
        if gpu != self._deployment.gpu.name:
            raise ConfigError(
                f"{shown} was measured on {gpu}, and --gpu is {self._deployment.gpu.name}: "
                f"expected --gpu {gpu}, or a table of that GPU"
            )
        if not self._has_layers(table):
            return
        if info.model != self._model.name:
            raise ConfigError(
                f"{shown} has layers of {info.model}, and --model is {self._model.name}: "
                f"expected --model {info.model}, or a table of that model"
            )
        if info.tensor_parallel_size != tp:
            raise ConfigError(
                f"{shown} has layers of one of {info.tensor_parallel_size} ranks, and "
                f"--tensor-parallel-size is {tp}: expected a table of that size"
            )

    @staticmethod
    def _has_layers(table: TimingTable) -> bool:
        """Whether *table* is of the layers of one model."""
        return bool(np.isin(table.columns["op"], LAYER_OPS).any())

    def _note(self, terms: str, provenance: str, description: str) -> None:
        self._sources.setdefault((provenance, description), []).append(terms)

    def _note_table(self, terms: str, table: TimingTable, what: str = "") -> None:
        worth = set(table.columns["provenance"].tolist()) | {table.info.provenance}
        worst = max(worth, key=PROVENANCES.index)
        if worst != table.info.provenance:
            share = np.mean(table.columns["provenance"] == worst)
            what += f", {100 * share:.0f} % of rows {worst}"
        origin = "" if self._timing.timing_table else "shipped table, "
        description = f"{self._deployment.gpu.name}, {origin}{table.describe()}{what}"
        self._note(terms, table.info.provenance, description)

    def _note_fit(self, term: str, fits: Fits, section: str) -> None:
        self._note(
            f"{term} (±{fits.error(section)})",
            "fitted",
            f"roofline of {fits.tables}, {fits.system}{fits.extrapolated}; p50/p90 error of each, "
            "of decodes whose KV exceeds the L2 cache",
        )

    def _note_fitted_attention(self, term: str) -> None:
        fits = self._needed_fits(term)
        decode, prefill = fits.attention_sections(self._shape, self._priced_kv_bytes(fits))
        self._note_fit(term, fits, decode if term == "decode attention" else prefill)
        if self._priced_kv_bytes(fits) != self._kv_bytes:
            why = f"that of a 16-bit KV cache: no fit of {self._deployment.kv_cache_dtype} on"
            self._note(term, "assumed", f"{why} {self._deployment.gpu.name}")

    def _needed_fits(self, what: str) -> Fits:
        """Answer the fits, without which *what* has no price; ConfigError if there are none."""
        if isinstance(self._fits, ConfigError):
            if self._table is None:
                raise self._fits
            if self._may_fall_back:
                raise ConfigError(f"--timing-fallback roofline: {self._fits}")
            raise ConfigError(f"the timing table has no {what}, and {self._fits}")
        return self._fits

    # ---- attention

    def _attention(self) -> tuple[AttentionCost, AttentionCost | None]:
        """Answer the cost of attention, and that of batches beyond it if the user permits."""
        if self._table is not None:
            table = self._table
            block = self._latent_block(table)
            if block is not None:
                return block, self._fitted_block() if self._may_fall_back else None
            rows = table.at(np.flatnonzero(_is_attention(table)))
            if len(rows):
                measured = self._table_attention(rows)
                if measured is not None:
                    return measured, self._fitted_attention() if self._may_fall_back else None
        fits = self._needed_fits("attention")
        cost = self._fitted_attention()
        for term in ("decode attention", "prefill attention"):
            self._note_fitted_attention(term)
        self._note_factor(fits.page)
        return cost, None

    def _fitted_attention(self) -> AttentionCost:
        fits = self._needed_fits("attention")
        kv_bytes, factor = self._priced_kv_bytes(fits), self._factor(fits.page)
        return fits.attention(self._shape, dtype_bytes(self._model), kv_bytes, factor)

    @property
    def _kv_bytes(self) -> float:
        return kv_element_bytes(self._model, self._deployment.kv_cache_dtype)

    def _priced_kv_bytes(self, fits: Fits) -> float:
        """Answer the bytes of a KV element that attention is priced by.

        Where fp8 was not measured on the GPU it is taken to be as slow as 16 bits: it reads half,
        and has to convert.
        """
        if self._kv_bytes == FP8_BYTES and not fits.has_attention(self._shape, FP8_BYTES):
            return KV_16_BIT_BYTES
        return self._kv_bytes

    def _latent_block(self, table: TimingTable) -> TableAttention | None:
        """Answer the cost of attention with all around it, if *table* has it for this model.

        Its products are then part of attention. A step with chunks and decodes counts their weights
        twice; the block size is that of the rows.
        """
        if not has_latent_block(self._model):
            return None
        rows = table.at(np.flatnonzero(np.isin(table.columns["op"], LATENT_BLOCK_OPS)))
        rows = of_dtype(self._of_kv_dtype(rows.where(num_heads=self._shape.num_heads)))
        if not len(rows):
            return None
        projections = attention_projections(self._model, self._deployment.tensor_parallel_size)
        self._in_block = {"rotary_emb", *(call.op for call in projections)}
        self._note_table("decode attention, prefill attention", rows, ", with its projections")
        return TableAttention(_each_chosen(rows), is_block=True)

    def _fitted_block(self) -> AttentionCost:
        projections = attention_projections(self._model, self._deployment.tensor_parallel_size)
        products = [self._from_fits(call) for call in projections]
        return WithProducts(self._fitted_attention(), products)

    def _of_kv_dtype(self, rows: TimingTable) -> TimingTable:
        return rows.at(np.flatnonzero(np.isin(rows.columns["kv_dtype"], self._kv_dtypes())))

    def _table_attention(self, rows: TimingTable) -> TableAttention | None:
        """Answer the cost from *rows* of this rank's heads; None if there are none and may be none.

        Raises:
            ConfigError: there are none, with the heads that are nearest.
        """
        shape = self._shape
        wanted = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        heads = ("num_heads", "num_kv_heads", "head_dim")
        of_heads = rows.where(**dict(zip(heads, wanted, strict=True)))
        of_kv = of_dtype(self._of_kv_dtype(of_heads))
        if not len(of_kv):
            if self._may_fall_back:
                return None
            near = sorted(rows.distinct(*heads, "kv_dtype"), key=lambda row: _distance(row, wanted))
            shown = "; ".join(
                f"{AttentionShape(row[0], row[1], row[2])}, KV {row[3]}" for row in near[:3]
            )
            raise ConfigError(
                f"the timing table has no attention for {shape}, KV {self._kv_dtypes()[0]}; "
                f"nearest: {shown}; --timing-fallback roofline prices it by the fit"
            )
        others = of_kv.at(np.flatnonzero(of_kv.columns["op"] != "prefill_attention"))
        block_size = self._nearest_size(others if len(others) else of_kv)
        others = _each_chosen(others.where(block_size=block_size))
        decodes, chunks = others.where(op="decode_attention"), self._chunks(of_heads)
        warm_tokens = self._warm_tokens(of_kv)
        warm = ", as if nothing were in the L2 cache" if warm_tokens else ""
        where = _page(block_size) + warm
        found = {
            "decode attention": (decodes, where),
            "prefill attention": (chunks, self._where_measured(chunks) + warm),
        }
        for term, (of_term, shown) in found.items():
            if len(of_term):
                self._note_table(term, of_term, shown)
            else:
                self._note_fitted_attention(term)
        mixed = others.where(op="mixed_attention")
        if len(mixed):
            self._note_table("chunks beside decodes", mixed, where)
        if len(decodes):
            self._note_factor(block_size)
        return TableAttention(
            others.joined(chunks),
            decode_factor=self._factor(block_size),
            warm_tokens=warm_tokens,
            other=None if len(decodes) and len(chunks) else self._fitted_attention(),
        )

    def _nearest_size(self, rows: TimingTable) -> int:
        """Answer the block size among *rows*, which are some, that is nearest to the run's."""
        mine = self._deployment.block_size
        sizes = [int(size) for (size,) in rows.distinct("block_size")]
        return min(sizes, key=lambda size: (size != mine, _far(size, mine)))

    def _chunks(self, of_heads: TimingTable) -> TimingTable:
        """Answer what prices single chunks: of the nearest block size that has any, and KV type.

        The fit may be further from the table than one block size from another: comparing sizes
        must not compare sources.
        """
        rows = of_heads.where(op="prefill_attention")
        of_kv = of_dtype(self._of_kv_dtype(rows))
        if not len(of_kv.where(batch=1)):
            is_16_bit = np.isin(rows.columns["kv_dtype"], _KV_16_BIT)
            of_kv = of_dtype(rows.at(np.flatnonzero(is_16_bit)))
        ones = of_kv.where(batch=1)
        if not len(ones):
            return ones
        return _each_chosen(of_kv.where(block_size=self._nearest_size(ones))).where(batch=1)

    def _where_measured(self, chunks: TimingTable) -> str:
        """Answer the blocks of *chunks*, and what was asked for and is not there."""
        where = ""
        for size, kv_dtype in chunks.distinct("block_size", "kv_dtype")[:1]:
            where = _page(size)
            if size != self._deployment.block_size:
                where += f" for {_named(self._deployment.block_size)}"
            if kv_dtype not in self._kv_dtypes():
                where += f", KV {kv_dtype} for {self._kv_dtypes()[0]}"
        return where

    def _warm_tokens(self, rows: TimingTable) -> float:
        """Answer how many tokens' keys and values the L2 cache holds, if it did when measuring."""
        if rows.info.l2_policy != "warm":
            return 0.0
        shape = self._shape
        elements = (1 if shape.latent else 2) * shape.num_kv_heads * shape.head_dim
        return (self._deployment.gpu.l2_bytes or 0) / (elements * self._kv_bytes)

    def _kv_dtypes(self) -> tuple[str, ...]:
        """Answer what the rows may call the type of the KV cache."""
        if self._deployment.kv_cache_dtype.startswith("fp8"):
            return ("fp8",)
        return _KV_16_BIT

    def _factor(self, measured: int) -> float:
        return block_size_factor(self._deployment.block_size) / block_size_factor(measured)

    def _note_factor(self, measured: int) -> None:
        mine = self._deployment.block_size
        if mine != measured:
            self._note(
                "block_size factor",
                "assumed",
                f"decode attention x{self._factor(measured):.2f} for {_named(mine)} over "
                f"{_named(measured)}",
            )

    # ---- everything else

    def _priced(self, call: Call) -> PricedCall | None:
        """Answer *call* with its price; None for one that is part of another."""
        cost = None if self._table is None else self._from_table(self._table, call)
        if cost is not None:
            fallback = self._from_fits(call) if self._may_fall_back else None
            return PricedCall(call.term, call.op, call.launches, cost, fallback)
        if call.op == "gate" and self._table is not None and self._has_layers(self._table):
            return None  # part of the measured block
        cost = self._from_fits(call)
        name = _NAMES.get(call.op, call.term)
        if call.bytes_per_token and call.op not in COLLECTIVES:
            self._note(name, "assumed", SMALL_KERNELS)
        else:
            fits = self._needed_fits(call.op)
            section = fits.section(call.op, self._deployment.tensor_parallel_size)
            self._note_fit(name, fits, section)
        return PricedCall(call.term, call.op, call.launches, cost)

    def _from_table(self, table: TimingTable, call: Call) -> Cost | None:
        cost: Cost | None = None
        rows = table.where(op=call.op)
        if call.op in COLLECTIVES:
            rows = rows.where(num_gpus=self._deployment.tensor_parallel_size)
            if len(rows):
                cost = transfer_of(rows, call.bytes_per_token)
        elif call.op == "moe":
            rows = of_dtype(expert_rows(rows, self._experts, call.k))
            if len(rows):
                cost = experts_of(rows, self._experts)
        elif len(rows):
            cost = curve_of(rows, "num_tokens")
        elif call.n:
            rows = table.where(op="gemm")
            cost = product_of(rows, call.n, call.k) if len(rows) else None
        if cost is not None:
            self._note_table(_NAMES.get(call.op, call.term), rows)
        return cost

    def _from_fits(self, call: Call) -> Cost:
        if call.bytes_per_token and call.op not in COLLECTIVES:
            return small_kernel(self._deployment.gpu, call.op, call.bytes_per_token)
        fits = self._needed_fits(call.op)
        num_bytes = dtype_bytes(self._model)
        if call.op in COLLECTIVES:
            return fits.collective(
                call.op, self._deployment.tensor_parallel_size, call.bytes_per_token
            )
        if call.op == "moe":
            return fits.experts(self._experts, call.k, num_bytes)
        return fits.gemm(call.n, call.k, num_bytes)


def _is_attention(table: TimingTable) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    ops = ("decode_attention", "prefill_attention", "mixed_attention")
    return np.isin(table.columns["op"], ops)


def _each_chosen(rows: TimingTable) -> TimingTable:
    """Answer, of every operation, the rows of the kernels that are `chosen`."""
    kept = np.zeros(len(rows), dtype=np.bool_)
    for (op,) in rows.distinct("op"):
        place = np.flatnonzero(rows.columns["op"] == op)
        kernels = set(chosen(rows.at(place)).columns["kernel"].tolist())
        kept[place] = [kernel in kernels for kernel in rows.columns["kernel"][place]]
    return rows.at(np.flatnonzero(kept))


def _distance(row: Sequence[object], wanted: tuple[int, ...]) -> float:
    return sum(
        abs(float(np.log2(max(1, int(str(a))) / b))) for a, b in zip(row, wanted, strict=False)
    )


def _far(size: int, wanted: int) -> float:
    return abs(float(np.log2((size or 1024) / (wanted or 1024))))


def _named(block_size: int) -> str:
    return f"block_size {block_size}" if block_size else "contiguous memory"


def _page(block_size: int) -> str:
    return f", page {block_size}" if block_size else ", contiguous"


def block_size_factor(block_size: int) -> float:
    """Answer how much longer decode attention takes with this block size than with large blocks.

    Between the sizes of ``sim/data/block_size_factors.toml``, which says where they come from, the
    logarithm is linear in that of the size. Assumed of any kernel that was not measured.
    """
    table = load_table("block_size_factors")["decode_attention"]
    if block_size == CONTIGUOUS:
        return float(table["contiguous"])
    logs = np.interp(np.log2(block_size), np.log2(table["block_sizes"]), np.log(table["factors"]))
    return float(np.exp(logs))
