"""Where prompts that hold the same text stop sharing it."""

from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.breaks import (
    LEAST_TOKENS,
    Prompt,
    compare,
    find_break,
    sampled_prompts,
)
from workloads.sources import read_workload


def _tokens(name: str, ids: list[int]) -> Prompt:
    return Prompt(name, (), array("q", ids).tobytes(), 8)


# Distinct ids, so that where lists agree is known beforehand.
@given(
    common=st.integers(0, 40),
    inserted=st.integers(1, 300),
    rest=st.integers(LEAST_TOKENS, 400),
    tail=st.integers(0, 100),
    first_has_it=st.booleans(),
)
def test_an_insertion_is_found_where_it_is(
    common: int, inserted: int, rest: int, tail: int, first_has_it: bool
) -> None:
    front, body = list(range(common)), list(range(1000, 1000 + rest))
    plain = front + body + list(range(5000, 5000 + tail))
    longer = front + list(range(9000, 9000 + inserted)) + body
    one, other = (longer, plain) if first_has_it else (plain, longer)
    pair = compare(_tokens("a", one), _tokens("b", other))
    places = (common, common + inserted)
    assert pair.common == common
    assert pair.resumes == (places[::-1] if first_has_it else places)
    assert pair.again == rest


@given(st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(0, 3), max_size=200))
def test_what_is_said_to_agree_agrees(first: list[int], second: list[int]) -> None:
    pair = compare(_tokens("a", first), _tokens("b", second))
    assert first[: pair.common] == second[: pair.common]
    assert first[pair.common : pair.common + 1] != second[pair.common : pair.common + 1] or (
        pair.common in {len(first), len(second)}
    )
    one, other = pair.resumes
    assert first[one : one + pair.again] == second[other : other + pair.again]
    assert min(one, other) >= pair.common


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 90)), max_size=6))
def test_runs_and_tokens_say_the_same_of_an_insertion(runs: list[tuple[str, int]]) -> None:
    """A prompt of runs, and the same prompt behind 16 tokens of its own."""
    runs = list({content: (content, length) for content, length in runs}.values())
    pair = compare(Prompt("a", runs), Prompt("b", [("own", 16), *runs]))
    assert pair.common == 0
    assert pair.again == max((length for _, length in runs), default=0)
    assert pair.resumes[1] - pair.resumes[0] == (16 if runs else 0)


def test_equal_prompts_and_unlike_prompts_are_no_break() -> None:
    same = [_tokens(f"r{row}", list(range(500))) for row in range(5)]
    assert find_break(same) is None
    unlike = [_tokens(f"r{row}", list(range(row * 1000, row * 1000 + 500))) for row in range(5)]
    assert find_break(unlike) is None
    assert find_break([]) is None


def _written(path: Path, prompts: list[dict[str, object]]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in prompts))
    return path


def test_token_ids_of_a_trace(tmp_path: Path) -> None:
    body = list(range(1000, 1400))
    lines: list[dict[str, object]] = [
        {
            "arrival_time": row,
            "prompt_token_ids": [1, 2, *([70 + row] * (row >= 4)), *body, 5000 + row],
            "output_len": 3,
        }
        for row in range(8)
    ]
    path = _written(tmp_path / "ids.jsonl", lines)
    found = find_break(sampled_prompts(path, None, 0, 8))
    assert found is not None
    assert (found.earlier, found.later, found.position, found.unit) == ("r3", "r4", 2, "token")
    assert (found.earlier_shown, found.later_shown) == ("token id 1000", "token id 74")
    assert found.again == 400
    assert 0.3 < found.lost < 0.5  # rows 4 to 7 of 8, nearly whole


def test_token_ids_of_llmservingsim(tmp_path: Path) -> None:
    body = list(range(1000, 1400))
    lines: list[dict[str, object]] = [
        {"input_toks": 402, "output_toks": 3, "arrival_time_ns": row,
         "input_tok_ids": [1, 70 + row, *body]}
        for row in range(6)
    ]  # fmt: skip
    path = _written(tmp_path / "ids.jsonl", lines)
    found = find_break(sampled_prompts(path, None, 0, 6))
    assert found is not None
    assert (found.position, found.unit, found.again) == (1, "token", 400)


def test_the_text_of_a_chat(tmp_path: Path) -> None:
    system = "You answer questions about the ACME catalogue. " * 30
    lines: list[dict[str, object]] = [
        {
            "timestamp": row,
            "messages": [
                {"role": "system", "content": f"It is 12:0{row}. {system}"},
                {"role": "user", "content": f"question {row}"},
            ],
            "max_tokens": 5,
        }
        for row in range(6)
    ]
    path = _written(tmp_path / "chat.jsonl", lines)
    found = find_break(sampled_prompts(path, None, 0, 6))
    assert found is not None
    assert found.unit == "byte"
    assert found.position == len("system\nIt is 12:0")
    assert found.earlier_shown.startswith("'0. You answer")
    assert found.lost > 0.7


def test_lengths_and_hashes_tell_nothing(samples: Path) -> None:
    for name in ("azure2023.csv", "mooncake.jsonl", "bailian.jsonl"):
        trace = read_workload(samples / name)
        assert find_break(sampled_prompts(samples / name, None, 0, len(trace))) is None


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.0), (1.0, 0.85, 0.95)])
def test_a_perturbed_specification(tmp_path: Path, share: float, least: float, most: float) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(
        'num_requests = 100\n[arrivals]\nkind = "poisson"\nrate = 5\n[[classes]]\n'
        "prefix = [{ tokens = 900 }]\ninput_len = 64\noutput_len = 5\n"
        + (f"perturbation = {{ share = {share}, tokens = 16 }}\n" if share else "")
    )
    found = find_break(sampled_prompts(path, None, 0, 100))
    assert least <= (0.0 if found is None else found.lost) <= most
