"""The committed comparison is what `kvsim compare` prints today.

A change here is explained in CHANGELOG.md; that the numbers are right is shown elsewhere (lockstep,
conformance, validation).
"""

import csv
import math
from pathlib import Path

from sim.cli import main

GOLDEN = Path(__file__).parents[2] / "results" / "default_compare" / "compare.csv"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _same(old: str, new: str) -> bool:
    try:
        return math.isclose(float(old), float(new), rel_tol=1e-9)
    except ValueError:
        return old == new


def test_default_compare_is_the_committed_one(tmp_path: Path) -> None:
    assert main(["compare", "-o", str(tmp_path)]) == 0
    expected, got = _rows(GOLDEN), _rows(tmp_path / "compare.csv")
    assert [row["allocator"] for row in got] == [row["allocator"] for row in expected]
    for old, new in zip(expected, got, strict=True):
        changed = {
            name: (old[name], new.get(name))
            for name in old
            if name not in new or not _same(old[name], new[name])
        }
        assert not changed, f"{old['allocator']}: (committed, now)"
