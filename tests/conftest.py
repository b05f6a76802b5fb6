import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces and published results, which the repository does not contain."""
    folder = Path(os.environ.get("KVSIM_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs real traces in {folder} (or KVSIM_SHARED)")
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    return REPOSITORY / "workloads" / "samples"
