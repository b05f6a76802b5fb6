"""``kvsim capacity``: what a card holds, without a run.

`answer_of` is what another source of settings needs, such as a server's start-up log: a resolved
`RunConfig` in, every figure out.
"""

from collections.abc import Iterator
from typing import Any

import click

from sim.capacity import (
    Lengths,
    check_start,
    concurrency,
    fixed_length,
    graphs_beside,
    hand_estimate,
    lengths_of,
    options,
)
from sim.capacity_report import capacity_report, log_report
from sim.commands.common import given_by, load_trace, print_json, say
from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import GIB, GpuSpec, get_gpu
from sim.kv_pool import KVPool, kv_cache_lines
from sim.kv_spec import check_tensor_parallel
from sim.models import ModelSpec, model_of
from sim.options import Setting
from sim.pool_sizing import pool_of
from sim.reconcile import reconcile_log
from sim.server_log import read_server_log
from sim.settings import FLAG_RANK, Given, convert, resolve
from workloads.errors import plain

MOST = 1_000_000_000
"""Of tokens and users: far beyond any, and far from overflow."""


def _own(values: dict[str, Any], name: str, least: int) -> int | None:
    """Answer the value of a flag that only this command has; None if it was not given."""
    if values[name] is None:
        return None
    setting = Setting(name, "capacity", int, None, "")
    flag = setting.flag
    value = int(convert(setting, Given(values[name], FLAG_RANK, flag)))
    if not least <= value <= MOST:
        raise ConfigError(f"{flag} {value}: expected from {least} to {MOST:,}")
    return value


def capacity(values: dict[str, Any]) -> int:
    """Print what the *values* of all flags make of a card; answer the exit code.

    Raises:
        ConfigError, TraceError: what cannot be used or does not fit.
    """
    if values["from_log"] is not None:
        return _from_log(values)
    resolved = resolve(given_by(values), shipped_workload=False, runs=False)
    users = _own(values, "users", 1)
    mean_len = _own(values, "mean_len", 1)
    prefix_len = _own(values, "prefix_len", 0) or 0
    config = resolved.run
    for note in resolved.notes:
        say(f"note: {note}")
    lengths = _lengths(config, mean_len, prefix_len)
    answer = answer_of(config, lengths, users)
    for note in answer["notes"]:
        say(f"note: {note}")
    if resolved.output.json:
        print_json(answer)
    else:
        click.echo(capacity_report(answer))
    return 0


def _from_log(values: dict[str, Any]) -> int:
    """Print what a server's log says beside what is computed; answer the exit code.

    Raises:
        ConfigError: flags that cannot be used, a file that is unreadable or says nothing of memory.
    """
    for name in ("users", "mean_len", "prefix_len", "trace"):
        if values[name] is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} and --from-log: the log is reconciled only; leave one out")
    path = values["from_log"]
    log = read_server_log(path, "--from-log")
    given = given_by(values)
    json = given.pop("json", None)
    starts, findings = reconcile_log(log, given, plain(path))
    if not findings and not any(start["lines"] for start in starts):
        raise ConfigError(
            f"--from-log {plain(path)}: nothing about memory in {log.num_lines:,} lines; expected "
            "the start-up log of vLLM, SGLang or TensorRT-LLM"
        )
    answer = {"log": plain(path), "starts": starts, "findings": findings}
    if json is not None:
        print_json(answer)
    else:
        click.echo(log_report(answer))
    return 0


def _lengths(config: RunConfig, mean_len: int | None, prefix_len: int) -> Lengths:
    """Answer what requests hold: the trace's, `--mean-len`, or max_model_len for want of both."""
    longest = config.model.max_model_len
    assert longest is not None, "resolved"
    if config.load.trace is not None and mean_len is not None:
        raise ConfigError("--mean-len and --trace both say how long requests are: leave one out")
    if config.load.trace is not None:
        trace = load_trace(config.load, [])
        lengths = lengths_of(
            trace.num_prompt_tokens.tolist(),
            trace.num_output_tokens.tolist(),
            prefix_len,
            f"{trace.name}, mean over time",
        )
    else:
        lengths = fixed_length(mean_len or longest, prefix_len)
        if mean_len is None:
            lengths = lengths._replace(where="--max-model-len")
    if config.load.trace is not None and lengths.tokens > longest:
        raise ConfigError(
            f"--trace: its requests have {lengths.tokens:,.0f} tokens in the mean, and "
            f"--max-model-len is {longest}: expected one that most of them fit"
        )
    if prefix_len >= lengths.tokens:
        raise ConfigError(
            f"--prefix-len {prefix_len}: expected less than the {lengths.tokens:,.0f} tokens of a "
            "request"
        )
    if mean_len is not None and mean_len > longest:
        raise ConfigError(
            f"--mean-len {mean_len}: expected at most --max-model-len {longest}, beyond which no "
            "request gets"
        )
    return lengths


def answer_of(config: RunConfig, lengths: Lengths, users: int | None) -> dict[str, Any]:
    """Answer what ``kvsim capacity --json`` prints: sizes in bytes, GiB (2^30) and percent.

    Raises:
        CapacityError: nothing is left for the KV cache, or too little for one longest request.
    """
    model = model_of(config.model)
    gpu = get_gpu(config.model.gpu, config.model.gpu_memory_gib)
    check_tensor_parallel(
        model,
        config.model.tensor_parallel_size,
        enable_expert_parallel=config.model.enable_expert_parallel,
    )
    try:
        pool = pool_of(config, model, gpu, grouped=True)
        check_start(pool, config)
    except CapacityError as error:
        raise CapacityError(f"{error}; {_what_fits(config, lengths, users)}") from None
    max_model_len, max_num_seqs = config.model.max_model_len, config.scheduler.max_num_seqs
    assert max_model_len is not None, "resolved"
    assert max_num_seqs is not None, "resolved"
    held = concurrency(pool, lengths, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    alone = config.cache.by_utilization and config.model.pipeline_parallel_size == 1
    estimate = hand_estimate(model, gpu, config, lengths.tokens) if alone else None
    return {
        "model": model.name,
        "gpu": gpu.name,
        "gpu_memory_visible_bytes": gpu.memory_visible_bytes,
        "tensor_parallel_size": config.model.tensor_parallel_size,
        "pipeline_parallel_size": config.model.pipeline_parallel_size,
        "gpu_memory_utilization": config.cache.gpu_memory_utilization,
        "vllm_version": config.cache.vllm_version,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "kv_cache_line": kv_cache_lines(pool, max_model_len),
        "num_gpu_blocks": pool.num_gpu_blocks,
        "block_size": pool.block_size,
        "kv_cache_bytes": pool.kv_cache_bytes,
        "kv_pool_provenance": pool.provenance,
        "breakdown": _breakdown(pool),
        "lengths": {
            "tokens": lengths.tokens,
            "blocks": lengths.blocks(pool),
            "prefix_len": lengths.prefix_len,
            "longest": lengths.longest,
            "where": lengths.where,
        },
        "block_tables": [
            {"kind": t.kind, "layers": t.num_layers, "block_size": t.block_size, "window": t.window}
            for t in pool.tables
        ],
        "concurrency": held._asdict(),
        "binding": (
            f"{held.binding} (memory holds {held.best:,.1f}, --max-num-seqs is {max_num_seqs:,})"
            + ("; reserve-max: max_model_len" if held.reserve_max < held.best else "")
        ),
        "hand_estimate": (
            None
            if estimate is None
            else {"bytes": estimate[0], "gib": estimate[0] / GIB, "requests": estimate[1]}
        ),
        "users": users,
        "options": (
            None
            if users is None
            else [
                option._asdict() | {"gpus": option.gpus, "flags": option.flags}
                for option in options(config, model, gpu, lengths, users)
            ]
        ),
        "notes": list(_notes(config, lengths, model, gpu, pool)),
    }


def _notes(
    config: RunConfig, lengths: Lengths, model: ModelSpec, gpu: GpuSpec, pool: KVPool
) -> Iterator[str]:
    """Answer what the user should know beside the figures."""
    graphs = graphs_beside(model, gpu, config)
    if graphs is not None:
        yield (
            f"vLLM {config.cache.vllm_version} captures CUDA graphs of about "
            f"{graphs[0] / GIB:.2f} GiB (fitted) after it has sized the pool: they have to fit the "
            f"{graphs[1] / GIB:.2f} GiB outside utilization"
            + (", and do not: out of memory is likely" if graphs[0] > graphs[1] else "")
        )
    if len(pool.tables) > 1:
        yield (
            f"layers are {model.layout.describe()}: a request has {len(pool.tables)} block tables "
            "from one pool, as vLLM's hybrid manager does; run and compare give it one, or refuse "
            "the model"
        )
    longest = config.model.max_model_len
    if longest is not None and lengths.longest > longest:
        yield (
            f"the longest request has {lengths.longest:,} tokens, max_model_len is "
            f"{longest:,}: it is cut or refused"
        )


def _what_fits(config: RunConfig, lengths: Lengths, users: int | None) -> str:
    """Answer which of `options` hold the users, one for want of a number, for a refusal."""
    model, gpu = (
        model_of(config.model),
        get_gpu(config.model.gpu, config.model.gpu_memory_gib),
    )
    fitting = [
        f"{option.flags} from utilization {option.utilization:.2f}"
        for option in options(config, model, gpu, lengths, users or 1)
        if option.utilization is not None
    ]
    listed = ", ".join(fitting[:4]) or "none of -tp 1, 2, 4, 8 with either KV dtype"
    return f"what fits on {gpu.name}: {listed}"


def _breakdown(pool: KVPool) -> list[dict[str, Any]]:
    """Answer the card's shares, in the order in which vLLM subtracts them."""
    total = sum(share.num_bytes for share in pool.breakdown)
    return [
        {
            "name": share.name,
            "bytes": share.num_bytes,
            "gib": share.num_bytes / GIB,
            "percent": 100 * share.num_bytes / total,
            "provenance": share.provenance,
        }
        for share in pool.breakdown
    ]
