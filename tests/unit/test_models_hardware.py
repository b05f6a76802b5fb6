"""Models and GPUs by name."""

import re
from pathlib import Path

import msgspec
import pytest

from sim.errors import ConfigError
from sim.hardware import GIB, get_gpu, gpu_names
from sim.models import check_model, count_parameters, get_model, model_names, parameter_counts
from sim.timing.roofline import fitted_gpu_names


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "META-LLAMA/llama-3.1-8b", "Llama-3.1-8B", " llama-3.1-8b "]
)
def test_a_model_is_found_by_full_or_short_name_in_any_case(name: str) -> None:
    assert get_model(name).name == "meta-llama/Llama-3.1-8B"


def test_short_names_of_models_are_unambiguous() -> None:
    shorts = [name.rpartition("/")[2].lower() for name in model_names()]
    assert len(set(shorts)) == len(shorts)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("opt-13", "facebook/opt-13b"), ("LLAMA-3.1-8", "meta-llama/Llama-3.1-8B")],
)
def test_an_unknown_model_is_refused_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--model '{wrong}' is unknown; did you mean '{nearest}'"
    ):
        get_model(wrong)


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_a_source(name: str) -> None:
    assert get_model(name).source


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # billions, as the models' cards say
        ("Llama-3.1-8B", 8.03, 8.03),
        ("Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("DeepSeek-V2-Lite", 15.7, 2.7),  # the card's 2.4 leaves out one embedding
        ("DeepSeek-V3", 671, 37),
    ],
)
def test_parameters_are_those_that_the_cards_say(name: str, total: float, active: float) -> None:
    model = get_model(name)
    assert count_parameters(model) / 1e9 == pytest.approx(total, rel=5e-3)
    assert count_parameters(model, active=True) / 1e9 == pytest.approx(active, rel=2e-2)


def test_qwen3_30b_a3b_by_hand() -> None:
    model = get_model("Qwen3-30B-A3B-Instruct-2507")
    assert parameter_counts(model) == (
        2 * 151_936 * 2048,
        48 * 2 * 2048 * 4 * 128,
        48 * 2048 * 128,
        48 * (2 * 2048 * 32 * 128 + 128 * 3 * 2048 * 768),
    )
    assert count_parameters(model) == model.num_parameters == 30_531_911_680


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("opt-13b", {"num_hidden_layers": 0}, "num_hidden_layers 0: expected at least 1"),
        ("Llama-3.1-8B", {"num_key_value_heads": 5}, "num_attention_heads 32: expected a multiple"),
        ("Llama-3.1-8B", {"num_parameters": 8_039_000_000}, "the shapes imply 8029995008"),
        ("Llama-3.1-8B", {"num_experts_per_tok": 2}, "num_experts 0: expected at least 1"),
        ("Llama-3.1-8B", {"q_lora_rank": 512}, "kv_lora_rank 0: expected at least 1"),
        (
            "Mixtral-8x7B-v0.1",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok 9: expected at most",
        ),
        ("Mixtral-8x7B-v0.1", {"num_dense_layers": 32}, "num_dense_layers 32: expected fewer"),
        ("DeepSeek-V3", {"head_dim": 128}, "head_dim 128: expected qk_nope_head_dim + qk_rope"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(
    name: str, change: dict[str, int], message: str
) -> None:
    model = msgspec.structs.replace(get_model(name), **change)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_model(model)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("RTX-4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("rtx_4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("H100 SXM", "H100"),
        ("h200_sxm", "H200"),
        ("H200sxm5", "H200"),
        ("A100-SXM4-80GB", "A100-80"),
        ("A100 40 GB", "A100-40"),
        ("a100-80gb-pcie", "A100-80-PCIe"),
        ("gb200", "GB200"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelt(name: str, known: str) -> None:
    assert get_gpu(name).name == known


@pytest.mark.parametrize(
    ("name", "meant"),
    [("A100", "A100-40, A100-80, A100-80-PCIe"), ("a100_sxm", "A100-40, A100-80, A100-80-PCIe")],
)
def test_a_name_that_several_gpus_have_is_refused_with_those(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu '{name}' is ambiguous; expected one of {meant}"):
        get_gpu(name)


def test_the_start_of_a_word_is_not_a_name() -> None:
    """The A10 is another GPU than the A100, and than the A10G."""
    with pytest.raises(ConfigError, match="--gpu 'A10' is unknown; did you mean 'A10"):
        get_gpu("A10")


def test_every_gpu_is_found_by_its_own_name() -> None:
    assert [get_gpu(name).name for name in gpu_names()] == gpu_names()


def test_visible_memory_is_less_than_nominal() -> None:
    assert get_gpu("A100-80GB").memory_visible_bytes / GIB == pytest.approx(79.15)
    assert get_gpu("H100").memory_visible_bytes / GIB == pytest.approx(79.19)
    assert 139 < get_gpu("H200").memory_visible_bytes / GIB < 140.4


def test_an_unknown_gpu_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--gpu 'H1000' is unknown; did you mean 'H100'"):
        get_gpu("H1000")


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_plausible_peaks_and_a_source(name: str) -> None:
    gpu = get_gpu(name)
    assert 14 * GIB < gpu.memory_visible_bytes < 300 * GIB
    assert 0.29e12 < gpu.hbm_bandwidth < 10e12
    assert 60e12 < gpu.bf16_flops < 3000e12
    assert gpu.source
    assert gpu.l2_bytes is not None
    assert 4e6 <= gpu.l2_bytes <= 256e6
    assert gpu.num_sms is not None
    assert 40 <= gpu.num_sms <= 304
    for link, fastest in ((gpu.nvlink_bandwidth, 900e9), (gpu.pcie_bandwidth, 64e9)):
        assert link is None or 16e9 <= link <= fastest < gpu.hbm_bandwidth


def test_every_fitted_gpu_is_known() -> None:
    assert set(fitted_gpu_names()) <= set(gpu_names())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("memory_visible_gib = inf", "'memory_visible_gib': expected a number above 0, at most"),
        ("memory_visible_gib = 1e300", "'memory_visible_gib': expected a number above 0, at most"),
        ("memory_visible_gib = 80\nusd_per_hour = -1", "'usd_per_hour': expected 0 or more, got"),
        ("a = " + "[" * 20_000, "nested too deeply|not TOML"),
        ("#" * 100_001, "more than 100,000 bytes"),
    ],
)
def test_a_file_of_a_gpu_that_cannot_be_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "card.toml"
    path.write_text(f"{line}\nhbm_bandwidth = 1e12\nbf16_flops = 1e14\n")
    with pytest.raises(ConfigError, match=message):
        get_gpu(str(path))
