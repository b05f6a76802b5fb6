"""The formats by their samples, with what each says; and every way to hand one over."""

import gzip
import io
import itertools
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workloads.errors import TraceError
from workloads.formats import READERS
from workloads.readers import read_trace
from workloads.readers.elements import elements
from workloads.readers.source import MAX_ITEM_BYTES
from workloads.record import PS_PER_S, Trace

TIMED = (
    "timed_trace:sec_multiplier=0.001,label-timestamp=ts,label_input_length=prompt_len,"
    "label_output_length=gen_len,label_hash_ids=blocks"
)
SAMPLES = {
    "aiperf.jsonl": "aiperf",
    "azure2023.csv": "azure",
    "azure2024.csv": "azure",
    "azure2025.csv": "azure",
    "bailian.jsonl": "bailian",
    "bench_serve.json": "bench_serve",
    "burstgpt.csv": "burstgpt",
    "chat.jsonl": "chat",
    "claude_code.jsonl": "claude_code",
    "claude_code_session.json": "claude_code",
    "conversation.jsonl": "native",
    "llmservingsim.jsonl": "llmservingsim",
    "mooncake.jsonl": "mooncake",
    "sharegpt.json": "sharegpt",
    "timed_trace.jsonl": TIMED,
    "tokens.jsonl": "native",
    "vidur.csv": "vidur",
}


def _sample(samples: Path, name: str, options: str = "") -> Trace:
    trace_format = SAMPLES[name] if SAMPLES[name] == TIMED else None
    return read_trace(samples / name, f"{SAMPLES[name]}:{options}" if options else trace_format)


def _seconds(trace: Trace) -> list[float]:
    return [ps / PS_PER_S for ps in trace.arrival_ps.tolist()]


def _columns(trace: Trace) -> dict[str, Any]:
    names = ["arrival_ps", "num_prompt_tokens", "num_output_tokens", "segment_nodes"]
    names += ["segment_ends", "output_nodes", "num_shareable_tokens", "previous_turn", "think_ps"]
    columns = {name: getattr(trace, name).tolist() for name in names}
    return columns | {"ids": trace.request_ids, "sessions": trace.session_ids}


def test_every_format_has_a_sample_and_is_detected(samples: Path) -> None:
    for name, trace_format in SAMPLES.items():
        assert _sample(samples, name).trace_format == trace_format.partition(":")[0]
    assert {f.partition(":")[0] for f in SAMPLES.values()} == set(READERS) - {"parquet"}


# What each says


def test_azure_2024_and_2025(samples: Path) -> None:
    trace = _sample(samples, "azure2024.csv")
    assert trace.arrival_ps[:2].tolist() == [0, 3_009_931_000_000]
    assert trace.num_output_tokens[0] == 1
    trace = _sample(samples, "azure2025.csv")
    assert _seconds(trace)[:2] == [0, 2.101]
    assert trace.num_prompt_tokens[:2].tolist() == [300, 1277]


def test_burstgpt_leaves_failures_out_and_keeps_sessions(samples: Path) -> None:
    trace = _sample(samples, "burstgpt.csv")
    assert len(trace) == 10
    assert trace.notes == ("2 requests without prompt or response tokens are left out",)
    assert trace.session_ids[:4] == [None, "s1", "s2", "s3"]
    # s1 asks at 4 s for 2 s and again at 20 s; s2 at 8 for 3 and at 24.
    assert trace.previous_turn[[4, 5]].tolist() == [1, 2]
    assert trace.think_ps[[4, 5]].tolist() == [14 * PS_PER_S, 13 * PS_PER_S]


def test_vidur_with_and_without_arrivals(samples: Path, tmp_path: Path) -> None:
    assert _sample(samples, "vidur.csv").num_prompt_tokens[:2].tolist() == [30, 113]
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n5,6,0.1\n7,8,0.2\n")
    assert _seconds(read_trace(lengths)) == [0, 0]
    trace = read_trace(lengths, "vidur:gap=0.5")
    assert _seconds(trace) == [0, 0.5]
    assert trace.notes == ("no arrival times: requests come 0.5 s apart (option gap=SECONDS)",)


def test_bailian_chats_are_sessions_and_share_blocks(samples: Path) -> None:
    trace = _sample(samples, "bailian.jsonl")
    assert trace.session_ids == ["100", "101"] * 3
    assert trace.previous_turn.tolist() == [-1, -1, 0, 1, 2, 3]
    # The third block of a first turn is partial, and another in the next turn... but for chat 0,
    # whose block 80 the second turn goes on with: whatever equal ids say.
    assert trace.num_shareable_tokens.tolist() == [37, 37, 80, 80, 80, 80]
    assert trace.notes == ("4 think times are not known: gaps between arrivals stand for them",)


def test_aiperf_turns_go_on_where_the_last_ended(samples: Path) -> None:
    trace = _sample(samples, "aiperf.jsonl")
    turns = [row for row, session in enumerate(trace.session_ids) if session == "a"]
    assert trace.num_prompt_tokens[turns].tolist() == [300, 300 + 40 + 150, 490 + 20 + 15]
    assert [_seconds(trace)[row] for row in turns] == [0, 2, 3.0005]
    assert trace.think_ps[turns].tolist() == [0, 2 * PS_PER_S, 1_000_500_000_000]
    nodes = [trace.segment_nodes[trace.segment_offsets[row] :].tolist() for row in turns]
    assert nodes[1][:2] == [nodes[0][0], trace.output_nodes[turns[0]]]
    assert nodes[2][:4] == [*nodes[1][:3], trace.output_nodes[turns[1]]]
    # The texts of b and c are 126 and 70 equal bytes: 17 whole tokens of 4.
    assert trace.num_shareable_tokens[[1, 2]].tolist() == [17, 17]


def test_timed_trace_by_vllms_options(samples: Path) -> None:
    trace = _sample(samples, "timed_trace.jsonl")
    assert _seconds(trace) == [0, 0.25, 0.5, 0.75, 1]
    assert trace.num_prompt_tokens.tolist() == [20, 21, 22, 23, 24]
    assert trace.num_output_tokens.tolist() == [5, 6, 7, 8, 9]
    # Ids 7, 8 or 7, 9: the first 16 tokens are everybody's.
    assert trace.num_shareable_tokens.tolist() == [20, 21, 22, 21, 22]


def test_timed_trace_cuts_prompts_to_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 1, "input_length": 100, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 2, "input_length": 100, "output_length": 2},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path, "timed_trace:chunk_hash_size=32")
    assert trace.num_prompt_tokens.tolist() == [64, 100]
    assert trace.notes == ("1 prompts are cut to the tokens of their ids, as vLLM does",)


def test_bench_serve_is_replayed_as_measured(samples: Path) -> None:
    trace = _sample(samples, "bench_serve.json")
    assert _seconds(trace) == [0, 0.5, 1.25]
    assert trace.num_prompt_tokens.tolist() == [110, 100, 120]
    assert trace.num_output_tokens.tolist() == [20, 10, 30]
    assert trace.notes[0] == "1 failed requests are left out"


def test_claude_code_by_runs_and_by_ids(samples: Path) -> None:
    trace = _sample(samples, "claude_code.jsonl")
    assert trace.session_ids == ["trace_0", "trace_1"] * 3
    assert trace.num_output_tokens.tolist() == [1, 1, 30, 30, 60, 60]
    # 5 blocks, then 2 more and 7 tokens of nobody else's, then 2 more and 14
    assert trace.num_shareable_tokens.tolist() == [320, 320, 448, 448, 448, 448]
    assert trace.think_ps.tolist() == [0, 0, 2 * PS_PER_S, 2 * PS_PER_S, 4 * PS_PER_S, 4 * PS_PER_S]
    shared = _sample(samples, "claude_code.jsonl", "shared_prefix=true,gap=100")
    assert _seconds(shared) == [0, 9.5, 19, 100, 109.5, 119]
    head = shared.segment_offsets[[0, 3]]
    assert shared.segment_ends[head].tolist() == [192, 192]
    assert len(set(shared.segment_nodes[head].tolist())) == 1
    assert shared.num_shareable_tokens.tolist() == trace.num_shareable_tokens[::2].tolist() * 2


def test_claude_code_sub_agents_are_sessions(samples: Path) -> None:
    trace = _sample(samples, "claude_code_session.json")
    name = "f64a8d4c-12d"
    assert trace.session_ids == [name, f"{name}/agent_001", f"{name}/agent_001", name]
    assert _seconds(trace) == [0, 12.5, 16.5, 30]
    assert trace.previous_turn.tolist() == [-1, -1, 1, 0]
    assert trace.num_shareable_tokens.tolist() == [6 * 64, 3 * 64, 4 * 64, 6 * 64]


def test_llmservingsim_turns_repeat_outputs(samples: Path) -> None:
    trace = _sample(samples, "llmservingsim.jsonl")
    assert _seconds(trace) == [0.00405974, 0.005, 0.006, 0.006 + 0.127348767]
    assert trace.think_ps[3] == 127_348_767_000
    # 4 of 5 ids are the session's; its second turn has the first's 6 ids and 3 outputs.
    assert trace.num_shareable_tokens.tolist() == [4, 0, 9, 9]
    last = trace.segment_offsets[3]
    assert trace.segment_nodes[last + 1 : last + 3].tolist()[1] == trace.output_nodes[2]


def test_sharegpt_lengths_without_a_tokenizer(samples: Path) -> None:
    trace = _sample(samples, "sharegpt.json")
    assert trace.num_prompt_tokens.tolist() == [7, 7]  # 6, 15 and 4 bytes: 2, 4 and 1 tokens
    assert trace.num_output_tokens.tolist() == [8, 9]
    assert trace.notes[0].startswith("no tokenizer: a token is 4 bytes of text")
    assert trace.notes[-1] == "1 conversations without an answer are left out"
    by_byte = _sample(samples, "sharegpt.json", "turns=0,bytes_per_token=1,gap=2")
    asked, answer = 6 + 15 + 4, 33  # the role of the answer is part of the prompt
    assert by_byte.num_prompt_tokens.tolist() == [asked, asked, asked + answer + 6 + 23 + 4]
    assert by_byte.num_output_tokens.tolist() == [32, answer, 21]
    assert by_byte.session_ids == ["c0", "c1", "c1"]
    assert _seconds(by_byte) == [0, 2, 2]
    # Both are asked the same; the second turn repeats the answer too.
    assert by_byte.num_shareable_tokens.tolist() == [asked, asked + answer, asked + answer]


def test_chat_prefixes_are_those_of_the_text(samples: Path) -> None:
    trace = _sample(samples, "chat.jsonl", "bytes_per_token=1")
    assert _seconds(trace) == [0, 2.5, 5]
    system, user, first, answerer, answer = 7 + 41, 5, 20, 10, 20  # bytes, with the line ends
    asked = system + user + first + answerer
    assert trace.num_prompt_tokens[:2].tolist() == [asked, system + user + 17 + answerer]
    assert trace.num_output_tokens.tolist() == [answer, 50, 13]
    shared = [asked + answer, system + user, asked + answer]
    assert trace.num_shareable_tokens.tolist() == shared


def test_chat_times_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = '{"timestamp": %s, "messages": [{"role": "user"}], "max_tokens": 1}\n'
    path.write_text(line % 1_700_000_000_000 + line % 1_700_000_000_250)
    assert _seconds(read_trace(path, "chat:sec_multiplier=0.001")) == pytest.approx([0, 0.25])
    path.write_text(line % '"2026-01-31T12:00:00Z"' + line % '"2026-01-31T12:00:01Z"')
    assert _seconds(read_trace(path, "chat:sec_multiplier=0.001")) == [0, 1]


# Ways to hand a trace over


def _compressed(data: bytes, codec: str) -> bytes:
    sink = io.BytesIO()
    with pa.CompressedOutputStream(pa.PythonFile(sink), codec) as stream:
        stream.write(data)
        stream.flush()
        return sink.getvalue() if stream.closed else _closed(stream, sink)


def _closed(stream: Any, sink: io.BytesIO) -> bytes:
    sink.close = lambda: None  # type: ignore[method-assign]
    stream.close()
    return sink.getvalue()


@pytest.mark.parametrize("name", SAMPLES)
def test_compressed_traces_are_the_same(samples: Path, tmp_path: Path, name: str) -> None:
    data = (samples / name).read_bytes()
    plain = _columns(_sample(samples, name))
    chosen = SAMPLES[name] if SAMPLES[name] == TIMED else None
    for content in (gzip.compress(data), _compressed(data, "zstd")):
        path = tmp_path / "trace"
        path.write_bytes(content)
        assert _columns(read_trace(path, chosen)) == plain


def test_standard_input(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gzip.compress((samples / "mooncake.jsonl").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    trace = read_trace("-")
    assert trace.name == "-"
    assert _columns(trace) == _columns(read_trace(samples / "mooncake.jsonl"))


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(TraceError, match=r"^-: standard input is closed"):
        read_trace("-")


def test_a_folder_of_sessions_is_one_trace(samples: Path, tmp_path: Path) -> None:
    session = (samples / "claude_code_session.json").read_bytes()
    for name in ("b.json", "a.json"):
        (tmp_path / name).write_bytes(session)
    for name in (".hidden", "README.md"):
        (tmp_path / name).write_text("no trace")
    trace = read_trace(tmp_path, "claude_code:gap=100")
    assert len(trace) == 8
    assert trace.request_ids[0] == "a.json/f64a8d4c-12d/0"
    assert _seconds(trace)[4] == 100  # the second file is the second session
    assert len(set(trace.request_ids)) == 8
    # Ids are local: what is in one session is not in the other.
    first, second = (set(trace.segment_nodes[trace.segment_offsets[row] :][:1]) for row in (0, 4))
    assert not first & second


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PARTS = {
    "azure": (AZURE + "2023-11-16 18:15:48,5,6\n", AZURE + "2023-11-16 18:15:46.5,7,8\n"),
    "burstgpt": tuple(f"Timestamp,Request tokens,Response tokens\n{at},5,6\n" for at in (8, 6.5)),
    "chat": tuple(
        f'{{"timestamp": {at}, "messages": [{{"role": "user"}}], "max_tokens": 6}}\n'
        for at in (1008, 1006.5)
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_files_of_one_clock_keep_their_times(tmp_path: Path, name: str) -> None:
    for part, text in enumerate(PARTS[name]):
        (tmp_path / f"{part}.txt.part").write_text(text)
    assert _seconds(read_trace(tmp_path, name)) == [0, 1.5]
    assert _seconds(read_trace(tmp_path / "0.txt.part", name)) == [0]


def test_files_years_apart_are_refused(samples: Path, tmp_path: Path) -> None:
    for name in ("azure2023.csv", "azure2024.csv"):
        (tmp_path / name).write_bytes((samples / name).read_bytes())
    with pytest.raises(TraceError, match=r"azure2024\.csv: starts .* s after the earliest file"):
        read_trace(tmp_path)


def test_errors_in_a_folder_name_the_file(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes((samples / "tokens.jsonl").read_bytes())
    (tmp_path / "2.jsonl").write_text('{"arrival_time": 3, "input_length": 0, "output_len": 1}')
    with pytest.raises(TraceError, match=r"2\.jsonl, line 1: input_length 0: expected int >= 1"):
        read_trace(tmp_path)
    (tmp_path / "2.jsonl").write_bytes((samples / "tokens.jsonl").read_bytes())
    with pytest.raises(
        TraceError,
        match=r"2\.jsonl, line 1: request id .* on line 1 of .*1\.jsonl$",
    ):
        read_trace(tmp_path)


def test_parquet_of_native_columns(tmp_path: Path) -> None:
    rows = [
        {"request_id": "a", "arrival_time": 0.5, "prompt_token_ids": [1, 2, 3], "output_len": 4},
        {"request_id": "b", "arrival_time": 0.75, "prompt_token_ids": [1, 2, 4], "output_len": 5},
    ]
    lines, path = tmp_path / "t.jsonl", tmp_path / "t.parquet"
    lines.write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), path)
    trace = read_trace(path)
    assert trace.trace_format == "parquet"
    assert _columns(trace) == _columns(read_trace(lines))
    segments = [[{"content": "s", "length": 3}, {"content": "out:a", "length": 4}], None]
    table = pa.table(
        {
            "arrival_time": [1.0, 2.0],
            "prompt": segments,
            "input_length": [None, 9],
            "output_length": [4, 5],
            "session_id": ["u", "u"],
            "think_time": [None, 0.25],
        }
    )
    pq.write_table(table, path)
    trace = read_trace(path)
    assert trace.segment_ends.tolist() == [3, 7, 9]
    assert trace.think_ps.tolist() == [0, PS_PER_S // 4]
    pq.write_table(
        pa.table({"arrival_time": [1.0, -2.0], "input_length": [1, 1], "output_len": [1, 1]}), path
    )
    with pytest.raises(TraceError, match=r"line 2: arrival_time -2\.0: expected float >= 0"):
        read_trace(path)
    pq.write_table(pa.table({"arrival": [1.0]}), path)
    with pytest.raises(TraceError, match="unknown column 'arrival': did you mean 'arrival_time'"):
        read_trace(path)


def test_native_sessions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {
        "arrival_time": 0,
        "input_length": 5,
        "output_len": 1,
        "session_id": "u",
        "think_time": 2,
    }
    path.write_text("\n".join(json.dumps(row | {"arrival_time": at}) for at in (3, 1)))
    trace = read_trace(path)
    assert trace.session_ids == ["u", "u"]
    assert trace.previous_turn.tolist() == [-1, 0]
    assert trace.think_ps.tolist() == [0, 2 * PS_PER_S]


# Options


@pytest.mark.parametrize(
    ("trace_format", "words"),
    [
        ("mooncake:blocksize=3", "option 'blocksize' is unknown: did you mean 'block_size'"),
        ("mooncake:block_size=x", "option block_size 'x': expected a whole number"),
        ("mooncake:block_size=", "option block_size '': expected a whole number"),
        ("mooncake:block_size=0", "option block_size '0': expected a whole number >= 1"),
        ("mooncake:block_size=2147483648", "expected a whole number <= 2147483647"),
        ("mooncake:block_size=256", "hash_ids has 3 ids: expected 6, one for each 256 tokens"),
        ("azure:gap=1", "option 'gap' is unknown: azure has none"),
        ("vidur:gap=nan", "option gap 'nan': expected a number"),
        ("claude_code:shared_prefix=7", "option shared_prefix '7': expected true or false"),
        ("timed_trace:label_timestamp=hash_ids", "options label_*: expected four keys"),
        ('timed_trace:label_timestamp="', "options label_*: expected keys without quotes"),
        ("timed_trace:sec_multiplier=-1", "option sec_multiplier '-1': expected a number > 0"),
        ("timed_trace:chunk_hash_size=0", "option chunk_hash_size '0': expected a whole number >="),
        ("sharegpt:bytes_per_token=65", "option bytes_per_token '65': expected a whole number <="),
        ("sharegpt:turns=-1", "option turns '-1': expected a whole number >= 0"),
        ("sharegpt:gap=1e300", "option gap '1e300': expected a number <= 9000000"),
        ("vidur:gap=-1", "option gap '-1': expected a number >= 0"),
        ("chat:sec_multiplier=1e308", "option sec_multiplier '1e308': expected a number <="),
    ],
)
def test_options_that_cannot_be(samples: Path, trace_format: str, words: str) -> None:
    path = samples / "mooncake.jsonl"
    with pytest.raises(TraceError) as refusal:
        read_trace(path, trace_format)
    assert str(refusal.value).startswith(f"{path}")
    assert words in str(refusal.value)


# What is no trace


RESULT = {"total_input_tokens": 1, "input_lens": [1], "output_lens": [1], "start_times": [0]}
SESSION = '{"id": "x", "block_size": 64, "tool_tokens": 0, "requests": [{"t": 0, "in": 70, "out": 1'
USER = '"messages": [{"role": "user"}]'
REFUSED: dict[str, tuple[str, str]] = {
    "deep nesting": ('{"hash_ids": [], "timestamp": 0, "z": ' + "[" * 200_000, "nested too deeply"),
    "deep array": ("[" * 200_000, "JSON array ends too early: truncated?"),
    "array without end": ('[{"conversations": []}', "JSON array ends too early"),
    "text behind an array": ('[{"conversations": []}] x', "text behind the end"),
    "nothing between commas": ('[{"conversations": []},,{}]', "truncated?"),
    "empty array": ("[]", "empty: expected at least one request"),
    "cut document": ('{\n"arrival_time": 1,\n', "truncated?"),
    "two results": ((json.dumps(RESULT) + "\n") * 2, "line 2: another result"),
    "a result without details": ('{"request_throughput": 2.0}', "start_times is missing"),
    "unequal lists": (json.dumps(RESULT | {"output_lens": []}), "have [0, 1] values"),
    "no output": (f'{{"timestamp": 0, {USER}}}', "response is missing"),
    "no time": (f'{{{USER}, "max_tokens": 1}}', "timestamp is missing: expected seconds since"),
    "odd time": (f'{{"created": "noon", {USER}, "max_tokens": 1}}', "created 'noon': expected"),
    "no delta": ('{"session_id": 1, "output_length": 1}', "input_length is missing: expected it"),
    "too many ids": (SESSION + ', "hash_ids": [1, 2]}]}', "hash_ids has 2 ids: expected 1"),
    "sub-agents without end": (
        '{"id": "x", "block_size": 64, "tool_tokens": 0, "requests": '
        + '[{"t": 0, "requests": ' * 90
        + "[]"
        + "}]" * 90
        + "}",
        "sub-agents within each other: expected up to 20",
    ),
    "a million segments and more": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ['
        + "1, " * (1 << 20)
        + "1]}",
        "expected array of length <= 1048576",
    ),
    "ids that are no ids": (SESSION + ', "hash_ids": [1.5]}]}', "hash_ids: "),
    "huge token ids": (
        '{"arrival_time": 0, "prompt_token_ids": [99999999999999999999], "output_len": 1}',
        "token ids: expected integers of 64 bits",
    ),
    "more ids than tokens": (
        '{"arrival_time_ns": 0, "input_toks": 2, "output_toks": 1, "input_tok_ids": [1]}',
        "input_tok_ids has 1 ids: expected input_toks, 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tmp_path: Path, case: str) -> None:
    content, words = REFUSED[case]
    path = tmp_path / "t"
    path.write_text(content)
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    message = str(refusal.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    assert words in message


MIB = 1 << 20
BOMBS: dict[str, tuple[Callable[[], Iterator[bytes]], str]] = {
    "line of a GiB": (lambda: itertools.repeat(b'{"a' + b"x" * MIB, 1024), "line of more than"),
    "blanks": (lambda: itertools.repeat(b" " * MIB, 1024), "empty: expected at least one"),
    "lines without end": (
        lambda: itertools.repeat(b"\n" * MIB, 1024),
        "empty: expected at least one",
    ),
    "a billion ids": (
        lambda: itertools.chain(
            [b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1'],
            itertools.repeat(b",1" * (MIB // 2), 1024),
        ),
        "line of more than",
    ),
    "an array of a GiB": (
        lambda: itertools.chain([b"["], itertools.repeat(b'"' + b"y" * MIB, 1024)),
        "JSON value of more than",
    ),
}


class _Endless(io.RawIOBase):
    """The pieces as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._pieces, b"")
        data, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize("case", BOMBS)
def test_what_would_fill_memory_is_refused(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    pieces, words = BOMBS[case]
    file = io.BufferedReader(_Endless(pieces()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=words):
            read_trace("-")
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_ITEM_BYTES
    finally:
        tracemalloc.stop()


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    row = b'{"arrival_time": 0, "input_length": 1,' + b" " * MIB + b'"output_len": 1}\n'
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(row * 100))
    with pytest.raises(TraceError, match="expands to more than 250 times its size"):
        read_trace(path)
    path.write_bytes(gzip.compress(row * 10))
    assert len(read_trace(path)) == 10


def test_turns_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"session_id": 1, "input_length": 1, "output_length": 1}\n' * 5000)
    monkeypatch.setattr("workloads.build.MAX_SEGMENTS", 1_000_000)
    with pytest.raises(TraceError, match=r"line \d+: more than 1,000,000 segments"):
        read_trace(path)
    said = ", ".join(['{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}'] * 1001)
    path.write_text(f'[{{"conversations": [{said}]}}]')
    assert len(read_trace(path, "sharegpt:turns=1000")) == 1000
    with pytest.raises(TraceError, match="more than 1,000 answers: expected option turns=N"):
        read_trace(path, "sharegpt:turns=0")


# Elements of an array, wherever blocks end

ARRAY = b'[{"a": "x]\\"},\\\\", "b": [1, {}]},\n\n  "y,\\\\" ,\n[[2], "\\u00e9"]\n,3 ]\n'


@pytest.mark.parametrize("size", range(1, 12))
def test_elements_do_not_depend_on_blocks(size: int) -> None:
    blocks = (ARRAY[i : i + size] for i in range(0, len(ARRAY), size))
    found = list(elements(blocks, 1 << 10))
    assert [json.loads(text) for _, text in found] == json.loads(ARRAY)
    assert [line for line, _ in found] == [1, 3, 4, 5]
