"""Bad input ends in one clear line: what, where, the expected form, the nearest valid choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.cli import main
from tests.cli.conftest import Kvsim
from tests.conftest import REPOSITORY

TRACE = str(REPOSITORY / "workloads" / "samples" / "tokens.jsonl")
WHOLE = "expected a whole number, at least 1, at most 2147483647 (1k is 1000, 1K is 1024), got "
SHARE = "expected a number, above 0, at most 1, got "


def _options(flag: str, expected: str, *values: str) -> list[tuple[list[str], int, list[str]]]:
    return [([flag, value], 2, [f"{flag}: {expected}{value!r}"]) for value in values]


RUNS: list[tuple[list[str], int, list[str]]] = [
    *_options("--block-size", WHOLE, "0", "-1", "1.5", "abc", "1e3", "", "99999999999", "1\n2"),
    *_options("--max-num-seqs", WHOLE, "0", "many"),
    *_options("--max-model-len", WHOLE, "0", "-5"),
    *_options("--gpu-memory-utilization", SHARE, "0", "1.1", "-0.5", "nan", "inf", "", "half"),
    *_options("--watermark", "expected a number, at least 0, below 1, got ", "1", "-0.1", "nan"),
    *_options("--tensor-parallel-size", WHOLE, "0", "two"),
    (["-tp", "3"], 2, ["--tensor-parallel-size 3: meta-llama/Llama-3.1-8B has 32 attention heads"]),
    (["-tp=16"], 2, ["--tensor-parallel-size 16: no all-reduce is fitted for 16 A100-40"]),
    (["--kv-cache-dtype", "fp9"], 2, ["--kv-cache-dtype: unknown value 'fp9'; did you mean 'fp8'"]),
    *_options("--output-dir", "expected text (not empty), got ", ""),
    *_options("--trace", "expected text (not empty), got ", ""),
    (["--block-size", "9" * 200], 2, ["--block-size: expected a whole number", "..."]),
    (["--block-size", "2147483647"], 1, ["no KV cache is left", "--gpu"]),
    (
        ["--model", "llama-3.1"],
        2,
        ["--model 'llama-3.1'", "did you mean 'meta-llama/Llama-3.1-8B'?"],
    ),
    (["--model", "Qwen3.5-27B"], 2, ["48 state", "allocators here model keys and values of every"]),
    (["--model", "DeepSeek-V3.2"], 2, ["61 index", "expected --step-time linear:"]),
    (["--model", "none/config.json"], 1, ["none/config.json: No such file or directory"]),
    (["--gpu", "H10"], 2, ["--gpu 'H10' is unknown; did you mean 'H100'?"]),
    (["--allocator", "pagged"], 2, ["--allocator: unknown value 'pagged'; did you mean 'paged'?"]),
    (["--allocator", "reserve-foo"], 2, ["--allocator", "did you mean 'reserve-", "reserve-max"]),
    (["--allocator", "reserv-max"], 2, ["--allocator", "did you mean 'reserve-max'?"]),
    (["--allocator", ""], 2, ["--allocator: unknown value ''", "choices: contiguous, paged"]),
    (["--allocator", "paged,prefix"], 2, ["--allocator paged,prefix", "kvsim compare a list"]),
    (["--format", "parket"], 2, ["--format: unknown value 'parket'; did you mean 'parquet'?"]),
    (["--placement", "budy"], 2, ["--placement", "did you mean 'buddy'?", "buddy, first_fit"]),
    (["--reservation", "pow"], 2, ["--reservation", "did you mean 'pow2'?"]),
    (["--trace-format", "natve"], 2, ["--trace-format", "did you mean 'native'?", "mooncake"]),
    (["--trace-format", "azure"], 1, ["tokens.jsonl, line 1", "this line looks like native"]),
    (["--step-time", "rooflin"], 2, ["--step-time 'rooflin'", "did you mean 'roofline'?"]),
    (["--step-time", "linear:1,2"], 2, ["has 2 numbers, expected linear:BASE,PER_TOKEN,PER_"]),
    (["--step-time", "linear:1,-2,3"], 2, ["--step-time: linear's PER_TOKEN is -2.0, expected"]),
    (["--step-time", "linear:nan,0,0"], 2, ["--step-time: linear's BASE is nan, expected"]),
    (["--step-time", "linear:0,0,0"], 2, ["--step-time linear:0,0,0", "expected"]),
    (["--step-time", "constant:0"], 2, ["--step-time constant:0", "expected more than 0"]),
    (["--step-time", "constant:1e-17"], 2, ["--step-time: constant:SECONDS", "resolution"]),
    (["--step-time", "constant:1e300"], 2, ["--step-time: constant:SECONDS", "0 to 1000000"]),
    (["--step-time", "constant:x"], 2, ["--step-time 'constant:x': 'x' is not a number"]),
    (["--step-time", "constant:1e6"], 2, ["simulated seconds, expected at most", "--step-time"]),
    (["--step-time", "roofline:1"], 2, ["--step-time 'roofline:1': roofline takes no numbers"]),
    (["--gpu", "A100-80-PCIe"], 2, ["roofline has no fit for --gpu A100-80-PCIe, only for"]),
    (["--save-steps"], 2, ["--save-steps needs a folder: add --output-dir DIR"]),
    (["--save-block-tables"], 2, ["--save-block-tables needs a folder: add --output-dir DIR"]),
    (
        ["--allocator", "paged", "--enable-prefix-caching"],
        2,
        ["--enable-prefix-caching contradicts --allocator paged: leave one of them out"],
    ),
    (
        ["--allocator", "reserve-max", "--reservation", "pow2"],
        2,
        ["--reservation pow2 contradicts --allocator reserve-max"],
    ),
    (
        ["--max-num-batched-tokens", "100", "--max-num-seqs", "200"],
        2,
        ["--max-num-batched-tokens 100 is less than --max-num-seqs 200", "expected"],
    ),
    (
        ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"],
        2,
        ["--max-num-batched-tokens 2048 is less than --max-model-len 131072", "raise it"],
    ),
    (["--max-model-len", "200000"], 2, ["--max-model-len 200000 is beyond", "131072"]),
    (["--num-gpu-blocks-override", "1"], 2, ["--num-gpu-blocks-override 1: expected at least 2"]),
    (
        ["--num-gpu-blocks-override", "100"],
        1,
        ["needs 8192 blocks of 16 tokens, the pool has 99", "--max-model-len to at most 1584"],
    ),
    (["--gpu-memory-utilization", "0.3"], 1, ["weights do not fit", "needs at least 0.81"]),
    (["--kv-cache-memory-bytes", "1"], 2, ["--kv-cache-memory-bytes 1: expected at least"]),
    (["--kv-cache-memory-bytes", "900g"], 1, ["--kv-cache-memory-bytes", "does not fit: A100-40"]),
    (["--blok-size", "16"], 2, ["--blok-size", "Did you mean", "--block-size"]),
    (["--block-size"], 2, ["--block-size", "requires an argument"]),
    (["trace.jsonl"], 2, ["unexpected argument 'trace.jsonl'", "--trace FILE"]),
]


@pytest.mark.parametrize(("flags", "code", "parts"), RUNS, ids=lambda value: str(value)[:60])
def test_run(kvsim: Kvsim, flags: list[str], code: int, parts: list[str]) -> None:
    done = kvsim("run", "--trace", TRACE, *flags)
    for part in parts:
        assert part in done.refusal
    assert done.code == code


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["a command is missing", "plot, report, run, sweep, tables"]),
        (["rum"], ["unknown command 'rum'; did you mean 'run'?"]),
        (["compair", "--allocator", "paged"], ["unknown command 'compair'", "mean 'compare'?"]),
        (["--nonsense"], ["--nonsense"]),
        (["compare", "--allocator", "paged,paged"], ["--allocator paged,paged: paged is there"]),
        (["compare", "--allocator", "contiguous,reserve-max"], ["reserve-max is there twice"]),
        (["compare", "--allocator", ""], ["--allocator: expected names separated by commas"]),
        (["compare", "--allocator", "paged,,prefix"], ["--allocator: expected names", "paged,,"]),
        (["compare", "--allocator", "paged,nope"], ["--allocator: unknown value 'nope'; choices"]),
        (["compare", "--allocator", "paged,prefx"], ["'prefx'; did you mean 'prefix'?"]),
        (["compare", "--reservation", "pow2"], ["--reservation pow2 has no effect on kvsim comp"]),
        (["compare", "--allocator", "paged", "--placement", "buddy"], ["--placement buddy has no"]),
        (["compare", "--no-enable-prefix-caching"], ["--no-enable-prefix-caching has no effect"]),
        (["compare", "--save-block-tables"], ["--save-block-tables is for kvsim run"]),
        (["compare", "paged"], ["unexpected argument 'paged'"]),
    ],
)
def test_commands(
    kvsim: Kvsim,
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvsim(*arguments)
    for part in parts:
        assert part in done.refusal
    assert done.code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file: did you mean 'trace.csv'?"),
        (b"", "empty: expected at least one request"),
        (b"\n\n", "empty: expected at least one request"),
        (b"hello\n", "unknown format 'hello': expected"),
        (b'{"arrival_time": 0}\n', "line 1: "),
        (b"\xff\xfe\x00", "is not UTF-8: expected text"),
    ],
)
def test_traces(kvsim: Kvsim, tmp_path: Path, content: bytes | None, part: str) -> None:
    (tmp_path / "trace.csv").touch()
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = kvsim("run", "--trace", path)
    assert done.code == 1
    assert str(path) in done.refusal
    assert part in done.refusal


def test_a_folder_is_no_trace(kvsim: Kvsim, tmp_path: Path) -> None:
    done = kvsim("run", "--trace", tmp_path)
    assert done.code == 1
    assert f"{tmp_path}: no files in this folder: expected those of a trace" in done.refusal


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("below", [".", "x/y"])
def test_an_output_folder_where_a_file_is(
    kvsim: Kvsim, tmp_path: Path, command: str, below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    done = kvsim(command, "--trace", TRACE, "--max-model-len", "200", "-o", file / below)
    assert done.code == 1
    assert f"--output-dir {file / below}: " in done.refusal
    assert "expected a folder that can be made and written to" in done.refusal
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_output_folder(kvsim: Kvsim, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = kvsim("run", "--trace", TRACE, "-o", tmp_path)
    tmp_path.chmod(0o700)
    assert done.code == 1
    assert f"--output-dir {tmp_path}: Permission denied" in done.refusal


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    for flag in ("--trace", "--config"):
        done = kvsim("run", flag, path)
        assert (done.code, "Permission denied" in done.refusal) == (1, True)


def test_a_folder_that_vanishes_during_the_run(
    kvsim: Kvsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("sim.commands.run.summarize", lambda _: out.rmdir())
    done = kvsim("run", "--trace", TRACE, "-o", out)
    assert done.code == 1
    assert f"{out / 'requests.parquet'} cannot be written: No such file" in done.refusal


def test_block_tables_of_an_allocator_without_blocks(kvsim: Kvsim, tmp_path: Path) -> None:
    flags = ("--allocator", "reserve-max", "--save-block-tables", "-o", tmp_path)
    done = kvsim("run", "--trace", TRACE, *flags)
    assert done.code == 2
    assert "the reserve-max allocator has no blocks; expected --allocator paged" in done.refusal
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "code", "part"),
    [
        (("c.json", None), 1, "No such file or directory; expected a file that can be read"),
        (("c.json", b""), 2, "not JSON: "),
        (("c.json", b"{"), 2, "not JSON: "),
        (("c.json", b"\xff\xfe\x00"), 2, "not JSON: "),
        (("c.toml", b"\xff\xfe\x00"), 2, "not TOML: "),
        (("c.toml", b"block_size"), 2, "not TOML: "),
        (("c.toml", b"a = 1\na = 2"), 2, "not TOML: "),
        (("c.json", b"[1]"), 2, "expected an object of settings"),
        (("c.json", b'"block_size"'), 2, "expected an object of settings"),
        (("c.json", b"[" * 100_000), 2, "nested too deeply; expected a flat object"),
        (("c.toml", b"a = " + b"[" * 100_000), 2, "nested too deeply; expected a flat object"),
        (("c.json", b'{"block_size": ' + b"[" * 900 + b"]" * 900 + b"}"), 2, "a whole number"),
        (("c.json", b'{"watermark": 1e999}'), 2, "not JSON: "),
        (("c.json", b'{"output_dir": "a\\u0000b"}'), 1, r"--output-dir 'a\x00b': embedded null"),
        (("c.json", b'{"trace": "a\\u0000b"}'), 1, r"'a\x00b': cannot be read"),
        (("c.json", b'{"config": "x.json"}'), 2, "key 'config' is unknown; "),
        (("c.yaml", b"block_size: 16"), 2, "expected a name ending in .json or .toml"),
        (("config", b"{}"), 2, "expected a name ending in .json or .toml"),
    ],
)
def test_configuration_files(
    kvsim: Kvsim, tmp_path: Path, file: tuple[str, bytes | None], code: int, part: str
) -> None:
    path, content = tmp_path / file[0], file[1]
    if content is not None:
        path.write_bytes(content)
    done = kvsim("run", "--config", path)
    assert part in done.refusal
    if "null" not in part and "cannot be read" not in part:
        assert f"--config {path}: " in done.refusal
    assert done.code == code


def test_a_folder_is_no_configuration_file(kvsim: Kvsim, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.mkdir()
    done = kvsim("run", "--config", path)
    assert (done.code, "Is a directory" in done.refusal) == (1, True)
    assert kvsim("run", "--config", "").code == 2


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.arrivals.read_trace", interrupted)
    assert main(["run"]) == 130
    assert capsys.readouterr().err.strip() == "kvsim: interrupted"


@pytest.mark.parametrize("module", ["click", "msgspec", "numpy", "simpy", "pyarrow.parquet"])
def test_an_interrupt_during_the_imports(tmp_path: Path, module: str) -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from sim.cli import console\n"
        "sys.exit(console())\n"
    )
    command = [sys.executable, "-c", code, "run", "--trace", TRACE, "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "kvsim: interrupted\n")
    assert not list(tmp_path.glob(".*"))
