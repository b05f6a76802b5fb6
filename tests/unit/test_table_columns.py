"""Tables of columns: their order, repeated rows, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.errors import ConfigError
from sim.timing.table import (
    COLUMNS,
    TableInfo,
    TimingTable,
    check_columns,
    make_table,
    of_columns,
)
from sim.timing.table_costs import chosen, curve_of
from sim.timing.table_file import load, save

INFO = TableInfo(gpu="H200", provenance="measured", source="us", licence="Apache-2.0")


def _columns(**columns: list[Any]) -> dict[str, Any]:
    return {
        name: np.array(values, dtype=object if isinstance(values[0], str) else None)
        for name, values in columns.items()
    }


GEMM = _columns(
    op=["gemm"] * 5,
    kernel=["b", "a", "a", "a", "a"],
    n=[8, 16, 8, 8, 8],
    k=[8] * 5,
    num_tokens=[1, 1, 2, 2, 2],
    latency_us=[1.0, 2.0, 7.0, 3.0, 4.0],
)


def test_rows_are_sorted_and_repeats_merged() -> None:
    table = of_columns(INFO, GEMM, "t", merge_repeats=True)
    assert tuple(table.columns) == COLUMNS
    assert table.distinct("kernel", "n", "num_tokens", "latency_us") == [
        ("a", 8, 2, 4.0), ("a", 16, 1, 2.0), ("b", 8, 1, 1.0),
    ]  # fmt: skip
    assert table.columns["kernel"].tolist() == ["a", "a", "b"]
    assert table.columns["n"].tolist() == [8, 16, 8]
    np.testing.assert_array_equal(table.columns["spread_us"], [4.0, np.nan, np.nan])
    assert set(table.columns["provenance"]) == {"measured"}
    check_columns(table.columns, "t")


def test_rows_and_columns_make_the_same_table(tmp_path: Path) -> None:
    distinct = {name: column[:3] for name, column in GEMM.items()}
    table = of_columns(INFO, distinct, "t")
    rows = [{name: column[row] for name, column in distinct.items()} for row in range(3)]
    save(table, tmp_path / "t.parquet")
    for other in (make_table(INFO, rows, "t"), load(tmp_path / "t.parquet")):
        for name in COLUMNS:
            np.testing.assert_array_equal(other.columns[name], table.columns[name])
            assert other.columns[name].dtype == table.columns[name].dtype


def test_refusals() -> None:
    with pytest.raises(
        ConfigError, match=r"t: rows 1 and 2 have the same key \(gemm num_tokens=2\)"
    ):
        of_columns(INFO, GEMM, "t")
    with pytest.raises(ConfigError, match="t: no rows"):
        make_table(INFO, [], "t")
    table = of_columns(INFO, GEMM, "t", merge_repeats=True)
    with pytest.raises(ConfigError, match=r"row 2 \(gemm num_tokens=2\) is out of order"):
        check_columns(table.at(np.array([2, 0, 1])).columns, "t")
    with pytest.raises(ConfigError, match="did you mean 'gemm'"):
        of_columns(INFO, {**GEMM, "op": np.array(["gem"] * 5, dtype=object)}, "t")


def _of_kernels(*kernels_and_tokens: tuple[str, int]) -> TimingTable:
    rows = [
        {"op": "gemm", "kernel": kernel, "n": 8, "k": 8}
        | {"num_tokens": tokens, "latency_us": tokens}
        for kernel, tokens in kernels_and_tokens
    ]
    return make_table(INFO, rows, "t")


def test_kernels_by_size_are_one_choice_and_others_are_alternatives() -> None:
    by_size = _of_kernels(("b", 1), ("a", 2), ("b", 4))
    assert len(chosen(by_size)) == 3
    assert curve_of(by_size, "num_tokens").sizes == [1, 2, 4]
    alternatives = _of_kernels(("b", 1), ("a", 1), ("b", 4))
    assert chosen(alternatives).distinct("kernel") == [("b",)]
