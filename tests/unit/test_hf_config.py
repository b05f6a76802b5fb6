"""Configurations of our own making: every quirk by itself, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.errors import ConfigError
from sim.hf_config import read_config, spec_of
from sim.kv_layout import fixed_bytes_per_request, kv_bytes_per_token_longctx
from sim.kv_spec import weight_bytes
from sim.model_spec import ModelSpec
from sim.models import get_model

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
TOKEN = 2 * 2 * 64 * 2
"""Bytes of a token in one layer of `SMALL`."""


def _read(change: dict[str, Any] | None = None, *without: str) -> ModelSpec:
    values = {**SMALL, **(change or {})}
    return spec_of(
        {key: value for key, value in values.items() if key not in without},
        name="small",
        where="--model small",
    )


def _per_token(change: dict[str, Any] | None = None, *without: str) -> int:
    return kv_bytes_per_token_longctx(_read(change, *without).layout)


def test_a_plain_model_is_as_a_preset_has_it() -> None:
    model = _read()
    assert model.kv_layout is None
    assert model.weights == ()
    assert model.num_parameters == 2 * 1000 * 512 + 4 * (
        2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024
    )
    assert model.note == ""
    assert kv_bytes_per_token_longctx(model.layout) == 4 * TOKEN


NAMES = {
    "hidden_size": ["n_embd", "n_embed", "d_model", "model_dim"],
    "num_hidden_layers": ["n_layer", "n_layers", "num_layers", "num_transformer_layers"],
    "num_attention_heads": ["n_head", "n_heads", "num_query_heads"],
    "num_key_value_heads": [
        "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num", "num_attention_groups",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("usual", "other"), [(usual, other) for usual, others in NAMES.items() for other in others]
)
def test_other_names(usual: str, other: str) -> None:
    assert _per_token({other: SMALL[usual]}, usual) == 4 * TOKEN


@pytest.mark.parametrize(
    ("change", "without", "layers"),
    [
        ({}, ["num_key_value_heads"], 4 * 4),  # as many as query heads
        ({"num_key_value_heads": None}, [], 4 * 4),
        ({"head_dim": None}, [], 4),
        ({"head_dim": 128}, [], 8),
        ({"multi_query": True}, [], 2),
        ({"multi_query": True, "new_decoder_architecture": True}, [], 4),
        ({"multi_query": True, "num_kv_heads": 8}, ["num_key_value_heads"], 2),
        ({"attn_config": {"kv_n_heads": 4}}, [], 8),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, [], 2),
        ({"num_kv_heads": [1, 2, 3, 4]}, ["num_key_value_heads"], 5),
        ({"num_key_value_heads_per_layer": [1, 1, 1, 1]}, [], 2),
        ({"head_dim": [64, 64, 32, 32]}, [], 3),
        ({"num_kv_shared_layers": 1}, [], 3),
        ({"use_cla": True, "cla_share_factor": 2}, [], 2),
        ({"hidden_size": "512", "num_hidden_layers": " 4 "}, [], 4),
        ({"num_hidden_layers": 4.0}, [], 4),
        ({"sliding_window": False}, [], 4),
        ({"sliding_window": 8192}, [], 4),  # longer than any sequence
        ({"v_head_dim": 32}, [], 3),
        ({"torch_dtype": "float32"}, [], 4),
        ({"torch_dtype": "torch.float16"}, [], 4),
        ({"dtype": "bfloat16"}, ["torch_dtype"], 4),
        ({}, ["torch_dtype"], 4),
    ],
)  # fmt: skip
def test_heads_and_dtypes(change: dict[str, Any], without: list[str], layers: float) -> None:
    assert _per_token(change, *without) == layers * TOKEN


HALF = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("change", "full", "window"),
    [
        ({"sliding_window": 128}, 0, 128),
        ({"sliding_window": 128, "layer_types": HALF}, 2, 128),
        ({"sliding_window": 128, "sliding_window_pattern": 4}, 1, 128),
        ({"sliding_window": 128, "sliding_window_pattern": "LLLG"}, 1, 128),
        ({"sliding_window": 128, "model_type": "gemma2"}, 2, 128),
        ({"sliding_window": [128, None]}, 2, 128),
        ({"sliding_window": 128, "use_sliding_window": False}, 4, 0),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, 3, 128),
        ({"sliding_window": 128, "model_type": "qwen2"}, 4, 0),
        ({"sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1]}, 1, 128),
        ({"attention_chunk_size": 128}, 1, 128),
        ({"attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 0]}, 2, 128),
        ({"attention_chunk_size": 128, "no_rope_layers": []}, 1, 128),
    ],
)
def test_windows(change: dict[str, Any], full: int, window: int) -> None:
    layout = _read(change).layout
    assert kv_bytes_per_token_longctx(layout) == full * TOKEN
    assert fixed_bytes_per_request(layout) == (4 - full) * window * TOKEN


def test_global_layers_may_have_heads_of_their_own() -> None:
    change = {
        "sliding_window": 128,
        "layer_types": HALF,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
    }
    layout = _read(change).layout
    assert kv_bytes_per_token_longctx(layout) == 2 * TOKEN
    assert fixed_bytes_per_request(layout) == 2 * 128 * TOKEN
    of_windows: dict[str, Any] = {
        "sliding_window": 128,
        "layer_types": HALF,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
    }
    assert fixed_bytes_per_request(_read(of_windows).layout) == 2 * 128 * TOKEN


MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 8, "mamba_d_conv": 4}
MAMBA_STATE = 16 * 64 * 8 * 2 + (1024 + 2 * 8) * 3 * 2
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
DELTA_STATE = 4 * 16 * 16 * 2 + (2 * 2 * 16 + 4 * 16) * 3 * 2


@pytest.mark.parametrize(
    ("change", "full", "state"),
    [
        ({"attn_layer_indices": [1], **MAMBA}, 1, 3 * MAMBA_STATE),
        ({"attn_layer_period": 2, "attn_layer_offset": 1, **MAMBA}, 2, 2 * MAMBA_STATE),
        ({"layer_types": ["mamba", "attention", "mamba", "mamba"], **MAMBA}, 1, 3 * MAMBA_STATE),
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"], **MAMBA}, 1, MAMBA_STATE),
        ({"hybrid_override_pattern": "M*-E", **MAMBA}, 1, MAMBA_STATE),
        ({"hybrid_override_pattern": "M*-E", **MAMBA, "mamba_ssm_cache_dtype": "float32"},
         1, MAMBA_STATE + 16 * 64 * 8 * 2),
        ({"mamba_d_ssm": 1024, **MAMBA}, 4, 4 * MAMBA_STATE),
        ({"full_attention_interval": 4, **DELTA}, 1, 3 * DELTA_STATE),
        ({"full_attention_interval": 2, **DELTA, "mamba_ssm_dtype": "torch.float32"},
         2, 2 * (DELTA_STATE + 4 * 16 * 16 * 2)),
        ({"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
         1, 3 * 2 * 512 * 2),
    ],
)  # fmt: skip
def test_states(change: dict[str, Any], full: int, state: int) -> None:
    layout = _read(change).layout
    assert kv_bytes_per_token_longctx(layout) == full * TOKEN
    assert fixed_bytes_per_request(layout) == state


LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize("first", [0, 1])
def test_lists_of_layers_count_from_zero_or_one(first: int) -> None:
    linear = {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [first + 1],
        "kda_layers": [first, first + 2, first + 3],
    }
    layout = _read({**LATENT, "linear_attn_config": linear}).layout
    assert kv_bytes_per_token_longctx(layout) == 80 * 2
    assert fixed_bytes_per_request(layout) == 3 * (4 * 16 * 16 * 4 + 3 * 64 * 3 * 2)


def test_an_indexer_is_a_cache_more() -> None:
    change: dict[str, Any] = {**LATENT, "index_head_dim": 128, "index_topk": 64, "index_n_heads": 4}
    assert _per_token(change) == 4 * (80 * 2 + 132)
    change["indexer_types"] = ["full", "shared", "shared", "full"]
    assert _per_token(change) == 4 * 80 * 2 + 2 * 132
    sparse = {"sparse_index_dim": 32, "sparse_attention_freq": [0, 1, 1, 1]}
    assert _per_token({"sparse_attention_config": sparse}) == 4 * TOKEN + 3 * 32 * 2


def test_searched_blocks() -> None:
    blocks = [
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        {"attention": {"num_key_value_heads": 4}, "ffn": {"intermediate_size": 256}},
        {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
    ]
    model = _read({"block_configs": blocks, "num_key_value_heads": None})
    assert kv_bytes_per_token_longctx(model.layout) == TOKEN + 2 * TOKEN
    mlps = next(part for part in model.weights if part.name == "mlp")
    assert mlps.elements == 3 * 512 * (512 + 0 + 256 + 171)


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_language_models_inside_others(name: str) -> None:
    outer = {"model_type": "both", "vision_config": {"hidden_size": 7}, name: SMALL}
    model = spec_of(outer, name="x", where="--model x")
    assert kv_bytes_per_token_longctx(model.layout) == 4 * TOKEN
    twice = spec_of({"thinker_config": outer}, name="x", where="--model x")
    assert kv_bytes_per_token_longctx(twice.layout) == 4 * TOKEN
    inner = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    kept = spec_of({name: inner, "vocab_size": 99}, name="x", where="--model x")
    assert kept.vocab_size == 99


def test_layers_are_counted_where_their_number_is_missing() -> None:
    change = {"layers_block_type": ["mamba", "attention", "moe"], **MAMBA}
    model = _read(change, "num_hidden_layers")
    assert model.num_hidden_layers == 3
    assert "num_hidden_layers is missing: 3, as many as layers_block_type has" in model.note


LINEARS = 4 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024)
ATTENTION = 4 * (2 * 512 * 512 + 2 * 512 * 128)
EMBEDDINGS = 2 * 1024 * 512  # padded to a multiple of 64
GROUP = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": GROUP}, 4 + 16 / 128),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "from-the-future"}, 16),
    ],
)
def test_weights_of_quantized_models(quantization: dict[str, Any], bits: float) -> None:
    model = _read({"quantization_config": quantization})
    assert weight_bytes(model) == pytest.approx(EMBEDDINGS * 2 + LINEARS * bits / 8, rel=1e-6)


def test_what_is_left_alone_stays_in_sixteen_bits() -> None:
    attention, mlps = ATTENTION, LINEARS - ATTENTION
    for ignore, kept in (
        (["lm_head"], 0.0),
        (["re:.*self_attn.*"], attention),
        ([f"model.layers.{i}.self_attn*" for i in range(2)], attention / 2),
        (["model.layers.3.mlp.down_proj", "model.layers.3.mlp.up_proj"], mlps / 4),
        (["model.visual*", "re:(a+)+$"], 0.0),
    ):
        model = _read({"quantization_config": {"quant_method": "fp8", "ignore": ignore}})
        want = EMBEDDINGS * 2 + LINEARS + kept
        assert weight_bytes(model) == pytest.approx(want, rel=1e-6), ignore


def test_matrices_named_with_their_bits() -> None:
    layers = {f"model.layers.{i}.mlp.up_proj": {"quant_algo": "NVFP4"} for i in range(4)}
    attention = {f"model.layers.{i}.self_attn.q_proj": {"quant_algo": "FP8"} for i in range(4)}
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers | attention}
    want = EMBEDDINGS * 2 + ATTENTION + (LINEARS - ATTENTION) * 4.5 / 8
    assert weight_bytes(_read({"quantization_config": config})) == pytest.approx(want, rel=1e-6)
    groups = {
        "group_0": {"targets": list(attention), "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {
            "targets": list(layers),
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        },
    }
    config = {"quant_method": "modelopt", "config_groups": groups}
    assert weight_bytes(_read({"quantization_config": config})) == pytest.approx(want, rel=1e-6)


def test_experts_alone_are_in_four_bits() -> None:
    change = {"num_local_experts": 8, "num_experts_per_tok": 2}
    plain, packed = (
        _read(change),
        _read({**change, "quantization_config": {"quant_method": "mxfp4"}}),
    )
    experts = 4 * 8 * 3 * 512 * 1024
    assert plain.weights == ()
    assert plain.num_experts == 8
    saved = weight_bytes(plain) - weight_bytes(packed)
    assert saved == pytest.approx(experts * (16 - 4.25) / 8)


@pytest.mark.parametrize(
    "scheme",
    ["FP8", "fp8", {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float", "x": 1}],
)
def test_a_cache_made_for_fp8_is_fp8_by_default(scheme: object) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": scheme}}
    layout = _read(config).layout
    assert kv_bytes_per_token_longctx(layout) == 4 * TOKEN // 2
    assert kv_bytes_per_token_longctx(layout, kv_cache_dtype="bfloat16") == 4 * TOKEN


@pytest.mark.parametrize("scheme", [None, "none", {"num_bits": 4, "type": "int"}, [], 7])
def test_another_scheme_leaves_the_cache_as_it_is(scheme: object) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": scheme}}
    assert _per_token(config) == 4 * TOKEN


def test_what_is_assumed_is_said() -> None:
    note = _read({"model_type": "novel"}, "torch_dtype", "max_position_embeddings").note
    assert "model_type 'novel' is unknown" in note
    assert "dtype is missing: bfloat16 assumed" in note
    assert "max_position_embeddings is missing: 2048 tokens assumed" in note


def test_weights_that_cannot_be_counted_are_refused_when_needed() -> None:
    model = _read(None, "vocab_size", "intermediate_size")
    assert kv_bytes_per_token_longctx(model.layout) == 4 * TOKEN
    with pytest.raises(ConfigError, match="vocab_size, intermediate_size missing"):
        weight_bytes(model)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16_384),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}, 16_384),
        ({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8192}, 4096),
        ({"type": "yarn", "factor": "large"}, 4096),
    ],
)
def test_longest_context(scaling: dict[str, Any] | None, longest: int) -> None:
    assert _read({"rope_scaling": scaling}).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("change", "without", "message"),
    [
        ({}, ["hidden_size"], "hidden_size is missing"),
        ({}, ["num_hidden_layers"], "num_hidden_layers is missing"),
        ({}, ["num_attention_heads"], "num_attention_heads is missing"),
        ({"num_attention_heads": 7}, [], "head_dim is missing and hidden_size 512 is no multiple"),
        ({"num_hidden_layers": 0}, [], "num_hidden_layers 0: expected a whole number of at least"),
        ({"num_hidden_layers": -4}, [], "num_hidden_layers -4: expected"),
        ({"num_hidden_layers": 10**9}, [], "at most 10000"),
        ({"hidden_size": 10**400}, [], "hidden_size 'far too large': expected"),
        ({"hidden_size": 512.5}, [], "hidden_size 512.5: expected a whole number"),
        ({"hidden_size": float("nan")}, [], "hidden_size nan: expected a whole number"),
        ({"hidden_size": float("inf")}, [], "hidden_size inf: expected a whole number"),
        ({"hidden_size": "4k"}, [], "hidden_size '4k': expected a whole number"),
        ({"hidden_size": "9" * 5000}, [], "hidden_size '999"),
        ({"hidden_size": [512]}, [], r"hidden_size \[512\]: expected a whole number"),
        ({"hidden_size": True}, [], "hidden_size True: expected a whole number"),
        ({"num_key_value_heads": 3}, [], "num_attention_heads 8: expected a multiple of"),
        ({"num_kv_heads": [1, 2]}, ["num_key_value_heads"], "num_kv_heads has 2 entries: expected"),
        ({"layer_types": ["full_attention"]}, [], "layer_types has 1 entries: expected 4"),
        ({"layer_types": ["warp"] * 4}, [], r"layer_types\[0\] 'warp' is no kind of layer"),
        ({"layer_types": [[]] * 4}, [], r"layer_types\[0\] \[\] is no kind of layer"),
        ({"layer_types": HALF}, [], "sliding_window is missing, but layers slide"),
        ({"layer_types": ["mamba"] * 4}, [], "mamba_d_state or mamba_d_conv is missing"),
        ({"layer_types": ["linear_attention"] * 4}, [], "the state of linear attention cannot"),
        ({"hybrid_override_pattern": "MX*E"}, [], "hybrid_override_pattern 'MX"),
        ({"sliding_window": "wide"}, [], "sliding_window 'wide': expected"),
        ({"torch_dtype": "int3"}, [], "torch_dtype 'int3': expected bfloat16"),
        ({"torch_dtype": 16}, [], "torch_dtype 16: expected a string"),
        ({"kv_lora_rank": 512}, [], "qk_rope_head_dim is missing: the latent is unknown"),
        ({"is_encoder_decoder": True}, [], "expected a model that only decodes"),
        ({"model_type": "bert"}, [], "model_type bert: expected a model that decodes"),
        ({"block_configs": [1, 2, 3, 4]}, [], r"block_configs\[0\] 1: expected an object"),
        ({"layer_types": ["moe"] * 4}, [], "no layer keeps keys, values or a state"),
        ({"tie_word_embeddings": "maybe"}, [], "tie_word_embeddings 'maybe': expected true"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 99}}, [], "bits 99: expected"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, [], "num_experts_per_tok 5: expected"),
        ({"attn_layer_period": 0}, [], "attn_layer_period 0: expected"),
        ({"model_type": ["llama"]}, [], "model_type .* expected a string"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    change: dict[str, Any], without: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        _read(change, *without)
    text = str(refusal.value)
    assert text.startswith("--model small")
    assert "\n" not in text
    assert len(text) < 700


def _file(folder: Path, content: str | bytes | dict[str, Any]) -> Path:
    path = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Small-Model"
    folder.mkdir()
    path = _file(folder, SMALL)
    for given in (str(path), str(folder)):
        model = get_model(given)
        assert model.name == "Small-Model"
        assert model.hidden_size == 512
    other = tmp_path / "other.json"
    other.write_text("\ufeff" + json.dumps(SMALL), encoding="utf-8")  # with a mark of byte order
    assert get_model(str(other)).name == "other"


def test_quantization_in_a_file_beside_it(tmp_path: Path) -> None:
    path = _file(tmp_path, SMALL)
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = read_config(path)
    assert kv_bytes_per_token_longctx(model.layout) == 4 * TOKEN // 2
    assert weight_bytes(model) == pytest.approx(EMBEDDINGS * 2 + LINEARS * 4.5 / 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1, 2]", "a list; expected an object"),
        ('"text"', "a single value; expected an object"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ('{"a": ' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0"),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "not JSON"),  # more digits than Python converts
        (b" " * (17 * 2**20), "more than 16,777,216 bytes"),
    ],
)
def test_files_that_are_no_configuration(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as refusal:
        get_model(str(path))
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder without config\.json"):
        get_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"No such file or directory; expected a config\.json"):
        get_model(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="No such file or directory"):
        get_model("./none")
    with pytest.raises(ConfigError, match="is unknown; did you mean"):
        get_model("meta-llama/Llama-3.1-9B")
    with pytest.raises(ConfigError):
        get_model("a\0b.json")
    with pytest.raises(ConfigError):
        get_model("x" * 10_000)
    deep: dict[str, Any] = SMALL
    for _ in range(6):
        deep = {"text_config": deep}
    with pytest.raises(ConfigError, match="text_config nested more than"):
        spec_of(deep, name="x", where="--model x")
