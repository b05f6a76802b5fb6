"""The remedy ladder in words: the report of ``kvsim advise``. Reads rows only."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tabulate

tabulate.MIN_PADDING = 0  # its default of two columns a header would not fit 100 columns

Answer = dict[str, Any]

_MARKS = {
    "start": " ",
    "kept": "+",
    "not enough": "~",
    "no gain": "-",
    "worse": "-",
    "cannot": "!",
    "not tried": ".",
}
"""What stands before a step, by its verdict."""

_SHORT = {
    "tensor_parallel_size": "tp {}",
    "gpu_memory_utilization": "{:g}",
    "max_model_len": "{:,}",
    "max_num_seqs": "{:,}",
    "quantization": "{}",
    "kv_cache_dtype": "{}",
}


class _Column(NamedTuple):
    """A figure of every step: its header, where it is, how it is written."""

    header: str
    key: str
    spec: str
    of: Callable[[float], float] = float


_GAINS = (
    _Column("users\nheld", "users_held", ",.1f"),
    _Column("gain", "users_held_factor", ".2f"),
    _Column("running\nmean", "mean_num_requests_running", ",.1f"),
    _Column("peak\npool %", "max_kv_cache_usage_perc", ".0f", lambda share: 100 * share),
    _Column("prefix\nhit %", "prefix_cache_hit_rate", ".0f", lambda share: 100 * share),
    _Column("output\ntok/s", "output_throughput", ",.0f"),
    _Column("gain", "output_throughput_factor", ".2f"),
    _Column("cards", "num_gpus", ".0f"),
    _Column("USD/h", "usd_per_hour", ".2f"),
    _Column("USD/M\ntokens", "usd_per_million_output_tokens", ".2f"),
)
_SERVED = (
    _Column("meet SLOs\n%", "slo_attainment", ".1f", lambda share: 100 * share),
    _Column("goodput\nreq/s", "request_goodput", ".2f"),
    _Column("TTFT ms\np50", "median_ttft_ms", ",.0f"),
    _Column("TTFT ms\np99", "p99_ttft_ms", ",.0f"),
    _Column("TPOT ms\np50", "median_tpot_ms", ",.1f"),
    _Column("TPOT ms\np99", "p99_tpot_ms", ",.1f"),
    _Column("preemp-\ntions", "num_preemptions", ",.0f"),
)


def advice_report(answer: Answer) -> str:
    """Answer the report of `sim.commands.advise.answer_of`."""
    steps = answer["steps"]
    reasons = [
        f"{_MARKS[step['verdict']]} {step['step']}: {step['verdict']}: {step['why']}"
        for step in steps
        if step["why"] and step["verdict"] in {"cannot", "not tried"}
    ]
    return "\n".join(
        [
            f"{answer['num_prompts']:,} requests of {answer['trace']}, {answer['model']} on "
            f"{answer['gpu']}" + (f", SLOs {answer['goodput']}" if answer["goodput"] else ""),
            "",
            "What each step gains on top of those kept (+) before it; ~ kept, but not enough to "
            "start,",
            "- no gain: dropped, ! cannot be done, . not tried",
            _table(steps, _GAINS),
            "",
            "How requests are served",
            _table(steps, _SERVED),
            *([""] if reasons else []),
            *reasons,
            "",
            f"rule: {answer['rule']}",
            f"result: {answer['result']}",
            *(["", "$ " + answer["commands"]["kvsim"]] if answer["commands"]["kvsim"] else []),
            *(["$ " + answer["commands"]["vllm"]] if answer["commands"]["vllm"] else []),
            "",
            *(f"- {line}" for line in answer["rests_on"]),
        ]
    )


def _value(step: Answer) -> str:
    """Answer what a step sets, in few characters."""
    words = [
        ("on" if value else "off")
        if isinstance(value, bool)
        else "no"
        if value is None
        else _SHORT[name].format(value)
        for name, value in step["changes"].items()
    ]
    if step["replicas"] > 1:
        words.append(f"x {step['replicas']}")
    return ", ".join(words)


def _table(steps: Sequence[Answer], columns: Sequence[_Column]) -> str:
    run = [step for step in steps if step["outcome"] is not None]
    columns = [c for c in columns if any(step["outcome"][c.key] is not None for step in run)]
    rows = []
    for step in steps:
        figures = step["outcome"]
        cells = [
            "" if figures is None else _number(figures[column.key], column) for column in columns
        ]
        rows.append([f"{_MARKS[step['verdict']]} {step['step']}", _value(step), *cells])
    return tabulate.tabulate(
        rows,
        ["  step", "", *(column.header for column in columns)],
        tablefmt="simple",
        colalign=("left", "left", *("right" for _ in columns)),
        disable_numparse=True,
        preserve_whitespace=True,
    )


def _number(value: float | None, column: _Column) -> str:
    return "-" if value is None else f"{column.of(value):{column.spec}}"
