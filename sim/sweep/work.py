"""What a worker does: one cell, from its configuration to the bytes of its files."""

import dataclasses
import math
from collections.abc import Generator
from typing import Any

from sim.arrivals import arriving
from sim.config import RunConfig
from sim.errors import ConfigError
from sim.files import encode_json
from sim.results import run_files, versions
from sim.simulation import RunResult, Simulation
from sim.summary import summarize
from sim.sweep.cells import Cell, Inputs, with_values
from sim.sweep.find import Found, highest_rate
from workloads.arrivals import mean_rate
from workloads.errors import TraceError

ERROR_FILE = "error.json"

Files = dict[str, bytes]
"""The files of a finished cell by name: those of a run, or `ERROR_FILE` alone."""


Results = Generator[tuple[Cell, Files], None, None]
"""Cells as they finish."""


def run_cell(cell: Cell, inputs: Inputs) -> Files:
    """Answer the files of *cell*. Whatever goes wrong with it is its result: `ERROR_FILE`."""
    try:
        if (here := versions()) != inputs.versions:
            return failure(cell, f"worker has {here}, but the sweep is of {inputs.versions}")
        if cell.find is not None:
            return _searched(cell, inputs)
        result = _run(cell.config, inputs)
        return run_files(result, summarize(result))
    except (ConfigError, TraceError) as error:
        return failure(cell, str(error))
    except MemoryError as error:
        return failure(cell, f"out of memory: {error}")
    except Exception as error:  # the others go on, and the list at the end has it
        return failure(cell, f"{type(error).__name__}: {error}")


def failure(cell: Cell, why: str) -> Files:
    """Answer the files of a *cell* that failed."""
    content = {"cell": cell.name, **cell.settings, "error": " ".join(why.splitlines())}
    return {ERROR_FILE: encode_json(content)}


def _run(config: RunConfig, inputs: Inputs) -> RunResult:
    trace = arriving(inputs.trace_of(config.load), config.load)
    with inputs.located(config) as located:
        simulation = Simulation(located, trace)
    return dataclasses.replace(simulation.run(), config=config)


def _searched(cell: Cell, inputs: Inputs) -> Files:
    """Answer the files of the run at the highest rate that meets the goal.

    Where none does, those of the run at the lowest rate tried. ``search.json`` has every rate.
    """
    find = cell.find
    assert find is not None
    tried: list[dict[str, Any]] = []
    kept: dict[bool, tuple[RunResult, dict[str, Any]]] = {}

    def meets(rate: float) -> bool:
        changes = {"request_rate": _json_rate(rate), "goodput": find.goodput}
        result = _run(with_values(cell.config, changes), inputs)
        summary = summarize(result)
        names = ("request_rate", "slo_attainment", "request_goodput", "p99_ttft_ms", "p99_tpot_ms")
        tried.append({name: summary[name] for name in names})
        met = bool(summary["slo_attainment"] >= find.share)
        kept[met] = (result, summary)  # of those that meet it, the last is the fastest
        return met

    start = mean_rate(inputs.trace_of(cell.config.load))
    if math.isinf(start):
        raise ConfigError("[find]: all requests of the trace arrive at once: no rate to change")
    found = highest_rate(meets, start, find.tolerance)
    result, summary = kept[bool(found.rate)]
    files = run_files(result, summary | _found_section(found))
    return files | {"search.json": encode_json(tried)}


def _found_section(found: Found) -> dict[str, Any]:
    return {
        "found_request_rate": _json_rate(found.rate),
        "found_failing_request_rate": _json_rate(found.failing),
        "found_num_runs": found.num_runs,
    }


def _json_rate(rate: float) -> float | str:
    """Answer *rate* as settings have it: JSON has no inf."""
    return "inf" if math.isinf(rate) else rate
