"""What all experiments here share: run a sweep, keep its summary, save a figure."""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from sim.cli import main as kvsim
from sim.files import atomic, write_json
from sim.plots.style import settle, write

RESULTS = Path(__file__).parent
SWEEPS = RESULTS.parent / "kvsim-results"
SOURCES = ("timing", "kv_pool_provenance")
"""Long texts of the summary that go to the manifest, each distinct one once."""


def swept(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Run ``spec.toml`` of *folder*, below `RESULTS`; answer its summary and manifest.

    A run that was interrupted goes on in `SWEEPS`. Exits if not all cells finish.
    """
    output = SWEEPS / folder.relative_to(RESULTS)
    if kvsim(["sweep", str(folder / "spec.toml"), "-o", str(output)]):
        sys.exit(f"{folder.name}: not all cells finished")
    frame = pd.read_parquet(output / "summary.parquet")
    manifest = json.loads((output / "sweep.json").read_text())
    manifest |= {source: sorted(set(frame[source])) for source in SOURCES}
    return frame.drop(columns=["cell", *SOURCES]).dropna(axis="columns", how="all"), manifest


def run_sweep(folder: Path) -> None:
    """Run ``spec.toml`` of *folder*; write its summary and manifest there."""
    frame, manifest = swept(folder)
    write_json(folder / "manifest.json", manifest)
    write_summary(frame, folder)


def csv_text(frame: pd.DataFrame) -> str:
    """Answer *frame* as CSV, numbers with nine digits."""
    return frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def write_summary(frame: pd.DataFrame, folder: Path) -> None:
    """Write *frame* to ``summary.csv`` of *folder*."""
    with atomic(folder / "summary.csv") as temporary:
        temporary.write_text(csv_text(frame))


def save(figure: Figure, path: Path) -> None:
    """Write *figure* to the PNG *path* in 256 colours: a third of the bytes."""
    settle(figure)
    write(figure, path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize()
    small.save(path, optimize=True)
