"""Specifications that cannot be used: one line that names the key and the nearest choice."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import TraceError
from workloads.generators import generate
from workloads.sources import read_workload
from workloads.spec import parse_spec, read_spec

GOOD = """
num_requests = 10
[arrivals]
kind = "poisson"
rate = 3
[[classes]]
input_len = 5
output_len = { kind = "uniform", low = 3, high = 5 }
prefix = [{ tokens = 5, variants = 2 }]
"""

REFUSALS = [
    ('"poisson"', '"poison"', "arrivals.kind 'poison': did you mean 'poisson'? choices: all_at"),
    (
        "rate = 3",
        "rat = 3",
        "arrivals: unknown key 'rat': did you mean 'rate'? choices: kind, rate",
    ),
    ("rate = 3", "rate = 0", "arrivals.rate 0: expected a number > 0.0"),
    ("rate = 3", "rate = nan", "arrivals.rate: nan: expected a finite number"),
    ("rate = 3", "rate = inf", "arrivals.rate: inf: expected a finite number"),
    ("rate = 3", 'rate = "3"', "arrivals.rate '3': expected a number, got text"),
    ("low = 3", "low = 7", "classes 1.output_len: low 7 is above high 5"),
    ("low = 3", "lo = 3", "classes 1.output_len: unknown key 'lo': did you mean 'low'?"),
    ("high = 5", "high = 5, min = 4, max = 2", "classes 1.output_len: min 4 is above max 2"),
    ("input_len = 5", "input_length = 5", "classes 1: unknown key 'input_length': did you mean"),
    ("input_len = 5\n", "", "classes 1: input_len is missing"),
    ("input_len = 5", 'input_len = "5"', "classes 1.input_len '5': expected a number or a table"),
    ("input_len = 5", "input_len = -5", "classes 1.input_len -5: expected a number >= 0"),
    ("variants = 2", "variants = 0", "classes 1.prefix 1.variants 0: expected a whole number >= 1"),
    ("variants = 2", "variant = 2", "classes 1.prefix 1: unknown key 'variant': did you mean"),
    ("variants = 2", "equal = true, zipf = 1", "equal and zipf contradict each other"),
    ('"uniform"', '"unifrom"', "classes 1.output_len.kind 'unifrom': did you mean 'uniform'?"),
    ('kind = "uniform", ', "", "classes 1.output_len: kind is missing: expected by_input"),
    (
        '"uniform", low = 3, high = 5',
        '"by_input", bounds = [3, 3], of = [1]',
        "bounds: expected each",
    ),
    ('"uniform", low = 3, high = 5', '"by_input", bounds = [3], of = [1]', "of: expected 2, one"),
    (
        '{ kind = "uniform", low = 3, high = 5 }',
        '"chat"',
        "output_len 'chat': expected lengths, or the name of a class",
    ),
    ("num_requests = 10", "num_request = 10", "unknown key 'num_request': did you mean 'num_req"),
    ("num_requests = 10", "num_requests = 1.5", "num_requests 1.5: expected a whole number"),
    ("num_requests = 10", "", "expected one of num_requests and duration"),
    (
        "num_requests = 10",
        "num_requests = 10\nduration = 5",
        "expected one of num_requests and dur",
    ),
    (
        '10\n[arrivals]\nkind = "poisson"',
        '10\n[arrivals]\nkind = "vllm"\nburstines = 1',
        "'burstin",
    ),
    ("output_len", "weight = 0\noutput_len", "the weights of all classes are 0"),
    ("output_len", "start = 5\nend = 4\noutput_len", "start 5 is not before end 4"),
    ("[[classes]]", "[[classes", "not TOML: "),
    ("[[classes]]", "[classes]", "classes: expected a list, got a table"),
]


@pytest.mark.parametrize(("old", "new", "refusal"), REFUSALS, ids=[new for _, new, _ in REFUSALS])
def test_refusals(tmp_path: Path, old: str, new: str, refusal: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(GOOD)
    assert len(generate(path)) == 10
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(TraceError) as caught:
        read_spec(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert refusal in message
    assert "\n" not in message
    assert len(message) < 500


CONTRADICTIONS = [
    (
        'num_requests = 10\n[arrivals]\nkind = "poisson"',
        'duration = 9\n[arrivals]\nkind = "vllm"',
        "arrivals of kind vllm need num_requests instead of duration",
    ),
    (
        'kind = "poisson"\nrate = 3\n[[classes]]',
        'kind = "vllm"\nrate = 3\n[[classes]]\nstart = 2',
        "arrivals of kind vllm know no start and end of classes",
    ),
    (
        "[[classes]]",
        "[[classes]]\nname = 'a'\ninput_len = 1\noutput_len = 1\n[[classes]]\nname = 'a'",
        "two classes are called 'a'",
    ),
]


@pytest.mark.parametrize(("old", "new", "refusal"), CONTRADICTIONS)
def test_contradictions(old: str, new: str, refusal: str) -> None:
    assert old in GOOD
    with pytest.raises(TraceError, match=refusal):
        parse_spec(GOOD.replace(old, new).encode())


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_workload(tmp_path / "no.toml")
    with pytest.raises(TraceError, match="no such file"):
        read_workload(tmp_path, "workload")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="not TOML"):
        read_workload(tmp_path / "x.toml")


def test_a_specification_is_known_by_its_name_or_the_format(tmp_path: Path) -> None:
    for name, trace_format in (("x.TOML", None), ("x.txt", "workload")):
        (tmp_path / name).write_text(GOOD)
        assert len(read_workload(tmp_path / name, trace_format)) == 10


def test_the_hash_is_of_all_files_and_not_of_the_seed(tmp_path: Path) -> None:
    text = GOOD.replace("= 5\n", '= { kind = "empirical", file = "x.csv", column = "n" }\n', 1)
    (tmp_path / "x.toml").write_text(text)
    (tmp_path / "x.csv").write_text("n\n5\n6\n")
    one, other = (generate(tmp_path / "x.toml", seed).sha256 for seed in (1, 2))
    assert one == other
    (tmp_path / "x.csv").write_text("n\n5\n7\n")
    assert generate(tmp_path / "x.toml", 1).sha256 != one


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 30), st.binary(max_size=20))
def test_any_bytes_are_read_or_refused(place: int, length: int, other: bytes) -> None:
    content = GOOD.encode()
    mutated = content[:place] + other + content[place + length :]
    try:
        found = parse_spec(mutated)
    except TraceError as error:
        assert "\n" not in str(error)  # noqa: PT017  # any other error fails the test
    else:
        assert found.classes


def test_deep_nesting_is_refused() -> None:
    deep = f"num_requests = 1\n[arrivals]\nkind = {'[' * 5000}{']' * 5000}\n"
    with pytest.raises(TraceError, match=r"not TOML|nested too deeply"):
        parse_spec(deep.encode())
