"""The grid: what comes first, and that its shapes are those of models."""

from collections import Counter

import pytest

from kernels import grid
from sim.models import get_model
from sim.timing.layers import AttentionShape, attention_shape, calls_of, expert_shape
from sim.timing.table import OPERATIONS, TableInfo, make_table

INFO = TableInfo(gpu="H200", provenance="assumed", source="a test", licence="CC0-1.0")


@pytest.mark.parametrize(
    "cases", [grid.gpu_grid(["flashinfer"], num_gpus=4), grid.cpu_grid()], ids=["gpu", "cpu"]
)
def test_cases_are_rows_of_a_table(cases: list[grid.Case]) -> None:
    table = make_table(INFO, (case.row() | {"latency_us": 1.0} for case in cases), "grid")
    assert len(table) == len(cases) == len({case.key for case in cases})
    assert {op for (op,) in table.distinct("op")} <= OPERATIONS.keys()


def test_a_table_that_can_be_used_comes_first() -> None:
    cases = grid.gpu_grid()
    first = cases[: len(cases) // 6]
    rows = make_table(INFO, (case.row() | {"latency_us": 1.0} for case in first), "first")
    blocks = rows.where(op="decode_attention")
    assert {size for (size,) in blocks.distinct("block_size")} >= {0, 16}
    assert blocks.columns["batch"].max() == 256
    assert len(rows.where(op="prefill_attention"))
    shapes = rows.where(op="gemm").distinct("n", "k")
    assert set(shapes) == set(grid.PRODUCTS)


@pytest.mark.parametrize("op", ["decode_attention", "prefill_attention"])
def test_every_block_size_of_the_main_heads(op: str) -> None:
    cases = [case for case in grid.gpu_grid() if case.op == op]
    main = [
        case
        for case in cases
        if case.kernel == grid.TRITON and case[5:8] == grid.LLAMA_8B and case.kv_dtype == "bfloat16"
    ]
    counts = Counter(case.block_size for case in main)
    assert set(counts) == {0, 1, 8, 16, 32, 64, 128, 256}
    assert len(set(counts.values())) == 1  # the same grid for each


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ("meta-llama/Llama-3.1-8B", grid.PRODUCTS),
        ("meta-llama/Llama-3.1-70B", grid.MORE_PRODUCTS),
    ],
)
def test_products_are_those_of_models(model: str, shapes: tuple[tuple[int, int], ...]) -> None:
    assert {(call.n, call.k) for call in calls_of(get_model(model), 1) if call.n} == set(shapes)


@pytest.mark.parametrize(
    ("model", "tp", "heads"),
    [
        ("meta-llama/Llama-3.1-8B", 1, grid.LLAMA_8B),
        ("meta-llama/Llama-3.1-70B", 1, grid.OTHER_HEADS[0]),
        ("meta-llama/Llama-3.1-70B", 8, grid.OTHER_HEADS[1]),
    ],
)
def test_heads_are_those_of_models(model: str, tp: int, heads: grid.Heads) -> None:
    assert attention_shape(get_model(model), tp) == AttentionShape(*heads)


def test_experts_are_those_of_a_model() -> None:
    model = get_model("Qwen/Qwen3-30B-A3B")
    experts = expert_shape(model, 1, enable_expert_parallel=False)
    shape = (experts.width, model.hidden_size, experts.num_local, experts.top_k)
    assert shape == grid.EXPERTS[0]
