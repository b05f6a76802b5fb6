"""Kernels run in Triton's interpreter, on a CPU, unless TRITON_INTERPRET=0 asks for a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

NEEDS_TORCH = "needs PyTorch and Triton: pip install '.[kernels]'"
