"""Result folders: what kind of folder it is, and what is in it, checked before it is drawn."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from sim.columns import SLOT_STATES
from sim.errors import FileError
from sim.files import read_small, reason
from sim.plots.table import EXPECTED, Cells, Series, numbers
from workloads.errors import plain, quote

_MAX_JSON_BYTES = 1 << 24
_SUMMARY_KEYS = {
    "allocator": str,
    "model_id": str,
    "gpu": str,
    "kv_cache_slots": int,
    "mean_num_requests_running": float,
    "kv_live_pct": float,
    "num_preemptions": int,
}
_STEP_COLUMNS = (
    "time", "duration", "running", "waiting", "num_preempted", "prefix_cache_queries",
    "prefix_cache_hits", *(f"kv_{state}_slots" for state in SLOT_STATES),
)  # fmt: skip
_FIRST_OF_SUMMARY = "model_id"
"""The column of `summarize` that follows those of the swept settings."""


class RunSeries:
    """A run over time: its summary and its step rows."""

    def __init__(self, summary: dict[str, Any], steps: pd.DataFrame) -> None:
        self.summary = summary
        self.steps = steps
        self.label: str = summary["allocator"]

    @property
    def end(self) -> float:
        """Seconds from the first step to the last one's end."""
        last = self.steps.iloc[-1]
        return float(last["time"] + last["duration"] - self.steps["time"].iloc[0])

    def mean_over_time(self, column: str, edges: Series) -> Series:
        """Answer the time-weighted mean of *column* between neighbouring *edges* (seconds)."""
        amounts = self.steps[column].to_numpy(float) * self.steps["duration"].to_numpy(float)
        return np.asarray(self._between(amounts, edges) / np.diff(edges))

    def sum_over_time(self, column: str, edges: Series) -> Series:
        """Answer the sum of *column* between neighbouring *edges*; a row's is spread evenly."""
        return self._between(self.steps[column].to_numpy(float), edges)

    def _between(self, amounts: Series, edges: Series) -> Series:
        start = self.steps["time"].to_numpy(float) - float(self.steps["time"].iloc[0])
        duration = self.steps["duration"].to_numpy(float)
        total = np.cumsum(amounts)
        times = np.column_stack([start, start + duration]).ravel()
        totals = np.column_stack([np.concatenate([[0.0], total[:-1]]), total]).ravel()
        return np.asarray(np.diff(np.interp(edges, times, totals)))


class RunFiles(RunSeries):
    """The result files of one run, as `sim.results.write_run` left them.

    Raises:
        FileError: a file is not there or not as it was left, or no step took time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = folder / "summary.json"
        summary = read_object(where)
        for key, kind in _SUMMARY_KEYS.items():
            value = summary.get(key)
            if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
                raise FileError(
                    f"{plain(str(where))}: key {key}: {quote(value)}; expected the summary of a "
                    "kvsim run that served somebody"
                )
        path, steps = read_frame(folder, "steps")
        for column in _STEP_COLUMNS:
            steps[column] = numbers(steps, column, path)
        if not steps["duration"].sum() > 0:
            raise FileError(f"{plain(str(path))}: no step took time: nothing to draw")
        slots, held = summary["kv_cache_slots"], steps[[f"kv_{s}_slots" for s in SLOT_STATES]]
        # Rows of a run of steps hold means, whose sum is rounded.
        if slots < 1 or not np.allclose(held.sum(axis=1), slots):
            raise FileError(
                f"{plain(str(where))}: key kv_cache_slots: {slots}; expected as many as the slots "
                f"of every row of {plain(path.name)} add up to"
            )
        super().__init__(summary, steps)


class Results(NamedTuple):
    """What a folder holds.

    Attributes:
        runs: that can be drawn over time: the one of a run folder, those of a comparison.
        cells: rows of a comparison or sweep; None of a run.
        notes: what is not there, for the user.
    """

    folder: Path
    runs: list[RunFiles]
    cells: Cells | None
    notes: list[str]


def read_results(folder: Path) -> Results:
    """Read *folder*, whichever command wrote it.

    Raises:
        FileError: it is no such folder, or one that is not finished or not as it was left.
    """
    shown = plain(str(folder))
    try:
        names = {path.name for path in folder.iterdir()}
    except (OSError, ValueError) as error:
        raise FileError(f"{shown}: {reason(error)}; {EXPECTED}") from None
    if names & {"summary.parquet", "summary.csv"}:
        return Results(folder, [], _sweep(folder), [])
    if names & {"sweep.json", "cells"}:
        raise FileError(
            f"{shown}: the sweep has no summary.parquet or summary.csv yet; "
            "run kvsim sweep again to finish it, or plot a folder below cells"
        )
    if "compare.csv" in names:
        return _comparison(folder)
    if "summary.json" in names:
        return Results(folder, [RunFiles(folder)], None, [])
    if names & {"steps.parquet", "steps.csv", "compare.json"}:
        missing = "compare.csv" if "compare.json" in names else "summary.json"
        raise FileError(f"{shown}: {missing} is missing: the folder is half-written; {EXPECTED}")
    raise FileError(f"{shown} {'has no results' if names else 'is empty'}; {EXPECTED}")


def _sweep(folder: Path) -> Cells:
    path, frame = read_frame(folder, "summary")
    columns = list(frame.columns)
    where = folder / "sweep.json"
    if where.exists():
        swept = read_object(where).get("swept")
        if not isinstance(swept, list) or not all(isinstance(name, str) for name in swept):
            raise FileError(f"{plain(str(where))}: key swept: expected a list of settings' names")
    elif _FIRST_OF_SUMMARY in columns:  # what a sweep left elsewhere, as in results/
        swept = [name for name in columns[: columns.index(_FIRST_OF_SUMMARY)] if name != "cell"]
    else:
        raise FileError(f"{plain(str(folder))}: sweep.json is missing; {EXPECTED}")
    for name in [*swept, "allocator"]:
        if name not in columns:
            raise FileError(f"{plain(str(path))}: column {plain(name)} is missing; {EXPECTED}")
    return Cells(frame, swept, path)


def _comparison(folder: Path) -> Results:
    path, frame = read_frame(folder, "compare")
    if "allocator" not in frame.columns:
        raise FileError(f"{plain(str(path))}: column allocator is missing; {EXPECTED}")
    cells = Cells(frame, ["allocator"], path)
    runs, notes, absent = [], [], []
    for label in cells.frame["allocator"]:
        place = folder / Path(label).name  # a name from a file leads nowhere else
        if not place.is_dir():
            absent.append(label)
            continue
        try:
            runs.append(RunFiles(place))
        except FileError as error:
            notes.append(f"{label} is in no chart over time: {error}")
    if absent:
        notes.append(f"in no chart over time, for want of their folders: {', '.join(absent)}")
    return Results(folder, runs, cells, notes)


def read_frame(folder: Path, name: str) -> tuple[Path, pd.DataFrame]:
    """Answer ``<name>.parquet``, or ``<name>.csv``, and where it is.

    Raises:
        FileError: there is neither, it cannot be read, or has no row.
    """
    path = folder / f"{name}.parquet"
    try:
        if path.exists():
            frame = pd.read_parquet(path)
        else:
            path = folder / f"{name}.csv"
            frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except FileNotFoundError:
        raise FileError(
            f"{plain(str(folder))}: neither {name}.parquet nor {name}.csv is there; {EXPECTED}"
        ) from None
    except (OSError, ValueError, NotImplementedError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else str(error)
        raise FileError(
            f"{plain(str(path))} cannot be read: {' '.join(why.split())[:200]}; "
            "write it again by the command that made it"
        ) from None
    if not len(frame):
        raise FileError(f"{plain(str(path))} has no row: nothing has finished, nothing to draw")
    frame = frame.rename(columns=str)
    return path, frame.loc[:, ~frame.columns.duplicated()]


def read_object(path: Path) -> dict[str, Any]:
    """Answer the JSON object in *path*.

    Raises:
        FileError: it cannot be read, or is none.
    """
    where = plain(str(path))
    try:
        content = msgspec.json.decode(read_small(path, _MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else "nested too deeply"
        raise FileError(f"{where}: {why}; {EXPECTED}") from None
    if not isinstance(content, dict):
        raise FileError(f"{where}: expected a JSON object; {EXPECTED}")
    return content
