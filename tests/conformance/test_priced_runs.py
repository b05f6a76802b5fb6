"""Runs priced by a table: several steps at once are the single steps, across its knots too."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.metrics import Recorder
from sim.result_tables import expand, step_table
from sim.simulation import Simulation
from sim.summary import summarize
from sim.timing.table_file import save
from tests.strategies import (
    VARIANTS,
    Variant,
    make_config,
    scheduler_settings,
    smallest_pool,
    traces,
)
from tests.timing_tables import chunks, decodes, layers, table
from workloads.record import Trace


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table whose decodes have a knot every few tokens, none of them on a line."""

    def bent(batch: int, history: int) -> float:
        return float(20 + 4 * batch + history**1.5 * batch / 10)

    file: Path = tmp_path_factory.mktemp("table") / "bent.parquet"
    grid = decodes(bent, (1, 2, 3, 5, 8), (1, 3, 4, 7, 9, 20, 33, 40, 50, 200))
    save(table(grid, chunks(), layers()), file)
    return str(file)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), trace=traces(), variant=st.sampled_from(VARIANTS))
def test_runs_are_their_single_steps(
    path: str, data: st.DataObject, trace: Trace, variant: Variant
) -> None:
    config = make_config(
        variant,
        gpu="A100-40",
        step_time="roofline",
        timing_table=path,
        max_model_len=96,
        num_gpu_blocks_override=smallest_pool(variant, 16, 96) + data.draw(st.integers(0, 9)),
        **data.draw(scheduler_settings(96)),
    )
    fast = Simulation(config, trace).run()
    slow = Simulation(config, trace, single_step=True).run()
    for name, column in expand(step_table(slow.recorder)).to_pydict().items():
        again = expand(step_table(fast.recorder)).column(name).to_pylist()
        assert again == pytest.approx(column, rel=1e-9, abs=1e-12), name
    assert _requests(fast.recorder) == _requests(slow.recorder)
    terms, again = (summarize(result)["step_time_s"] for result in (fast, slow))
    assert terms == pytest.approx(again, rel=1e-9)
    busy_ps = sum(
        int(rows["duration_ps"][rows["num_steps"] > 0].sum())
        for rows in slow.recorder.step_chunks()
    )
    assert sum(terms.values()) == pytest.approx(busy_ps / 1e12)


def _requests(recorder: Recorder) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in recorder.request_columns().items()}
