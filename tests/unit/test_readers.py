import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.test_formats import SAMPLES, TIMED
from workloads.errors import MAX_QUOTE, TraceError
from workloads.readers import read_trace
from workloads.record import Trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
NATIVE = '{"arrival_time": 0.5, "prompt": [["s", 3], ["u", 2]], "output_len": 7}'
MOONCAKE = '{"timestamp": 2, "input_length": 513, "output_length": 4, "hash_ids": [0, 1]}'

Read = Callable[..., Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read the text or bytes given as the content of a file."""

    def from_content(content: str | bytes, trace_format: str | None = None) -> Trace:
        path = tmp_path / "trace.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_trace(path, trace_format)

    return from_content


def _native(**changes: object) -> str:
    """A native line with *changes*; None removes a key."""
    line = {**json.loads(NATIVE), **changes}
    return json.dumps({key: value for key, value in line.items() if value is not None})


def _mooncake(**changes: object) -> str:
    line = {**json.loads(MOONCAKE), **changes}
    return json.dumps({key: value for key, value in line.items() if value is not None})


# Accepted


def test_native_segments(read: Read) -> None:
    trace = read(NATIVE + "\n")
    assert trace.trace_format == "native"
    assert trace.arrival_ps.tolist() == [500_000_000_000]
    assert trace.segment_ends.tolist() == [3, 5]
    assert trace.num_prompt_tokens.tolist() == [5]
    assert trace.num_output_tokens.tolist() == [7]
    assert trace.request_ids == ["r0"]


def test_native_token_ids_lengths_and_null(read: Read) -> None:
    trace = read(
        _native(prompt=None, prompt_token_ids=[7, 7, 8])
        + "\n"
        + _native(prompt=None, input_length=9, request_id="named")
        + '\n{"arrival_time": 1, "prompt": null, "input_length": 2, "output_length": 3}'
    )
    assert trace.segment_offsets.tolist() == [0, 1, 2, 3]
    assert trace.segment_ends.tolist() == [3, 9, 2]
    assert trace.num_prompt_tokens.tolist() == [3, 9, 2]
    assert trace.request_ids == ["r0", "named", "r2"]


def test_mooncake(read: Read) -> None:
    trace = read(MOONCAKE)
    assert trace.trace_format == "mooncake"
    assert trace.arrival_ps.tolist() == [2_000_000_000]
    assert trace.segment_ends.tolist() == [513]
    full = read(_mooncake(input_length=1024, timestamp=0.5))
    assert full.segment_ends.tolist() == [1024]
    assert full.arrival_ps.tolist() == [500_000_000]


def test_mooncake_notes_ignored_keys(read: Read) -> None:
    trace = read(_mooncake(zeta=[[1]], turn=3) + "\n" + MOONCAKE)
    assert trace.notes == ("ignored keys: 'turn, zeta'",)


def test_azure_keeps_seven_digits_and_starts_at_the_earliest(read: Read) -> None:
    rows = [
        "2023-12-31 23:59:59.9999999,1,2",
        "2023-12-31 23:59:59.0000001,3,4",
        "2024-01-01 00:00:00.0000001,5,6",
        "2024-01-01 00:00:01,7,8",
    ]
    trace = read("\r\n".join([HEADER, *rows]))
    assert trace.trace_format == "azure"
    ticks = [0, 9_999_998, 10_000_000, 19_999_999]
    assert trace.arrival_ps.tolist() == [tick * 100_000 for tick in ticks]
    assert trace.num_prompt_tokens.tolist() == [3, 1, 5, 7]
    assert trace.notes == ("sorted by arrival time: 1 requests came before their predecessor",)


@pytest.mark.parametrize("lines", [[HEADER, ROW, ROW], [NATIVE, NATIVE], [MOONCAKE, MOONCAKE]])
def test_line_ends_bom_and_blank_lines_change_nothing(read: Read, lines: list[str]) -> None:
    plain = read("\n".join(lines) + "\n")
    for content in (
        "\n".join(lines),
        "\r\n".join(lines),
        "\r\n".join(lines) + "\r\n",
        "\ufeff" + "\n".join(lines),
        "\ufeff\n \n\n" + "\n\t\r\n\n".join(lines) + "\n\n  \n",
    ):
        trace = read(content)
        for column in ("arrival_ps", "num_prompt_tokens", "num_output_tokens", "segment_nodes"):
            assert getattr(trace, column).tolist() == getattr(plain, column).tolist()
        assert trace.sha256 == hashlib.sha256(content.encode()).hexdigest()


def test_every_format_can_be_named(read: Read) -> None:
    for name, content in (("azure", f"{HEADER}\n{ROW}"), ("mooncake", MOONCAKE)):
        assert read(content, name).trace_format == name


def test_a_long_line_is_read(read: Read) -> None:
    tokens = list(range(200_000))
    trace = read(_native(prompt=None, prompt_token_ids=tokens))
    assert trace.segment_ends.tolist() == [200_000]


# Refused: (content, line or None, words of the message)

HUGE = "9" * 5000
REFUSED = {
    "empty": ("", None, ["empty", "expected at least one request"]),
    "blank lines": ("\n \n\r\n", 3, ["empty"]),
    "bom only": (b"\xef\xbb\xbf", 1, ["empty"]),
    "unknown format": ("a,b,c\n", 1, ["unknown format 'a,b,c'", "azure", "mooncake", "native"]),
    "not utf-8": (NATIVE.encode() + b"\n\xff\n", 2, ["0xff at column 1", "not UTF-8"]),
    "cut gzip": (b"\x1f\x8b\x08\x00", None, ["cannot be read (Truncated compressed stream)"]),
    "cut zstd": (b"\x28\xb5\x2f\xfd\x04", None, ["cannot be read (", "expected a readable file"]),
    "no parquet": (b"PAR1PAR1", None, ["no Parquet file that can be read ("]),
    "utf-16": ("\ufeff{}".encode("utf-16-le"), 1, ["not UTF-8"]),
    "null bytes": (NATIVE.replace("{", "{\0"), 1, [r"column 2, '\x00"]),
    "null byte in csv": (f"{HEADER}\n{ROW}\0", 2, [r"GeneratedTokens '44\x00'"]),
    # native
    "missing arrival": (
        NATIVE + "\n" + _native(arrival_time=None),
        2,
        ["arrival_time is missing", "expected keys arrival_time, request_id"],
    ),
    "negative arrival": (_native(arrival_time=-1), 1, ["arrival_time -1: expected float >= 0"]),
    "late arrival": (
        _native(arrival_time=1e10),
        1,
        ["arrival_time 1", "expected float <= 9000000"],
    ),
    "arrival string": (_native(arrival_time="3"), 1, ["arrival_time '3': expected float, got str"]),
    "arrival true": (_native(arrival_time=True), 1, ["arrival_time True: expected float"]),
    "nan": (_native(arrival_time=float("nan")), 1, ["arrival_time: ", "'NaN,", "a finite number"]),
    "infinity": (_native(arrival_time=float("inf")), 1, ["arrival_time: ", "'Infinity,"]),
    "minus infinity": (_native(arrival_time=float("-inf")), 1, ["arrival_time: "]),
    "1e400": (NATIVE.replace("0.5", "1e400"), 1, ["arrival_time ", "out of range"]),
    "huge arrival": (NATIVE.replace("0.5", HUGE), 1, ["arrival_time ", "out of range"]),
    "huge count": (NATIVE.replace("7}", HUGE + "}"), 1, ["output_len ", "out of range"]),
    "big count": (_native(output_len=2**31), 1, ["output_len 2147483648: expected int <= 2147483"]),
    "zero output": (_native(output_len=0), 1, ["output_len 0: expected int >= 1"]),
    "negative output": (_native(output_len=-4), 1, ["output_len -4: expected int >= 1"]),
    "fraction": (_native(output_len=10.5), 1, ["output_len 10.5: expected int, got float"]),
    "float count": (_native(output_len=10.0), 1, ["output_len 10.0: expected int, got float"]),
    "boolean count": (_native(output_len=True), 1, ["output_len True: expected int, got bool"]),
    "no output": (
        _native(output_len=None),
        1,
        ["output_len is missing", "exactly one of output_l"],
    ),
    "two outputs": (_native(output_length=7), 1, ["output_len and output_length are given"]),
    "no prompt": (
        _native(prompt=None),
        1,
        ["prompt is missing: expected exactly one of prompt, p"],
    ),
    "two prompts": (_native(input_length=5), 1, ["prompt and input_length are given"]),
    "empty prompt": (_native(prompt=[]), 1, ["prompt []: expected array of length >= 1"]),
    "zero segment": (_native(prompt=[["a", 0]]), 1, ["prompt[0][1] 0: expected int >= 1"]),
    "short segment": (_native(prompt=[["a"]]), 1, ["prompt[0] ['a']: expected array of length 2"]),
    "float content": (_native(prompt=[[1.5, 2]]), 1, ["prompt[0][0] 1.5: expected int | str"]),
    "too long together": (
        _native(prompt=[["a", 2**31 - 1], ["b", 1]]),
        1,
        ["prompt length 2147483648: expected 1 to 2147483647"],
    ),
    "token string": (
        _native(prompt=None, prompt_token_ids=[1, "2"]),
        1,
        ["prompt_token_ids[1] '2': expected int, got str"],
    ),
    "unknown key": (
        _native(arrival_tme=1),
        1,
        ["unknown key 'arrival_tme': did you mean 'arrival_time'? choices: arrival_time, "],
    ),
    "line break in key": (_native(**{"a\nb\u2028": 1}), 1, [r"unknown key 'a\nb\u2028'"]),
    "key like a path": (_native(**{"a - at `$.b\n`": 1}), 1, [r"unknown key 'a - at `$.b\n`'"]),
    "lone surrogate": (
        NATIVE.replace('"s"', r'"\ud800"'),
        1,
        ["prompt: unexpected end of escaped utf-16 surrogate pair at column"],
    ),
    "empty id": (_native(request_id=""), 1, ["request_id '': expected str of length >= 1"]),
    "number id": (_native(request_id=5), 1, ["request_id 5: expected str, got int"]),
    "duplicate id": (
        "\n".join([_native(request_id="x" * 500), NATIVE, "", _native(request_id="x" * 500)]),
        4,
        ["request id 'xxx", "is already used on line 1"],
    ),
    "key twice": (NATIVE[:-1] + ', "prompt": 5}', 1, ["prompt 5: expected array, got int"]),
    "first of two keys wrong": (
        _native(prompt=[["a", 0]])[:-1] + ', "prompt": 5}',
        1,
        ["prompt[0][1] '{", "expected int >= 1"],
    ),
    "truncated": (NATIVE + "\n" + NATIVE[:-9], 2, ["truncated?", "line ends too early"]),
    "truncated in a key": (NATIVE + "\n" + NATIVE[:5], 2, ["truncated?"]),
    "two objects on a line": (NATIVE + NATIVE, 1, ["trailing characters"]),
    "array": (NATIVE + "\n[1]", 2, ["line '[1]': expected a JSON object"]),
    "deep nesting": (
        '{"arrival_time": 1, "prompt": ' + "[" * 100_000 + "}",
        1,
        ["expected int | str, got array"],
    ),
    "deep mooncake": (
        MOONCAKE[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        1,
        ["nested too deeply"],
    ),
    # mooncake
    "missing timestamp": (
        MOONCAKE + "\n" + _mooncake(timestamp=None),
        2,
        ["timestamp is missing: expected milliseconds, as before"],
    ),
    "negative timestamp": (_mooncake(timestamp=-1), 1, ["timestamp -1: expected float >= 0"]),
    "zero input": (_mooncake(input_length=0), 1, ["input_length 0: expected int >= 1"]),
    "one hash id too many": (
        _mooncake(input_length=512),
        1,
        ["hash_ids has 2 ids: expected 1, one for each 512 tokens of input_length 512"],
    ),
    "one hash id too few": (_mooncake(hash_ids=[1]), 1, ["hash_ids has 1 ids: expected 2"]),
    "no hash ids": (_mooncake(hash_ids=[]), 1, ["hash_ids has 0 ids: expected 2"]),
    "hash id string": (_mooncake(hash_ids=[0, "1"]), 1, ["hash_ids[1] '1': expected int, got str"]),
    # azure
    "header only": (HEADER + "\r\n", None, ["no requests in it: expected at least one"]),
    "other header": (
        HEADER + ",ContextTokens\n",
        1,
        ["expected columns TIMESTAMP, ContextTokens, Gen"],
    ),
    "two columns": (f"{HEADER}\n{ROW[:-3]}", 2, ["expected 3 columns", "truncated?"]),
    "four columns": (f"{HEADER}\n{ROW},1", 2, ["expected 3 columns, TIMESTAMP,Con"]),
    "cut in the last column": (f"{HEADER}\n{ROW[:-2]}", 2, ["GeneratedTokens ''", "truncated?"]),
    "no timestamp": (f"{HEADER}\n,1,2", 2, ["TIMESTAMP '': expected YYYY-MM-DD HH:MM:SS.fffffff"]),
    "a zone in one row": (
        f"{HEADER}\n{ROW}\n2024-05-10 00:00:00.009930+00:00,1,2",
        3,
        ["TIMESTAMP '2024-05-10 00:00:00.009930+00:00': expected YYYY"],
    ),
    "month 13": (f"{HEADER}\n2023-13-16 18:15:46.6805900,1,2", 2, ["TIMESTAMP '2023-13-16 18"]),
    "ten digits": (f"{HEADER}\n2023-11-16 18:15:46.1234567890,1,2", 2, ["TIMESTAMP '2023-"]),
    "zero tokens": (f"{HEADER}\n{ROW[:-2]}0", 2, ["GeneratedTokens '0': expected an integer, 1"]),
    "negative tokens": (f"{HEADER}\n{ROW[:-2]}-3", 2, ["GeneratedTokens '-3'"]),
    "fraction of tokens": (f"{HEADER}\n{ROW}.5", 2, ["GeneratedTokens '44.5'"]),
    "huge tokens": (f"{HEADER}\n{ROW}{HUGE}", 2, ["GeneratedTokens '449999"]),
    "other digits": (f"{HEADER}\n{ROW[:-2]}\u0664", 2, ["GeneratedTokens '\u0664'"]),
    "trace of a year": (
        f"{HEADER}\n{ROW}\n{ROW.replace('2023', '2024')}",
        3,
        ["arrival time 9.2e+06 s: expected 0 to 9000000 seconds"],
    ),
    # mixed
    "native in mooncake": (MOONCAKE + "\n" + NATIVE, 2, ["(this line looks like native)"]),
    "mooncake in native": (NATIVE + "\n" + MOONCAKE, 2, ["(this line looks like mooncake)"]),
    "mooncake in azure": (f"{HEADER}\n{MOONCAKE}", 2, ["(this line looks like mooncake)"]),
    "csv in native": (f"{NATIVE}\n{ROW}", 2, ["expected a JSON object"]),
}


def _check_message(error: TraceError, path: Path) -> str:
    message = str(error)
    assert message.isprintable()
    assert message.startswith(str(path))
    assert len(message) < len(str(path)) + 5 * MAX_QUOTE
    return message


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(read: Read, tmp_path: Path, case: str) -> None:
    content, line, words = REFUSED[case]
    with pytest.raises(TraceError) as refusal:
        read(content)
    message = _check_message(refusal.value, tmp_path / "trace.txt")
    where = "trace.txt: " if line is None else f"trace.txt, line {line}: "
    assert where in message
    for word in words:
        assert word in message


def test_an_unknown_format_name_is_refused(read: Read) -> None:
    with pytest.raises(TraceError, match="'Moonkake' is unknown: did you mean 'mooncake'\\? choi"):
        read(NATIVE, "Moonkake")


def test_a_wrong_format_name_is_refused_with_the_right_one(read: Read) -> None:
    with pytest.raises(TraceError, match=r"line 1: header .*\(this line looks like native\)"):
        read(NATIVE, "azure")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trace.json", "no such file: did you mean 'trace.jsonl'?"),
        ("no/such/trace", "no such file: expected the path of a trace"),
        ("folder", "no files in this folder: expected those of a trace"),
        ("a\0b", "cannot be read (embedded null byte)"),
        ("a\nb", "no such file"),
        ("x" * 5000, "cannot be read (File name too long)"),
        ("trace.jsonl/x", "cannot be read (Not a directory)"),
    ],
)
def test_paths_that_cannot_be_read(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "trace.jsonl").write_text(NATIVE)
    (tmp_path / "folder" / "within").mkdir(parents=True)
    with pytest.raises(TraceError) as refusal:
        read_trace(tmp_path / name)
    assert words in str(refusal.value)
    assert str(refusal.value).isprintable()


def test_a_failing_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TraceError, match=r"x: cannot be read \(Permission denied\)"):
        read_trace(tmp_path / "x")


def test_a_long_hostile_line_is_refused_quickly(read: Read) -> None:
    start = time.perf_counter()
    with pytest.raises(TraceError, match="unknown key 'xxx"):
        read('{"arrival_time": 1, "' + "x" * 10_000_000 + '": 1}')
    assert time.perf_counter() - start < 5


EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 8), st.binary(max_size=8)),
    min_size=1,
    max_size=3,
)


FUZZED = [name for name in SAMPLES if name != "conversation.jsonl"]


@pytest.mark.parametrize("name", FUZZED)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(edits=EDITS)
def test_mutated_samples_are_read_or_refused(
    samples: Path, tmp_path: Path, name: str, edits: list[tuple[int, int, bytes]]
) -> None:
    content = (samples / name).read_bytes()
    for place, removed, added in edits:
        start = place % (len(content) + 1)
        content = content[:start] + added + content[start + removed :]
    path = tmp_path / name
    path.write_bytes(content)
    try:
        assert len(read_trace(path, SAMPLES[name] if SAMPLES[name] == TIMED else None)) > 0
    except TraceError as error:
        _check_message(error, path)
