"""Types of models whose fields mean what they are read to mean here."""

KNOWN = frozenset({
    "llama", "mistral", "mixtral", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
    "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "phi", "phi3", "phimoe", "opt", "gpt2",
    "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "falcon_h1", "falcon_mamba", "mpt",
    "dbrx", "baichuan", "chatglm", "internlm2", "internlm3", "cohere", "cohere2", "deepseek",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k2", "kimi_linear",
    "kimi_k25", "glm", "glm4", "glm4_moe", "glm_moe_dsa", "minimax", "minimax_m2", "minimax_m3",
    "gpt_oss", "llama4", "granite", "granitemoe", "granitemoehybrid", "bamba", "jamba", "nemotron",
    "nemotron-nas", "nemotron_h", "deci", "olmo", "olmo2", "olmo3", "olmoe", "openelm", "mllama",
    "step3", "step3p5", "starcoder2", "stablelm", "solar", "exaone", "exaone4", "mamba", "mamba2",
    "mimo", "mimo_v2_flash", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "lfm2", "smollm3", "seed_oss", "mistral3", "pixtral", "apertus", "arcee",
})  # fmt: skip
"""Types whose classes read these fields as they are read here; any other gets a note."""

ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert", "electra", "deberta",
    "deberta-v2", "modernbert", "nomic_bert", "mpnet", "vit", "clip", "siglip", "wav2vec2",
})  # fmt: skip
"""Types that have no KV cache."""
