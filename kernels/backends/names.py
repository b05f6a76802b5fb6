"""Names of backends; apart from them, for who has no PyTorch."""

PACKAGES = {
    "flashinfer": "flashinfer",
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "vllm_flash_attn": "vllm",
}
"""The package that a backend needs, by the name of its kernel and of its module ``with_NAME``."""
