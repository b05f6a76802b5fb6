"""One run in numbers: vLLM's ``bench serve`` keys, then what happened to the KV memory.

Definitions are those of vLLM 0.33.0, ``benchmarks/serve.py:655-806`` and ``v1/metrics``; lists are
left out of the summary as they are there without ``--save-detailed``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sim.columns import BoolArray, Columns, FloatArray
from sim.gaps import PERCENTILES, GapStatistics
from sim.goodput import parse_goodput
from sim.overrun import Overrun, StepSizes
from sim.refusal import can_be_served
from sim.request import UNSET
from sim.simulation import RunResult
from sim.timing.base import StepTimeModel
from sim.totals import Totals
from workloads.record import PS_PER_S, IntArray


class Served(NamedTuple):
    """The completed requests of a run, in seconds; arrays of equal length.

    Attributes:
        arrival, first, last: when each arrived, and had its first and its last token.
        num_output: tokens generated.
    """

    arrival: FloatArray
    first: FloatArray
    last: FloatArray
    num_output: IntArray

    def latencies(self) -> dict[str, FloatArray]:
        """Answer what an SLO can bound, by its name: TPOT is 0 for outputs of one token."""
        tpot = (self.last - self.first) / np.maximum(self.num_output - 1, 1)
        return {"ttft": self.first - self.arrival, "tpot": tpot, "e2el": self.last - self.arrival}

    def section(self) -> dict[str, float | None]:
        """Answer mean, median, standard deviation and p99 of TTFT, TPOT and end-to-end latency.

        As in vLLM, requests of one token have no TPOT.
        """
        found = self.latencies()
        found["tpot"] = found["tpot"][self.num_output > 1]
        return {
            key: value
            for name, seconds in found.items()
            for key, value in _latency(name, seconds).items()
        }


def served(result: RunResult) -> Served:
    """Answer the requests of *result* that were completed."""
    requests = result.recorder.request_columns()
    done = requests["finish_ps"] != UNSET
    times = (result.recorder.arrival_ps, requests["first_token_ps"], requests["finish_ps"])
    arrival, first, last = (column[done] / PS_PER_S for column in times)
    return Served(arrival, first, last, requests["num_output_tokens"][done])


def summarize(result: RunResult) -> dict[str, Any]:
    """Answer the summary of a run; None where a figure has no value (no request, no look-up).

    Times in milliseconds where the name ends in ``_ms``, in seconds in *duration*; throughputs per
    second of simulated time from the first arrival to the last token. *request_rate* and what
    `goodput_of` answers are there if they were asked for.
    """
    config, trace, recorder = result.config, result.trace, result.recorder
    spent = _Spent(result.step_time)
    totals = recorder.add_up(spent.watch(recorder.step_chunks()))
    completed = served(result)
    done = recorder.request_columns()["finish_ps"] != UNSET
    num_prompt, num_output = trace.num_prompt_tokens[done], completed.num_output
    duration = totals.duration_ps / PS_PER_S
    load: dict[str, Any] = {}
    if config.load.request_rate is not None:
        load["request_rate"] = config.load.request_rate
    if config.load.goodput is not None:
        load |= goodput_of(config.load.goodput, completed, duration, len(trace))
    max_model_len = config.model.max_model_len or 0
    admitted = can_be_served(trace.num_prompt_tokens, max_model_len)
    clipped = admitted & (trace.num_prompt_tokens + trace.num_output_tokens > max_model_len)
    return {
        "model_id": config.model.model,
        "gpu": config.model.gpu,
        "num_prompts": len(trace),
        **load,
        "duration": duration,
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "total_input_tokens": int(num_prompt.sum()),
        "total_output_tokens": int(num_output.sum()),
        "request_throughput": _ratio(int(done.sum()), duration),
        "output_throughput": _ratio(num_output.sum(), duration),
        "total_token_throughput": _ratio(num_prompt.sum() + num_output.sum(), duration),
        "max_output_tokens_per_s": int(totals.tokens_in_second.max(initial=0)),
        "max_concurrent_requests": _peak_per_second(completed.arrival, completed.last),
        **_latencies(completed, totals),
        "num_clipped_requests": int(clipped.sum()),
        "refused": dict(sorted(Counter(result.recorder.refused.values()).items())),
        **_kv_section(result, totals),
        **_overrun_section(spent.sizes.overrun(config, result.pool)),
        **spent.section(),
        "kv_pool_provenance": result.pool.provenance,
    }


def goodput_of(
    goodput: str, completed: Served, duration: float, num_prompts: int
) -> dict[str, float | None]:
    """Answer the requests that meet all SLOs of *goodput* a second, as vLLM counts them.

    And ``slo_attainment``, their share of all *num_prompts* requests, refused ones included.
    """
    seconds = completed.latencies()
    met: BoolArray = np.ones(len(completed.last), dtype=np.bool_)
    for name, milliseconds in parse_goodput(goodput).items():
        met &= seconds[name] <= milliseconds / 1e3
    good = int(met.sum())
    return {"request_goodput": _ratio(good, duration), "slo_attainment": good / num_prompts}


def _latencies(completed: Served, totals: Totals) -> dict[str, float | None]:
    """Answer all latencies in the order of vLLM's report."""
    sections = completed.section()
    between = _inter_token_latency(totals.inter_token)
    before_e2el = {key: value for key, value in sections.items() if not key.endswith("e2el_ms")}
    return before_e2el | between | sections


def _kv_section(result: RunResult, totals: Totals) -> dict[str, Any]:
    config = result.config
    capacity = result.recorder.capacity
    slot_time = capacity * totals.duration_ps
    held = sum(totals.slot_time[state] for state in ("live", "reserved", "internal"))
    return {
        "allocator": config.label,
        "block_size": config.cache.block_size,
        "num_gpu_blocks": result.pool.num_gpu_blocks,
        "kv_cache_slots": capacity,
        "num_steps": totals.num_steps,
        "mean_num_requests_running": _ratio(totals.running_time, totals.duration_ps),
        "max_num_requests_running": totals.max_running,
        "mean_num_requests_waiting": _ratio(totals.waiting_time, totals.duration_ps),
        "mean_kv_cache_usage_perc": _ratio(held, slot_time),
        "max_kv_cache_usage_perc": _ratio(totals.max_held_slots, capacity),
        **{
            f"kv_{state}_pct": _ratio(100 * time, slot_time)
            for state, time in totals.slot_time.items()
        },
        "prefix_cache_queries": totals.prefix_cache_queries,
        "prefix_cache_hits": totals.prefix_cache_hits,
        "prefix_cache_hit_rate": _ratio(totals.prefix_cache_hits, totals.prefix_cache_queries),
        "preempted_cache_queries": totals.preempted_cache_queries,
        "preempted_cache_hits": totals.preempted_cache_hits,
        "num_preemptions": totals.num_preempted,
        "recomputed_tokens": totals.recomputed_tokens,
        "allocation_refusals": totals.num_refusals,
    }


class _Spent:
    """What steps spent their time on, by the rows that pass by."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._terms: dict[str, float] = {}
        self._num_outside = 0
        self.sizes = StepSizes()

    def watch(self, chunks: Iterable[Columns]) -> Iterator[Columns]:
        """Answer *chunks* as they are, and note them."""
        for rows in chunks:
            for term, seconds in self._step_time.split(rows).items():
                self._terms[term] = self._terms.get(term, 0.0) + seconds
            self._num_outside += self._step_time.steps_outside(rows)
            self.sizes.add(rows)
            yield rows

    def section(self) -> dict[str, Any]:
        """Answer where step times come from, and the seconds of each term."""
        sources = self._step_time.sources
        num_outside = self._num_outside + self._step_time.num_outside
        return {
            "timing": [str(source) for source in sources],
            "timing_provenance": ", ".join(
                dict.fromkeys([s.provenance for s in sources] + ["fitted"] * (num_outside > 0))
            ),
            "timing_steps_outside": num_outside,
            "step_time_s": self._terms,
        }


def _overrun_section(overrun: Overrun | None) -> dict[str, Any]:
    """Answer what steps needed beside the KV cache; None of a model whose memory is not known."""
    if overrun is None:
        return dict.fromkeys(("activation_room_bytes", "max_activation_bytes", "steps_overrun_pct"))
    return {
        "activation_room_bytes": overrun.room_bytes,
        "max_activation_bytes": overrun.max_activation_bytes,
        "steps_overrun_pct": 100 * overrun.share,
    }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _latency(name: str, seconds: FloatArray) -> dict[str, float | None]:
    """Answer mean, median, standard deviation and percentiles in milliseconds."""
    if not len(seconds):
        return dict.fromkeys(_latency_keys(name))
    median, p99 = np.percentile(seconds, PERCENTILES)
    values = (seconds.mean(), median, seconds.std(), p99)
    return {key: float(value) * 1e3 for key, value in zip(_latency_keys(name), values, strict=True)}


def _inter_token_latency(gaps: GapStatistics) -> dict[str, float | None]:
    """Answer what `_latency` would of the list of all gaps."""
    keys = _latency_keys("itl")
    if not gaps.count:
        return dict.fromkeys(keys)
    median, p99 = (gaps.percentiles_ps[percent] for percent in PERCENTILES)
    values = (gaps.mean_ps, median, gaps.std_ps, p99)
    return {key: value / PS_PER_S * 1e3 for key, value in zip(keys, values, strict=True)}


def _latency_keys(name: str) -> list[str]:
    return [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")]


def _peak_per_second(start: FloatArray, end: FloatArray) -> int:
    """Answer the most requests alive in any one second counted from the first start."""
    if not len(start):
        return 0
    first = (start - start.min()).astype(np.int64)
    after = (end - start.min()).astype(np.int64) + 1
    change = np.zeros(int(after.max()) + 1, dtype=np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, after, -1)
    return int(change.cumsum().max())
