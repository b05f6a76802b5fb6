"""Requests that are served well enough: service level objectives as vLLM's ``--goodput`` has them.

vLLM 0.33.0, ``benchmarks/serve.py:655-692`` (what counts) and ``:1868-1878`` (the flag).
"""

import math
from typing import Any

import numpy as np

from sim.columns import BoolArray, FloatArray
from sim.errors import ConfigError
from workloads.errors import did_you_mean, quote

METRICS = ("ttft", "tpot", "e2el")
"""What can be bounded, as vLLM names it."""


def parse_goodput(text: str, where: str = "--goodput") -> dict[str, float]:
    """Answer the most milliseconds by metric that *text*, like ``ttft:500 tpot:50``, allows.

    *where* begins a refusal.

    Raises:
        ConfigError: a metric that is unknown or there twice, or a number that is none.
    """
    slos: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition(":")
        if name not in METRICS:
            raise ConfigError(
                f"{where}: unknown metric {quote(name)}; {did_you_mean(name, METRICS)}"
            )
        if name in slos:
            raise ConfigError(f"{where}: {name} is there twice; expected each metric once")
        try:
            slos[name] = float(number)
        except ValueError:
            slos[name] = math.nan
        if not 0 <= slos[name] < math.inf:
            raise ConfigError(
                f"{where}: {name}: expected milliseconds, at least 0, got {quote(number)}"
            )
    if not slos:
        raise ConfigError(f"{where}: expected METRIC:MILLISECONDS, like 'ttft:500 tpot:50'")
    return slos


def goodput_section(
    slos: dict[str, float], seconds: dict[str, FloatArray], duration: float, num_prompts: int
) -> dict[str, Any]:
    """Answer ``request_goodput``, requests that meet *slos* a second of *duration*, as vLLM does.

    And ``slo_attainment``, their share of all *num_prompts* requests, refused ones included.
    *seconds* [num completed] by metric, tpot 0 for outputs of one token.
    """
    met: BoolArray = np.ones(len(seconds["ttft"]), dtype=np.bool_)
    for name, milliseconds in slos.items():
        met &= seconds[name] <= milliseconds / 1e3
    good = int(met.sum())
    return {
        "request_goodput": good / duration if duration else None,
        "slo_attainment": good / num_prompts,
    }
