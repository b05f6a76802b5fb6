"""What a stage of layers holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import ConfigError
from sim.kv_groups import cache_groups
from sim.kv_spec import kv_bytes_per_token, weight_bytes
from sim.memory import Engine
from sim.models import get_model, model_names
from sim.pool_sizing import stages_of
from sim.stages import groups_of_stage, spans_of_stages


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(3, [1, 1, 1]), (4, [1, 2, 1]), (5, [2, 2, 1]), (6, [2, 2, 2])],
)
def test_what_is_left_over_goes_before_the_last(num_layers: int, layers: list[int]) -> None:
    """As vLLM's own test has it (``tests/distributed/test_pipeline_partition.py``)."""
    assert [span.end - span.start for span in spans_of_stages(num_layers, 3)] == layers


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_cover_all_layers(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match="expected at most"):
            spans_of_stages(num_layers, num_stages)
        return
    spans = spans_of_stages(num_layers, num_stages)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == num_layers
    assert {span.end - span.start for span in spans} <= {
        num_layers // num_stages,
        num_layers // num_stages + 1,
    }
    for number in (num_layers // 3, 7 * num_layers):
        assert sum(span.of(number) for span in spans) == number


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_hold_the_model_between_them(name: str, num_stages: int) -> None:
    """But for the input embedding that is the output embedding too: both ends have a copy."""
    model = get_model(name)
    engine = Engine(8, 64, pipeline_parallel_size=num_stages)
    parts = [part for _, part, _ in stages_of(model, engine)]
    whole = sum(weight_bytes(part) for part in parts)
    expected: float = weight_bytes(model)
    if model.tie_word_embeddings and num_stages > 1:
        expected += sum(
            round(part.elements / model.vocab_size) * -(-model.vocab_size // 64) * 64
            * (part.bits or 16) // 8
            for part in parts[0].weights
            if part.held_by == "vocabulary"
        )  # fmt: skip
    assert whole == pytest.approx(expected, rel=1e-5)
    tokens = sum(kv_bytes_per_token(part) for part in parts)
    assert tokens == pytest.approx(kv_bytes_per_token(model), abs=num_stages)  # rounded each


def test_groups_of_a_stage() -> None:
    groups = cache_groups(get_model("gpt-oss-20b").layout, 16)
    spans = spans_of_stages(24, 2)
    each = [groups_of_stage(groups, span).bytes_per_block for span in spans]
    assert each == [groups.bytes_per_block // 2] * 2
