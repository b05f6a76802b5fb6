"""Charts show the numbers they are given: read off the drawn figures."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from sim.cli import main
from sim.columns import SLOT_STATES
from sim.commands.compare import COMPARED
from sim.errors import ConfigError, FileError
from sim.plots import bars, grids, pareto, series
from sim.plots.axis import is_geometric
from sim.plots.curves import draw_curves
from sim.plots.figures import choose, write_charts
from sim.plots.labels import metric_of, short, text_of
from sim.plots.results import RunFiles, read_results
from sim.plots.style import COLORS, drawing, load_style, looks
from sim.plots.table import Cells, arrange

RUNNING = "mean_num_requests_running"


@pytest.fixture(autouse=True)
def _in_our_style() -> Iterator[None]:
    with drawing():
        yield


def _cells(swept: Sequence[str], rows: Sequence[dict[str, Any]]) -> Cells:
    return Cells(pd.DataFrame({"allocator": "paged", **row} for row in rows), swept, Path("s.csv"))


def _grid(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Answer a row each combination of *values*; what runs at once grows with every place."""
    rows: list[dict[str, Any]] = [{RUNNING: 10.0}]
    for place, (name, choices) in enumerate(values.items(), 1):
        rows = [
            {**row, name: choice, RUNNING: row[RUNNING] + 10**place * number}
            for row in rows
            for number, choice in enumerate(choices)
        ]
    return rows


def _draw(cells: Cells, x: str, *columns: str) -> Figure:
    return draw_curves(cells, x, [metric_of(column) for column in columns or (RUNNING,)])


def _lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """Answer x and y of every curve; NaN as None, which is equal to itself."""
    curves = [c.lines[0] for c in axes.containers if isinstance(c, ErrorbarContainer)]
    return [
        tuple([None if np.isnan(v) else v for v in np.asarray(data, float).tolist()] for data in d)  # type: ignore[misc]
        for d in (curve.get_data() for curve in curves)
    ]


def _title(figure: Figure) -> str:
    return " ".join(figure.get_suptitle().split())


def _legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_curve_an_allocator_in_its_colour() -> None:
    cells = _cells(["block_size"], _grid(allocator=["paged", "reserve-max"], block_size=[1, 4, 16]))
    figure = _draw(cells, "block_size")
    (axes,) = figure.axes
    assert _lines(axes) == [
        ([1, 4, 16], [20, 120, 220]),
        ([1, 4, 16], [10, 110, 210]),
    ]
    assert [line.get_color() for line in axes.get_lines()] == [
        COLORS["reserve-max"],
        COLORS["paged"],
    ]
    assert _legend(figure) == ["reserve-max", "paged"]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "16"]
    assert axes.get_xlabel() == "block_size (tokens)"
    assert axes.get_ylabel() == "running requests (mean)"
    assert axes.get_ylim()[0] == 0


def test_points_are_means_of_seeds_and_bars_reach_the_extremes() -> None:
    rows = [
        {"rate": rate, "seed": seed, RUNNING: value}
        for rate, values in ((1, (3, 5, 10)), (2, (8, 8, 8)))
        for seed, value in enumerate(values)
    ]
    figure = _draw(_cells(["rate", "seed"], rows), "rate")
    (axes,) = figure.axes
    assert _lines(axes) == [([1, 2], [6, 8])]
    (container,) = axes.containers
    assert isinstance(container, ErrorbarContainer)
    (bar,) = container.lines[2]
    assert isinstance(bar, LineCollection)
    assert [segment[:, 1].tolist() for segment in bar.get_segments()] == [[3, 10], [8, 8]]
    assert "mean of 3 seeds, bars from the smallest to the largest" in _title(figure)


def test_a_cell_without_a_value_is_a_gap() -> None:
    rows = _grid(rate=[1, 2, 3, 4, 5])
    rows[2][RUNNING] = None
    rows[4][RUNNING] = float("inf")
    (axes,) = _draw(_cells(["rate"], rows), "rate").axes
    assert _lines(axes) == [([1, 2, 3, 4, 5], [10, 20, None, 40, None])]


def test_names_are_side_by_side_and_not_joined() -> None:
    cells = _cells(["model"], _grid(model=["b/B", "$a$"], allocator=["paged", "prefix"]))
    (axes,) = _draw(cells, "model").axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["b/B", "$a$"]
    paged, prefix = axes.get_lines()
    assert (paged.get_linestyle(), prefix.get_linestyle()) == ("None", "None")
    assert [y for _, y in _lines(axes)] == [[10, 20], [110, 120]]
    assert np.all(np.abs(np.asarray(paged.get_xdata(), float) - [0, 1]) < 0.2)


def test_other_settings_have_panels_with_one_range() -> None:
    rows = _grid(block_size=[8, 16], gpu=["A", "B"], allocator=["paged", "prefix"])
    figure = _draw(_cells(["block_size", "gpu"], rows), "block_size")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["gpu A", "gpu B"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert _lines(figure.axes[1]) == [([8, 16], [110, 120]), ([8, 16], [1110, 1120])]


def test_one_allocator_leaves_curves_to_another_setting() -> None:
    figure = _draw(_cells(["rate", "util"], _grid(rate=[1, 2], util=[0.9, 0.8])), "rate")
    (axes,) = figure.axes
    assert _lines(axes) == [([1, 2], [110, 120]), ([1, 2], [10, 20])]
    assert _legend(figure) == ["util 0.8", "util 0.9"]


def test_what_is_zipped_with_x_has_no_panel_but_a_word() -> None:
    rows = [{**row, "blocks": 100 * row["size"]} for row in _grid(size=[1, 2, 3])]
    figure = _draw(_cells(["size", "blocks"], rows), "size")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "size, and blocks with it"
    assert _lines(axes) == [([1, 2, 3], [10, 20, 30])]


def test_too_many_panels_are_counted() -> None:
    rows = _grid(rate=[1, 2], model=[f"m{i}" for i in range(20)], gpu=["A", "B"])
    layout = arrange(_cells(["rate", "model", "gpu"], rows), "rate")
    assert (len(layout.panels), layout.left_out) == (12, 28)


def test_allocators_alone_are_bars() -> None:
    (axes,) = _draw(_cells([], _grid(allocator=["paged", "prefix"])), "allocator").axes
    drawn = next(c for c in axes.containers if isinstance(c, BarContainer))
    assert [bar.get_height() for bar in drawn.patches] == [10, 20]
    colors = [mpl.colors.to_hex(bar.get_facecolor()).upper() for bar in drawn.patches]
    assert colors == [COLORS["paged"], COLORS["prefix"]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 4, 8, 16], True),
        ([1, 2, 5, 10, 20, 50], True),
        ([0.8, 0.9, 0.95, 0.98], False),
        ([1, 2, 3, 4, 5, 6], False),
        ([0, 1, 2, 4, 8], False),
        ([8, 16], False),
        ([8], False),
    ],
)
def test_geometric_values(values: list[float], expected: bool) -> None:
    assert is_geometric(np.array(values, dtype=float)) is expected


@pytest.mark.parametrize(
    ("column", "paged", "prefix", "expected"),
    [
        (RUNNING, [10, 20], [20, 60], "prefix has 2.0 to 3.0 times the running requests of paged"),
        ("p99_ttft_ms", [10, 20], [1, 4], "prefix has 0.1 to 0.2 times the p99 TTFT of paged"),
        ("num_preemptions", [0, 0], [0, 0], "No preemptions"),
        ("num_preemptions", [0, 0], [0, 7], "paged has no preemptions, prefix up to 7"),
        (RUNNING, [10, 20], [10.1, 20], "All have about the same running requests"),
        ("num_steps", [1, 2], [3, 9], "Num steps: from 1 at paged, rate 1 to 9 at prefix, rate 2"),
        (
            "prefix_cache_hit_rate",
            [None, None],
            [0.5, 0.5],
            "Prefix hit rate: 50 % of tokens throughout",
        ),
    ],
)
def test_titles_say_what_the_curves_show(
    column: str, paged: list[Any], prefix: list[Any], expected: str
) -> None:
    rows = [
        {"rate": rate, "allocator": name, column: value}
        for name, values in (("paged", paged), ("prefix", prefix))
        for rate, value in enumerate(values, 1)
    ]
    assert _title(_draw(_cells(["rate"], rows), "rate", column)) == expected


def test_titles_measure_by_reserve_max_and_say_what_times_rest_on() -> None:
    rows = [
        {
            "allocator": name,
            "rate": rate,
            RUNNING: value * rate,
            "model_id": "M",
            "gpu": "G",
            "num_prompts": 1000,
            "timing_provenance": "measured, fitted",
        }
        for name, value in (("reserve-max", 5), ("paged", 4), ("prefix", 15))
        for rate in (1, 2)
    ]
    assert _title(_draw(_cells(["rate"], rows), "rate")) == (
        "prefix has 3.0 times the running requests of reserve-max "
        "M on G; 1,000 requests; times measured, fitted"
    )


def _with_slots(row: dict[str, Any], live: float) -> dict[str, Any]:
    shares = dict.fromkeys(SLOT_STATES, 0.0) | {"live": live, "internal": 30.0, "free": 70 - live}
    return row | {f"kv_{state}_pct": share for state, share in shares.items()}


def test_slots_are_stacked_to_the_whole_pool() -> None:
    rows = [
        _with_slots({"allocator": name, "block_size": size, "seed": seed}, live + seed)
        for name, live in (("paged", 40.0), ("prefix", 50.0))
        for size in (8, 16)
        for seed in (0, 2)
    ]
    figure = bars.draw_slots(_cells(["block_size", "seed"], rows), "block_size")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["paged", "prefix"]
    assert _legend(figure) == ["live", "internal", "free"], "states that are never there are not"
    for axes, live in zip(figure.axes, (41, 51), strict=True):
        stacks = [c for c in axes.containers if isinstance(c, BarContainer)]
        heights = [[bar.get_height() for bar in stack.patches] for stack in stacks]
        assert heights == [[live, live], [30, 30], [70 - live, 70 - live]]
        assert [bar.get_y() + bar.get_height() for bar in stacks[-1].patches] == [100, 100]
    assert "paged 40 to 42 %" in _title(figure)


def test_a_map_has_the_mean_of_each_pair_and_leaves_holes() -> None:
    rows = _grid(block_size=[1, 16], util=[0.8, 0.9], allocator=["paged", "prefix"])
    rows = [row for row in rows if row[RUNNING] != 1120]
    cells = _cells(["block_size", "util"], rows)
    assert grids.second_setting(cells, "block_size") == "util"
    figure = grids.draw_grid(cells, "block_size", "util", metric_of(RUNNING))
    maps: list[Any] = [axes.get_images()[0].get_array() for axes in figure.axes[:2]]
    maps = [shown.filled(-1).tolist() for shown in maps]
    assert maps == [[[10, 20], [110, 120]], [[1010, 1020], [1110, -1]]]
    assert _title(figure) == (
        "Highest running requests: 1,110, prefix at block_size 1, util 0.9 grey: no result"
    )


def test_zipped_settings_have_no_map() -> None:
    rows = [{**row, "blocks": 100 * row["size"]} for row in _grid(size=[1, 2, 3])]
    assert grids.second_setting(_cells(["size", "blocks"], rows), "size") is None


POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


@given(POINTS)
def test_nothing_beats_the_front_and_the_front_beats_the_rest(
    points: list[tuple[int, int]],
) -> None:
    latency, throughput = np.array(points, dtype=float).T
    best = pareto.front(latency, throughput)

    def beats(i: int, j: int) -> bool:
        as_good = latency[i] <= latency[j] and throughput[i] >= throughput[j]
        return bool(as_good and (latency[i] < latency[j] or throughput[i] > throughput[j]))

    every = range(len(points))
    assert not any(beats(i, j) for i in every for j in best)
    on_front = {points[i] for i in best}
    assert all(points[j] in on_front or any(beats(i, j) for i in best) for j in every)


def test_the_front_is_drawn_and_named() -> None:
    rows = [
        {"rate": rate, "output_throughput": 100.0 * rate, "p99_ttft_ms": ttft, "p99_tpot_ms": 5.0}
        for rate, ttft in ((1, 10.0), (2, 20.0), (3, 15.0))
    ]
    figure = pareto.draw_pareto(_cells(["rate"], rows))
    front = figure.axes[0].get_lines()[-1]
    assert np.asarray(front.get_data()).tolist() == [[10, 15], [100, 300]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["1", "3"]
    assert "by p99 TTFT: paged 2; by p99 TPOT: paged 1" in _title(figure)


# ---- over time


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    flags = ("--trace", str(samples / "conversation.jsonl"), "--num-gpu-blocks-override", "2000")
    more = ("--step-time", "constant:0.05", "--max-model-len", "8192", "-o", str(folder))
    assert main(["run", *flags, *more]) == 0
    return folder


def test_sums_and_means_over_time_are_those_of_the_summary(run_folder: Path) -> None:
    run = RunFiles(run_folder)
    edges = np.linspace(0, run.end, 51)
    mean = run.mean_over_time("running", edges).mean()
    assert mean == pytest.approx(run.summary[RUNNING])
    for column in ("num_preempted", "prefix_cache_hits"):
        key = column.replace("num_preempted", "num_preemptions")
        assert run.sum_over_time(column, edges).sum() == pytest.approx(run.summary[key])


def test_a_run_over_time(run_folder: Path) -> None:
    figure = series.time_series([RunFiles(run_folder)])
    labels = [axes.get_ylabel().partition("\n")[0] for axes in figure.axes]
    assert labels == ["requests", "KV slots (%)", "prefix hits", "preemptions"]
    summary = json.loads((run_folder / "summary.json").read_bytes())
    running, _ = figure.axes[0].get_lines()
    assert np.mean(np.asarray(running.get_ydata(), float)) == pytest.approx(summary[RUNNING])
    (stairs,) = figure.axes[3].patches
    assert stairs.get_data().values.sum() == pytest.approx(summary["num_preemptions"])  # type: ignore[attr-defined]
    top = figure.axes[1].collections[-1].get_paths()[0].vertices
    assert np.asarray(top)[:, 1].max() == pytest.approx(100)


# ---- how it looks


def test_every_allocator_of_a_comparison_can_be_told_without_colour() -> None:
    look = looks([*COMPARED, "reserve-max-buddy", "mine", "yours"])
    assert list(look)[:6] == ["reserve-max", "reserve-max-buddy", *COMPARED[1:]]
    assert len({(each.marker, each.fill) for each in look.values()}) == len(look)
    assert {name: look[name].color for name in COLORS} == COLORS


def test_equal_results_give_equal_bytes_whatever_the_user_has_set(
    tmp_path: Path,
) -> None:
    cells = _cells(["rate", "util"], _grid(rate=[1, 2], util=[1, 2]))
    charts: dict[str, Callable[[], Figure]] = {
        "curves": lambda: _draw(cells, "rate"),
        "map": lambda: grids.draw_grid(cells, "rate", "util", metric_of(RUNNING)),
    }
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files, lacking = write_charts(tmp_path / name, charts)
        assert lacking == set()
        mpl.rcParams["font.size"] = 30
        mpl.rcParams["axes.facecolor"] = "red"
    assert len(files) == 4
    for path in files:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_names_of_the_user_are_text(tmp_path: Path) -> None:
    names = ["$x^2$", "_hidden", "a" * 200, "名", "<&>", "two\nlines"]
    figure = _draw(_cells(["rate"], _grid(rate=[1, 2], allocator=names)), "rate")
    assert len(_legend(figure)) == len(names)
    _, lacking = write_charts(tmp_path, {"x": lambda: figure}, ["svg"])
    assert lacking == {"名"}
    assert short("_hidden").strip() == "_hidden"
    assert len(short("a" * 200)) <= 30
    assert text_of("two\nlines") == "'two\\nlines'"


def test_a_style_changes_letters_but_no_colour_of_an_allocator(tmp_path: Path) -> None:
    path = tmp_path / "my.mplstyle"
    path.write_text(
        "font.size: 20  # large\n"
        'axes.facecolor: "#123456"\n'
        "axes.prop_cycle: cycler('color', [__import__('os').abort()])\n"
        "text.usetex: True\n"
    )
    style = load_style(str(path))
    assert style == {"font.size": 20, "axes.facecolor": "#123456"}
    cells = _cells(["rate"], _grid(rate=[1, 2]))
    width = _draw(cells, "rate").get_figwidth()
    with drawing(style):
        figure = _draw(cells, "rate")
    assert figure.get_figwidth() == 2 * width, "or letters would not fit"
    assert mpl.colors.to_hex(figure.axes[0].get_facecolor()) == "#123456"
    assert figure.axes[0].get_lines()[0].get_color() == COLORS["paged"]
    assert load_style("dark_background")["axes.facecolor"] == "black"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"font.sise: 8", "line 1: 'font.sise' is no key of matplotlib; did you mean 'font.size'"),
        (b"\nlines.linewidth: wide", "line 2: Key lines.linewidth: Could not convert 'wide'"),
        (b"font.family: Nowhere Sans", "font.family 'Nowhere Sans' is not installed"),
        (b"\xff\xfe", "expected a matplotlib style"),
        (b"#" * 70_000, "more than 65,536 bytes"),
    ],
)
def test_a_style_file_that_cannot_be_used(tmp_path: Path, text: bytes, expected: str) -> None:
    path = tmp_path / "bad.mplstyle"
    path.write_bytes(text)
    with pytest.raises(FileError, match=r"--style .*bad\.mplstyle") as raised:
        load_style(str(path))
    assert expected in str(raised.value)


def test_an_unknown_style_has_a_neighbour() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dark_background'"):
        load_style("darkbackground")


def test_a_thousand_cells_are_a_few_panels(tmp_path: Path) -> None:
    rows = _grid(a=range(10), b=range(10), c=[f"name-{i}" for i in range(10)])
    rows = [_with_slots(row, 40.0) for row in rows]
    pd.DataFrame({"allocator": "paged", **row} for row in rows).to_csv(
        tmp_path / "summary.csv", index=False
    )
    (tmp_path / "sweep.json").write_text('{"swept": ["a", "b", "c"]}')
    charts, _ = choose(read_results(tmp_path), None, [], [])
    assert list(charts) == ["running", "slots", "map_running"]
    figure = charts["running"]()
    assert len(figure.axes) == 12
    assert "the first 12 of 100 panels (--where chooses)" in _title(figure)
