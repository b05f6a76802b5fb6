"""From a sweep's file to its cells: a checked configuration each, and the files that they read.

What a worker needs is read here, once, and goes to it as values: it may be on another machine, and
a file that changes in the meantime changes no cell.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from sim.arrivals import recorded
from sim.config import LoadConfig, RunConfig
from sim.errors import ConfigError, FileError
from sim.files import reason, regular
from sim.hf_config import CONFIG_FILE, QUANT_FILE
from sim.models import model_path
from sim.options import settings
from sim.results import versions
from sim.settings import FILE_RANK, Given, resolve
from sim.sweep.spec import Find, Spec
from sim.timing.table_file import sidecar
from workloads.errors import plain
from workloads.formats import SPEC_FORMAT, is_spec
from workloads.record import Trace

SWEPT_RANK = 3
"""A swept value wins over a fixed one, with a note."""

HASH_LENGTH = 16
"""Hexadecimal digits of a cell's name."""

TraceKey = tuple[str | None, str | None, int]
"""Name and format of a trace, as configured; and the seed, where it draws the requests."""


class Cell(NamedTuple):
    """One configuration of a sweep.

    Attributes:
        name: hash of all that decides its result; the name of its folder.
        settings: what was swept, in the spec's order, and the seed.
        config: the configuration, with paths as the spec has them.
        find: what to search for instead of a single run.
    """

    name: str
    settings: dict[str, Any]
    config: RunConfig
    find: Find | None

    @property
    def shown(self) -> str:
        """Name and settings, for messages."""
        values = ", ".join(f"{name}={plain(str(value))}" for name, value in self.settings.items())
        return f"{self.name} ({values})"


class Material(NamedTuple):
    """Small files that a setting names: a model's, a GPU's or a timing table.

    Attributes:
        entry: the file or folder that the setting means, relative to where the files are put.
        files: content by name relative to that.
    """

    entry: str
    files: dict[str, bytes]

    @property
    def digest(self) -> str:
        """Hash of names and contents."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


class Inputs(NamedTuple):
    """What cells read: the same for every worker.

    Attributes:
        traces: as recorded.
        materials: by setting and value.
        versions: of the program that plans, which all that run must have.
    """

    traces: dict[TraceKey, Trace]
    materials: dict[tuple[str, str], Material]
    versions: dict[str, Any]

    def trace_of(self, load: LoadConfig) -> Trace:
        """Answer the trace of *load* as recorded."""
        return self.traces[_trace_key(load)]

    @contextmanager
    def located(self, config: RunConfig) -> Iterator[RunConfig]:
        """Lend *config* with paths of files that are there, in a folder that goes afterwards."""
        flat = config.flat()
        used = {
            name: material
            for (name, value), material in self.materials.items()
            if flat[name] == value
        }
        if not used:
            yield config
            return
        with TemporaryDirectory(prefix="kvsim-") as folder:
            for name, material in used.items():
                for file, content in material.files.items():
                    path = Path(folder, name, file)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
            paths = {name: str(Path(folder, name, m.entry)) for name, m in used.items()}
            yield with_values(config, paths)


class Plan(NamedTuple):
    """A sweep that can start.

    Attributes:
        cells: in the spec's order.
        inputs: what they read.
        files: sha256 of every file that is read, by the name in the spec.
        notes: what the user should be told.
    """

    cells: list[Cell]
    inputs: Inputs
    files: dict[str, str]
    notes: list[str]


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Answer *config* with other *values*, by the names of settings."""
    concerns: dict[str, dict[str, Any]] = {}
    for setting in settings():
        if setting.name in values:
            concerns.setdefault(setting.concern, {})[setting.name] = values[setting.name]
    changed = {
        concern: msgspec.structs.replace(getattr(config, concern), **changes)
        for concern, changes in concerns.items()
    }
    return msgspec.structs.replace(config, **changed)


def make_plan(spec: Spec) -> Plan:
    """Answer the cells of *spec*. Paths in it are relative to its own folder.

    Raises:
        ConfigError: a combination that contradicts itself; two that are one configuration; a file
            that cannot be read.
        TraceError: a trace that cannot be used.
    """
    inputs = Inputs({}, {}, versions())
    files: dict[str, str] = {}
    notes: list[str] = []
    cells: dict[str, Cell] = {}
    for combination in spec.combinations():
        config, more = _resolved(spec, combination, inputs)
        notes += more
        trace = _trace(spec, config.load, inputs)
        if config.load.trace is not None:
            files[config.load.trace] = trace.sha256
        cell = _cell(spec, combination, config, inputs)
        if cell.name in cells:
            raise ConfigError(
                f"{spec.shown}: cells {cells[cell.name].shown} and {cell.shown} are one "
                "configuration: leave one of them out, by [[exclude]] say"
            )
        cells[cell.name] = cell
    if "seed" in spec.swept:
        notes += [
            f"{trace.name}: recorded, so that no seed changes it: cells of all seeds are equal"
            for trace in inputs.traces.values()
            if trace.trace_format != SPEC_FORMAT
        ]
    files |= {value: material.digest for (_, value), material in inputs.materials.items()}
    notes += [f"{trace.name}: {note}" for trace in inputs.traces.values() for note in trace.notes]
    return Plan(list(cells.values()), inputs, files, list(dict.fromkeys(notes)))


def _resolved(
    spec: Spec, combination: Mapping[str, Any], inputs: Inputs
) -> tuple[RunConfig, list[str]]:
    """Answer the configuration of one cell and its notes; add the files it names to *inputs*."""
    where = {name: f"{spec.shown}: {table} {name}" for name, table in spec.swept.items()}
    given = {
        name: Given(value, FILE_RANK, f"{spec.shown}: [fixed] {name}")
        for name, value in spec.fixed.items()
    } | {name: Given(value, SWEPT_RANK, where[name]) for name, value in combination.items()}
    written: dict[str, str] = {}
    for name in ("model", "gpu", "timing_table"):
        if name not in given:
            continue
        value = given[name].value
        path = _path(name, value, spec.path.parent)
        if path is None:
            continue
        if (name, value) not in inputs.materials:
            inputs.materials[name, value] = _material(name, path, given[name].where)
        written[name] = value
        given[name] = given[name]._replace(value=str(path))
    found = resolve(given)
    return with_values(found.run, written), found.notes


def _path(name: str, value: str, folder: Path) -> Path | None:
    """Answer the file that setting *name* means by *value*; None where it is no path."""
    if name == "model":
        return model_path(value, folder)
    if name == "gpu" and not value.lower().endswith(".toml"):
        return None
    return folder / value


def _material(name: str, path: Path, where: str) -> Material:
    """Answer the files at *path*, under the names that say what they are.

    Raises:
        FileError: one that cannot be read.
    """
    try:
        path = path.expanduser()
        entry = path.resolve().name
        if name == "model":
            entry = f"{path.resolve().parent.name}/{entry}"
        paths = {entry: path}
        if path.is_dir():
            paths = {f"{entry}/{CONFIG_FILE}": path / CONFIG_FILE}
        if name == "timing_table":
            paths[sidecar(Path(entry)).name] = sidecar(path)
        found = dict(paths)
        for file, source in paths.items():
            quant = source.with_name(QUANT_FILE)
            if name == "model" and source.name == CONFIG_FILE and quant.is_file():
                found[str(Path(file).with_name(QUANT_FILE))] = quant
        files = {file: regular(source).read_bytes() for file, source in found.items()}
    except (OSError, ValueError, RuntimeError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else str(error)
        raise FileError(f"{where} {plain(str(path))}: {why}; expected a file to read") from None
    return Material(entry, files)


def _trace_key(load: LoadConfig) -> TraceKey:
    drawn = load.trace is not None and is_spec(load.trace, load.trace_format)
    return load.trace, load.trace_format, load.seed if drawn else 0


def _trace(spec: Spec, load: LoadConfig, inputs: Inputs) -> Trace:
    """Answer the trace of *load* as recorded, read only once."""
    key = _trace_key(load)
    if key not in inputs.traces:
        path = None if load.trace is None else spec.path.parent / load.trace
        inputs.traces[key] = recorded(load, path)
    return inputs.traces[key]


def _cell(spec: Spec, combination: Mapping[str, Any], config: RunConfig, inputs: Inputs) -> Cell:
    """Answer the cell of one combination, named by the hash of all that decides its result."""
    trace = inputs.trace_of(config.load)
    options = (config.load.trace_format or "").partition(":")[2]
    flat = config.flat()
    for (name, value), material in inputs.materials.items():
        if flat[name] == value:
            flat[name] = f"{material.entry}: {material.digest}"
    decides = flat | {
        "trace": trace.sha256,
        "trace_format": [trace.trace_format, options],
        "find": spec.find,
        "kvsim": inputs.versions["kvsim"]["version"],
    }
    digest = hashlib.sha256(msgspec.json.encode(decides, order="deterministic")).hexdigest()
    seed = {"seed": config.load.seed}
    return Cell(digest[:HASH_LENGTH], {**combination, **seed}, config, spec.find)
