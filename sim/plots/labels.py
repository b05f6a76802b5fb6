"""What columns and values are called on a chart, with their units."""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from workloads.errors import plain

MAX_LABEL = 30
"""Most characters of a name on a chart; of a longer one the middle is left out."""


class Metric(NamedTuple):
    """A column of the summary, as it is drawn.

    Attributes:
        label: of the axis, with the unit.
        noun: in a title: "prefix has 2.0 times the <noun> of paged".
        more_is_better: None where that is not known.
        scale: that values are multiplied by.
    """

    column: str
    label: str
    noun: str
    more_is_better: bool | None = None
    scale: float = 1.0

    @property
    def unit(self) -> str:
        """The unit in its label, behind a space; nothing if it is a count."""
        match = re.search(r" \((.+)\)$", self.label)
        return f" {match[1]}" if match and match[1] != "mean" else ""


_METRICS = {
    metric.column: metric
    for metric in (
        Metric("mean_num_requests_running", "running requests (mean)", "running requests", True),
        Metric("output_throughput", "throughput (output tokens/s)", "output throughput", True),
        Metric("total_token_throughput", "throughput (tokens/s)", "token throughput", True),
        Metric("request_throughput", "throughput (requests/s)", "request throughput", True),
        Metric("request_goodput", "goodput (requests/s within the SLOs)", "goodput", True),
        Metric(
            "found_request_rate",
            "highest load within the SLOs (requests/s)",
            "highest load within the SLOs",
            True,
        ),
        Metric(
            "prefix_cache_hit_rate", "prefix cache hits (% of tokens)", "prefix hit rate", True, 100
        ),
        Metric("num_preemptions", "preemptions", "number of preemptions", False),
        Metric("duration", "duration (s)", "duration", False),
    )
}

_LATENCY = re.compile(r"(mean|median|std|p\d+)_(ttft|tpot|itl|e2el)_ms")
_UNITS = (("_ms", "ms"), ("_pct", "%"), ("_bytes", "bytes"), ("_tokens", "tokens"), ("_s", "s"))

SETTING_UNITS = {
    "block_size": "tokens",
    "max_model_len": "tokens",
    "max_num_batched_tokens": "tokens",
    "long_prefill_token_threshold": "tokens",
    "max_num_seqs": "requests",
    "request_rate": "requests/s",
    "gpu_memory_utilization": "share of GPU memory",
    "watermark": "share of the pool",
    "gpu_memory_gib": "GiB",
    "kv_cache_memory_bytes": "bytes",
    "num_gpu_blocks_override": "blocks",
    "tensor_parallel_size": "GPUs",
    "host_overhead": "s",
}
"""Units of settings, by the names of their flags."""


def metric_of(column: str) -> Metric:
    """Answer how *column* is drawn; one that is not known goes by its name's ending."""
    if column in _METRICS:
        return _METRICS[column]
    if match := _LATENCY.fullmatch(column):
        noun = f"{match[1]} {match[2].upper()}"
        return Metric(column, f"{noun} (ms)", noun, more_is_better=False)
    for ending, unit in _UNITS:
        if column.endswith(ending) and column != ending:
            words = plain(column.removesuffix(ending)).replace("_", " ")
            return Metric(column, short(f"{words} ({unit})", 60), short(words))
    words = plain(column).replace("_", " ")
    return Metric(column, short(words, 60), short(words))


def setting_label(name: str) -> str:
    """Answer the label of an axis over the setting *name*."""
    unit = SETTING_UNITS.get(name)
    return short(plain(name), 40) + (f" ({unit})" if unit else "")


def short(text: str, most: int = MAX_LABEL) -> str:
    """Answer *text* with at most *most* characters; never empty, nor hidden from a legend."""
    if len(text) > most:
        half = (most - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return f" {text}" if text.startswith("_") else text or "''"


def text_of(value: object) -> str:
    """Answer a value of a setting as its flag would have it; ``default`` where there is none."""
    if value is None or value is pd.NA or value != value:  # noqa: PLR0124  # NaN
        return "default"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value).lower() if isinstance(value, bool | np.bool_) else plain(str(value))


def number(value: float) -> str:
    """Answer *value* with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def named(name: str, value: object) -> str:
    """Answer a setting and its value."""
    return f"{short(plain(name))} {short(text_of(value))}"
