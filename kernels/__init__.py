"""GPU kernels of paged attention, and the program that measures timing tables with them.

Runs from a clone; needs PyTorch, and Triton on a GPU (``pip install '.[kernels]'``).
"""
