"""The table that a source tree ships for a GPU is that GPU's default."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sim.config import TimingConfig
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing import Deployment, KernelStepTime, kernel_step_time, table, table_file
from sim.timing.base import StepBatch
from tests.conftest import REPOSITORY
from tests.tiny_table import INFO, prefill, tiny_table

H200 = Deployment(get_model("meta-llama/Llama-3.1-8B"), get_gpu("H200"), max_num_seqs=8)


def _sources(step_time: KernelStepTime) -> str:
    return "\n".join(f"{s.terms} {s.provenance} {s.description}" for s in step_time.sources)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(table_file, "SHIPPED", tmp_path)
    return tmp_path


def test_without_a_shipped_table_nothing_changes(folder: Path) -> None:
    step_time = kernel_step_time(TimingConfig(), H200)
    assert step_time.table is None
    assert "shipped" not in _sources(step_time)


def test_a_shipped_table_is_the_default_and_the_report_says_so(folder: Path) -> None:
    table_file.save(tiny_table(), folder / "H200.parquet")
    default = kernel_step_time(TimingConfig(), H200)
    given = kernel_step_time(TimingConfig(timing_table=str(folder / "H200.parquet")), H200)
    assert default.table == given.table
    batch = StepBatch(4, 1000, ())
    assert default.step_time(batch) == given.step_time(batch)
    assert "decode attention, prefill attention assumed H200, shipped table, " in _sources(default)
    assert "shipped" not in _sources(given)


def test_only_its_own_gpu(folder: Path) -> None:
    table_file.save(tiny_table(), folder / "H200.parquet")
    assert kernel_step_time(TimingConfig(), H200._replace(gpu=get_gpu("H100"))).table is None


def test_what_a_shipped_table_has_not_is_priced_by_the_roofline(folder: Path) -> None:
    other_heads = [prefill(16, 10, num_heads=5), prefill(64, 20, num_heads=5)]
    table_file.save(table.make_table(INFO, other_heads, "tiny"), folder / "H200.parquet")
    assert "decode attention (±" in _sources(kernel_step_time(TimingConfig(), H200))


def test_a_file_without_its_description_is_none(folder: Path) -> None:
    table_file.save(tiny_table(), folder / "H200.parquet")
    (folder / "H200.json").unlink()
    assert kernel_step_time(TimingConfig(), H200).table is None


def test_an_installed_package_has_the_tables_where_they_are_looked_for(tmp_path: Path) -> None:
    """And nothing else of `kernels`, whose name others have too and which needs PyTorch."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77 to build a wheel")
    tree = tmp_path / "tree"
    for name in ("sim", "workloads", "kernels"):
        shutil.copytree(REPOSITORY / name, tree / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    shipped = tree / "kernels" / "tables"
    shipped.mkdir(exist_ok=True)
    table_file.save(tiny_table(), shipped / "H200.parquet")
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True
    )
    names = zipfile.ZipFile(tree / done.stdout.splitlines()[-1]).namelist()
    site = Path(table_file.__file__).parents[2]
    assert (table_file.SHIPPED / "H200.parquet").relative_to(site).as_posix() in names
    ours = {name for name in names if name.startswith("kernels/")}
    assert ours >= {"kernels/tables/H200.parquet", "kernels/tables/H200.json"}
    assert not {name for name in ours if not name.startswith("kernels/tables/")}
