"""``kvsim tables``: tables of measured kernel times: which there are, what is in them, new ones."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec

from sim.commands.common import print_json, say
from sim.errors import ConfigError, FileError
from sim.files import check_output_file, read_small
from sim.hardware import get_gpu
from sim.kv_spec import check_tensor_parallel
from sim.models import get_model
from sim.options import settings
from sim.settings import FLAG_RANK, Given, convert
from sim.timing import table_file
from sim.timing.importers import IMPORTERS, Importer
from sim.timing.importers.native import named
from sim.timing.table import TableInfo, TimingTable
from sim.timing.table_file import MAX_INFO_BYTES, load, save, sidecar
from sim.timing_report import (
    description,
    fit_description,
    fit_rows,
    listing,
    operations_text,
    table_row,
)
from workloads.errors import did_you_mean, plain

_DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
_IMPORT_OPTIONS = ("gpu", "model", "tensor_parallel_size", "backend", "backend_version")


def list_tables(values: dict[str, Any]) -> int:
    """Print every fit, and every table in folders; answer the exit code.

    Without folders: the shipped tables, and those in the current folder, not below it.

    Raises:
        FileError: a folder that is none.
    """
    folders = [Path(folder) for folder in values["folders"]]
    for folder in folders:
        if not folder.is_dir():
            raise FileError(f"{plain(str(folder))} is no folder; expected one with timing tables")
    rows = []
    for path in (
        _found(folders) if folders else [*_found([table_file.SHIPPED]), *_found([Path()], "*")]
    ):
        try:
            rows.append(table_row(path, _table(path)))
        except ConfigError as error:
            say(f"note: left out: {error}")
    fits = fit_rows()
    if values["json"]:
        print_json({"fits": fits, "tables": rows})
    else:
        places = "" if folders else ", shipped and in the current folder"
        click.echo(listing(fits, rows, places))
    return 0


def _found(folders: Iterable[Path], below: str = "**/*") -> list[Path]:
    """Answer the Parquet files below *folders* that have the JSON file of a timing table."""
    paths = (path for folder in folders for path in sorted(folder.glob(f"{below}.parquet")))
    return [path for path in dict.fromkeys(paths) if _format_of(sidecar(path)) == _FORMAT]


_FORMAT = msgspec.structs.fields(TableInfo)[-2].default


def _format_of(path: Path) -> object:
    """Answer what the JSON file *path* says that it describes; None if it says nothing."""
    try:
        content = msgspec.json.decode(read_small(path, MAX_INFO_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None


def _table(path: str | Path) -> TimingTable:
    """Answer the table in *path*, whose GPU and model are ours."""
    table = load(path, "")
    where = plain(str(sidecar(Path(path))))
    ours = named(table.info, where)
    for key in ("gpu", "model"):
        name, expected = getattr(table.info, key), getattr(ours, key)
        if name != expected:
            raise FileError(f"{where}: key {key}: {name!r}; expected {expected!r}")
    return table


def show(values: dict[str, Any]) -> int:
    """Print what is in a table or a fit, and draw it; answer the exit code.

    Raises:
        ConfigError, FileError: flags that contradict each other, or what cannot be used.
    """
    name, output = values["table"], values["output"]
    if (name is None) == (values["gpu"] is None):
        raise ConfigError(
            "kvsim tables show: expected a table, like H200.parquet, or --gpu H200 for its fit; "
            f"got {'neither' if name is None else 'both'}"
        )
    _refuse_useless(
        values,
        ("heads", "kernel") if name is None else ("model", "tensor_parallel_size"),
        f"kvsim tables show of a {'fit' if name is None else 'table'}",
    )
    if output is None:
        needs_chart = ("heads", "kernel", "model", "tensor_parallel_size")
        _refuse_useless(values, needs_chart, "kvsim tables show without -o FILE.png")
    else:
        check_output_file(Path(output), (".png", ".svg"), "--output")
    if name is None:
        _show_fit(values)
    else:
        _show_table(name, values)
    if output is not None:
        say(f"wrote {plain(output)}")
    return 0


def _show_table(name: str, values: dict[str, Any]) -> None:
    table = _table(name)
    text = description(name, table)
    if values["output"] is not None:
        from sim.timing_plots import draw_table, write  # noqa: PLC0415  # only who draws pays

        figure, notes = draw_table(table, heads=values["heads"], kernel=values["kernel"])
        write(figure, Path(values["output"]))
        for note in notes:
            say(f"note: {note}")
    click.echo(text)


def _show_fit(values: dict[str, Any]) -> None:
    gpu = get_gpu(_value(values, "gpu"))
    model = get_model(_value(values, "model") or _DEFAULT_MODEL)
    tensor_parallel_size = _value(values, "tensor_parallel_size") or 1
    check_tensor_parallel(model, tensor_parallel_size)
    text = fit_description(gpu.name)
    if not text:
        known = sorted(fit["gpu"] for fit in fit_rows())
        raise ConfigError(f"--gpu {gpu.name} has no fit; choices: {', '.join(known)}")
    if values["output"] is not None:
        from sim.timing_plots import draw_fit, write  # noqa: PLC0415  # only who draws pays

        write(draw_fit(gpu, model, tensor_parallel_size), Path(values["output"]))
    click.echo(text)


def import_table(values: dict[str, Any]) -> int:
    """Make a table of other measurements, and say how to use it; answer the exit code.

    Raises:
        ConfigError, FileError: a name or flag that cannot be used, a source that is not as
            described, a file that cannot be written. Nothing is written then.
    """
    name, source, output = values["name"], values["source"], values["output"]
    if name is None or source is None or output is None:
        raise ConfigError(
            "kvsim tables import: expected NAME SOURCE -o OUT.parquet; NAME and SOURCE are "
            + "; ".join(f"{name}: {importer.source}" for name, importer in IMPORTERS.items())
        )
    if name not in IMPORTERS:
        raise ConfigError(f"importer {name!r} is unknown; {did_you_mean(name, IMPORTERS)}")
    importer = IMPORTERS[name]
    useless = [option for option in _IMPORT_OPTIONS if option not in importer.options]
    _refuse_useless(values, useless, f"kvsim tables import {name}")
    options = {
        option: value
        for option in importer.options
        if (value := _value(values, option)) is not None
    }
    if "gpu" in options:
        options["gpu"] = get_gpu(options["gpu"]).name
    if "model" in options:
        options["model"] = get_model(options["model"]).name
    path = Path(output)
    check_output_file(path, (".parquet",), "--output")
    check_output_file(sidecar(path), (".json",), "--output: its JSON file")
    taken = next((p for p in (path, sidecar(path)) if p.exists()), None)
    if taken is not None and _format_of(sidecar(path)) != _FORMAT:
        raise FileError(
            f"--output {plain(output)}: {plain(taken.name)} is there and belongs to no timing "
            "table; expected another name"
        )
    table = _imported(importer, source, options)
    _check_units(table, plain(source))
    save(table, path)
    for note in table.info.notes:
        say(f"note: {note}")
    info = table.info
    flags = f"--gpu {info.gpu}"
    if info.model:
        flags += f" --model {info.model}"
        if info.tensor_parallel_size > 1:
            flags += f" --tensor-parallel-size {info.tensor_parallel_size}"
    click.echo(f"{len(table):,} rows, {info.gpu}, {info.provenance}: {table.describe()}\n")
    click.echo(operations_text(table))
    click.echo(f"\nuse it: kvsim run {flags} --timing-table {plain(output)}")
    say(f"wrote {plain(output)} and {plain(sidecar(path).name)} beside it")
    return 0


def _imported(importer: Importer, source: str, options: dict[str, Any]) -> TimingTable:
    try:
        return importer.read(source, **options)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0].replace("_", "-")
        raise FileError(
            f"{plain(source)}: needs {package}, which is not installed: pip install {package}"
        ) from None


def check(values: dict[str, Any]) -> int:
    """Print a line a table: good, or what is wrong; answer 1 if one is bad, else 0.

    Raises:
        ConfigError: no table is named.
    """
    if not values["tables"]:
        raise ConfigError("kvsim tables check: expected one or more tables, like H200.parquet")
    code = 0
    for name in values["tables"]:
        try:
            table = _table(name)
            _check_units(table, plain(name))
        except ConfigError as error:
            click.echo(f"bad: {error}")
            code = 1
            continue
        info = table.info
        click.echo(f"ok: {plain(name)}: {len(table):,} rows, {info.gpu}, {info.provenance}")
    return code


def _check_units(table: TimingTable, where: str) -> None:
    """Refuse times that no GPU takes, as of another unit, where the check for that is installed."""
    module = "sim.timing.table_check"
    try:
        check_units: Callable[[TimingTable, str], object] = import_module(module).check_units
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return
    check_units(table, where)


def _refuse_useless(values: dict[str, Any], names: Iterable[str], where: str) -> None:
    for name in names:
        if values[name] is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect on {where}: leave it out")


def _value(values: dict[str, Any], name: str) -> Any:
    """Answer the value of flag *name*, checked as the setting of that name is; None if not given.

    Raises:
        ConfigError: it is none.
    """
    value = values[name]
    setting = next((setting for setting in settings() if setting.name == name), None)
    if value is None or setting is None:
        return value
    return convert(setting, Given(value, FLAG_RANK, setting.flag))


TABLE_COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "list": list_tables,
    "show": show,
    "import": import_table,
    "check": check,
}
"""The commands of ``kvsim tables`` by name."""
