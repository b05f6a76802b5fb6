"""The optional build: with KVSIM_COMPILE=1 the simulation loop is compiled to C by mypyc.

The code is the same, and so are its results; it takes a C compiler and two minutes. Everything else
is in pyproject.toml.
"""

import os

from setuptools import setup

LOOP = (
    "sim/allocators/block_cache.py",
    "sim/allocators/contiguous.py",
    "sim/allocators/paged.py",
    "sim/allocators/prefix.py",
    "sim/allocators/ring.py",
    "sim/allocators/runs.py",
    "sim/allocators/values.py",
    "sim/clients.py",
    "sim/columns.py",
    "sim/engine.py",
    "sim/metrics.py",
    "sim/refusal.py",
    "sim/request.py",
    "sim/scheduler.py",
    "sim/scheduler_output.py",
    "sim/static_batching.py",
    "sim/timing/attention.py",
    "sim/timing/base.py",
    "sim/timing/kernels.py",
    "sim/timing/roofline.py",
    "sim/timing/simple.py",
)
"""Modules in which a run spends its time."""

if os.environ.get("KVSIM_COMPILE") == "1":
    try:
        from mypyc.build import mypycify
    except ImportError:  # asked first what it needs, then run again with that installed
        setup(setup_requires=["mypy>=1.15", "msgspec", "numpy", "simpy"])  # for their types
    else:
        options = [
            "--config-file=",
            "--ignore-missing-imports",
            "--disable-error-code=unused-ignore",
        ]
        setup(ext_modules=mypycify([*options, *LOOP]))
else:
    setup()
