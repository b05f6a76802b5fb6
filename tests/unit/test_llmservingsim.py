"""Profile folders of LLMServingSim: a made-up one, and a real one where it is at hand."""

import csv
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.errors import ConfigError, FileError
from sim.timing.attention import decode_time
from sim.timing.base import PS_PER_US
from sim.timing.importers.llmservingsim import read_profile
from sim.timing.table import TimingTable
from sim.timing.table_attention import TableAttention
from sim.timing.table_costs import curve_of

META = """\
profiler_version: 1.0.0
vllm_version: 0.19.0
hardware: RTX4090
profiled_at: '2026-01-02'
model: meta-llama/Llama-3.1-8B
variant: bf16
engine_effective: {block_size: 32}
"""
ATTENTION = """\
prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,0,0,1
0,0,1,16,10
0,0,1,64,12
0,0,2,16,11
0,0,2,64,15
0,0,4,16,14
16,0,0,0,20
16,64,0,0,24
64,0,0,0,30
16,0,1,16,21
16,0,1,32,22.5
16,0,1,64,23
16,0,2,16,22
64,0,1,16,31
64,0,1,64,33
64,0,2,16,32
64,0,2,64,36
"""
DENSE = "layer,tokens,time_us\nact_fn,1,2\nact_fn,64,4\nmystery,1,1\nlayernorm,1,3\n"
PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,100\nlm_head,8,110\nsampler,1,5\n"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of one and of two ranks; layers that are the same on both are in tp1 only."""
    folder = tmp_path / "hw" / "llama"
    for name in ("tp1", "tp2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "attention.csv").write_text(ATTENTION)
        (folder / name / "dense.csv").write_text(DENSE)
    (folder / "meta.yaml").write_text(META)
    (folder / "tp1" / "per_sequence.csv").write_text(PER_SEQUENCE)
    (folder / "tp2" / "dense.csv").write_text("layer,tokens,time_us\nact_fn,1,1.5\n")
    return folder


def _times(table: TimingTable, **equal: Any) -> list[float]:
    times: list[float] = table.where(**equal).columns["latency_us"].tolist()
    return times


def test_one_rank(profile: Path) -> None:
    table = read_profile(profile)
    info = table.info
    assert (info.gpu, info.model) == ("RTX-4090", "meta-llama/Llama-3.1-8B")
    assert (info.provenance, info.licence, info.date) == ("measured", "MIT", "2026-01-02")
    assert info.versions == {"vllm": "0.19.0", "profiler": "1.0.0"}
    assert "layer mystery of dense.csv left out: not known" in info.notes
    heads = ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "kv_dtype")
    attention = table.where(op="decode_attention")
    assert attention.distinct(*heads) == [(32, 8, 128, 32, "bfloat16", "bfloat16")]
    assert _times(table, op="decode_attention", batch=2) == [11, 15]
    assert _times(table, op="prefill_attention") == [20, 24, 30]
    assert _times(table, op="act_fn") == [2, 4]
    assert _times(table, op="lm_head") == [100, 110]


def test_two_ranks_have_half_the_heads_and_take_what_is_missing_from_tp1(profile: Path) -> None:
    table = read_profile(profile, tensor_parallel_size=2)
    assert table.info.tensor_parallel_size == 2
    assert table.where(op="decode_attention").distinct("num_heads", "num_kv_heads") == [(16, 4)]
    assert _times(table, op="act_fn") == [1.5]
    assert _times(table, op="layernorm") == [3]
    assert _times(table, op="sampler") == [5]
    assert len(read_profile(profile / "tp2", tensor_parallel_size=2)) == len(table)


def test_more_decodes_beside_a_chunk_than_were_measured_are_drawn_on(profile: Path) -> None:
    """4 decodes run alone only: the line through 1 and 2 beside a chunk goes on to them."""
    table = read_profile(profile)
    mixed = table.where(op="mixed_attention")
    measured = mixed.where(provenance="measured").columns["latency_us"]
    assert sorted(measured) == [21, 22, 22.5, 23, 31, 32, 33, 36]
    sizes = {"op": "mixed_attention", "query_len": 64, "context": 64}
    assert _times(table, **sizes) == [33, 36, 36 + 2 * 3]
    assert table.where(**sizes).columns["provenance"].tolist() == ["measured"] * 2 + ["fitted"]
    drawn_on = len(mixed) - len(measured)
    note = f"{drawn_on} rows of mixed_attention with more decodes than were measured"
    assert note in str(table.info.notes)


def test_holes_between_two_grids_are_filled_where_they_are_read(profile: Path) -> None:
    """Histories of 32 beside a chunk of 64 lie between those of 16 and 64."""
    attention = TableAttention(read_profile(profile))
    (low, middle, high) = (
        attention.step_time(((64, 64),), 1, 1 + history) for history in (16, 32, 64)
    )
    assert low is not None
    assert middle is not None
    assert high is not None
    assert middle == pytest.approx(low + (high - low) / 3)


def test_mean_keys_of_newer_profiles_become_histories(profile: Path) -> None:
    """A key is the history and half the chunk; shorter ones are of several prompts."""
    lines = [
        "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us",
        "attention,0,0,1,16,1,10",
        "attention,0,0,1,16,4,99",
        "linear_attention,64,32,0,0,1,99",
        "attention,64,16,0,0,1,20",
        "attention,64,48,0,0,1,30",
        "attention,64,96,0,0,1,33",
    ]
    (profile / "tp1" / "attention.csv").write_text("\n".join(lines))
    table = read_profile(profile)
    assert _times(table, op="decode_attention") == [10]
    chunks = table.where(op="prefill_attention")
    assert chunks.columns["query_context"].tolist() == [0, 16, 32, 64]
    assert chunks.columns["latency_us"].tolist() == [29, 30, 31, 33]
    assert "brought to equal histories" in str(table.info.notes)


def test_names_may_be_overruled(profile: Path) -> None:
    table = read_profile(profile, gpu="h100 sxm", model="Qwen3-8B")
    assert (table.info.gpu, table.info.model) == ("H100", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("with_ranks", [False, True])
def test_experts(profile: Path, with_ranks: bool) -> None:
    text = "tokens,activated_experts,time_us\n1,8,50\n64,128,90\n"
    if with_ranks:
        text = "tokens,activated_experts,ep,time_us\n1,8,1,50\n64,128,1,90\n64,64,2,70\n"
    (profile / "tp2" / "moe.csv").write_text(text)
    table = read_profile(profile, tensor_parallel_size=2, model="Qwen3-30B-A3B")
    names = ("n", "k", "num_experts", "top_k", "num_gpus", "num_tokens", "num_active_experts")
    rows = table.where(op="moe").distinct(*names)
    assert rows[:2] == [(384, 2048, 128, 8, 1, 1, 8), (384, 2048, 128, 8, 1, 64, 128)]
    assert rows[2:] == ([(768, 2048, 64, 8, 2, 64, 64)] if with_ranks else [])


def test_experts_of_a_model_that_has_none_are_left_out(profile: Path) -> None:
    (profile / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_us\n1,8,50\n")
    table = read_profile(profile)
    assert not len(table.where(op="moe"))
    assert "moe.csv left out: meta-llama/Llama-3.1-8B has no experts" in table.info.notes


def test_all_reduces_of_the_hardware_above(profile: Path) -> None:
    samples = (
        "[{collective: all_reduce, bytes: 4096, us: 12.5}, {collective: p2p, bytes: 1, us: 1}]"
    )
    text = f"measured: {{interconnect: {{npus: 2, samples: {samples}}}}}\n"
    (profile.parent / "hardware.yaml").write_text(text)
    table = read_profile(profile, tensor_parallel_size=2)
    names = ("num_gpus", "message_bytes", "latency_us")
    assert table.where(op="all_reduce").distinct(*names) == [(2, 4096, 12.5)]
    (profile.parent / "hardware.yaml").write_text("measured: {interconnect: {samples: [1]}}\n")
    with pytest.raises(FileError, match=r"hardware.yaml: measured.interconnect: .*expected npus"):
        read_profile(profile)


@pytest.mark.parametrize(
    ("npus", "samples", "message"),
    [
        (".inf", "bytes: 1, us: 1", "npus: expected a whole number, at least 1"),
        ("-2", "bytes: 1, us: 1", "npus: expected a whole number, at least 1"),
        ("2", "bytes: 100000000000000000000, us: 1", "sample 1: bytes: expected a whole number"),
        ("2", "bytes: .nan, us: 1", "sample 1: bytes: expected a whole number"),
        ("2", "bytes: [1], us: 1", "measured.interconnect: "),
        ("2", "bytes: 1, us: .nan", "sample 1: us: expected 1e-06 to 1e+12 microseconds"),
        ("2", "bytes: 1, us: -1", "sample 1: us: expected 1e-06 to 1e+12 microseconds"),
        (
            "2",
            "bytes: 1, us: 1}, {collective: all_reduce, bytes: 1, us: 2",
            "sample 2: all_reduce of 1 bytes is there twice",
        ),
    ],
)
def test_collectives_that_cannot_be_right_are_refused(
    profile: Path, npus: str, samples: str, message: str
) -> None:
    sample = f"{{collective: all_reduce, {samples}}}"
    text = f"measured: {{interconnect: {{npus: {npus}, samples: [{sample}]}}}}\n"
    (profile.parent / "hardware.yaml").write_text(text)
    with pytest.raises(FileError, match=re.escape(f"hardware.yaml: {message}")) as refusal:
        read_profile(profile)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "measured:\n", "measured: null\n"])
def test_an_empty_hardware_file_has_no_collectives(profile: Path, text: str) -> None:
    (profile.parent / "hardware.yaml").write_text(text)
    assert not len(read_profile(profile).where(op="all_reduce"))


def test_aliases_that_nest_are_not_followed(profile: Path) -> None:
    """Nine levels of nine: a billion of what is written in a line each."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]")
    bomb = "\n".join(lines) + "\n"
    (profile / "meta.yaml").write_text(bomb + META)
    assert len(read_profile(profile))
    for key in ("model", "variant", "profiled_at"):
        meta = re.sub(f"{key}: .*", f"{key}: *i", META)
        (profile / "meta.yaml").write_text(bomb + meta)
        with pytest.raises(FileError, match=f"meta.yaml: key {key}: a list; expected"):
            read_profile(profile)


def test_a_layer_whose_name_has_a_line_end_is_one_line(profile: Path) -> None:
    (profile / "tp1" / "dense.csv").write_text(DENSE + '"a\nb",1,1\n')
    assert r"layer 'a\nb' of dense.csv left out: not known" in read_profile(profile).info.notes


def test_a_byte_order_mark_does_not_matter(profile: Path) -> None:
    rows = len(read_profile(profile))
    for path in (profile / "tp1").iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert len(read_profile(profile)) == rows


def _line(name: str, number: int, text: str) -> Callable[[Path], object]:
    def change(profile: Path) -> None:
        path = profile / "tp1" / name
        lines = path.read_text().splitlines()
        lines[number - 1] = text
        path.write_text("\n".join(lines) + "\n")

    return change


def _fifo(name: str) -> Callable[[Path], object]:
    def change(profile: Path) -> None:
        (profile / name).unlink()
        os.mkfifo(profile / name)

    return change


def _meta(old: str, new: str) -> Callable[[Path], object]:
    return lambda profile: (profile / "meta.yaml").write_text(META.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_line("attention.csv", 4, "0,0,1,64"), "attention.csv, line 4: expected 5 values"),
        (_line("attention.csv", 4, "0,0,1,64,12,9"), "attention.csv, line 4: expected 5 values"),
        (_line("attention.csv", 4, "0,0,1,x,12"), "line 4, kv_decode: expected a whole number, at"),
        (_line("attention.csv", 4, "0,0,1,6.5,12"), "line 4, kv_decode: expected a whole number"),
        (_line("attention.csv", 4, "0,0,-1,64,12"), "line 4, n_decode: expected a whole number"),
        (_line("attention.csv", 4, "0,0,1,nan,12"), "line 4, kv_decode: expected a whole number"),
        (
            _line("attention.csv", 4, "0,0,1,64,0"),
            "line 4, time_us: expected 1e-06 to 1e+12 microsec",
        ),
        (_line("attention.csv", 4, "0,0,1,64,-2"), "line 4, time_us: expected 1e-06 to"),
        (_line("attention.csv", 4, "0,0,1,64,inf"), "line 4, time_us: expected 1e-06 to"),
        (_line("attention.csv", 4, "0,0,1,16,12"), "line 4: the same sizes as in line 3"),
        (_line("dense.csv", 3, "act_fn,1,2"), "dense.csv, line 3: the same sizes as in line 2"),
        (_line("dense.csv", 3, "act_fn,2,ms"), "dense.csv, line 3, time_us: expected 1e-06 to"),
        (
            _line("dense.csv", 1, "layer,time_us"),
            "dense.csv: no column tokens; expected layer, tok",
        ),
        (lambda p: (p / "tp1" / "attention.csv").write_text(""), "no column prefill_chunk, "),
        (lambda p: (p / "tp1" / "dense.csv").unlink(), "dense.csv: No such file or directory"),
        (lambda p: (p / "tp1" / "dense.csv").write_bytes(b"\xff\xfe"), "expected a CSV file of a"),
        (
            lambda p: (p / "meta.yaml").unlink(),
            "meta.yaml: No such file or directory; expected the",
        ),
        (_meta(META, "- 1"), "meta.yaml: expected keys and values, got a list"),
        (_meta(META, "a: [\n"), "meta.yaml: while parsing a flow node; expected the meta.yaml of"),
        (
            _meta("32}", "1000000000000000000000}"),
            "block_size is '1000000000000000000000'; expected",
        ),
        (_meta("32}", "[1]}"), "meta.yaml: block_size is 'a list'; expected a whole number"),
        (_meta("bf16", "fp4-kvint8"), "meta.yaml: key variant: 'fp4-kvint8'; expected one of bf16"),
        (_meta("bf16", "bf16-kvint8"), "meta.yaml: key variant: 'bf16-kvint8'; expected one of"),
        (_meta("model: meta-llama/Llama-3.1-8B", ""), "meta.yaml: no key model; expected its name"),
        (_meta("hardware: RTX4090", "hardware:"), "meta.yaml: no key hardware; expected its name"),
        (_meta(META, ""), "meta.yaml: no key model; expected its name there, or --model"),
        (_meta("0.19.0", "[a]"), "meta.yaml: key vllm_version: a list; expected printable text"),
        (_meta("0.19.0", r'"a\e[31m"'), r"key vllm_version: 'a\x1b[31m'; expected printable text"),
        (_meta(META, "x" * 10**6 + "\n"), "meta.yaml: more than 1,000,000 bytes; expected the met"),
        (_line("attention.csv", 2, "0,0,0,0,1e300"), "time_us: expected 1e-06 to 1e+12 microsec"),
        (_line("attention.csv", 2, f"{2**31},0,0,0,1"), "prefill_chunk: expected a whole number, "),
        (
            lambda p: (p / "tp1" / "attention.csv").write_text(ATTENTION.partition("\n")[0] + "\n"),
            "attention.csv: no decode and no chunk; expected a line of one",
        ),
        (_fifo("tp1/dense.csv"), "dense.csv: no regular file; expected a CSV file of a profile"),
        (_fifo("meta.yaml"), "meta.yaml: no regular file; expected the meta.yaml of a profile"),
        (_meta("32}", "x}"), "meta.yaml: block_size is 'x'; expected a whole number, at least 1"),
    ],
)
def test_files_that_are_not_as_described_are_refused(
    profile: Path, change: Callable[[Path], object], message: str
) -> None:
    change(profile)
    with pytest.raises(FileError, match=re.escape(message)) as refusal:
        read_profile(profile)
    assert str(profile) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        (_meta("RTX4090", "RTX4095"), 1, "--gpu 'RTX4095' is unknown; did you mean 'RTX-4090'?"),
        (_meta("RTX4090", "A100"), 1, "--gpu 'A100' is ambiguous; expected one of A100-40, "),
        (_meta("model: meta", "model: mata"), 1, "--model 'mata-llama/Llama-3.1-8B' is unknown"),
        (_meta("", ""), 4, "--tensor-parallel-size 4: "),
        (_meta("", ""), 3, "--tensor-parallel-size 3: meta-llama/Llama-3.1-8B has 32 attention"),
    ],
)
def test_names_and_numbers_that_it_does_not_have_are_refused(
    profile: Path, change: Callable[[Path], object], size: int, message: str
) -> None:
    change(profile)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_profile(profile, tensor_parallel_size=size)


def test_a_folder_of_other_ranks_is_refused(profile: Path) -> None:
    with pytest.raises(
        ConfigError, match="tp2 is of one of 2 ranks; expected --tensor-parallel-si"
    ):
        read_profile(profile / "tp2")


# ---- a real one


@pytest.fixture(scope="session")
def real(shared: Path) -> Path:
    folder = shared / "published" / "e2e_rtx4090" / "profile"
    if not folder.is_dir():
        pytest.skip(f"needs the profile in {folder}")
    return folder


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_real_profile_is_read_whole_and_priced_as_measured(real: Path) -> None:
    table = read_profile(real)
    lines = _lines(real / "attention.csv")
    layers = [*_lines(real / "dense.csv"), *_lines(real / "per_sequence.csv")]
    assert len(table.where(provenance="measured")) == len(lines) + len(layers)
    attention = table.where(kv_dtype="bfloat16")
    cost = TableAttention(attention)
    alone = [line for line in lines if line["prefill_chunk"] == "0"]
    assert len(alone) == 99
    for line in alone:
        batch, context = int(line["n_decode"]), int(line["kv_decode"])
        segments = cost.decode_segments(batch)
        time = decode_time(segments, batch * (context + 1))
        assert time == pytest.approx(float(line["time_us"]) * PS_PER_US, rel=0.02)  # dips are level
    mixed = [line for line in lines if line["prefill_chunk"] != "0"][::97]
    for line in mixed:
        chunk, before, batch, context = (int(line[name]) for name in list(line)[:4])
        time = cost.step_time(((chunk, before + chunk),), batch, batch * (context + 1))
        assert time == pytest.approx(float(line["time_us"]) * PS_PER_US)
    tokens = np.array([1.0, 64.0, 2048.0])
    curve = curve_of(table.where(op="gate_up_proj"), "num_tokens")
    measured = {
        float(line["tokens"]): float(line["time_us"])
        for line in layers
        if line["layer"] == "gate_up_proj"
    }
    assert curve.at_all(tokens) == pytest.approx([measured[t] * PS_PER_US for t in tokens])
