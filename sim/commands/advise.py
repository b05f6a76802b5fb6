"""``kvsim advise``: the remedies for a deployment that does not carry its load, one after another.

`answer_of` is what a report, a notebook or an experiment needs: every figure of every step.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import click

from sim.advice import GOAL, MOST_CARDS, RULE, Advice, Setup, Step, advise
from sim.advice_report import advice_report
from sim.commands.common import given_by, load_recorded, print_json, simulate
from sim.config import CONTIGUOUS_ONLY, RunConfig
from sim.modelled import modelled_notes
from sim.models import model_of
from sim.options import as_flags, settings
from sim.report import provenance
from sim.settings import FLAG_RANK, Given, resolve
from sim.what_if import compared
from workloads.record import Trace

OF_VLLM = (
    "dtype", "quantization", "tensor_parallel_size", "enable_expert_parallel", "max_model_len",
    "block_size", "kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
    "long_prefill_token_threshold", "scheduler_reserve_full_isl", "watermark", "async_scheduling",
    "enforce_eager",
)  # fmt: skip
"""Settings that ``vllm serve`` has by the same flag."""

START = "paged"
"""Allocator that the ladder starts from unless told otherwise: sharing prefixes is a step."""


def advise_command(values: dict[str, Any]) -> int:
    """Print the ladder that the *values* of all flags start from; answer the exit code.

    Raises:
        ConfigError, TraceError: what cannot be used.
    """
    given = given_by(values)
    if not {"allocator", "enable_prefix_caching"} & given.keys():
        given["allocator"] = Given(START, FLAG_RANK, "--allocator")
    resolved = resolve(given)
    trace = load_recorded(resolved.run.load, resolved.notes)
    advice = advise(resolved.run, trace, simulate)
    answer = answer_of(advice, resolved.run, trace, given)
    if resolved.output.json:
        print_json(answer)
    else:
        click.echo(advice_report(answer))
    return 0 if advice.summary is not None else 1


def answer_of(
    advice: Advice, start: RunConfig, trace: Trace, given: Mapping[str, Given]
) -> dict[str, Any]:
    """Answer *advice*, on *trace* from *start*, as rows; *given* is what the user set by name."""
    final = advice.final
    return {
        "model": model_of(start.model).name,
        "gpu": start.model.gpu,
        "trace": trace.name,
        "num_prompts": len(trace),
        "goodput": start.load.goodput,
        "rule": RULE,
        "steps": [_row(step) for step in advice.steps],
        "changes": advice.changes,
        "replicas": final.replicas,
        "result": _result(advice),
        "commands": _commands(advice, start, given),
        "rests_on": list(_rests_on(advice)),
    }


def _row(step: Step) -> dict[str, Any]:
    """Answer a step with its gains: factors over the steps kept before, and points of SLOs."""
    outcome: dict[str, Any] | None = None
    if step.outcome is not None:
        outcome = step.outcome._asdict()
        gains = compared(step.before, step.outcome) if step.before is not None else {}
        for name in ("users_held", "output_throughput", "usd_per_million_output_tokens"):
            outcome[f"{name}_factor"] = gains[name].ratio if gains else None
        outcome["slo_attainment_gain"] = gains["slo_attainment"].difference if gains else None
    return {
        "step": step.name,
        "changes": step.changes,
        "replicas": step.replicas,
        "verdict": step.verdict,
        "why": step.why,
        "outcome": outcome,
    }


def _result(advice: Advice) -> str:
    """Answer what was reached, in a line."""
    first, last = advice.steps[0].outcome, advice.final.outcome
    if last is None:
        return f"nothing that was tried starts, on up to {MOST_CARDS} cards"
    text = f"{last.output_throughput or 0:,.0f} output tok/s"
    if first is not None and first.output_throughput:
        text += f", {(last.output_throughput or 0) / first.output_throughput:.2f} times the start's"
    text += f", on {last.num_gpus} card" + "s" * (last.num_gpus > 1)
    if last.usd_per_million_output_tokens is not None:
        text += f" at {last.usd_per_million_output_tokens:.2f} USD a million"
    if last.slo_attainment is not None:
        met = "met" if last.slo_attainment >= GOAL else f"not met, which takes {100 * GOAL:.0f} %"
        text += f"; {100 * last.slo_attainment:.1f} % of all requests meet the SLOs: {met}"
    return text


def _commands(
    advice: Advice, start: RunConfig, given: Mapping[str, Given]
) -> dict[str, str | None]:
    """Answer the final deployment as command lines of kvsim and vLLM; None where there is none."""
    final = advice.final
    if final.run is None:
        return {"kvsim": None, "vllm": None}
    flat, label = final.config.flat(), final.config.label
    named = {*given, *advice.changes, "allocator"} - {
        "enable_prefix_caching",
        *CONTIGUOUS_ONLY,
    }
    mine = {s.name: flat[s.name] for s in settings() if s.name in named and s.name in flat}
    mine["allocator"] = label.removesuffix("-buddy")
    if label.endswith("-buddy"):
        mine["placement"] = "buddy"
    if start.load.trace is not None:  # else the shipped one's own
        mine.setdefault("max_model_len", flat["max_model_len"])
    if mine.get("request_rate") is not None:  # of all replicas, as is the other
        mine["request_rate"] /= final.replicas
    if mine.get("max_concurrency") is not None:
        mine["max_concurrency"] = math.ceil(mine["max_concurrency"] / final.replicas)
    kvsim = shlex.join(["kvsim", "run", *as_flags(mine)])
    if final.replicas > 1:
        kvsim += (
            f"  # one of {final.replicas} replicas, each with the sessions of "
            f"kvsim trace sample --every {final.replicas}"
        )
    return {"kvsim": kvsim, "vllm": _vllm(final, {**mine, "max_model_len": flat["max_model_len"]})}


def _vllm(final: Setup, values: Mapping[str, Any]) -> str | None:
    """Answer the command line of vLLM; None where it has no such allocator or batching."""
    allocator = final.config.cache.allocator
    if allocator == "contiguous" or final.config.scheduler.batching == "static":
        return None
    flags = {name: values[name] for name in OF_VLLM if name in values}
    flags["enable_prefix_caching"] = allocator == "prefix"
    if final.replicas > 1:
        flags["data_parallel_size"] = final.replicas
    model = final.config.model.model
    return shlex.join(
        ["vllm", "serve", model_of(final.config.model).name or model, *as_flags(flags)]
    )


def _rests_on(advice: Advice) -> Iterator[str]:
    """Answer what the figures rest on, of the final run, and what is not modelled."""
    if advice.summary is not None:
        yield from provenance([advice.summary]).splitlines()
    config = advice.final.config
    assert config.model.max_model_len is not None, "resolved"
    yield from modelled_notes(
        model_of(config.model),
        max_model_len=config.model.max_model_len,
        pipeline_parallel_size=1,
        prices_kernels=config.timing.step_time == "roofline",
    )
    tried = {name for step in advice.steps for name in step.changes}
    if tried & {"kv_cache_dtype", "quantization"}:
        yield (
            "fp8 KV and quantized weights may cost quality of answers: not modelled, measure it; "
            "steps with quantized weights take what 16-bit ones do: fp8 should gain more than that"
        )
    if "max_model_len" in advice.changes:
        yield "max_model_len: longer requests than this trace's are cut or refused"
    if "tensor_parallel_size" in tried:
        yield "replicas (x) take the sessions in turn, and know no prefixes of each other"
    yield "prices are rough, by the hour, and paid whether cards are busy or not"
