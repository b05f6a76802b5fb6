"""Price attention: which rows of a timing table, or which fit, and what is assumed between them."""

from collections.abc import Sequence

import numpy as np

from sim.errors import ConfigError
from sim.kv_spec import dtype_bytes, kv_element_bytes
from sim.tables import load_table
from sim.timing.attention import AttentionCost, WithProducts
from sim.timing.basis import CONTIGUOUS, Basis
from sim.timing.layers import AttentionShape, attention_projections, has_latent_block
from sim.timing.roofline import Fits
from sim.timing.table import TimingTable
from sim.timing.table_attention import LATENT_BLOCK_OPS, TableAttention
from sim.timing.table_costs import chosen, of_dtype

_KV_16_BIT = ("bfloat16", "float16")  # equally fast
FP8_BYTES, KV_16_BIT_BYTES = 1, 2


class AttentionPricing:
    """Chooses what prices the attention of a deployment, and notes it in its *basis*.

    Attributes:
        in_block: operations that `price` has found to be part of attention.
    """

    def __init__(self, basis: Basis) -> None:
        self._basis = basis
        self._deployment, self._model, self._shape = basis.deployment, basis.model, basis.shape
        self.in_block: set[str] = set()

    def price(self) -> tuple[AttentionCost, AttentionCost | None]:
        """Answer the cost of attention, and that of batches beyond it if the user permits."""
        if self._basis.table is not None:
            table = self._basis.table
            block = self._latent_block(table)
            if block is not None:
                return block, self._fitted_block() if self._basis.may_fall_back else None
            rows = table.at(np.flatnonzero(_is_attention(table)))
            if len(rows):
                measured = self._table_attention(rows)
                if measured is not None:
                    return measured, self._fitted_attention() if self._basis.may_fall_back else None
        fits = self._basis.needed_fits("attention")
        cost = self._fitted_attention()
        for term in ("decode attention", "prefill attention"):
            self._note_fitted_attention(term)
        self._note_factor(fits.page)
        return cost, None

    def _fitted_attention(self) -> AttentionCost:
        fits = self._basis.needed_fits("attention")
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
        self.in_block = {"rotary_emb", *(call.op for call in projections)}
        self._basis.note_table(
            "decode attention, prefill attention", rows, ", with its projections"
        )
        return TableAttention(_each_chosen(rows), is_block=True)

    def _fitted_block(self) -> AttentionCost:
        projections = attention_projections(self._model, self._deployment.tensor_parallel_size)
        products = [self._basis.from_fits(call) for call in projections]
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
            if self._basis.may_fall_back:
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
                self._basis.note_table(term, of_term, shown)
            else:
                self._note_fitted_attention(term)
        mixed = others.where(op="mixed_attention")
        if len(mixed):
            self._basis.note_table("chunks beside decodes", mixed, where)
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
            self._basis.note(
                "block_size factor",
                "assumed",
                f"decode attention x{self._factor(measured):.2f} for {_named(mine)} over "
                f"{_named(measured)}",
            )

    def _note_fitted_attention(self, term: str) -> None:
        fits = self._basis.needed_fits(term)
        decode, prefill = fits.attention_sections(self._shape, self._priced_kv_bytes(fits))
        self._basis.note_fit(term, fits, decode if term == "decode attention" else prefill)
        if self._priced_kv_bytes(fits) != self._kv_bytes:
            why = f"that of a 16-bit KV cache: no fit of {self._deployment.kv_cache_dtype} on"
            self._basis.note(term, "assumed", f"{why} {self._deployment.gpu.name}")


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
