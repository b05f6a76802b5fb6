"""Profile folders of LLMServingSim, in the variations that are published."""

from pathlib import Path

import pytest

from sim.errors import FileError
from sim.timing.importers.llmservingsim import read_profile
from sim.timing.table import TimingTable

MOE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
ATTENTION = """\
prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,16,7
16,0,0,0,8
16,0,1,16,9
"""
DENSE = "layer,tokens,time_us\nqkv_proj,1,{}\nlayernorm,1,2\n"
PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,50\nsampler,1,5\n"
EXPERTS = "ep,tokens,activated_experts,time_us\n1,1,8,48\n2,1,4,36\n"


def _profile(folder: Path, *, variant: str = "bf16", engine: str = "") -> Path:
    (folder / "meta.yaml").write_text(
        f"hardware: RTXPRO6000\nmodel: {MOE}\nvariant: {variant}\n{engine}"
    )
    for tp, time in ((1, 40), (2, 25)):
        rank = folder / f"tp{tp}"
        rank.mkdir()
        (rank / "attention.csv").write_text(ATTENTION)
        (rank / "dense.csv").write_text(DENSE.format(time))
        (rank / "per_sequence.csv").write_text(PER_SEQUENCE)
    (folder / "tp1" / "moe.csv").write_text(EXPERTS)
    return folder


def _only(table: TimingTable, name: str) -> object:
    (value,) = set(table.columns[name].tolist())
    return value


def test_experts_of_expert_parallel_ranks_are_measured_once(tmp_path: Path) -> None:
    table = read_profile(_profile(tmp_path), tensor_parallel_size=2).where(op="moe", num_gpus=2)
    assert len(table) == 1
    assert _only(table, "latency_us") == 36
    assert _only(table, "num_experts") == 64
    assert _only(table, "n") == 768  # whole experts


def test_a_slice_of_experts_is_not_that_of_another_size(tmp_path: Path) -> None:
    table = read_profile(_profile(tmp_path), tensor_parallel_size=2)
    assert len(table.where(op="moe", num_gpus=1, n=768 // 2)) == 0


def test_more_ranks_than_experts_are_refused_with_the_line(tmp_path: Path) -> None:
    folder = _profile(tmp_path)
    for ep, message in ((1000, "1000 ranks; expected at most the 128 experts"), (-1, "expected a")):
        (folder / "tp1" / "moe.csv").write_text(EXPERTS + f"{ep},1,4,36\n")
        with pytest.raises(FileError, match=rf"moe.csv, line 4, ep: {message}"):
            read_profile(folder)


def test_layers_are_those_of_the_rank(tmp_path: Path) -> None:
    folder = _profile(tmp_path)
    times = [
        _only(read_profile(folder, tensor_parallel_size=tp).where(op="qkv_proj"), "latency_us")
        for tp in (1, 2)
    ]
    assert times == [40, 25]


@pytest.mark.parametrize(
    ("engine", "block_size"),
    [
        ("", 16),
        ("engine_effective: {block_size: 32}", 32),
        ("engine_effective: {}\nengine_resolved: {per_tp: {'1': {block_size: 128}}}", 128),
        ("engine_resolved: {per_tp: {1: {block_size: 64}}}", 64),
    ],
)
def test_block_size_is_what_the_engine_ended_up_with(
    tmp_path: Path, engine: str, block_size: int
) -> None:
    table = read_profile(_profile(tmp_path, engine=engine))
    assert _only(table.where(op="decode_attention"), "block_size") == block_size


@pytest.mark.parametrize(
    ("variant", "kv_dtype"), [("bf16", "bfloat16"), ("bf16-kvfp8", "fp8"), ("null", "bfloat16")]
)
def test_type_of_the_kv_cache_is_in_the_name(tmp_path: Path, variant: str, kv_dtype: str) -> None:
    table = read_profile(_profile(tmp_path, variant=variant))
    assert _only(table, "dtype") == "bfloat16"
    assert _only(table, "kv_dtype") == kv_dtype
