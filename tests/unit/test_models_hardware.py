"""Models and GPUs by name."""

import pytest

from sim.errors import ConfigError
from sim.hardware import GIB, get_gpu, gpu_names
from sim.models import get_model, model_names
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
def test_parameters_follow_from_the_shapes(name: str) -> None:
    """The row's count is that of its own shapes, norms and biases apart."""
    m = get_model(name)
    attention = m.hidden_size * m.head_dim * (2 * m.num_attention_heads + 2 * m.num_key_value_heads)
    mlp = (3 if m.gated_mlp else 2) * m.hidden_size * m.intermediate_size
    embeddings = (1 if m.tie_word_embeddings else 2) * m.vocab_size * m.hidden_size
    computed = m.num_hidden_layers * (attention + mlp) + embeddings
    assert computed == pytest.approx(m.num_parameters, rel=1e-3)
    assert m.source


@pytest.mark.parametrize("name", ["RTX-4090", "rtx 4090", "RTX4090", "rtx_4090"])
def test_a_gpu_is_found_however_it_is_spelt(name: str) -> None:
    assert get_gpu(name).memory_visible_bytes == 25_250_627_584


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
    assert 20 * GIB < gpu.memory_visible_bytes < 300 * GIB
    assert 0.5e12 < gpu.hbm_bandwidth < 10e12
    assert 100e12 < gpu.bf16_flops < 3000e12
    assert gpu.source
    assert gpu.l2_bytes is not None
    assert 40e6 <= gpu.l2_bytes <= 128e6
    for link, fastest in ((gpu.nvlink_bandwidth, 900e9), (gpu.pcie_bandwidth, 64e9)):
        assert link is None or 32e9 <= link <= fastest < gpu.hbm_bandwidth


def test_every_fitted_gpu_is_known() -> None:
    assert set(fitted_gpu_names()) <= set(gpu_names())
