"""Replay a measured vLLM run and compare: tables, charts and manifest of this folder.

``python results/validation_rtx4090/validate.py [FOLDER]``: FOLDER has the measured run, by default
``e2e_rtx4090`` of the published results in ``../shared`` or ``KVSIM_SHARED``. All that decides the
simulated run is read from there: engine, model, GPU, blocks and kernel times.
"""

import argparse
import csv
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from sim.config import RunConfig
from sim.files import write_json
from sim.hardware import get_gpu
from sim.kv_spec import kv_bytes_per_token
from sim.models import get_model
from sim.options import settings
from sim.results import manifest
from sim.settings import FLAG_RANK, Given, resolve
from sim.simulation import RunResult, Simulation
from sim.timing import curves, table_attention
from sim.timing.attention import Segment
from sim.timing.base import UNLIMITED, StepTimeModel
from sim.timing.importers.llmservingsim import read_profile
from sim.timing.kernels import Cost, CudaGraphs, KernelStepTime, PricedCall
from sim.timing.layers import PER_SEQUENCE, calls_of
from sim.timing.roofline import fitted_gpu_names
from sim.timing.table import TimingTable, make_table
from sim.timing.table_attention import TableAttention
from sim.timing.table_costs import curve_of
from sim.timing.table_file import save
from workloads.build import build_trace
from workloads.record import PS_PER_S, RequestRecord, Trace

HERE = Path(__file__).parent
ASYNC_SCHEDULING = True
"""Of the main row; the other way is a row of the sensitivity table, where it can be simulated."""

MEAN_LIMIT, PERCENTILE_LIMIT = 2.0, 4.0
"""Per cent."""
RMS_LIMITS = {"running": 2.5, "waiting": 4.0, "kv_cache_pct": 5.0}
SERIES = ("running", "waiting", "kv_cache_pct", "prompt_throughput", "gen_throughput")
SEEDS, JITTER_S = range(10), 0.020

Array = npt.NDArray[np.float64]


def default_folder() -> Path:
    """Answer where the measured run is expected."""
    shared = Path(os.environ.get("KVSIM_SHARED", HERE.parents[2] / "shared"))
    return shared / "published" / "e2e_rtx4090"


# ---- what was measured


class Served(NamedTuple):
    """Requests as served, in seconds from the moment that the workload counts from.

    Attributes:
        arrival, first_token, last_token: of every request.
        num_prompt_tokens, num_output_tokens: of every request.
        series: ``SERIES`` by the second; entry i is of the bucket that ends i + 1 seconds in.
    """

    arrival: Array
    first_token: Array
    last_token: Array
    num_prompt_tokens: Array
    num_output_tokens: Array
    series: Mapping[str, Array]

    @property
    def makespan(self) -> float:
        """Seconds to the last token."""
        return float(self.last_token.max())

    @property
    def latencies(self) -> dict[str, Array]:
        """TTFT, TPOT and latency in milliseconds; TPOT of requests of several tokens."""
        later = self.num_output_tokens > 1
        decoding = (self.last_token - self.first_token)[later]
        return {
            "TTFT": 1e3 * (self.first_token - self.arrival),
            "TPOT": 1e3 * decoding / (self.num_output_tokens[later] - 1),
            "latency": 1e3 * (self.last_token - self.arrival),
        }


class Measured(NamedTuple):
    """A measured run.

    Attributes:
        trace: what was sent; outputs have content of their own.
        table: kernel times of that GPU.
        config: settings of kvsim that make the same engine, by name.
        served: what happened; the arrival is the moment that the engine queued the request.
        start: of the first bucket of the series, in seconds.
    """

    trace: Trace
    table: TimingTable
    config: dict[str, Any]
    served: Served
    start: float


def read_measured(folder: Path) -> Measured:
    """Answer the run in *folder*."""
    meta = json.loads((folder / "vllm_meta.json").read_text())
    engine, cache = meta["engine_kwargs"], meta["kv_cache"]
    resolved = meta["resolved_config"]
    tp = engine["tensor_parallel_size"]
    table = read_profile(folder / "profile", tensor_parallel_size=tp)
    config = {
        "model": table.info.model,
        "gpu": table.info.gpu,
        "tensor_parallel_size": tp,
        "enable_expert_parallel": engine["enable_expert_parallel"],
        "max_model_len": engine["max_model_len"],
        "kv_cache_dtype": engine["kv_cache_dtype"],
        "block_size": cache["block_size"],
        "num_gpu_blocks_override": cache["num_gpu_blocks"],
        "enable_prefix_caching": cache["enable_prefix_caching"],
        "max_num_seqs": engine["max_num_seqs"],
        "max_num_batched_tokens": engine["max_num_batched_tokens"],
        "scheduler_reserve_full_isl": resolved["scheduler_config"]["scheduler_reserve_full_isl"],
        "enforce_eager": resolved["model_config"]["enforce_eager"],
    }
    sent = _json_lines(folder / "workload.jsonl")
    served, start = _served(folder, sent)
    return Measured(_trace(sent), table, config, served, start)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _trace(sent: Sequence[dict[str, Any]]) -> Trace:
    """Answer the workload: one segment a prompt token, so that equal beginnings are shared."""
    records = [
        RequestRecord(
            line=line,
            arrival_ps=request["arrival_time_ns"] * 1000,
            num_prompt_tokens=request["input_toks"],
            num_output_tokens=request["output_toks"],
            request_id=f"bench-{line - 1}",
            segments=[(token, 1) for token in request["input_tok_ids"]],
        )
        for line, request in enumerate(sent, start=1)
    ]
    return build_trace(records, name="workload.jsonl", trace_format="LLMServingSim", sha256="")


def _served(folder: Path, sent: Sequence[dict[str, Any]]) -> tuple[Served, float]:
    """Answer what happened to the requests *sent*, and when the series begin.

    The client's clock and the engine's differ by the least time between a request's arrival at one
    and its place in the queue of the other. The workload counts from the median of what the client
    sent each request after its time: the first was late.
    """
    requests = _json_lines(folder / "vllm_requests.jsonl")

    def column(name: str) -> Array:
        return np.array([request[name] for request in requests], dtype=np.float64)

    sent_at, queued = column("arrival_time"), column("queued_ts")
    planned = np.array([request["arrival_time_ns"] / 1e9 for request in sent])
    zero = float(np.median(sent_at - planned)) + float((queued - sent_at).min())
    first_token, prompts = column("first_token_ts") - zero, column("input_toks")
    with (folder / "vllm_timeseries.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    series = {name: np.array([float(row[name]) for row in rows]) for name in SERIES}
    start = _start_of_series(first_token, prompts, series["prompt_throughput"])
    served = Served(
        arrival=queued - zero,
        first_token=first_token,
        last_token=column("last_token_ts") - zero,
        num_prompt_tokens=prompts,
        num_output_tokens=column("output_toks"),
        series=series,
    )
    return served, start


def _start_of_series(first_token: Array, prompts: Array, throughput: Array) -> float:
    """Answer when the first bucket began: so that prompts come in the buckets that have them.

    Of all moments, a millisecond apart, that fit best: their median.
    """
    starts = np.arange(-500, 501) / 1e3
    misses = [np.abs(_sums(first_token - s, prompts, len(throughput)) - throughput) for s in starts]
    total = np.array([miss.sum() for miss in misses])
    return float(np.median(starts[total == total.min()]))


def _sums(times: Array, values: Array, num_buckets: int) -> Array:
    """Answer the sums of *values* by the second of their *times*."""
    places = np.clip(np.floor(times).astype(np.int64), 0, num_buckets - 1)
    sums: Array = np.zeros(num_buckets)
    np.add.at(sums, places, values)
    return sums


# ---- what is simulated


@dataclass(frozen=True)
class Variant:
    """A run that differs from the measured one, or from its table, in one rule.

    Attributes:
        name: as in the table.
        config: settings that differ.
        step_time: made of the table; None for the one that kvsim makes.
        arrivals: made of the trace's, in picoseconds.
        around: what holds during the run.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    step_time: Callable[[TimingTable, RunConfig], StepTimeModel] | None = None
    arrivals: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def can_be_async() -> bool:
    """Whether this kvsim has asynchronous scheduling."""
    return "async_scheduling" in {setting.name for setting in settings()}


def simulate(measured: Measured, variant: Variant) -> RunResult:
    """Answer the run of *variant*."""
    trace = measured.trace
    if variant.arrivals is not None:
        trace = _sorted(trace, variant.arrivals(trace.arrival_ps))
    values = measured.config | dict(variant.config)
    if can_be_async():
        values = {"async_scheduling": ASYNC_SCHEDULING} | values
    with tempfile.TemporaryDirectory() as folder, variant.around():
        if "step_time" not in values:
            values["timing_table"] = f"{folder}/profile.parquet"
            save(measured.table, values["timing_table"])
        given = {
            name: Given(value, FLAG_RANK, f"--{name}")
            for name, value in values.items()
            if value is not None
        }
        config = resolve(given).run
        simulation = Simulation(config, trace, save_steps=True)
        if variant.step_time is not None:
            step_time = variant.step_time(measured.table, config)
            simulation.result = replace(simulation.result, step_time=step_time)
        return simulation.run()


def _sorted(trace: Trace, arrival_ps: npt.NDArray[np.int64]) -> Trace:
    """Answer *trace* with other arrivals, in their order."""
    order = np.argsort(arrival_ps, kind="stable")
    bounds = list(zip(trace.segment_offsets[:-1], trace.segment_offsets[1:], strict=True))
    places = np.concatenate([np.arange(*bounds[index]) for index in order])
    lengths = np.diff(trace.segment_offsets)[order]
    return replace(
        trace,
        arrival_ps=arrival_ps[order],
        num_prompt_tokens=trace.num_prompt_tokens[order],
        num_output_tokens=trace.num_output_tokens[order],
        request_ids=[trace.request_ids[index] for index in order],
        segment_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_nodes=trace.segment_nodes[places],
        segment_ends=trace.segment_ends[places],
        output_nodes=trace.output_nodes[order],
        num_shareable_tokens=trace.num_shareable_tokens[order],
    )


def served_of(result: RunResult, start: float, num_buckets: int) -> Served:
    """Answer what *result* served, its series sampled like the measured ones.

    *num_buckets* at least. vLLM takes a sample when it has taken in the output of a step, and freed
    who finished; asynchronously it has scheduled the next step by then.
    """
    recorder, trace = result.recorder, result.trace
    requests = recorder.request_columns()
    first, last = (requests[f"{name}_ps"] / PS_PER_S for name in ("first_token", "finish"))
    steps = {
        name: np.concatenate([rows[name][rows["num_steps"] > 0] for rows in chunks])
        for chunks in [list(recorder.step_chunks())]
        for name in chunks[0]
    }
    begins = steps["start_ps"] / PS_PER_S
    ends = (steps["start_ps"] + steps["duration_ps"]) / PS_PER_S
    is_async = getattr(result.config.scheduler, "async_scheduling", False)
    num_buckets = max(num_buckets, int(np.ceil(ends[-1] - start)))
    edges = start + np.arange(1, num_buckets + 1)
    place = np.searchsorted(begins if is_async else ends, edges, side="left") - 1
    place = np.where(edges > ends[-1] + 1, len(ends) - 1, place)
    usable = recorder.capacity
    after = {
        "running": steps["running"].astype(np.int64) - steps["num_finished"],
        "waiting": steps["waiting"],
        "kv_cache_pct": 100 * np.array(recorder.held_after) / usable,
    }
    num_sampled = steps["num_decodes"].astype(np.int64) + steps["num_sampled_prefills"]
    prompts = trace.num_prompt_tokens.astype(np.float64)
    series = {name: np.where(place < 0, 0, v[place]).astype(float) for name, v in after.items()}
    series["prompt_throughput"] = _sums(first - start, prompts, num_buckets)
    series["gen_throughput"] = _sums(ends - start, num_sampled.astype(float), num_buckets)
    return Served(
        arrival=trace.arrival_ps / PS_PER_S,
        first_token=first,
        last_token=last,
        num_prompt_tokens=prompts,
        num_output_tokens=requests["num_output_tokens"].astype(np.float64),
        series=series,
    )


# ---- what is compared


class Row(NamedTuple):
    """A line of ``summary.csv``: *difference* in per cent of *measured*, or in *unit*."""

    metric: str
    unit: str
    measured: float | None
    simulated: float | None
    difference: float
    difference_unit: str
    limit: float | None

    @property
    def is_met(self) -> bool:
        """Whether it is within its limit."""
        return self.limit is None or abs(self.difference) <= self.limit


def compare(measured: Served, simulated: Served) -> list[Row]:
    """Answer the rows of ``summary.csv``."""

    def relative(metric: str, unit: str, pair: tuple[float, float], limit: float) -> Row:
        return Row(metric, unit, *pair, 100 * (pair[1] / pair[0] - 1), "%", limit)

    both = (measured, simulated)
    spans = (measured.makespan, simulated.makespan)
    output = (float(served.num_output_tokens.sum()) / served.makespan for served in both)
    rows = [
        relative("makespan", "s", spans, MEAN_LIMIT),
        relative("output throughput", "tokens/s", (next(output), next(output)), MEAN_LIMIT),
    ]
    for name in measured.latencies:
        times = [served.latencies[name] for served in both]
        means = (float(times[0].mean()), float(times[1].mean()))
        rows.append(relative(f"{name} mean", "ms", means, MEAN_LIMIT))
        for percent in (50, 90, 99):
            shares = [float(np.percentile(time, percent)) for time in times]
            pair = (shares[0], shares[1])
            rows.append(relative(f"{name} p{percent}", "ms", pair, PERCENTILE_LIMIT))
    peaks = [float(served.series["running"].max()) for served in both]
    name = "most running, by the second"
    rows.append(Row(name, "requests", peaks[0], peaks[1], peaks[1] - peaks[0], "requests", None))
    units = {"running": "requests", "waiting": "requests", "kv_cache_pct": "points"}
    for name, limit in RMS_LIMITS.items():
        error = rms(measured.series[name], simulated.series[name])
        metric = f"{name} by the second, RMS error"
        rows.append(Row(metric, units[name], None, None, error, units[name], limit))
    return rows


def rms(measured: Array, simulated: Array) -> float:
    """Answer the root mean square of the difference; a series that has ended is 0."""
    length = max(len(measured), len(simulated))
    first, second = (np.pad(values, (0, length - len(values))) for values in (measured, simulated))
    return float(np.sqrt(np.mean((first - second) ** 2)))


# ---- sensitivity


def step_time_of(
    table: TimingTable,
    config: RunConfig,
    *,
    cost: Callable[[PricedCall], Cost | None] = lambda call: call.cost,
    attention: Callable[[TimingTable], TableAttention] = TableAttention,
) -> KernelStepTime:
    """Answer the step time that kvsim makes of *table*, with other kernels.

    *cost* answers what prices a call, None to leave it out.
    """
    model = get_model(config.model.model)
    calls = []
    for call in calls_of(model, config.model.tensor_parallel_size):
        curve = curve_of(table.where(op=call.op), "num_tokens")
        priced = PricedCall(call.term, call.op, call.launches, curve)
        chosen = cost(priced)
        if chosen is not None:
            calls.append(PricedCall(call.term, call.op, call.launches, chosen))
    assert config.scheduler.max_num_seqs is not None, "resolved"
    return KernelStepTime(
        num_layers=model.num_hidden_layers,
        calls=calls,
        attention=attention(table),
        sources=(),
        graphs=CudaGraphs.default(config.scheduler.max_num_seqs),
    )


class _At(NamedTuple):
    """Prices any number of requests like *size* of them."""

    cost: Cost
    size: int

    def at(self, size: float) -> float | None:
        del size
        return self.cost.at(self.size)


def _lm_head_at(size: int) -> Callable[[TimingTable, RunConfig], StepTimeModel]:
    def cost(call: PricedCall) -> Cost:
        return _At(call.cost, size) if call.term == PER_SEQUENCE else call.cost

    return lambda table, config: step_time_of(table, config, cost=cost)


def _no_lm_head(table: TimingTable, config: RunConfig) -> StepTimeModel:
    def cost(call: PricedCall) -> Cost | None:
        return None if call.term == PER_SEQUENCE else call.cost

    return step_time_of(table, config, cost=cost)


def _two_calls(table: TimingTable, config: RunConfig) -> StepTimeModel:
    return step_time_of(_without_mixed(table), config)


def _without_mixed(table: TimingTable) -> TimingTable:
    return table.at(np.flatnonzero(table.columns["op"] != "mixed_attention"))


def _bytes_only(table: TimingTable, config: RunConfig) -> StepTimeModel:
    """Decode attention as the bytes of its context over the bandwidth of the GPU's memory."""
    model, gpu = get_model(config.model.model), get_gpu(config.model.gpu)
    a_layer = kv_bytes_per_token(model) / model.num_hidden_layers
    per_token_ps = a_layer / gpu.hbm_bandwidth * PS_PER_S

    class Bytes(TableAttention):
        def decode_segments(self, num_decodes: int) -> list[Segment]:
            del num_decodes
            return [Segment(UNLIMITED, 0.0, per_token_ps)]

    return step_time_of(_without_mixed(table), config, attention=Bytes)


def _logarithmic(table: TimingTable, config: RunConfig) -> StepTimeModel:
    """Straight lines over the logarithm of every size; over context, of 8 points between knots."""
    is_decode = table.columns["op"] == "decode_attention"
    decodes = table.at(np.flatnonzero(is_decode))
    names = list(table.columns)
    records = [
        dict(zip(names, values, strict=True))
        for values in zip(*(column.tolist() for column in table.columns.values()), strict=True)
    ]
    for (batch,) in decodes.distinct("batch"):
        row = decodes.where(batch=batch).columns
        contexts, times = row["context"], row["latency_us"]
        between = np.unique(np.geomspace(contexts[:-1], contexts[1:], 10)[1:-1].astype(np.int64))
        base = {name: row[name][0] for name in names}
        for context in np.setdiff1d(between, contexts).tolist():
            time = float(np.interp(np.log(context), np.log(contexts), times))
            records.append(base | {"context": context, "latency_us": time})
    return step_time_of(make_table(table.info, records, "logarithmic"), config)


def _log_bracket(knots: Sequence[float], value: float) -> curves.Bracket | None:
    place = curves.Bracket(0, 0, 0.0) if value <= knots[0] else _LINEAR(knots, value)
    if place is None or place.low == place.high or not knots[place.low]:
        return place
    low, high = knots[place.low], knots[place.high]
    return place._replace(weight=float(np.log(value / low) / np.log(high / low)))


_LINEAR = curves.bracket


@contextmanager
def _log_axes() -> Iterator[None]:
    with (
        mock.patch.object(curves, "bracket", _log_bracket),
        mock.patch.object(table_attention, "bracket", _log_bracket),
    ):
        yield


def variants(measured: Measured) -> list[Variant]:
    """Answer what the sensitivity table has, but for jitter."""
    blocks = measured.config["num_gpu_blocks_override"]
    found = [
        Variant("no lm_head and sampler", step_time=_no_lm_head),
        Variant("lm_head and sampler as for 1 request", step_time=_lm_head_at(1)),
        Variant("lm_head and sampler as for 256 requests", step_time=_lm_head_at(256)),
        Variant("chunks and decodes as two calls of attention", step_time=_two_calls),
        Variant("two calls, decodes by bytes over bandwidth", step_time=_bytes_only),
        Variant("straight lines over logarithms", step_time=_logarithmic, around=_log_axes),
        Variant("no padding to CUDA graphs", {"enforce_eager": True}),
        Variant("host overhead of 1 ms a step", {"host_overhead": 0.001}),
        Variant("no prefix caching", {"enable_prefix_caching": False}),
        Variant("admission by the first chunk", {"scheduler_reserve_full_isl": False}),
        Variant("10 blocks fewer", {"num_gpu_blocks_override": blocks - 10}),
        Variant("10 blocks more", {"num_gpu_blocks_override": blocks + 10}),
    ]
    if can_be_async():
        name = "synchronous scheduling" if ASYNC_SCHEDULING else "asynchronous scheduling"
        found.append(Variant(name, {"async_scheduling": not ASYNC_SCHEDULING}))
    if measured.config["gpu"] in fitted_gpu_names():
        found.append(Variant("roofline, no table", {"step_time": "roofline"}))
    return found


MEANS = ("makespan_s", "ttft_mean_ms", "tpot_mean_ms", "latency_mean_ms")


def means(served: Served) -> Array:
    """Answer makespan and the means of TTFT, TPOT and latency: ``MEANS``."""
    return np.array([served.makespan, *(times.mean() for times in served.latencies.values())])


def sensitivity(measured: Measured, reference: Served) -> list[dict[str, Any]]:
    """Answer the rows of ``sensitivity.csv``: means, and their change from *reference*."""
    base = means(reference)

    def row(name: str, values: Array, change: Array) -> dict[str, Any]:
        changes = {f"{mean}_change_pct": share for mean, share in zip(MEANS, change, strict=True)}
        return {"variant": name, **dict(zip(MEANS, values, strict=True)), **changes}

    def run(variant: Variant) -> Array:
        return means(served_of(simulate(measured, variant), measured.start, 1))

    rows = [row("as measured", means(measured.served), 100 * (means(measured.served) / base - 1))]
    rows.append(row("reference", base, np.zeros(len(base))))
    for variant in variants(measured):
        values = run(variant)
        rows.append(row(variant.name, values, 100 * (values / base - 1)))
    jittered = []
    for seed in SEEDS:
        later = np.random.default_rng(seed).uniform(0, JITTER_S, len(measured.trace))
        shift = np.round(later * PS_PER_S).astype(np.int64)
        jittered.append(run(Variant(f"seed {seed}", arrivals=shift.__add__)))
    what = f"arrivals up to {1e3 * JITTER_S:.0f} ms later, {len(SEEDS)} seeds"
    mean, deviation = np.mean(jittered, axis=0), np.std(jittered, axis=0, ddof=1)
    rows.append(row(f"{what}: mean", mean, 100 * (mean / base - 1)))
    rows.append(row(f"{what}: standard deviation", deviation, 100 * deviation / base))
    return rows


# ---- what is written

_LABELS = {
    "running": "running requests",
    "waiting": "waiting requests",
    "kv_cache_pct": "KV cache usage (%)",
    "prompt_throughput": "prompt tokens/s",
    "gen_throughput": "output tokens/s",
}
_STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_MEASURED: Any = {"color": "#E69F00", "linewidth": 2.4, "label": "measured (vLLM)"}
_SIMULATED: Any = {"color": "#0072B2", "linewidth": 1.0, "label": "simulated (kvsim)"}


def draw_series(measured: Served, simulated: Served) -> Figure:
    """Draw both runs by the second."""
    figure = Figure(figsize=(8, 10), layout="constrained")
    panels = figure.subplots(len(_LABELS), 1, sharex=True)
    for axes, (name, label) in zip(panels, _LABELS.items(), strict=True):
        for served, style in ((measured, _MEASURED), (simulated, _SIMULATED)):
            values = served.series[name]
            axes.plot(np.arange(1, len(values) + 1), values, **style)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, len(measured.series[name]))
    panels[-1].set_xlabel("time since the first second of the run (s)")
    _legend(figure, panels[0])
    return figure


def draw_distributions(measured: Served, simulated: Served) -> Figure:
    """Draw the share of requests by TTFT, TPOT and latency."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    units = {"TTFT": (1e3, "s"), "TPOT": (1.0, "ms a token"), "latency": (1e3, "s")}
    for axes, (name, (per_unit, unit)) in zip(panels, units.items(), strict=True):
        for served, style in ((measured, _MEASURED), (simulated, _SIMULATED)):
            times = np.sort(served.latencies[name]) / per_unit
            axes.step(times, 100 * np.arange(1, len(times) + 1) / len(times), where="post", **style)
        axes.set_xlabel(f"{name} ({unit})")
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
    panels[0].set_ylabel("requests at or below (%)")
    _legend(figure, panels[0])
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)


def rounded(value: float | str | None) -> str:
    """Answer *value* as the tables have it: five digits."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write *rows* as CSV, rounded."""
    lines = [{name: rounded(value) for name, value in row.items()} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    sys.stdout.write(tabulate([line.values() for line in lines], list(lines[0]), "github") + "\n\n")


def manifest_of(result: RunResult, folder: Path) -> dict[str, Any]:
    """Answer what decided *result*, without where it was run."""
    found = manifest(result)
    found["config"]["timing_table"] = "of profile/"
    found["config"]["trace"] = "workload.jsonl"
    names = ("vllm_meta.json", "vllm_requests.jsonl", "vllm_timeseries.csv", "workload.jsonl")
    paths = [*(folder / name for name in names), *sorted((folder / "profile").iterdir())]
    found["measured_sha256"] = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }
    return found


def main(folder: Path) -> None:
    """Write every file of this folder but the README."""
    measured = read_measured(folder)
    result = simulate(measured, Variant("reference"))
    simulated = served_of(result, measured.start, len(measured.served.series["running"]))
    write_rows(HERE / "summary.csv", (row._asdict() for row in compare(measured.served, simulated)))
    write_rows(HERE / "sensitivity.csv", sensitivity(measured, simulated))
    with mpl.rc_context(_STYLE):
        for name, draw in (("series", draw_series), ("distributions", draw_distributions)):
            figure = draw(measured.served, simulated)
            figure.savefig(HERE / f"fig_{name}.png", dpi=120, metadata={"Software": None})
    write_json(HERE / "manifest.json", manifest_of(result, folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder())
    main(parser.parse_args().folder)
