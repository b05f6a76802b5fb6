"""Charts of timing tables and fits: what was measured, what lies between, and what bounds it."""

import functools
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.columns import FloatArray
from sim.errors import ConfigError, FileError
from sim.hardware import GpuSpec, get_gpu
from sim.kv_layout import ELEMENT_BYTES
from sim.kv_spec import DTYPE_BYTES, dtype_bytes
from sim.models import ModelSpec
from sim.plots import style as plot_style
from sim.plots.style import PALETTE, drawing
from sim.timing.attention import AttentionCost, decode_times
from sim.timing.base import PS_PER_US
from sim.timing.build_attention import block_size_factor
from sim.timing.layers import DEEPSEEK_V3_DIMS, AttentionShape, attention_shape, calls_of
from sim.timing.roofline import Fits
from sim.timing.table import LAYER_OPS, OPERATIONS, TimingTable
from sim.timing.table_attention import TableAttention
from workloads.errors import did_you_mean

MAX_BATCHES = 5
"""Most batches that are drawn, from the smallest to the largest."""

MAX_LAYERS = 6
"""Most kernels that are drawn over tokens, those that take longest."""

FIT_BATCHES = (1, 8, 64, 256)
FIT_CONTEXTS = (128, 131_072)

MLA_HEAD_DIM = 256
"""One kv head with more elements than this is the latent of MLA, key and value in one."""

_STYLE: Any = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}

_style = functools.partial(drawing, _STYLE)


def write(figure: Figure, path: Path) -> None:
    """Write *figure* to *path*, .png or .svg, whole or not at all; equal figures, equal bytes."""
    with _style():
        plot_style.write(figure, path)


class _Decode(NamedTuple):
    """Decode attention of some heads on a GPU.

    Attributes:
        batches: that are drawn.
        contexts: of history that each request has, the ends of the axis.
        kv_bytes: that one request reads of the cache, a token of context.
        measured: (histories, times in us) of a batch, and the cost between them; None for a fit.
        fit: None where there is none.
    """

    gpu: GpuSpec
    batches: list[int]
    contexts: tuple[float, float]
    kv_bytes: float
    measured: tuple[Callable[[int], tuple[FloatArray, FloatArray]], AttentionCost] | None
    fit: AttentionCost | None

    def bytes_of(self, batch: int, histories: FloatArray) -> FloatArray:
        """Answer the bytes of keys and values that a call reads; the new token is among them."""
        return batch * (histories + 1) * self.kv_bytes


def draw_table(
    table: TimingTable, *, heads: str | None = None, kernel: str | None = None
) -> tuple[Figure, list[str]]:
    """Draw decode attention of one shape, and kernels over tokens; answer notes for the reader.

    *heads* as ``QUERY/KV/DIM``; those with most rows, and the *kernel* with most of them, if None.

    Raises:
        ConfigError: no such heads or kernel.
        FileError: the table has nothing to draw.
    """
    notes: list[str] = []
    rows = table.where(op="decode_attention")
    curves, kernels = _table_curves(table)
    if not len(rows) and not curves:
        raise FileError("nothing to draw: no rows of decode_attention, of a layer or of gemm")
    if not len(rows) and (heads or kernel):
        raise ConfigError("--heads, --kernel: the table has no rows of decode_attention")
    decode, title = None, ""
    if len(rows):
        rows, title = _one_shape(rows, heads, kernel)
        decode = _measured_decode(rows, notes)
    gpu = table.info.gpu
    with _style():
        figure, panels = _panels((2 if decode else 0) + bool(curves))
        if decode:
            _draw_decode(panels[0], panels[1], decode, title)
        if curves:
            _draw_layers(panels[-1], curves, kernels)
        about = f"{gpu}, {table.info.provenance}: {_short(table.describe())}"
        figure.suptitle(about, fontsize=11, parse_math=False)
    return figure, notes


def draw_fit(gpu: GpuSpec, model: ModelSpec, tensor_parallel_size: int) -> Figure:
    """Draw what the fit of *gpu* says of one rank of *model*: decode attention, and products.

    Raises:
        ConfigError: there is no fit for that GPU or those heads.
    """
    fits = Fits(gpu)
    shape = attention_shape(model, tensor_parallel_size)
    num_bytes = dtype_bytes(model)
    fit = fits.attention(shape, num_bytes, num_bytes, 1.0)
    kv_bytes = (1 if shape.latent else 2) * shape.num_kv_heads * shape.head_dim * num_bytes
    contexts = (float(FIT_CONTEXTS[0]), float(FIT_CONTEXTS[1]))
    decode = _Decode(gpu, list(FIT_BATCHES), contexts, kv_bytes, None, fit)
    tokens = np.geomspace(1, 8192, 100)
    curves = {
        f"{call.op} {call.n} x {call.k}": (
            tokens,
            np.array([fits.gemm(call.n, call.k, num_bytes).at(size) for size in tokens])
            / PS_PER_US,
        )
        for call in calls_of(model, tensor_parallel_size)
        if call.n and call.op != "moe"
    }
    with _style():
        figure, panels = _panels(3)
        _draw_decode(panels[0], panels[1], decode, f"{shape}, page {fits.page}")
        _draw_layers(panels[2], _longest(curves), "roofline fit", markers=False)
        ranks = f", one of {tensor_parallel_size} ranks" if tensor_parallel_size > 1 else ""
        figure.suptitle(f"{gpu.name}, fitted: {fits.system}; {model.name}{ranks}", fontsize=11)
    return figure


def _short(text: str) -> str:
    return text if len(text) <= 110 else text[:107] + "..."


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.9 * count if count > 1 else 6.5, 5.4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False).ravel())


# ---- decode attention


def _one_shape(rows: TimingTable, heads: str | None, kernel: str | None) -> tuple[TimingTable, str]:
    """Answer the rows of the shape to draw, and its name."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    if heads is not None:
        shapes = {"/".join(map(str, shape)): shape for shape in rows.distinct(*names)}
        if heads not in shapes:
            raise ConfigError(
                f"--heads {heads!r}: no decode attention of these; {did_you_mean(heads, shapes)}"
            )
        rows = rows.where(**dict(zip(names, shapes[heads], strict=True)))
    if kernel is not None:
        kernels = [str(name) for (name,) in rows.distinct("kernel")]
        if kernel not in kernels:
            raise ConfigError(
                f"--kernel {kernel!r}: no decode attention by it; {did_you_mean(kernel, kernels)}"
            )
        rows = rows.where(kernel=kernel)
    identity = OPERATIONS["decode_attention"].identity
    counts = Counter(zip(*(rows.columns[name].tolist() for name in identity), strict=True))
    most = max(sorted(counts), key=lambda key: counts[key])
    rows = rows.where(**dict(zip(identity, most, strict=True)))
    shown = dict(zip(identity, most, strict=True))
    page = f"page {shown['block_size']}" if shown["block_size"] else "contiguous"
    title = (
        f"{shown['kernel']}, {shown['num_heads']}/{shown['num_kv_heads']}/{shown['head_dim']} "
        f"{shown['kv_dtype']}, {page}"
    )
    return rows, title


def _measured_decode(rows: TimingTable, notes: list[str]) -> _Decode:
    gpu = get_gpu(rows.info.gpu)
    first = {name: column[0] for name, column in rows.columns.items()}
    heads, kv_heads, dim = (int(first[n]) for n in ("num_heads", "num_kv_heads", "head_dim"))
    is_latent = kv_heads == 1 and dim > MLA_HEAD_DIM
    shape = AttentionShape(heads, kv_heads, dim, DEEPSEEK_V3_DIMS if is_latent else None)
    element = ELEMENT_BYTES.get(str(first["kv_dtype"]))
    if element is None:
        notes.append(f"KV type {first['kv_dtype']!r} is unknown: drawn with 2 bytes an element")
        element = 2
    fit: AttentionCost | None = None
    try:
        fits = Fits(gpu)
        factor = block_size_factor(int(first["block_size"])) / block_size_factor(fits.page)
        fit = fits.attention(shape, 2, element, factor)
    except ConfigError as error:
        notes.append(f"no roofline is drawn: {error}")
    histories = rows.columns["context"].astype(float)

    def measured(batch: int) -> tuple[FloatArray, FloatArray]:
        chosen = rows.where(batch=batch).columns
        return chosen["context"].astype(float), chosen["latency_us"]

    return _Decode(
        gpu,
        _spread([int(batch) for (batch,) in rows.distinct("batch")]),
        (max(1.0, float(histories.min())), float(histories.max())),
        (1 if shape.latent else 2) * kv_heads * dim * element,
        (measured, TableAttention(rows)),
        fit,
    )


def _spread(values: Sequence[int]) -> list[int]:
    """Answer at most `MAX_BATCHES` of ascending *values*, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(MAX_BATCHES, len(values)))
    return [values[int(place)] for place in np.round(places)]


def _draw_decode(times: Axes, shares: Axes, decode: _Decode, title: str) -> None:
    """Draw latency, and bandwidth as a share of peak, over the context of a request."""
    colors = mpl.colormaps["viridis"](np.linspace(0, 0.85, len(decode.batches)))
    low, high = decode.contexts
    axis = np.unique(np.round(np.geomspace(low, max(high, low + 1), 200)))
    peak_us = decode.gpu.hbm_bandwidth / 1e6  # bytes a microsecond
    for batch, color in zip(decode.batches, colors, strict=True):

        def both(histories: FloatArray, us: FloatArray, style: str, of: int = batch) -> None:
            share = 100 * decode.bytes_of(of, histories) / us / peak_us
            width = 1.2 if style in {"-", "--"} else 1.0
            for axes, values in ((times, us), (shares, share)):
                axes.plot(histories, values, style, color=color, lw=width, ms=3.5)  # noqa: B023

        if decode.measured is not None:
            measured, cost = decode.measured
            histories, us = measured(batch)
            both(histories, us, "o")
            both(axis, _times_us(cost, batch, axis), "-")
        if decode.fit is not None:
            both(axis, _times_us(decode.fit, batch, axis), "--")
        times.plot(axis, decode.bytes_of(batch, axis) / peak_us, ":", color=color, lw=1)
    shares.axhline(100, ls=":", color="black", lw=1)
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("context of each request (tokens)")
        _thousands(axes)
    times.set_yscale("log")
    times.set_ylabel("latency of one layer (us)")
    shares.set_ylabel("KV bytes / latency (% of peak bandwidth)")
    shares.set_ylim(bottom=0)
    times.set_title(f"Decode attention\n{title}", loc="left", parse_math=False)
    shares.set_title(
        f"Bandwidth achieved\npeak {decode.gpu.hbm_bandwidth / 1e9:,.0f} GB/s; more is from L2",
        loc="left",
    )
    batches = [
        Line2D([], [], color=color, lw=2, label=f"batch {batch}")
        for batch, color in zip(decode.batches, colors, strict=True)
    ]
    _legend_below(times, batches)
    _legend_below(shares, _style_legend(decode))


def _style_legend(decode: _Decode) -> list[Line2D]:
    grey = "0.3"
    lines = []
    if decode.measured is not None:
        lines.append(Line2D([], [], color=grey, ls="", marker="o", ms=3.5, label="in the table"))
        lines.append(Line2D([], [], color=grey, ls="-", label="between its rows"))
    if decode.fit is not None:
        lines.append(Line2D([], [], color=grey, ls="--", label="roofline fit"))
    return [*lines, Line2D([], [], color=grey, ls=":", label="KV bytes / peak bandwidth")]


def _times_us(cost: AttentionCost, batch: int, histories: FloatArray) -> FloatArray:
    contexts = (batch * (histories + 1)).astype(np.int64)
    return decode_times(cost, np.full(len(histories), batch), contexts) / PS_PER_US


# ---- kernels over tokens

Curves = dict[str, tuple[FloatArray, FloatArray]]
"""(tokens, times in us) by name."""


def _table_curves(table: TimingTable) -> tuple[Curves, str]:
    """Answer the kernels over tokens that take longest, of the layers or else of products.

    Of several kernels and types the one with most rows, 16 bits first; and its name.
    """
    ops = [op for op in LAYER_OPS if len(table.where(op=op))] or ["gemm"]
    curves: Curves = {}
    names: dict[str, None] = {}
    for op in ops:
        rows = table.where(op=op)
        counts = Counter(zip(*(rows.columns[n].tolist() for n in ("dtype", "kernel")), strict=True))
        if not counts:
            continue
        dtype, kernel = max(sorted(counts), key=lambda key: (key[0] in DTYPE_BYTES, counts[key]))
        names[f"{kernel} {dtype}"] = None
        rows = rows.where(kernel=kernel, dtype=dtype)
        if op != "gemm":
            curves[op] = _curve(rows)
            continue
        largest = sorted(rows.distinct("n", "k"), key=lambda shape: -shape[0] * shape[1])
        for n, k in largest[:MAX_LAYERS]:
            curves[f"gemm {n} x {k}"] = _curve(rows.where(n=n, k=k))
    return _longest(curves), ", ".join(names)


def _curve(rows: TimingTable) -> tuple[FloatArray, FloatArray]:
    return rows.columns["num_tokens"].astype(float), rows.columns["latency_us"]


def _longest(curves: Curves) -> Curves:
    names = sorted(curves, key=lambda name: -float(curves[name][1].max()))
    return {name: curves[name] for name in names[:MAX_LAYERS]}


def _draw_layers(axes: Axes, curves: Curves, kernels: str, *, markers: bool = True) -> None:
    for color, (name, (tokens, us)) in zip(PALETTE, curves.items(), strict=False):
        style = "o-" if markers else "--"
        axes.plot(tokens, us, style, color=color, lw=1.2, ms=2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _thousands(axes)
    requests = [op for op in ("lm_head", "sampler") if any(op in name for name in curves)]
    axes.set_xlabel("tokens" + (f" ({', '.join(requests)}: requests)" if requests else ""))
    axes.set_ylabel("latency (us)")
    longest = f", the {MAX_LAYERS} that take longest" if len(curves) == MAX_LAYERS else ""
    title = f"Kernels over tokens{longest}\n{textwrap.shorten(kernels, 60)}"
    axes.set_title(title, loc="left", parse_math=False)
    _legend_below(axes, axes.get_legend_handles_labels()[0])


def _thousands(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"
    )


def _legend_below(axes: Axes, handles: Sequence[Any]) -> None:
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False
    )
