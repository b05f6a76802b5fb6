"""Fits of traces whose making is known, and the measures of how well."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.distributions import Exponential, Geometric, Lognormal, Quantiles
from workloads.errors import TraceError
from workloads.fit import compare, fit, ks_distance
from workloads.generators import generate
from workloads.processes import Gamma, Profile
from workloads.readers import read_trace
from workloads.record import Trace
from workloads.reuse import num_repeated_tokens
from workloads.spec import parse_spec
from workloads.spec_text import to_toml

CHAT = """
num_requests = 6000
[arrivals]
kind = "gamma"
rate = 5
burstiness = 0.5
[[classes]]
prefix = [{ tokens = 400 }, { tokens = 100, variants = 8, zipf = 1 }]
input_len = { kind = "lognormal", median = 300, p99 = 3000 }
turn_len = { kind = "lognormal", median = 60, p99 = 400 }
output_len = { kind = "lognormal", median = 150, p99 = 900 }
correlation = 0.4
turns = { kind = "geometric", mean = 3 }
think_time = { kind = "exponential", mean = 20 }
"""


def _distance(one: Trace, other: Trace, name: str) -> float:
    return ks_distance(*(getattr(t, name).astype(np.float64) for t in (one, other)))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("fit") / "chat.toml"
    path.write_text(CHAT)
    return generate(path, 11)


def test_a_fit_finds_what_the_trace_was_made_of(chat: Trace) -> None:
    found = fit(chat)
    assert isinstance(found.arrivals, Gamma)
    assert found.arrivals.rate == pytest.approx(5, rel=0.1)
    assert found.arrivals.burstiness == pytest.approx(0.5, rel=0.1)
    [each] = found.classes
    assert isinstance(each.input_len, Lognormal)
    assert each.input_len.median == pytest.approx(300, rel=0.1)
    assert each.input_len.p99 == pytest.approx(3000, rel=0.2)
    assert isinstance(each.turn_len, Lognormal)
    assert each.turn_len.median == pytest.approx(60, rel=0.1)
    assert isinstance(each.output_len, Lognormal)
    assert each.output_len.median == pytest.approx(150, rel=0.1)
    assert isinstance(each.turns, Geometric)
    assert each.turns.mean == pytest.approx(3, rel=0.05)
    assert isinstance(each.think_time, Exponential)
    assert each.think_time.mean == pytest.approx(20, rel=0.1)
    assert each.correlation == pytest.approx(0.4, abs=0.1)
    first, second = each.prefix
    assert (first.tokens, second.tokens, second.variants) == (400, 100, 8)
    assert second.zipf == pytest.approx(1, abs=0.15)


def test_an_imitation_is_as_near_as_another_seed(chat: Trace, tmp_path: Path) -> None:
    path = tmp_path / "fit.toml"
    path.write_text(to_toml(fit(chat), "x"))
    imitation = generate(path, 0)
    assert len(imitation) == len(chat)
    limit = 1.95 * (2 / 6000) ** 0.5 + 0.03
    for name in ("num_output_tokens", "num_prompt_tokens"):
        assert _distance(chat, imitation, name) < limit
    hits = [
        num_repeated_tokens(t, outputs=True).sum() / t.num_prompt_tokens.sum()
        for t in (chat, imitation)
    ]
    assert hits[1] == pytest.approx(hits[0], abs=0.03)
    assert f"{100 * hits[0]:.2f}" in compare(chat, imitation, 0)


def test_the_text_of_a_fit_is_the_fit(chat: Trace, samples: Path) -> None:
    for trace in (
        chat,
        read_trace(samples / "mooncake.jsonl"),
        read_trace(samples / "azure2023.csv"),
    ):
        found = fit(trace)
        assert parse_spec(to_toml(found, "x").encode()) == found


def test_rates_and_lengths_that_vary_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        """
num_requests = 8000
[arrivals]
kind = "ramp"
start_rate = 2
end_rate = 12
over = 1000
[[classes]]
name = "short"
end = 600
input_len = 100
output_len = { kind = "uniform", low = 1, high = 50 }
[[classes]]
name = "long"
start = 600
input_len = 900
output_len = { kind = "uniform", low = 200, high = 250 }
"""
    )
    trace = generate(tmp_path / "x.toml", 2)
    found = fit(trace)
    assert isinstance(found.arrivals, Profile)
    assert found.arrivals.rates[0] < 4
    assert found.arrivals.rates[-1] > 9
    assert len(found.classes) > 2
    assert found.classes[0].input_len == 100
    assert found.classes[-1].input_len == 900
    (tmp_path / "fit.toml").write_text(to_toml(found, "x"))
    imitation = generate(tmp_path / "fit.toml", 0)
    assert _distance(trace, imitation, "arrival_ps") < 0.01
    assert imitation.num_output_tokens.sum() == pytest.approx(
        trace.num_output_tokens.sum(), rel=0.01
    )
    step = found.arrivals.step * 1e12
    counts = [np.bincount((t.arrival_ps // step).astype(int))[:20] for t in (trace, imitation)]
    assert counts[1] == pytest.approx(counts[0], abs=1)


def test_steady_lengths_are_one_class_and_odd_ones_quantiles(samples: Path) -> None:
    found = fit(read_trace(samples / "conversation.jsonl"))
    [each] = found.classes
    assert isinstance(found.arrivals, Gamma)
    assert isinstance(each.input_len, Quantiles)
    assert [prefix.tokens for prefix in each.prefix] == [512]
    assert each.turns == 1


def test_turns_of_block_ids_are_found(samples: Path) -> None:
    [each] = fit(read_trace(samples / "mooncake.jsonl")).classes
    assert each.turns == 4  # five conversations of four turns


def test_too_few_requests_are_refused(samples: Path) -> None:
    with pytest.raises(TraceError, match="5 requests: expected at least 10"):
        fit(read_trace(samples / "tokens.jsonl"))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
)
def test_the_distance_is_the_largest_difference_of_shares(one: list[int], other: list[int]) -> None:
    expected = max(
        abs(sum(x <= v for x in one) / len(one) - sum(x <= v for x in other) / len(other))
        for v in range(10)
    )
    found = ks_distance(np.array(one, float), np.array(other, float))
    assert found == pytest.approx(expected, abs=1e-12)
    assert ks_distance(np.array(one, float), np.array(one, float)) == 0


def test_outputs_that_go_with_their_prompts_are_found(tmp_path: Path) -> None:
    """Short prompts ask for long answers, middling ones for short: no correlation says that."""
    (tmp_path / "x.toml").write_text(
        """
num_requests = 6000
arrivals = { kind = "poisson", rate = 3 }
[[classes]]
input_len = { kind = "uniform", low = 1, high = 900 }
[classes.output_len]
kind = "by_input"
bounds = [300, 600]
of = [{ kind = "uniform", low = 400, high = 500 }, 10, { kind = "uniform", low = 300, high = 420 }]
"""
    )
    trace = generate(tmp_path / "x.toml", 2)
    (tmp_path / "fit.toml").write_text(to_toml(fit(trace), "x"))
    for each in (trace, generate(tmp_path / "fit.toml", 0)):
        prompts, outputs = each.num_prompt_tokens, each.num_output_tokens
        assert outputs[prompts <= 250].min() >= 390
        middle = outputs[(prompts > 350) & (prompts <= 550)]
        assert (middle.min(), middle.max()) == (10, 10)
        assert outputs[prompts > 650].mean() == pytest.approx(360, rel=0.02)
