"""Metrics by vLLM's names, types, labels and bounds (vLLM 0.33.0, ``v1/metrics/loggers.py``).

``vllm:`` is what means the same there; what only a simulator knows is ``kvsim:``.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from sim.watch.observer import Bounds, Sample

Values = Mapping[str, float]
"""Values by the value of the label that tells them apart; by "" where there is none."""


class Scalar(NamedTuple):
    """A counter or gauge.

    Attributes:
        name: without the ``_total`` that a counter gains when it is shown.
        values: reads them off a sample.
        label: what tells the values apart, "" if there is one value only.
    """

    name: str
    kind: Literal["counter", "gauge"]
    doc: str
    values: Callable[[Sample], Values]
    label: str = ""


def _counter(name: str, doc: str, key: str) -> Scalar:
    return Scalar(name, "counter", doc, lambda sample: {"": sample.counts[key]})


def _external(name: str) -> Scalar:
    return Scalar(name, "counter", "Of a KV connector: there is none.", lambda _: {"": 0})


_SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

SCALARS = (
    Scalar(
        "vllm:num_requests_running",
        "gauge",
        "Requests in the step that runs.",
        lambda sample: {"": sample.running},
    ),
    Scalar(
        "vllm:num_requests_waiting",
        "gauge",
        "Requests in the queue once the step that runs was scheduled.",
        lambda sample: {"": sample.waiting},
    ),
    Scalar(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Requests in the queue by reason.",
        lambda sample: {"capacity": sample.waiting, "deferred": 0},
        "reason",
    ),
    Scalar(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the KV pool that requests hold; 1 is all of it.",
        lambda sample: {"": sample.usage},
    ),
    _counter(
        "vllm:prefix_cache_queries", "Prompt tokens looked up at admission.", "prefix_cache_queries"
    ),
    _counter("vllm:prefix_cache_hits", "Of those, tokens found.", "prefix_cache_hits"),
    _external("vllm:external_prefix_cache_queries"),
    _external("vllm:external_prefix_cache_hits"),
    _counter("vllm:num_preemptions", "Preemptions.", "num_preempted"),
    _counter("vllm:prompt_tokens", "Prompt tokens, once the first token comes.", "prompt_tokens"),
    Scalar(
        "vllm:prompt_tokens_by_source",
        "counter",
        "Prompt tokens by where their KV came from.",
        lambda sample: {
            "local_compute": sample.counts["prompt_tokens"] - sample.counts["cached_tokens"],
            "local_cache_hit": sample.counts["cached_tokens"],
            "external_kv_transfer": 0,
        },
        "source",
    ),
    _counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", "cached_tokens"),
    Scalar(
        "vllm:prompt_tokens_cached_by_source",
        "counter",
        "Prompt tokens found in the cache by where it is; here all on the GPU.",
        lambda sample: dict.fromkeys(_SOURCES, 0) | {"device": sample.counts["cached_tokens"]},
        "source",
    ),
    _counter("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    Scalar(
        "vllm:request_success",
        "counter",
        "Requests that finished; here each for its length.",
        lambda sample: (
            dict.fromkeys(FINISHED_REASONS, 0) | {"length": sample.counts["num_finished"]}
        ),
        "finished_reason",
    ),
    Scalar(
        "kvsim:kv_slots",
        "gauge",
        "Token slots of the pool by state.",
        lambda sample: sample.slots,
        "state",
    ),
    _counter(
        "kvsim:allocation_refusals",
        "Block allocations that failed: each preempted somebody or held up the queue.",
        "num_refusals",
    ),
    _counter(
        "kvsim:recomputed_tokens", "Tokens computed again after preemptions.", "recomputed_tokens"
    ),
    Scalar(
        "kvsim:simulated_seconds",
        "gauge",
        "Time of the sample on the trace's clock.",
        lambda sample: {"": sample.seconds},
    ),
)

_REQUEST_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN_LATENCY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PARAMS_N = (1, 2, 5, 10, 20)
_NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_TOKENS = ()
"""Up to max_model_len: `bounds`."""

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", _TIME_TO_FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": (
        "A token to the next of its request, preemptions included.",
        _INTER_TOKEN_LATENCY,
    ),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time of a request's tokens after the first; 0 without any.",
        _INTER_TOKEN_LATENCY,
    ),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", _REQUEST_LATENCY),
    "vllm:request_queue_time_seconds": ("Arrival to first scheduled.", _REQUEST_LATENCY),
    "vllm:request_inference_time_seconds": (
        "First scheduled to last token, preemptions included.",
        _REQUEST_LATENCY,
    ),
    "vllm:request_prefill_time_seconds": ("First scheduled to first token.", _REQUEST_LATENCY),
    "vllm:request_decode_time_seconds": (
        "First token to last, preemptions included.",
        _REQUEST_LATENCY,
    ),
    "vllm:iteration_tokens_total": (
        "Prompt tokens computed, as their first token comes, and tokens generated by a step.",
        _ITERATION_TOKENS,
    ),
    "vllm:request_prompt_tokens": ("Prompt tokens of a finished request.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens that it generated.", _TOKENS),
    "vllm:request_max_num_generation_tokens": ("The most of any of its outputs.", _TOKENS),
    "vllm:request_params_max_tokens": ("Tokens that it wanted.", _TOKENS),
    "vllm:request_prefill_kv_computed_tokens": (
        "Prompt tokens that were not in the cache.",
        _TOKENS,
    ),
    "vllm:request_params_n": ("Outputs that it wanted.", _PARAMS_N),
    "vllm:request_num_preemptions": ("How often it was preempted.", _NUM_PREEMPTIONS),
}
"""Help and bounds (seconds, tokens) by name; of ``request_`` and ``e2e_`` once it has finished."""


def bounds(max_model_len: int) -> dict[str, Bounds]:
    """Answer the bounds of every histogram's buckets (``v1/metrics/buckets.py``), without inf."""
    tokens = []
    for place in range(3 * len(str(max_model_len))):
        tokens.append((1, 2, 5)[place % 3] * 10 ** (place // 3))
    tokens = [bound for bound in tokens if bound <= max_model_len]
    return {name: own or tuple(tokens) for name, (_, own) in HISTOGRAMS.items()}
