"""When the requests of a trace arrive, at another rate than the recorded one."""

import dataclasses
import math

import numpy as np

from workloads.errors import TraceError
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, Trace


def mean_rate(trace: Trace) -> float:
    """Answer the requests a second of *trace*: one over the mean gap; inf where there is no gap."""
    span_ps = int(trace.arrival_ps[-1]) - int(trace.arrival_ps[0])
    return (len(trace) - 1) * PS_PER_S / span_ps if span_ps else math.inf


def at_request_rate(trace: Trace, rate: float) -> Trace:
    """Answer *trace* with its gaps multiplied by one factor, so that `mean_rate` is *rate*.

    The first request arrives when it did, bursts stay bursts; *rate* inf lets all arrive then.
    vLLM's ``--request-rate`` also ends at the asked mean (``benchmarks/serve.py:500-530``), of gaps
    that it draws.

    Raises:
        TraceError: gaps that are all 0 cannot be stretched; or the last request would arrive later
            than a trace may say.
    """
    first = trace.arrival_ps[0]
    gaps = (trace.arrival_ps - first).astype(np.float64)
    if math.isinf(rate):
        factor = 0.0
    elif len(trace) > 1 and not gaps[-1]:
        raise TraceError(
            f"{trace.name}: all requests arrive at one instant, which no factor brings to "
            f"{rate:g} requests/s; expected a trace with gaps, or the rate inf"
        )
    else:
        factor = mean_rate(trace) / rate if len(trace) > 1 else 0.0
    if first + factor * gaps[-1] > MAX_ARRIVAL_S * PS_PER_S:
        raise TraceError(
            f"{trace.name}: at {rate:g} requests/s the last of {len(trace):,} arrives after more "
            f"than {MAX_ARRIVAL_S:,} s; expected a higher rate"
        )
    return dataclasses.replace(trace, arrival_ps=first + np.rint(factor * gaps).astype(np.int64))
