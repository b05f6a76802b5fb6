"""What a specification generates: streams that do not touch, prefixes, sessions, times."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.editing import first_turns, native_lines
from workloads.errors import TraceError
from workloads.generators import generate, make_records
from workloads.readers import read_trace
from workloads.record import PS_PER_S, RequestRecord, Trace
from workloads.reuse import num_repeated_tokens
from workloads.spec import Spec, parse_spec

BASE = """
num_requests = 300
[arrivals]
kind = "poisson"
rate = 4
[[classes]]
name = "a"
weight = 2
prefix = [{ tokens = 64, variants = 5, zipf = 1 }]
input_len = { kind = "uniform", low = 1, high = 90 }
output_len = { kind = "geometric", mean = 40 }
[[classes]]
name = "b"
input_len = { kind = "normal", mean = 70, std = 20 }
output_len = 9
turns = { kind = "uniform", low = 1, high = 5 }
think_time = { kind = "exponential", mean = 3 }
"""


def _records(text: str, seed: int = 1) -> list[RequestRecord]:
    return make_records(Spec(parse_spec(text.encode()), Path(), "x.toml", ()), seed)[0]


def _generated(tmp_path: Path, text: str, seed: int = 1) -> Trace:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return generate(path, seed)


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    lines = [b"".join(native_lines(_generated(tmp_path, BASE, seed))) for seed in (1, 1, 2)]
    assert lines[0] == lines[1] != lines[2]


# what changes, and which parts of a request may change with it
CONCERNS = {
    "arrivals": ('kind = "poisson"', 'kind = "gamma"\nburstiness = 0.2', {"arrival"}),
    "output": ("mean = 40", "mean = 90", {"output"}),
    "input": ("high = 90", "high = 900", {"input"}),
    "prefix": ("variants = 5", "variants = 9", {"prefix"}),
    "prefix tokens": ("tokens = 64", "tokens = 99", {"prefix"}),
    "think": ("mean = 3 }", "mean = 8 }", {"think", "arrival"}),
    "perturbation": ("output_len = 9", "output_len = 9\nperturbation = {}", {"front"}),
    "other kind": (
        '{ kind = "normal", mean = 70, std = 20 }',
        '{ kind = "zipf", exponent = 1, max = 50 }',
        {"input"},
    ),
}


def _parts(record: RequestRecord) -> dict[str, object]:
    segments = record.segments or []
    return {
        "arrival": record.arrival_ps,
        "output": record.num_output_tokens,
        "input": [n for name, n in segments if str(name).endswith(":in")],
        "prefix": [each for each in segments if ":prefix" in str(each[0])],
        "front": [each for each in segments if str(each[0]).endswith(":front")],
        "think": record.think_ps,
        "id": record.request_id,
        "session": record.session_id,
    }


@pytest.mark.parametrize(("old", "new", "moved"), CONCERNS.values(), ids=list(CONCERNS))
def test_a_change_of_one_concern_moves_no_other(old: str, new: str, moved: set[str]) -> None:
    assert BASE.count(old) == 1
    before, after = ([_parts(r) for r in _records(text)] for text in (BASE, BASE.replace(old, new)))
    assert [r["id"] for r in before] == [r["id"] for r in after]
    changed = {
        name
        for one, other in zip(before, after, strict=True)
        for name in one
        if one[name] != other[name]
    }
    assert changed == moved


def test_fewer_requests_are_the_first_of_more() -> None:
    more, fewer = _records(BASE), _records(BASE.replace("300", "40"))
    whole = {r.request_id: r for r in more}
    kept = [r for r in fewer[:-5] if r == whole.get(r.request_id)]
    assert len(kept) >= 35 - 5  # but for the last session, which is cut
    assert [r.request_id for r in fewer[:-5]] == [r.request_id for r in more[:35]]


def test_shares_of_classes_follow_their_weights() -> None:
    text = BASE.replace("num_requests = 300", "duration = 3000")
    sessions = Counter(str(r.request_id).split("-")[0] for r in _records(text) if not r.think_ps)
    num = sum(sessions.values())
    assert num == pytest.approx(12_000, abs=4 * 12_000**0.5)
    assert sessions["a"] / num == pytest.approx(2 / 3, abs=4 * (2 / 9 / num) ** 0.5)


def test_a_turn_repeats_all_that_was_said(tmp_path: Path) -> None:
    trace = _generated(tmp_path, BASE)
    hits = num_repeated_tokens(trace, outputs=True)
    previous = trace.previous_turn
    later = np.flatnonzero(previous >= 0)
    assert len(later) > 50
    said = trace.num_prompt_tokens[previous[later]] + trace.num_output_tokens[previous[later]]
    assert hits[later].tolist() == said.tolist()
    gaps = trace.arrival_ps[later] - trace.arrival_ps[previous[later]]
    assert gaps == pytest.approx(trace.think_ps[later], abs=2)
    assert np.bincount(first_turns(trace.previous_turn)).max() == 5


@given(num=st.integers(1, 400), seed=st.integers(0, 2**63 - 1), turns=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_as_many_requests_as_asked_for(num: int, seed: int, turns: int) -> None:
    text = BASE.replace("300", str(num)).replace("high = 5", f"high = {turns}")
    records = _records(text, seed)
    assert len(records) == num
    assert all(r.num_prompt_tokens >= 1 and r.num_output_tokens >= 1 for r in records)
    assert all(sum(n for _, n in r.segments or []) == r.num_prompt_tokens for r in records)
    assert len({r.request_id for r in records}) == num


REPETITION = """
num_requests = {num}
[arrivals]
kind = "all_at_once"
[[classes]]
prefix = [{{ tokens = 256, variants = {prefixes}, {how} }}]
input_len = 128
output_len = 16
"""


def test_prefix_repetition_has_each_prefix_equally_often(tmp_path: Path) -> None:
    text = REPETITION.format(num=700, prefixes=7, how="equal = true")
    trace = _generated(tmp_path, text)
    counts = Counter(trace.segment_nodes[trace.segment_offsets[:-1]].tolist())
    assert sorted(counts.values()) == [100] * 7
    order = trace.segment_nodes[trace.segment_offsets[:-1]].tolist()
    repeats = sum(one == other for one, other in pairwise(order))
    assert repeats == pytest.approx(700 / 7, abs=4 * 10)  # not in blocks, not in turns
    assert num_repeated_tokens(trace, outputs=True).sum() == (700 - 7) * 256


def test_distinct_prefixes_by_chance_are_as_many_as_expected(tmp_path: Path) -> None:
    num, prefixes = 400, 300
    expected = prefixes * (1 - (1 - 1 / prefixes) ** num)
    seen = [
        (
            num_repeated_tokens(
                _generated(
                    tmp_path, REPETITION.format(num=num, prefixes=prefixes, how="zipf = 0"), seed
                ),
                outputs=True,
            )
            == 0
        ).sum()
        for seed in range(20)
    ]
    assert np.mean(seen) == pytest.approx(expected, abs=4 * 8 / 20**0.5)


def test_popularity_follows_zipf(tmp_path: Path) -> None:
    trace = _generated(tmp_path, REPETITION.format(num=20_000, prefixes=4, how="zipf = 1"))
    counts = Counter(trace.segment_nodes[trace.segment_offsets[:-1]].tolist())
    shares = [count / 20_000 for _, count in counts.most_common()]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=4 * 0.5 / 20_000**0.5)


def test_a_tree_has_a_node_for_each_path(tmp_path: Path) -> None:
    text = REPETITION.format(num=4000, prefixes=3, how="depth = 3")
    trace = _generated(tmp_path, text)
    starts = trace.segment_offsets[:-1]
    assert [len(set(trace.segment_nodes[starts + level].tolist())) for level in range(3)] == [
        3,
        9,
        27,
    ]
    assert trace.segment_ends[starts + 2].tolist() == [768] * 4000


def test_heterogeneous_prefixes_keep_their_length(tmp_path: Path) -> None:
    text = REPETITION.format(num=500, prefixes=40, how="zipf = 0").replace(
        "tokens = 256", 'tokens = { kind = "uniform", low = 10, high = 4000 }'
    )
    trace = _generated(tmp_path, text)
    starts = trace.segment_offsets[:-1]
    pairs = set(
        zip(trace.segment_nodes[starts].tolist(), trace.segment_ends[starts].tolist(), strict=True)
    )
    assert len(pairs) == len({node for node, _ in pairs}) == 40
    assert len({tokens for _, tokens in pairs}) > 30


def test_classes_share_a_prefix_by_name_only() -> None:
    text = BASE.replace("output_len = 9", "output_len = 9\nprefix = [{ tokens = 64, name = 'p' }]")
    named = text.replace("zipf = 1 }", "zipf = 1 }, { tokens = 64, name = 'p' }")
    for source, shared in ((text, False), (named, True)):
        texts = {
            name: {
                s
                for r in _records(source)
                if str(r.request_id)[0] == name
                for s in r.segments or []
            }
            for name in "ab"
        }
        assert bool(texts["a"] & texts["b"]) is shared


def test_a_perturbed_prompt_shares_nothing_from_its_time_on(tmp_path: Path) -> None:
    text = REPETITION.format(num=2000, prefixes=1, how="zipf = 0").replace(
        'kind = "all_at_once"', 'kind = "constant"\nrate = 10'
    )
    text += "perturbation = { share = 0.25, tokens = 9, start = 100 }\n"
    trace = _generated(tmp_path, text)
    hits, late = num_repeated_tokens(trace, outputs=True), trace.arrival_ps >= 100 * PS_PER_S
    assert set(hits[1:][~late[1:]].tolist()) == {256}
    assert set(hits[late].tolist()) == {0, 256}
    assert (hits[late] == 0).mean() == pytest.approx(0.25, abs=4 * (0.1875 / late.sum()) ** 0.5)
    assert set(trace.num_prompt_tokens[hits == 0][1:].tolist()) == {256 + 128 + 9}


TIMED = """
duration = 100
[arrivals]
kind = "poisson"
rate = 20
[[classes]]
name = "early"
end = 30
input_len = 1
output_len = 1
[[classes]]
name = "late"
start = 30
input_len = 1
output_len = 1
"""


def test_classes_have_their_times(tmp_path: Path) -> None:
    trace = _generated(tmp_path, TIMED)
    early = [name.startswith("early") for name in trace.request_ids]
    assert early == (trace.arrival_ps < 30 * PS_PER_S).tolist()
    assert 0 < sum(early) < len(trace)
    with pytest.raises(TraceError, match="no class has weight from 20 s on"):
        _generated(tmp_path, TIMED.replace("end = 30", "end = 20"))


@pytest.mark.parametrize("seed", [1, 2])
def test_stratified_draws_have_the_mean_of_the_distribution(seed: int) -> None:
    text = BASE.replace("weight = 2", "weight = 2\nstratified = true").replace("300", "2000")
    inputs = [
        r.segments[-1][1]
        for r in _records(text, seed)
        if r.segments and str(r.request_id)[0] == "a"
    ]
    assert np.mean(inputs) == pytest.approx(45.5, abs=0.1)  # else the error would be 0.6
    assert len(set(inputs)) == 90


def test_bounds_that_were_used_are_notes(tmp_path: Path) -> None:
    text = BASE.replace("high = 90", "high = 90, max = 80")
    notes = _generated(tmp_path, text).notes
    assert any(note.startswith("class a, input_len: ") and "moved" in note for note in notes)
    assert not any(
        "moved" in note for note in _generated(tmp_path, BASE.replace("std = 20", "std = 0")).notes
    )


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        (
            "num_requests = 300",
            "duration = 9\n[[classes]]\ninput_len = 1\noutput_len = 1\nturns = 20_000\n#",
            "turns: a session of 20,000: expected at most 10,000",
        ),
        ("rate = 4", "rate = 1e-7", "last session starts after .* s"),
        ("rate = 4", "rate = 1e-300", "last session starts after .{1,12} s"),
        (
            'kind = "poisson"\nrate = 4',
            "kind = 'profile'\nrates = [1e-300]\nstep = 1e-300",
            "rates and step: expected 1e-09 or more in a step",
        ),
        ("num_requests = 300", "duration = 0.001", "no session starts in 0.001 s"),
        ("num_requests = 300\n", "duration = 9e6\n", "sessions are expected in 9e.06 s"),
        ("mean = 3 }", "mean = 9e8 }", "a turn arrives after"),
        (
            "tokens = 64",
            "tokens = { kind = 'empirical', file = 'no.csv', column = 'x' }",
            "no such",
        ),
    ],
)
def test_too_much_is_refused(tmp_path: Path, old: str, new: str, refusal: str) -> None:
    with pytest.raises(TraceError, match=refusal) as caught:
        _generated(tmp_path, BASE.replace(old, new))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_frozen_workload_is_the_generated_one(tmp_path: Path) -> None:
    text = BASE.replace("output_len = 9", "output_len = 9\nperturbation = { share = 0.3 }")
    trace = _generated(tmp_path, text)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(native_lines(trace)))
    again = read_trace(path)
    assert again.request_ids == trace.request_ids
    for name in (
        "arrival_ps",
        "num_prompt_tokens",
        "num_output_tokens",
        "num_shareable_tokens",
        "segment_ends",
        "previous_turn",
        "think_ps",
    ):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist(), name
    assert (
        num_repeated_tokens(again, outputs=True).tolist()
        == num_repeated_tokens(trace, outputs=True).tolist()
    )
