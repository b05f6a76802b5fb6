"""How charts look, and how they are saved: colours, markers, styles of matplotlib."""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.figure import Figure

from sim.errors import ConfigError, FileError
from sim.files import atomic, read_small, reason
from workloads.errors import did_you_mean, nearest, plain, quote

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, told apart by colour-blind readers."""

COLORS = {
    "reserve-max": "#D55E00",
    "reserve-pow2": "#E69F00",
    "reserve-oracle": "#CC79A7",
    "paged": "#0072B2",
    "prefix": "#009E73",
}
"""Of each allocator, from `PALETTE`; the same in every figure."""

_SHAPES: dict[str, tuple[str, Any]] = {
    "reserve-max": ("^", "-"),
    "reserve-pow2": ("v", (0, (6, 2))),
    "reserve-oracle": ("D", ":"),
    "paged": ("o", "-"),
    "prefix": ("s", "--"),
}
"""Marker and line of each allocator: they tell curves apart without colour."""

_MORE_COLORS = ("#56B4E9", "#882255", "#999933", "#332288", "#888888")
_MORE_MARKERS = ("P", "X", "*", "p", "<")
_BUDDY = "-buddy"

SLOT_COLORS = {
    "live": "#0072B2",
    "reserved": "#9AD1F5",
    "internal": "#D55E00",
    "external": "#F0C05A",
    "cached": "#009E73",
    "free": "#EEEEEE",
}
SLOT_HATCHES = {"internal": "////", "external": "....", "cached": "xxxx"}
"""For print without colour, where live, internal and cached are equally dark."""

_BASE: Any = {
    "svg.hashsalt": "kvsim",  # ids in the file follow from its content: equal runs, equal bytes
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
    "lines.markersize": 5,
}

_STYLED = (
    "axes.", "axes3d.", "figure.", "font.", "grid.", "hatch.", "image.", "legend.", "lines.",
    "markers.", "mathtext.", "patch.", "scatter.", "text.color", "text.hinting", "xtick.", "ytick.",
)  # fmt: skip
"""Keys of a style that reach a chart. Not those of programs, files and backends."""

_NOT_STYLED = {"axes.prop_cycle", "figure.figsize", "figure.dpi"}
"""Colours belong to allocators, sizes to charts."""

_FAMILIES = {"serif", "sans-serif", "sans", "sans serif", "cursive", "fantasy", "monospace"}
"""Names that stand for lists of fonts."""

_MAX_STYLE_BYTES = 1 << 16
_DPI = 150


class Look(NamedTuple):
    """Of one curve: what matplotlib draws it with."""

    color: str
    marker: str
    line: Any
    fill: str

    def of_line(self) -> dict[str, Any]:
        """Answer it as keywords of ``plot``."""
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": self.line,
            "markerfacecolor": self.fill,
        }


def looks(allocators: Iterable[str]) -> dict[str, Look]:
    """Answer the look of each allocator, in the order of legends.

    Buddy placement has hollow markers; others get what is left, by name.
    """
    names = sorted(set(allocators))
    known = [name for base in COLORS for name in (base, base + _BUDDY) if name in names]
    answer = {}
    for name in known:
        base = name.removesuffix(_BUDDY)
        marker, line = _SHAPES[base]
        fill = COLORS[base] if name == base else "white"
        answer[name] = Look(COLORS[base], marker, line, fill)
    for place, name in enumerate(name for name in names if name not in known):
        color = _MORE_COLORS[place % len(_MORE_COLORS)]
        answer[name] = Look(color, _MORE_MARKERS[place % len(_MORE_MARKERS)], "-.", color)
    return answer


def shades(names: Iterable[str]) -> dict[str, Look]:
    """Answer the look of curves that are values of a setting: dark to light, in their order."""
    names = list(names)
    lines = ("-", "--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
    colors = [
        mpl.colormaps["viridis"](0.85 * i / max(len(names) - 1, 1)) for i in range(len(names))
    ]
    return {
        name: Look(color := mpl.colors.to_hex(colors[i]), "os^vDP"[i % 6], lines[i % 6], color)
        for i, name in enumerate(names)
    }


@contextmanager
def drawing(*styles: Mapping[str, Any]) -> Iterator[None]:
    """Draw in our style and then *styles*, whatever the user's own matplotlibrc says.

    What cannot be drawn of extreme values is left out without a word.
    """
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's
        warnings.simplefilter("ignore", UserWarning)  # matplotlib's
        mpl.rcdefaults()
        for style in (_BASE, *styles):
            mpl.rcParams.update(style)
        log = logging.getLogger("matplotlib.font_manager")
        level = log.level
        log.setLevel(logging.ERROR)  # it repeats for every text that another font was taken
        try:
            yield
        finally:
            log.setLevel(level)


def write(figure: Figure, path: Path) -> set[str]:
    """Write *figure* to *path*, .png or .svg, whole or not at all; equal figures, equal bytes.

    Call it inside `drawing`. Answers the characters that the font has no shape for.
    """
    suffix = path.suffix.lower().removeprefix(".")
    metadata = {"Software": None} if suffix == "png" else {"Date": None}
    with warnings.catch_warnings(record=True) as seen, atomic(path) as temporary:
        warnings.simplefilter("always")
        figure.savefig(temporary, format=suffix, dpi=_DPI, metadata=metadata)
    found = (re.match(r"Glyph (\d+) ", str(warning.message)) for warning in seen)
    return {chr(int(match[1])) for match in found if match}


def settle(figure: Figure) -> None:
    """Place everything in *figure* for good, which else takes place again for every file."""
    figure.set_dpi(_DPI)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def load_style(name: str) -> dict[str, Any]:
    """Answer the style *name*: one of matplotlib's, or a file of ``key: value`` lines.

    What would change the colours of allocators, or run or read something else, is left out.

    Raises:
        ConfigError: there is no such style.
        FileError: the file cannot be used; the message names the line.
    """
    from matplotlib import style  # noqa: PLC0415  # reads thirty files

    if name == "default":
        return {}
    if name in style.available:
        library: Any = style.library
        return _usable(library[name])
    path = Path(name)
    try:
        found = path.is_file()
    except (OSError, ValueError):  # ValueError: a null byte
        found = False
    if not found:
        raise ConfigError(
            f"--style {quote(name)} is neither a file nor a style of matplotlib; "
            f"{did_you_mean(name, ['default', *style.available])}"
        )
    found_style = _usable(_style_file(path))
    for family in found_style.get("font.family", []):
        if family not in _FAMILIES and family not in (names := font_manager.get_font_names()):
            raise FileError(
                f"--style {plain(name)}: font.family {quote(family)} is not installed; "
                f"{nearest(family, names)}expected a font of this machine"
            )
    return found_style


def _usable(style: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in style.items()
        if key.startswith(_STYLED) and key not in _NOT_STYLED
    }


def _style_file(path: Path) -> dict[str, Any]:
    """Answer what *path* says, each value checked by matplotlib, none of it evaluated."""
    where = plain(str(path))
    try:
        text = read_small(path, _MAX_STYLE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise FileError(f"--style {where}: {reason(error)}; expected a matplotlib style") from None
    style: dict[str, Any] = {}
    checked: Any = mpl.RcParams()
    for number, line in enumerate(text.splitlines(), 1):
        content = re.sub(r'#(?=(?:[^"]*"[^"]*")*[^"]*$).*', "", line).strip()
        if not content:
            continue
        key, colon, value = (part.strip() for part in content.partition(":"))
        if not colon or key not in mpl.rcParams:
            raise FileError(
                f"--style {where}, line {number}: {quote(key)} is no key of matplotlib; "
                f"{nearest(key, mpl.rcParams)}expected lines like font.size: 12"
            )
        if not _usable({key: value}):
            continue
        try:
            checked[key] = value.strip('"')
        except (ValueError, TypeError) as error:
            raise FileError(
                f"--style {where}, line {number}: {' '.join(str(error).split())}"
            ) from None
        style[key] = checked[key]
    return style
