"""The page of ``kvsim report`` in a real browser, opened from disk.

Needs the extra ``browser``, Chromium and its driver (Debian: ``chromium chromium-driver``).
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from sim.block_map import movie
from sim.cli import main
from sim.columns import SLOT_STATES

pytest.importorskip("selenium", reason="pip install '.[browser]'")

from selenium.common.exceptions import JavascriptException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="apt-get install chromium chromium-driver"
)

ALLOCATORS = ("reserve-max", "paged", "prefix")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of the shipped workload: 10,437 blocks."""
    folder = tmp_path_factory.mktemp("compared")
    assert main(["compare", "--allocator", ",".join(ALLOCATORS), "-o", str(folder)]) == 0
    assert main(["report", str(folder)]) == 0
    return folder


def _small_run(folder: Path, *flags: str) -> Path:
    """Answer a run of few steps, every one of which has a frame, and whose names are hostile."""
    lines = [
        {
            "request_id": f"{HOSTILE}{row}",
            "arrival_time": 0.1 * row,
            "prompt": [["system", 32], [f"u{row}", 5 + row]],
            "output_len": 10 + 3 * row,
        }
        for row in range(6)
    ]
    trace = folder / "trace.jsonl"
    trace.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    flags = (*flags, "--max-model-len", "128", "--step-time", "constant:0.05", "--single-step")
    assert main(["run", "--trace", str(trace), *flags, "-o", str(folder / "out")]) == 0
    assert main(["report", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _small_run(tmp_path_factory.mktemp("small"), "--num-gpu-blocks-override", "17")


@pytest.fixture(scope="module")
def of_one_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block is a slot, as large as a place of a reservation."""
    flags = ["--block-size", "1", "--num-gpu-blocks-override", "167"]
    return _small_run(tmp_path_factory.mktemp("of_one_token"), *flags)


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync",
            "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
            f"user-data-dir={profile}", "window-size=1400,1000",
        ):  # fmt: skip
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=ChromeService(DRIVER))
        yield driver
        driver.quit()


def _open(chrome: Chrome, folder: Path, width: int = 1400) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    address = (folder / "report.html").as_uri()
    chrome.get(address)
    # The driver may answer once more for the page before.
    ready = "return location.href === arguments[0] && panels.length > 0"
    WebDriverWait(chrome, 30, ignored_exceptions=[JavascriptException]).until(
        lambda _: _do(chrome, ready, address)
    )


def _do(chrome: Chrome, script: str, *arguments: Any) -> Any:
    return chrome.execute_script(script, *arguments)


def _frame(chrome: Chrome) -> int:
    return int(_do(chrome, "return Number(document.getElementById('time').value)"))


def _shown(chrome: Chrome) -> list[dict[str, Any]]:
    """Answer what the panels show now, read from the page's text."""
    panels: list[dict[str, Any]] = _do(
        chrome,
        """return [...document.querySelectorAll('.panel')].map((panel) => ({
            allocator: panel.dataset.allocator,
            running: panel.querySelector('[data-count=running]').textContent,
            waiting: panel.querySelector('[data-count=waiting]').textContent,
            verdict: panel.querySelector('.verdict').textContent,
            percent: Object.fromEntries([...panel.querySelectorAll('[data-state]')].map(
                (cell) => [cell.dataset.state, cell.textContent])),
            slots: Object.fromEntries([...panel.querySelectorAll('[data-state]')].map(
                (cell) => [cell.dataset.state, Number(cell.dataset.slots)])),
            pixels: panel.querySelector('canvas.map').toDataURL().length,
        }))""",
    )
    return panels


def _slide(chrome: Chrome, frame: int) -> None:
    _do(
        chrome,
        "const time = document.getElementById('time'); time.value = arguments[0];"
        "time.dispatchEvent(new Event('input'));",
        frame,
    )


def test_it_opens_from_disk_alone(chrome: Chrome, compared: Path) -> None:
    assert (compared / "report.html").stat().st_size < 5_000_000
    _open(chrome, compared)
    assert chrome.get_log("browser") == []
    loaded = _do(chrome, "return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert [panel["allocator"] for panel in _shown(chrome)] == list(ALLOCATORS)
    images = "return [...document.images].map((image) => image.complete && image.naturalWidth)"
    assert min(_do(chrome, images)) > 100
    headline = _do(chrome, "return document.getElementById('headline').textContent")
    assert "reserve-max wastes" in headline
    assert "prefix wastes" in headline


def test_the_slider_moves_all_panels_and_cursors(chrome: Chrome, compared: Path) -> None:
    _open(chrome, compared)
    cursors = "return [...document.querySelectorAll('.cursor')].map((c) => c.getAttribute('x1'))"
    _slide(chrome, 30)
    before, at_first = _shown(chrome), _do(chrome, cursors)
    _slide(chrome, 120)
    after, then = _shown(chrome), _do(chrome, cursors)
    for one, other in zip(before, after, strict=True):
        assert one["slots"] != other["slots"]
        assert one["pixels"] != other["pixels"]
    assert len(at_first) == 3
    assert all(float(x) < float(y) for x, y in zip(at_first, then, strict=True))
    _slide(chrome, 299)
    assert all(panel["verdict"].startswith("Finished at") for panel in _shown(chrome))


def test_numbers_are_those_of_the_tables(chrome: Chrome, small: Path) -> None:
    _open(chrome, small)
    steps = pq.read_table(small / "steps.parquet").to_pylist()
    single = {row["step"]: row for row in steps}
    capacity = msgspec.json.decode((small / "summary.json").read_bytes())["kv_cache_slots"]
    checked = 0
    for frame, step in enumerate(_do(chrome, "return panels[0].film.step")):
        row = single.get(step)
        if row is None or not row["running"]:
            continue
        _slide(chrome, frame)
        (panel,) = _shown(chrome)
        if "Finished" in panel["verdict"]:
            continue
        checked += 1
        assert (panel["running"], panel["waiting"]) == (str(row["running"]), str(row["waiting"]))
        for state in SLOT_STATES:
            slots = row[f"kv_{state}_slots"]
            assert panel["slots"][state] == slots
            shown = float(panel["percent"][state].removesuffix("\u00a0%"))
            assert shown == pytest.approx(100 * slots / capacity, abs=0.05 + 1e-9)
    assert checked > 10


@pytest.mark.parametrize("folder", ["compared", "small", "of_one_token"])
def test_the_squares_add_up_to_the_numbers(
    chrome: Chrome, folder: str, request: pytest.FixtureRequest
) -> None:
    """What is drawn, square by square, is what the numbers say; in any order of frames."""
    _open(chrome, request.getfixturevalue(folder))
    wrong = _do(
        chrome,
        """const wrong = [];
        for (const { film } of panels) {
          for (const share of [0.5, 0.1, 0.33, 0.95, 0.2, 1, 0, 0.6]) {
            const frame = Math.round(share * last);
            film.seek(frame);
            const sum = (name) => film.sums[name].reduce((total, slots) => total + slots, 0);
            for (const state of SLOT_STATES) {
              const drawn = sum(state) + (state === 'live' ? sum('shared') : 0);
              if (drawn !== film[state][frame]) wrong.push([film.label, frame, state, drawn]);
            }
          }
        }
        return wrong""",
    )
    assert wrong == []


def test_the_headline_names_the_least_waste(chrome: Chrome, compared: Path) -> None:
    _open(chrome, compared)
    wrong = _do(
        chrome,
        """const wrong = [];
        for (let frame = 0; frame < last; frame++) {
          const films = panels.map(({ film }) => film).filter((film) => !film.ended(frame));
          if (films.length < 2) continue;
          show(frame);
          const named = document.querySelector('#headline em:last-of-type').textContent;
          const best = films.find((film) => named.startsWith(film.label + ' '));
          for (const film of films) {
            const [ours, theirs] = [best.wasted(frame), film.wasted(frame)];
            const [few, many] = [best.running[frame], film.running[frame]];
            if (ours > theirs + 0.1 || (ours > theirs && few <= many)) wrong.push([frame, named]);
          }
        }
        return wrong""",
    )
    assert wrong == []
    _do(chrome, "show(nearest(61))")
    headline = _do(chrome, "return document.getElementById('headline').textContent")
    assert "prefix wastes under" in headline, "it serves most, and what it wastes is next to none"


def test_the_keyboard_moves_time(chrome: Chrome, compared: Path) -> None:
    _open(chrome, compared)
    body = chrome.find_element("tag name", "body")
    start = _frame(chrome)
    body.send_keys(Keys.ARROW_RIGHT)
    assert _frame(chrome) == start + 1
    body.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert _frame(chrome) == start - 1
    body.send_keys(Keys.END)
    assert _frame(chrome) == 299
    body.send_keys(Keys.HOME)
    assert _frame(chrome) == 0
    slider = chrome.find_element("id", "time")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert _frame(chrome) == 1, "once, though the slider has keys of its own"
    label = "return document.getElementById('play').getAttribute('aria-label')"
    body.send_keys(Keys.SPACE)
    assert _do(chrome, label) == "Pause"
    body.send_keys(Keys.SPACE)
    assert _do(chrome, label) == "Play"
    button = chrome.find_element("id", "play")
    button.send_keys(Keys.SPACE)
    assert _do(chrome, label) == "Pause", "once, though the button has a key of its own"
    button.click()
    assert _do(chrome, label) == "Play"


def test_playing_goes_on_to_the_end(chrome: Chrome, small: Path) -> None:
    _open(chrome, small)
    _do(chrome, "document.getElementById('speed').value = '4'; show(last - 3)")
    chrome.find_element("id", "play").click()
    done = _do(
        chrome,
        """return new Promise((answer) => {
          const wait = () =>
            state.playing ? requestAnimationFrame(wait) : answer(state.frame === last);
          wait();
        })""",
    )
    assert done


def test_who_owns_a_block(chrome: Chrome, small: Path) -> None:
    """Names are text, in the tip as on the map; the block table is the allocator's."""
    _open(chrome, small)
    tip = _do(
        chrome,
        """show(nearest(0.42));
        const { canvas, map, film } = panels[0];
        const place = film.table(film.present[state.frame][2])[0];
        const box = canvas.getBoundingClientRect();
        const [x, y, w, h] = map.box(film.square[place]);
        canvas.dispatchEvent(new MouseEvent('click',
          { clientX: box.left + 1 + x + w / 2, clientY: box.top + 1 + y + h / 2 }));
        return document.getElementById('tip').textContent""",
    )
    assert HOSTILE in tip
    assert "is shared by" in tip
    assert "Block table, " in tip
    assert "0 → 1" in tip
    assert _do(chrome, "return document.title").startswith("KV pool of ")
    assert _do(chrome, "return document.getElementById('follow').value").startswith(HOSTILE)
    chrome.find_element("tag name", "body").send_keys(Keys.ESCAPE)
    assert _do(chrome, "return document.getElementById('tip').hidden")
    assert chrome.get_log("browser") == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_do_not_overflow(chrome: Chrome, compared: Path, width: int) -> None:
    _open(chrome, compared, width)
    assert _do(chrome, "return document.documentElement.scrollWidth") <= width
    widths = "return [...document.querySelectorAll('canvas.map')].map((c) => c.clientWidth)"
    assert min(_do(chrome, widths)) > 200
    small_targets = """return [...document.querySelectorAll('#controls button')]
      .filter((button) => button.offsetHeight < 32 || button.offsetWidth < 32).length"""
    assert _do(chrome, small_targets) == 0


def test_everything_has_a_name(chrome: Chrome, compared: Path) -> None:
    _open(chrome, compared)
    nameless = """return [...document.querySelectorAll('button, input, select, canvas, svg, img')]
      .filter((e) => e.getAttribute('aria-hidden') !== 'true' && !e.getAttribute('aria-label')
        && !e.getAttribute('alt') && !(e.labels && e.labels.length)).map((e) => e.outerHTML)"""
    assert _do(chrome, nameless) == []
    labels = "return panels.map((panel) => panel.canvas.getAttribute('aria-label'))"
    assert all("Wastes" in label for label in _do(chrome, labels))


def test_a_frame_says_why_requests_wait(chrome: Chrome, compared: Path) -> None:
    _open(chrome, compared)
    _do(chrome, "show(nearest(61))")
    shown = "return panels.map(({ element }) => element.querySelector('.why').innerText)"
    reasons = _do(chrome, shown)
    assert reasons[0].startswith("Next in line needs 8,192 slots in one piece; free: ")
    assert all(reasons)
    _do(chrome, "show(last)")
    assert _do(chrome, shown) == ["", "", ""]


def test_few_frames_have_a_reason(
    chrome: Chrome, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "return document.getElementById('few').innerText"
    _open(chrome, small)
    num_frames = _do(chrome, "return data.times.length")
    assert _do(chrome, few) == ""
    monkeypatch.setattr(movie, "MAX_DATA_BYTES", 2000)
    assert main(["report", str(small), "-o", str(tmp_path / "report.html")]) == 0
    _open(chrome, tmp_path)
    left = _do(chrome, "return data.times.length")
    assert left < num_frames
    assert _do(chrome, few).startswith(f"{left} of {num_frames} frames: ")
    assert "Every step" not in _do(chrome, "return document.getElementById('grain').innerText")


def test_blocks_of_one_token_are_blocks(chrome: Chrome, of_one_token: Path) -> None:
    """They share prefixes, grow, and have a block table, though no larger than a slot."""
    _open(chrome, of_one_token)
    assert "shared prefix" in _do(chrome, "return document.getElementById('legend').innerText")
    tip = _do(
        chrome,
        """const { film } = panels[0];
        show(film.present.findIndex((numbers) => numbers.length > 1));
        const [first] = film.table(film.present[state.frame][1]);
        showTip(panels[0], first, { clientX: 0, clientY: 0 }, true);
        return document.getElementById('tip').textContent""",
    )
    assert "block 1 is shared by" in tip
    assert "Block table, " in tip
