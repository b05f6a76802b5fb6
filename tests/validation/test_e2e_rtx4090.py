"""A real run of vLLM against its replay: results/validation_rtx4090."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "results" / "validation_rtx4090"


@pytest.fixture(scope="module")
def validate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("validate_rtx4090", FOLDER / "validate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(shared: Path, validate: ModuleType) -> Any:
    folder = shared / "published" / "e2e_rtx4090"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    return validate.read_measured(folder)


@pytest.fixture(scope="module")
def rows(measured: Any, validate: ModuleType) -> dict[str, Any]:
    result = validate.simulate(measured, validate.Variant("reference"))
    num_buckets = len(measured.served.series["running"])
    simulated = validate.served_of(result, measured.start, num_buckets)
    return {row.metric: row for row in validate.compare(measured.served, simulated)}


def test_totals_and_means_within_two_percent(rows: dict[str, Any]) -> None:
    names = ("makespan", "output throughput", "TTFT mean", "TPOT mean", "latency mean")
    assert {name: abs(rows[name].difference) < 2 for name in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize("percent", [50, 90, 99])
@pytest.mark.parametrize("time", ["TTFT", "TPOT", "latency"])
def test_percentiles_within_four_percent(rows: dict[str, Any], time: str, percent: int) -> None:
    assert abs(rows[f"{time} p{percent}"].difference) < 4


def test_as_many_run_at_once(rows: dict[str, Any]) -> None:
    assert rows["most running, by the second"].measured == 49
    assert rows["most running, by the second"].simulated in {48, 49}


def test_curves_by_the_second(rows: dict[str, Any]) -> None:
    for name, limit in (("running", 2.5), ("waiting", 4.0), ("kv_cache_pct", 5.0)):
        assert rows[f"{name} by the second, RMS error"].difference <= limit


def test_the_committed_summary(rows: dict[str, Any], validate: ModuleType) -> None:
    with (FOLDER / "summary.csv").open(newline="") as file:
        committed = {row["metric"]: row for row in csv.DictReader(file)}
    assert list(committed) == list(rows)
    for metric, row in rows.items():
        for name, text in committed[metric].items():
            now = validate.rounded(getattr(row, name))
            if name in {"measured", "simulated", "difference", "limit"} and text:
                tolerance = 2e-3 if name == "difference" else 0.0  # a difference of rounded numbers
                assert float(now) == pytest.approx(float(text), rel=1e-4, abs=tolerance), metric
            else:
                assert now == text, metric


def test_the_variants_start_from_the_same_step_time(measured: Any, validate: ModuleType) -> None:
    """What the sensitivity table changes is put together by hand: unchanged, it is kvsim's own."""
    by_hand = validate.Variant("by hand", step_time=validate.step_time_of)
    runs = [validate.simulate(measured, v) for v in (validate.Variant("reference"), by_hand)]
    ends = [run.recorder.request_columns()["finish_ps"] for run in runs]
    assert (ends[0] == ends[1]).all()
