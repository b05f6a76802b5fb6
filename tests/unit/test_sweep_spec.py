"""What a sweep's file means: which cells, in which order, and what is refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import ConfigError
from sim.sweep.cells import make_plan
from sim.sweep.find import highest_rate
from sim.sweep.spec import Spec, read_spec


def _spec(tmp_path: Path, text: str) -> Spec:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return read_spec(str(path))


VALUES = st.dictionaries(
    st.sampled_from(["block_size", "max_num_seqs", "max_model_len"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    min_size=1,
)


@given(VALUES, st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=4, unique=True))
@settings(max_examples=50)
def test_combinations(grid: dict[str, list[int]], rows: list[tuple[int, bool]]) -> None:
    zips: list[dict[str, list[Any]]] = []
    if rows:
        zips = [{"seed": [seed for seed, _ in rows], "enforce_eager": [eager for _, eager in rows]}]
    got = Spec(Path("spec.toml"), {}, grid, zips, [], None).combinations()
    ends: list[tuple[Any, ...]] = [*rows] or [()]
    expected = [(*crossed, *row) for crossed in itertools.product(*grid.values()) for row in ends]
    assert [tuple(cell.values()) for cell in got] == expected
    assert list(got[0]) == [*grid, *(["seed", "enforce_eager"] if rows else [])]
    first = got[0]
    rule = {name: [value] for name, value in first.items()}
    if len(got) > 1:
        spec = Spec(Path("spec.toml"), {}, grid, zips, [rule], None)
        assert spec.combinations() == got[1:]


WHOLE = """
[fixed]
model = "Qwen/Qwen3-14B"
max-model-len = 4096
[grid]
allocator = ["reserve-max", "paged"]
block_size = [16, 32]
request_rate = [2, inf]
[[zip]]
gpu = ["A100-80", "H100"]
max_num_seqs = [64, 128]
[[exclude]]
allocator = "reserve-max"
block_size = 32
[[exclude]]
allocator = "paged"
gpu = ["H100", "A100-80"]
request_rate = inf
"""


def test_a_whole_spec(tmp_path: Path) -> None:
    plan = make_plan(_spec(tmp_path, WHOLE))
    got = [tuple(cell.settings.values()) for cell in plan.cells]
    assert got == [
        ("reserve-max", 16, 2.0, "A100-80", 64, 0),
        ("reserve-max", 16, 2.0, "H100", 128, 0),
        ("reserve-max", 16, "inf", "A100-80", 64, 0),
        ("reserve-max", 16, "inf", "H100", 128, 0),
        ("paged", 16, 2.0, "A100-80", 64, 0),
        ("paged", 16, 2.0, "H100", 128, 0),
        ("paged", 32, 2.0, "A100-80", 64, 0),
        ("paged", 32, 2.0, "H100", 128, 0),
    ]
    config = plan.cells[0].config
    assert (config.model.model, config.model.max_model_len) == ("Qwen/Qwen3-14B", 4096)
    assert (config.cache.allocator, config.cache.reservation) == ("contiguous", "max")
    assert len({cell.name for cell in plan.cells}) == 8


def test_names_follow_content_not_places(tmp_path: Path) -> None:
    """A trace that moves keeps its cells; one that changes gets others."""
    line = '{"arrival_time": 0, "input_length": 9, "output_len": 3}\n'
    names = []
    for place, content in (("a", line), ("b/c", line), ("d", 2 * line)):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / f"{folder.name}.jsonl").write_text(content)
        spec = _spec(folder, f'[fixed]\ntrace = "{folder.name}.jsonl"\n' + GRID)
        names.append(make_plan(spec).cells[0].name)
    assert names[0] == names[1] != names[2]


GRID = "[grid]\nblock_size = [16]\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing to sweep"),
        ("[grid]\n", "nothing to sweep"),
        ("[grid]\nblock_size = []\n", "[grid] block_size: expected a list of values, at least one"),
        ("[grid]\nblock_size = 16\n", "[grid] block_size: expected a list of values"),
        ("[grid]\nblok_size = [16]\n", "[grid] 'blok_size' is unknown; did you mean 'block_size'?"),
        ("[grid]\njson = [true]\n", "[grid] 'json' is unknown"),
        ("[grid]\nblock_size = [16, 0]\n", "[grid] block_size: expected a whole number"),
        ("[grid]\nblock_size = [16, 16]\n", "[grid] block_size: 16 is there twice"),
        ("[grid]\nblock_size = ['16']\n", "[grid] block_size: expected a whole number"),
        ("[grid]\nallocator = ['pagd']\n", "unknown value 'pagd'; did you mean 'paged'?"),
        ("[gird]\nblock_size = [16]\n", "key 'gird' is unknown; did you mean 'grid'?"),
        ("seeds = [1]\n" + GRID, "key 'seeds' is unknown"),
        ("[grid]\nblock_size = [16]\nblock-size = [16]\n", "block_size is there twice"),
        ("[fixed]\nblock_size = 8\n" + GRID, "block_size is in [fixed] and in [grid]"),
        (GRID + "[[zip]]\nblock_size = [16]\n", "block_size is in [grid] and in [[zip]]"),
        ("[[zip]]\nseed = [1, 2]\nblock_size = [16]\n", "[[zip]] 1: expected lists of one length"),
        ("[[zip]]\n", "[[zip]] 1: expected lists of one length"),
        ("[[zip]]\nseed = [1, 1]\nblock_size = [16, 16]\n", "(1, 16) is there twice"),
        ("[zip]\nseed = [1]\n", "zip: expected [[zip]] tables"),
        (GRID + "[[exclude]]\nseed = 1\n", "[[exclude]] 1 seed is not swept"),
        (GRID + "[[exclude]]\nblock_size = 32\n", "[[exclude]] 1 (block_size = [32]) is true of"),
        (GRID + "[[exclude]]\nblock_size = 16\n", "[[exclude]] leaves no cell"),
        (GRID + "[[exclude]]\n", "[[exclude]] 1: empty"),
        (GRID + "[find]\n", "[find] goodput: expected text like 'ttft:500 tpot:50'"),
        (GRID + "[find]\ngoodput = 'tft:5'\n", "[find] goodput: unknown metric 'tft'"),
        (GRID + "[find]\ngoodput = 'ttft:5'\nshare = 2\n", "[find] share: expected a number above"),
        (GRID + "[find]\ngoodput = 'ttft:5'\ntol = 1\n", "[find] 'tol' is unknown; did you mean"),
        (
            "[fixed]\nrequest_rate = 3\n" + GRID + "[find]\ngoodput = 'ttft:5'\n",
            "[find] decides request_rate: leave it out elsewhere",
        ),
        ("[grid\n", "not TOML"),
        (
            "[grid]\n"
            + "".join(
                f"{name} = {list(range(1, 101))}\n"
                for name in ("block_size", "max_num_seqs", "max_model_len")
            ),
            "1,000,000 cells; expected at most 100,000",
        ),
    ],
)
def test_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _spec(tmp_path, text).combinations()
    assert why in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path}/spec.toml")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[grid]\nallocator = ['contiguous', 'reserve-max']\n", "are one configuration"),
        (
            "[grid]\nallocator = ['paged']\nreservation = ['max']\n",
            "[grid] reservation max contradicts",
        ),
        (
            "[grid]\nmax_num_seqs = [8]\nmax_num_batched_tokens = [4]\n",
            "--max-num-batched-tokens 4 is less than --max-num-seqs 8",
        ),
        ("[grid]\nmodel = ['none.json']\n", "[grid] model none.json"),
        ("[grid]\ngpu = ['none.toml']\n", "No such file or directory"),
        ("[grid]\nmodel = ['Qwen3-15B']\n", "did you mean 'Qwen/Qwen3-14B'"),
    ],
)
def test_conflicting_cells(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_plan(_spec(tmp_path, text))
    assert why.replace("none.json", str(tmp_path / "none.json")) in str(refusal.value)


def test_a_swept_setting_wins_over_a_fixed_one(tmp_path: Path) -> None:
    spec = _spec(
        tmp_path, "[fixed]\nreservation = 'pow2'\n[grid]\nallocator = ['contiguous', 'paged']\n"
    )
    plan = make_plan(spec)
    assert plan.cells[0].config.cache.reservation == "pow2"
    assert any("reservation ('pow2') has no effect" in note for note in plan.notes)


def _meets(limit: float, tried: list[float]) -> Any:
    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    return meets


@given(st.floats(-6, 12), st.floats(1e-4, 0.5), st.floats(0.01, 100))
def test_highest_rate(log_limit: float, tolerance: float, start: float) -> None:
    """Whatever the limit, it lies between what is answered, and both were tried."""
    limit, tried = start * 2**log_limit, list[float]()
    found = highest_rate(_meets(limit, tried), start, tolerance)
    assert found.rate <= limit < found.failing <= found.rate * (1 + tolerance)
    assert {found.rate, found.failing} <= set(tried)
    assert found.num_runs == len(tried) == len(set(tried))


def test_a_goal_that_is_never_or_always_met() -> None:
    tried: list[float] = []
    assert highest_rate(_meets(0, tried), 8.0, 0.01)[:2] == (0.0, 8 / 1024)
    assert highest_rate(_meets(float("inf"), tried), 8.0, 0.01)[:2] == (float("inf"),) * 2


def test_options_of_a_format_are_part_of_a_cell(tmp_path: Path, samples: Path) -> None:
    grid = f'[fixed]\ntrace = "{samples / "sharegpt.json"}"\n[grid]\ntrace_format = '
    plan = make_plan(_spec(tmp_path, grid + '["sharegpt:gap=1", "sharegpt:gap=2"]'))
    assert len({cell.name for cell in plan.cells}) == 2


def test_seeds_that_change_nothing_are_noted(tmp_path: Path, samples: Path) -> None:
    grid = f'[fixed]\ntrace = "{samples / "vidur.csv"}"\n[grid]\nseed = [0, 1]'
    assert any("no seed changes it" in note for note in make_plan(_spec(tmp_path, grid)).notes)
    drawn = grid.replace("vidur.csv", "chat.toml")
    assert not any("no seed" in note for note in make_plan(_spec(tmp_path, drawn)).notes)


def test_long_lists_are_counted_first(tmp_path: Path) -> None:
    text = f"[grid]\nseed = {list(range(100_001))}"
    with pytest.raises(ConfigError, match="100,001 values; expected at most 100,000"):
        _spec(tmp_path, text)
