"""Charts of measurements: achieved bandwidth, and what block sizes cost."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kernels.journal import Record
from kernels.summary import Decode, copy_bytes_per_s, decodes, main_heads, penalties
from sim.timing_plots import write

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_MARKERS = "osD^vP*X"
_CLASSES = (
    (0.0, 64e6, "KV below 64 MB"),
    (64e6, 1e9, "KV 64 MB to 1 GB"),
    (1e9, float("inf"), "KV above 1 GB"),
)


def draw(folder: Path, header: Record, records: Sequence[Record], peak: float | None) -> list[Path]:
    """Draw the heads with most rows into *folder*; *peak* of the memory in bytes/s, if known.

    Answers the files; none if no decode was measured.

    Raises:
        FileError: they cannot be written.
    """
    steps = decodes(records)
    if not steps:
        return []
    heads = main_heads(steps)
    steps = [step for step in steps if step.heads == heads]
    title = "{}: decode attention, {} query and {} kv heads of {}, KV {}".format(
        header["gpu"], *heads
    )
    if header["device"] == "cpu":
        title = "A TEST ON A CPU, NO GPU'S TIMES\n" + title
    figures = {
        "bandwidth.png": _bandwidth(steps, title, copy_bytes_per_s(records), peak),
        "block_size.png": _block_sizes(steps, title),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            write(figure, folder / name)
            written.append(folder / name)
    return written


def _bandwidth(
    steps: Sequence[Decode], title: str, copy: float | None, peak: float | None
) -> Figure:
    """Draw what was read of keys and values a second, over how much they are.

    Colours are block sizes, markers kernels.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curves: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        curves[(step.kernel, step.block_size)][step.kv_bytes].append(step.bytes_per_s)
    kernels = sorted({kernel for kernel, _ in curves})
    block_sizes = sorted({block_size for _, block_size in curves})
    for (kernel, block_size), by_bytes in sorted(curves.items()):
        sizes = sorted(by_bytes)
        axes.plot(
            [size / 1e6 for size in sizes],
            [statistics.median(by_bytes[size]) / 1e9 for size in sizes],
            marker=_MARKERS[kernels.index(kernel) % len(_MARKERS)],
            markersize=4,
            color=_COLORS[block_sizes.index(block_size) % len(_COLORS)],
            linestyle="-" if block_size else "--",
            linewidth=1.2,
            label=f"{kernel}, {f'block_size {block_size}' if block_size else 'contiguous'}",
        )
    for rate, name, style in ((copy, "copy, measured", ":"), (peak, "peak of the memory", "-.")):
        if rate is not None:
            axes.axhline(rate / 1e9, color="black", linestyle=style, linewidth=1, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("keys and values of a call, MB")
    axes.set_ylabel("read a second, GB/s (median of batches)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _block_sizes(steps: Sequence[Decode], title: str) -> Figure | None:
    """Draw time over that of contiguous memory by block size: median, smallest and largest."""
    by_size = penalties(steps)
    if not by_size:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = list(by_size)
    for index, (low, high, name) in enumerate(_CLASSES):
        places, middles, errors = [], [], []
        for place, size in enumerate(sizes):
            ratios = [ratio for step, ratio in by_size[size] if low <= step.kv_bytes < high]
            if ratios:
                middle = statistics.median(ratios)
                places.append(place + 0.12 * (index - 1))
                middles.append(middle)
                errors.append((middle - min(ratios), max(ratios) - middle))
        if places:
            axes.errorbar(
                places,
                middles,
                yerr=[list(side) for side in zip(*errors, strict=True)],
                marker=_MARKERS[index],
                color=_COLORS[index],
                linewidth=1.2,
                capsize=3,
                label=name,
            )
    axes.axhline(1, color="black", linestyle=":", linewidth=1, label="contiguous")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("block_size, tokens")
    axes.set_ylabel("time over contiguous memory\n(median, smallest, largest of calls)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return figure
