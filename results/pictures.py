"""How the figures of this folder are saved."""

from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from sim.plots.style import settle, write


def save(figure: Figure, path: Path) -> None:
    """Write *figure* to the PNG file *path* with 256 colours: a third of the bytes.

    Call it inside `sim.plots.style.drawing`.
    """
    settle(figure)
    write(figure, path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize()
    small.save(path, optimize=True)
