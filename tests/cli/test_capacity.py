"""``kvsim capacity``: a card, what it holds, and what would hold more."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Kvsim
from tests.unit.test_imports import _imported

H100 = ("--gpu", "H100", "--max-model-len", "8192")


def answer(kvsim: Kvsim, *arguments: str | Path) -> dict[str, Any]:
    done = kvsim("capacity", "--json", *arguments)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_prints_vllm_s_line_the_card_and_what_it_holds(kvsim: Kvsim) -> None:
    done = kvsim("capacity", *H100, "--mean-len", "2000", "--prefix-len", "500")
    lines = done.out.splitlines()
    assert done.code == 0
    assert lines[0].startswith("GPU KV cache size: ")
    assert "Maximum concurrency for 8,192 tokens per request: " in lines[0]
    assert [line[0] for line in lines[4:10]] == ["W", "a", "n", "g", "K", "."]
    bar = next(line for line in lines if line.startswith("["))
    assert len(bar) == 74
    assert set(bar) == set("[WangK.]")
    assert any(line.startswith("prefix ") for line in lines)
    assert lines[-1].startswith("binding: memory (memory holds ")


def test_the_card_adds_up_and_so_do_the_percentages(kvsim: Kvsim) -> None:
    found = answer(kvsim, *H100)
    shares = found["breakdown"]
    assert sum(share["bytes"] for share in shares) == found["gpu_memory_visible_bytes"]
    assert sum(share["percent"] for share in shares) == pytest.approx(100)


def test_run_has_the_same_pool(kvsim: Kvsim, samples: Path) -> None:
    flags = (*H100, "--vllm-version", "0.19", "--gpu-memory-utilization", "0.8")
    trace = ("--trace", samples / "tokens.jsonl")
    ours = answer(kvsim, *flags)
    done = kvsim("run", "--json", "--allocator", "paged", *trace, *flags)
    assert json.loads(done.out)["kv_cache_slots"] == (ours["num_gpu_blocks"] - 1) * 16


def test_concurrency_by_hand(kvsim: Kvsim) -> None:
    """1,000 usable blocks; 100 tokens are 7 blocks, 40 of them share 2."""
    flags = ("--num-gpu-blocks-override", "1001", "--max-model-len", "1024")
    found = answer(kvsim, *flags, "--mean-len", "100", "--prefix-len", "40")
    held = found["concurrency"]
    assert held["reserve_max"] == 16_000 // 1024
    assert held["paged"] == pytest.approx(1000 / 7)
    assert held["prefix"] == pytest.approx((1000 - 2) / 5)
    assert found["hand_estimate"] is None
    assert found["binding"].startswith("memory (memory holds 199.6, --max-num-seqs is 256)")
    few = answer(kvsim, *flags, "--mean-len", "100", "--max-num-seqs", "8")
    assert few["binding"].startswith("max_num_seqs (memory holds 142.9, --max-num-seqs is 8)")


def test_a_trace_has_lengths_of_its_own(kvsim: Kvsim, tmp_path: Path) -> None:
    """Each holds prompt and half its output, for as long as it generates."""
    trace = tmp_path / "two.jsonl"
    trace.write_text(
        '{"arrival_time": 0, "input_length": 100, "output_len": 10}\n'
        '{"arrival_time": 1, "input_length": 400, "output_len": 30}\n'
    )
    flags = ("--num-gpu-blocks-override", "1001", "--max-model-len", "420")
    found = answer(kvsim, *flags, "--trace", trace)
    tokens = (10 * (100 + 5.5) + 30 * (400 + 15.5)) / 40
    assert found["lengths"]["tokens"] == pytest.approx(tokens)
    assert found["concurrency"]["paged"] == pytest.approx(1000 * 16 / (tokens + 7.5))
    assert found["notes"] == [
        "the longest request has 430 tokens, max_model_len is 420: it is cut or refused"
    ]
    both = kvsim("capacity", *flags, "--trace", trace, "--mean-len", "100")
    assert both.code == 2
    assert "--mean-len and --trace both say" in both.err


def test_the_hand_estimate_of_the_tutorial_beside_the_exact_one(kvsim: Kvsim) -> None:
    """80 GB, 40 GB of weights, 0.9, 4K: 0.9 of the 40 GB left are 36, of all 80 less 40 are 32.

    A model of 20.6 GiB of weights a GPU stands in; the estimate is above vLLM's pool by 0.1 of the
    weights, and by activation and the rest.
    """
    flags = ("--model", "Llama-3.1-70B", "-tp", "4", "--gpu", "H100", "--mean-len", "4096")
    found = answer(
        kvsim, *flags, "--gpu-memory-utilization", "0.9", "--max-model-len", "4096",
    )  # fmt: skip
    shares = {share["name"]: share["bytes"] for share in found["breakdown"]}
    visible = found["gpu_memory_visible_bytes"]
    estimate = found["hand_estimate"]["bytes"]
    assert estimate == pytest.approx(0.9 * (visible - shares["weights"]), abs=1)
    rest = shares["peak activation"] + shares["non-torch"] + shares["CUDA graphs"]
    too_much = estimate - shares["KV cache"]
    assert too_much == pytest.approx(0.1 * shares["weights"] + rest, abs=2)
    assert found["hand_estimate"]["requests"] > found["concurrency"]["paged"]


def test_users_are_held_by_what_the_options_say(kvsim: Kvsim) -> None:
    flags = (*H100, "--mean-len", "2000")
    found = answer(kvsim, *flags, "--users", "500")
    by_flags = {(o["tensor_parallel_size"], o["kv_cache_dtype"]): o for o in found["options"]}
    assert by_flags[1, "auto"]["utilization"] is None
    assert by_flags[1, "auto"]["replicas"] == 3
    assert by_flags[1, "auto"]["usd_per_hour"] == 3 * 4.5
    fp8 = by_flags[1, "fp8"]
    for utilization, holds in ((fp8["utilization"], True), (fp8["utilization"] - 0.01, False)):
        tried = answer(
            kvsim, *flags, "--kv-cache-dtype", "fp8", "--gpu-memory-utilization",
            f"{utilization:.2f}",
        )  # fmt: skip
        assert (tried["concurrency"]["paged"] >= 500) == holds
    two = answer(kvsim, *flags, "-tp", "2")
    assert by_flags[2, "auto"]["held"] == int(two["concurrency"]["paged"])


def test_graphs_that_an_old_version_leaves_no_room_for_are_told(kvsim: Kvsim) -> None:
    flags = (*H100, "--vllm-version", "0.19", "--gpu-memory-utilization")
    assert "(fitted) after it has sized the pool" in answer(kvsim, *flags, "0.95")["notes"][0]
    assert "out of memory is likely" not in answer(kvsim, *flags, "0.95")["notes"][0]
    assert answer(kvsim, *flags, "0.995")["notes"][0].endswith("out of memory is likely")
    assert answer(kvsim, *flags, "0.995", "--enforce-eager")["notes"] == []


@pytest.mark.parametrize(
    ("version", "utilization", "shares"),
    [("0.33", 0.92, 6), ("0.19", 0.9, 5), ("0.11", 0.9, 5)],
)
def test_versions(kvsim: Kvsim, version: str, utilization: float, shares: int) -> None:
    found = answer(kvsim, *H100, "--vllm-version", version)
    assert found["gpu_memory_utilization"] == utilization
    assert len(found["breakdown"]) == shares


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("-tp 3", 2, "32 attention heads that cannot be shared equally by 3 GPUs"),
        ("-tp 5 --model Qwen/Qwen3-14B", 2, "151936 rows of the padded vocabulary"),
        ("--model opt-13b --max-model-len 8192", 2, "is beyond facebook/opt-13b"),
        ("--model opt-13b --gpu RTX-4090", 1, "weights do not fit, 2.30 GiB short"),
        ("--model opt-13b --gpu RTX-4090", 1, "what fits on RTX-4090: -tp 2 --kv-cache-dtype auto"),
        ("--gpu RTX-4090", 1, "16.00 GiB of KV cache are needed, which is more than the 5."),
        ("--model DeepSeek-V3 --gpu T4", 1, "what fits on T4: none of -tp 1, 2, 4, 8"),
        ("--users 0", 2, "--users 0: expected from 1 to 1,000,000,000"),
        ("--mean-len many", 2, "--mean-len: expected a whole number"),
        ("--mean-len 200000", 2, "expected at most --max-model-len 131072"),
        ("--mean-len 16 --prefix-len 16", 2, "expected less than the 16 tokens"),
        ("--allocator paged", 2, "No such option"),
    ],
)
def test_refusals(kvsim: Kvsim, flags: str, code: int, words: str) -> None:
    done = kvsim("capacity", *flags.split())
    assert (done.code, words in done.refusal) == (code, True), done.err


def test_a_gpu_of_one_s_own(kvsim: Kvsim, tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_text("memory_visible_gib = 47.5\nhbm_bandwidth = 1e12\nbf16_flops = 2e14\n")
    found = answer(kvsim, "--gpu", card, "--max-model-len", "8192")
    assert (found["gpu"], found["gpu_memory_visible_bytes"]) == ("card", int(47.5 * 2**30))
    found = answer(kvsim, "--gpu", "A100-40", "--gpu-memory-gib", "47.5", "--max-model-len", "8192")
    assert found["gpu_memory_visible_bytes"] == int(47.5 * 2**30)
    for text, words in (
        ("memory = 1", "key 'memory' is unknown; did you mean"),
        ("hbm_bandwidth = 1e12", "key 'memory_visible_gib': expected a number above 0"),
        ("= 1", "not TOML"),
    ):
        card.write_text(text)
        done = kvsim("capacity", "--gpu", card)
        assert (done.code, words in done.err) == (2, True), done.err
    assert kvsim("capacity", "--gpu", tmp_path / "none.toml").code == 1


def test_imports_little() -> None:
    heavy = {"numpy", "pandas", "matplotlib", "pyarrow", "simpy", "tqdm", "tabulate"}
    imported = _imported("capacity", *H100, "--users", "500")
    assert not imported & heavy


@pytest.mark.parametrize(
    ("model", "flags", "line"),
    [
        (
            "gemma-2-27b-it",
            ("--kv-cache-memory-bytes", str(round(20.594 * 2**30)), "--vllm-version", "0.19"),
            "GPU KV cache size: 58,672 tokens, Maximum concurrency for 8,192 tokens per request: "
            "7.16x",
        ),
        (
            "gpt-oss-20b",
            ("--num-gpu-blocks-override", "1000", "--max-num-batched-tokens", "1024"),
            "GPU KV cache size: 12,622 tokens, Maximum concurrency for 8,192 tokens per request: "
            "1.54x",
        ),
    ],
)
def test_windows_have_block_tables_of_their_own(
    kvsim: Kvsim, model: str, flags: tuple[str, ...], line: str
) -> None:
    """Gemma: as a server logged; gpt-oss: 512 blocks of the full layers, 137 of the window."""
    done = kvsim("capacity", "--model", model, *H100, "--max-num-batched-tokens", "8192", *flags)
    assert done.out.splitlines()[0] == line
    assert "block tables from one pool" in done.err


def test_states_take_blocks_whatever_the_length(kvsim: Kvsim) -> None:
    flags = ("--model", "Qwen3-Next-80B-A3B-Instruct", "--gpu", "H100", "-tp", "4")
    short = answer(kvsim, *flags, "--mean-len", "1")
    states = [table for table in short["block_tables"] if table["kind"] == "state"]
    assert short["lengths"]["blocks"] == 1 + 2 * len(states)


def test_compressed_layers_have_five_block_tables(kvsim: Kvsim) -> None:
    flags = ("--model", "DeepSeek-V4-Pro", "--gpu", "H200", "-tp", "8")
    found = answer(kvsim, *flags)
    assert len(found["block_tables"]) == 5
    assert found["block_size"] == 256
    pages = 30 * (37_440 + 8_640) + 31 * 1_728
    assert found["num_gpu_blocks"] == found["kv_cache_bytes"] // pages
    done = kvsim("capacity", *flags, "-pp", "2")
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith("stages of compressed layers are not modelled")


def test_the_stage_with_least_room_decides(kvsim: Kvsim) -> None:
    """As two stages of a server on H100 logged: 1,075,312 tokens, 131.26x."""
    flags = (*H100, "-pp", "2", "--gpu-memory-utilization", "0.95", "--vllm-version", "0.19")
    found = answer(kvsim, *flags, "--max-model-len", "8192", "--users", "200")
    assert found["num_gpu_blocks"] * 16 == pytest.approx(1_075_312, rel=0.001)
    assert "stage 2 of 2 has least room" in found["kv_pool_provenance"]
    assert {option["gpus"] % 2 for option in found["options"]} == {0}
    done = kvsim("capacity", *flags, "-pp", "99")
    assert done.code == 2
    assert done.err.strip() == (
        "kvsim: --pipeline-parallel-size 99: expected at most 32, the layers there are"
    )
    assert kvsim("run", "-pp", "2").err.strip().endswith("expected 1, or kvsim capacity")


def test_dtype_and_quantization_size_weights_and_cache(kvsim: Kvsim) -> None:
    def sizes(*flags: str) -> tuple[int, float]:
        found = answer(kvsim, *H100, *flags)
        weights = next(s["bytes"] for s in found["breakdown"] if s["name"] == "weights")
        return weights, found["kv_cache_bytes"] / found["num_gpu_blocks"] / 16

    weights, token = sizes()
    assert sizes("--dtype", "half") == (weights, token)
    wide, twice = sizes("--dtype", "float32")
    assert wide == 2 * weights
    assert twice == pytest.approx(2 * token, rel=1e-3)
    loaded, same = sizes("--quantization", "fp8")
    embeddings = 2 * 2 * 128_256 * 4096
    assert loaded == embeddings + (weights - embeddings) // 2
    assert same == pytest.approx(token, rel=1e-3)
    done = kvsim("capacity", *H100, "--model", "gpt-oss-20b", "--quantization", "fp8")
    assert done.code == 2
    assert "are quantized already; expected a checkpoint in 16 bits" in done.err
