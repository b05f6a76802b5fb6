"""The tables under ``sim/data``: read once, when first asked for."""

import functools
import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@functools.cache
def load_table(name: str) -> dict[str, Any]:
    """Answer the content of ``sim/data/<name>.toml``; callers must not change it."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))
