"""Tables of measured kernel times: rows, and what they are.

One row is one measurement: an operation, what identifies its kernel, the size of the call, and its
time. `OPERATIONS` lists what identifies a row of each operation, and its sizes; a column that an
operation does not use is 0 or empty. Times are of one call on one GPU of a tensor-parallel group,
in microseconds; ``spread_us`` is the largest less the smallest of several measurements, else NaN.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sim.columns import Columns
from sim.errors import ConfigError, FileError
from workloads.errors import did_you_mean, quote

TEXT_COLUMNS = ("op", "kernel", "dtype", "kv_dtype", "provenance")
COUNT_COLUMNS = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "n",
    "k",
    "num_experts",
    "top_k",
    "num_gpus",
    "batch",
    "context",
    "query_len",
    "query_context",
    "num_tokens",
    "num_active_experts",
    "message_bytes",
)
TIME_COLUMNS = ("latency_us", "spread_us")
COLUMNS = (*TEXT_COLUMNS, *COUNT_COLUMNS, *TIME_COLUMNS)
SORTED_BY = ("op", "kernel", "dtype", "kv_dtype", *COUNT_COLUMNS)
"""The key of a row: operation, identity, sizes."""

PROVENANCES = ("measured", "fitted", "assumed")
"""What a time is worth, best first."""

MIN_LATENCY_US, MAX_LATENCY_US = 1e-6, 1e12
LATENCY = f"{MIN_LATENCY_US:g} to {MAX_LATENCY_US:g} microseconds"
"""A picosecond to twelve days: what our integers of picoseconds count."""

MAX_COUNT = 2**31 - 1
"""Of tokens, heads, experts: products of two fit an int64."""

MAX_BYTES = 2**53
"""Of a message."""

_MAY_BE_ZERO = frozenset({"block_size", "context", "query_context", "num_active_experts"})
"""Contiguous, no history, as many as uniform routing touches."""

_ATTENTION = ("kernel", "dtype", "kv_dtype", "num_heads", "num_kv_heads", "head_dim", "block_size")
_LAYER = ("kernel", "dtype")

LAYER_OPS = (
    "embedding",
    "layernorm",
    "qkv_proj",
    "qk_norm",
    "rotary_emb",
    "o_proj",
    "gate_up_proj",
    "act_fn",
    "down_proj",
    "final_layernorm",
    "lm_head",
    "sampler",
)
"""Operations of one model at one tensor-parallel size, by vLLM's names. Their ``num_tokens`` are
requests for ``lm_head`` and ``sampler``."""


class Operation(NamedTuple):
    """Columns of the rows of one operation.

    Attributes:
        identity: what kernel it is, and for what shapes.
        sizes: how large the call is; a row is interpolated along these.
    """

    identity: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def positive(self) -> tuple[str, ...]:
        """Columns of whole numbers that mean nothing as 0."""
        used = (*self.identity, *self.sizes)
        return tuple(n for n in used if n in COUNT_COLUMNS and n not in _MAY_BE_ZERO)


OPERATIONS: dict[str, Operation] = {
    "decode_attention": Operation(_ATTENTION, ("batch", "context")),
    "prefill_attention": Operation(_ATTENTION, ("batch", "query_len", "query_context")),
    "mixed_attention": Operation(_ATTENTION, ("batch", "context", "query_len", "query_context")),
    "gemm": Operation(("kernel", "dtype", "n", "k"), ("num_tokens",)),
    "mla_decode_block": Operation(_ATTENTION, ("batch", "context")),
    "mla_prefill_block": Operation(_ATTENTION, ("batch", "query_len", "query_context")),
    "moe": Operation(
        ("kernel", "dtype", "n", "k", "num_experts", "top_k", "num_gpus"),
        ("num_tokens", "num_active_experts"),
    ),
    "all_reduce": Operation(("kernel", "dtype", "num_gpus"), ("message_bytes",)),
    "all_gather": Operation(("kernel", "dtype", "num_gpus"), ("message_bytes",)),
    **{op: Operation(_LAYER, ("num_tokens",)) for op in LAYER_OPS},
}
"""Every operation.

decode_attention: *batch* requests of one query each, behind *context* tokens of history **each**.
prefill_attention: *batch* requests of *query_len* queries each, behind *query_context* of history.
mixed_attention: one chunk of *query_len* behind *query_context* in one call with the decodes.
MLA is attention with one kv head of kv_lora_rank + qk_rope_head_dim elements.
mla_decode_block, mla_prefill_block: the same with the projections and norms around it, from
residual stream to residual stream, of DeepSeek-V3's widths (`sim.timing.layers.LATENT_BLOCK`);
*dtype* is that of their weights.
gemm: [num_tokens, k] x [k, n].
moe: the experts of a layer that one of *num_gpus* ranks holds, which share them out whole, n wide
inside, k outside. *num_experts* are those of the rank, *num_tokens* and *top_k* those of all ranks;
the tokens touch *num_active_experts* (0: as many as uniform routing makes likely).
all_reduce, all_gather: *message_bytes* come from each of *num_gpus*.
History is what is in the cache before the step."""


class TableInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a table is: the content of its JSON file (`sim.timing.table_file`).

    Attributes:
        gpu: name as in ``sim/data/gpus.toml``.
        provenance: ``measured``, ``fitted`` or ``assumed``; a row may be worth less, never more.
        source: who measured it, with what, where it can be found.
        licence: SPDX identifier, or ``unknown``.
        date: of the measurement, ISO 8601; empty if unknown.
        l2_policy: whether kernels were timed with their data in the L2 cache: ``warm`` (the same
            buffers again and again), ``cold`` (rotated or flushed) or ``unknown``.
        driver: version of the GPU driver; empty if unknown.
        versions: of the libraries that were measured, by name.
        model: Hugging Face id, where rows are of the layers of one model (`LAYER_OPS`).
        tensor_parallel_size: of those rows; shapes are those of one rank.
        notes: what else a reader must know.
    """

    gpu: str
    provenance: Literal["measured", "fitted", "assumed"]
    source: str
    licence: str
    date: str = ""
    l2_policy: Literal["warm", "cold", "unknown"] = "unknown"
    driver: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    model: str = ""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    notes: tuple[str, ...] = ()
    format: Literal["kvsim-timing-table"] = "kvsim-timing-table"
    version: Literal[1] = 1


class TimingTable(NamedTuple):
    """Rows of measurements, as columns `COLUMNS`, sorted; and what they are."""

    info: TableInfo
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["op"])

    def where(self, **equal: object) -> "TimingTable":
        """Answer the rows whose columns equal all of *equal*."""
        chosen = np.ones(len(self), dtype=np.bool_)
        for name, value in equal.items():
            chosen &= self.columns[name] == value
        return self.at(np.flatnonzero(chosen))

    def at(self, index: npt.NDArray[np.int64]) -> "TimingTable":
        """Answer the rows at *index*."""
        columns = {name: column[index] for name, column in self.columns.items()}
        return TimingTable(self.info, columns)

    def joined(self, more: "TimingTable") -> "TimingTable":
        """Answer these rows, and then those of *more*."""
        columns = {
            name: np.concatenate([c, more.columns[name]]) for name, c in self.columns.items()
        }
        return TimingTable(self.info, columns)

    def distinct(self, *names: str) -> list[tuple[Any, ...]]:
        """Answer the combinations of columns *names* that there are, sorted."""
        return sorted(set(zip(*(self.columns[name].tolist() for name in names), strict=True)))

    def describe(self) -> str:
        """Answer source and versions in a few words."""
        versions = [f"{name} {version}" for name, version in self.info.versions.items()]
        return ", ".join([self.info.source, *versions])


def make_table(info: TableInfo, rows: Iterable[Mapping[str, Any]], where: str) -> TimingTable:
    """Answer the table of *rows*, sorted; columns that a row lacks are 0, empty or unknown.

    Raises:
        FileError: as `checked`; *where* says of which table.
    """
    listed = list(rows)
    columns: Columns = {}
    for name in dict.fromkeys(name for row in listed for name in row):
        missing = _missing(info, name)
        dtype = object if name in TEXT_COLUMNS else np.float64 if name in TIME_COLUMNS else np.int64
        columns[name] = np.array([row.get(name, missing) for row in listed], dtype=dtype)
    return of_columns(info, columns, where)


def of_columns(
    info: TableInfo, columns: Columns, where: str, *, merge_repeats: bool = False
) -> TimingTable:
    """Answer the table of *columns* [n], sorted; columns that lack are 0, empty or unknown.

    *merge_repeats*: of rows with the same key answer one, with their median and spread.

    Raises:
        ConfigError: as `check_columns`; *where* says of which table.
    """
    num_rows = len(next(iter(columns.values()), ()))
    whole: Columns = {
        name: columns[name] if name in columns else np.full(num_rows, _missing(info, name))
        for name in COLUMNS
    }
    for name in TEXT_COLUMNS:
        whole[name] = whole[name].astype(object)
    keys = [_codes(whole[name]) for name in reversed(SORTED_BY)]
    keys = [key for key in keys if num_rows and key.min() != key.max()]  # the rest sorts nothing
    order = np.lexsort([whole["latency_us"], *keys])
    table = TimingTable(info, whole).at(order)
    if merge_repeats and num_rows:
        table = _merged(table)
    return checked(table, where)


def _missing(info: TableInfo, name: str) -> str | int | float:
    """Answer what a row has in a column that it lacks."""
    if name in TEXT_COLUMNS:
        return info.provenance if name == "provenance" else ""
    return np.nan if name in TIME_COLUMNS else 0


def _merged(table: TimingTable) -> TimingTable:
    """Answer one row a key: the median of its times, which are ascending, and their spread."""
    first = np.flatnonzero(np.append(True, _steps(table.columns) != 0))
    counts = np.diff(np.append(first, len(table)))
    times = table.columns["latency_us"]
    low, high = times[first + (counts - 1) // 2], times[first + counts // 2]
    spread = times[first + counts - 1] - times[first]
    merged = table.at(first)
    merged.columns["latency_us"] = (low + high) / 2
    merged.columns["spread_us"] = np.where(counts > 1, spread, merged.columns["spread_us"])
    return merged


def _codes(column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Answer numbers that sort as the values of *column*."""
    if column.dtype != object:
        return column
    values = column.tolist()
    ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return np.fromiter(map(ranks.__getitem__, values), np.int64, len(values))


def _steps(columns: Columns) -> npt.NDArray[np.int64]:
    """Answer for every row but the first whether its key is larger (1) than the one before it.

    0 is the same, -1 smaller.
    """
    steps = np.zeros(max(len(columns["op"]) - 1, 0), dtype=np.int64)
    for name in SORTED_BY:
        column = columns[name]
        if name not in TEXT_COLUMNS or len(set(column.tolist())) > 1:
            steps = np.where(steps == 0, np.sign(np.diff(_codes(column))), steps)
    return steps


def check_columns(columns: Columns, where: str) -> None:
    """Check the rows of a table.

    Raises:
        ConfigError: no rows, an unknown operation, text that cannot be printed, a size or time that
            cannot be, rows out of order or the same twice: with the first such row, counted from 1.
    """
    if not len(columns["op"]):
        raise ConfigError(f"{where}: no rows; expected at least one measurement")
    for op in dict.fromkeys(columns["op"].tolist()):
        if op not in OPERATIONS:
            near = did_you_mean(str(op), OPERATIONS)
            raise ConfigError(f"{where}: column op: unknown operation {quote(op)}; {near}")
    for name in TEXT_COLUMNS:
        for text in dict.fromkeys(columns[name].tolist()):
            if not text.isprintable():
                row = columns[name].tolist().index(text) + 1
                raise ConfigError(
                    f"{where}: column {name}, row {row}: {quote(text)}; expected {PRINTABLE}"
                )
    for name in COUNT_COLUMNS:
        column, most = columns[name], max_of(name)
        bad = (column < 0) | (column > most)
        _first(bad, column, f"{where}: column {name}", f"0 or more, at most {most}")
    for op in dict.fromkeys(columns["op"].tolist()):
        is_op = columns["op"] == op
        for name in OPERATIONS[op].positive:
            bad = is_op & (columns[name] == 0)
            _first(bad, columns[name], f"{where}: column {name}", f"1 or more, as in any {op}")
    latency, spread = columns["latency_us"], columns["spread_us"]
    bad = ~((latency >= MIN_LATENCY_US) & (latency <= MAX_LATENCY_US))
    _first(bad, latency, f"{where}: column latency_us", LATENCY)
    bad = (spread < 0) | (spread > MAX_LATENCY_US)
    _first(bad, spread, f"{where}: column spread_us", "0 or more microseconds")
    steps = _steps(columns)
    wrong = np.flatnonzero(steps <= 0)
    if len(wrong):
        row = int(wrong[0]) + 1
        if steps[row - 1] == 0:
            raise ConfigError(
                f"{where}: rows {row} and {row + 1} have the same key ({_shown(columns, row)}); "
                "expected one row a measurement"
            )
        raise ConfigError(
            f"{where}: row {row + 1} ({_shown(columns, row)}) is out of order; expected rows "
            f"sorted by op, kernel, dtype, kv_dtype, {COUNT_COLUMNS[0]}, ... in this order"
        )


def max_of(name: str) -> int:
    """Answer the most that column *name*, of whole numbers, may be."""
    return MAX_BYTES if name == "message_bytes" else MAX_COUNT


PRINTABLE = "printable text on one line"


def check_info(info: TableInfo, where: str) -> None:
    """Check that every text of *info* can be printed; *where* begins the message.

    Raises:
        FileError: one has control characters.
    """
    for key, value in msgspec.structs.asdict(info).items():
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, dict):
            texts = [*texts, *texts.values()]
        for text in texts if isinstance(texts, list | tuple) else ():
            if not text.isprintable():
                raise FileError(f"{where}: key {key}: {quote(text)}; expected {PRINTABLE}")


def checked(table: TimingTable, where: str) -> TimingTable:
    """Answer *table*, whose texts `check_info` accepts, whose rows `check_columns` accepts.

    Raises:
        FileError: they do not, or a row says to be worth more than its table.
    """
    check_info(table.info, where)
    try:
        check_columns(table.columns, where)
    except ConfigError as error:
        raise FileError(str(error)) from None
    worth = PROVENANCES[PROVENANCES.index(table.info.provenance) :]
    for row, kind in enumerate(table.columns["provenance"].tolist(), start=1):
        if kind not in worth:
            raise FileError(
                f"{where}: column provenance, row {row}: {kind!r}; expected {' or '.join(worth)} "
                f"in a table that is {table.info.provenance}"
            )
    return table


def _shown(columns: Columns, row: int) -> str:
    op = str(columns["op"][row])
    sizes = " ".join(f"{name}={columns[name][row]}" for name in OPERATIONS[op].sizes)
    return f"{op} {sizes}"


def _first(bad: npt.NDArray[np.bool_], values: npt.NDArray[Any], where: str, expected: str) -> None:
    rows = np.flatnonzero(bad)
    if len(rows):
        row = int(rows[0])
        raise ConfigError(f"{where}, row {row + 1}: {values[row]}; expected {expected}")
