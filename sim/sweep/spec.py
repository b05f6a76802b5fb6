"""What a sweep's file asks for: what is fixed, lists to cross or to pair, combinations left out."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sim.errors import ConfigError
from sim.goodput import parse_goodput
from sim.options import Setting, settings
from sim.settings import FILE_RANK, Given, convert, parse_file
from workloads.errors import did_you_mean, plain, quote

MAX_CELLS = 100_000
"""Most cells of one sweep: beyond it a typing error is likelier than patience."""

_TABLES = ("fixed", "grid", "zip", "exclude", "find")


class Find(msgspec.Struct, frozen=True):
    """A search for the highest request rate at which requests are served well enough.

    Attributes:
        goodput: what each request has to meet, as ``--goodput``.
        share: of all requests, that have to meet it. vLLM reports the 99th percentile; DistServe
            (OSDI 2024) counts 0.9.
        tolerance: how far, relatively, a rate that was too high may be above the rate found.
    """

    goodput: str
    share: float = 0.99
    tolerance: float = 0.01


class Spec(NamedTuple):
    """A sweep's file, every value converted and checked by itself.

    Attributes:
        path: the file.
        fixed: the value of each setting that all cells share.
        grid: the values of each setting that is crossed with all others.
        zips: settings whose lists go together; crossed with the rest.
        excludes: combinations left out: a cell that has one of the values of every setting named.
        find: what to search for, if anything.
    """

    path: Path
    fixed: dict[str, Any]
    grid: dict[str, list[Any]]
    zips: list[dict[str, list[Any]]]
    excludes: list[dict[str, list[Any]]]
    find: Find | None

    @property
    def shown(self) -> str:
        """The file, for messages."""
        return plain(str(self.path))

    @property
    def swept(self) -> dict[str, str]:
        """Every setting that differs between cells, in order, and the table that it is in."""
        return dict.fromkeys(self.grid, "[grid]") | {
            name: "[[zip]]" for group in self.zips for name in group
        }

    def record(self) -> dict[str, Any]:
        """Answer what decides the cells, as JSON would give it back."""
        found: dict[str, Any] = msgspec.to_builtins(
            {
                "fixed": self.fixed,
                "grid": self.grid,
                "zip": self.zips,
                "exclude": self.excludes,
                "find": self.find,
            }
        )
        return found

    def combinations(self) -> list[dict[str, Any]]:
        """Answer the swept settings of every cell; the first list of the file changes slowest.

        Raises:
            ConfigError: nothing is left, or an exclusion that excludes nothing.
        """
        lists = [[{name: value} for value in values] for name, values in self.grid.items()]
        for group in self.zips:
            rows = zip(*group.values(), strict=True)
            lists.append([dict(zip(group, row, strict=True)) for row in rows])
        left: list[dict[str, Any]] = []
        used: set[int] = set()
        for parts in itertools.product(*lists):
            cell = {name: value for part in parts for name, value in part.items()}
            hits = {place for place, rule in enumerate(self.excludes) if _has(cell, rule)}
            used |= hits
            if not hits:
                left.append(cell)
        for place, rule in enumerate(self.excludes):
            if place not in used:
                raise ConfigError(
                    f"{self.shown}: [[exclude]] {place + 1} ({_shown(rule)}) is true of no cell: "
                    "expected values that occur together"
                )
        if not left:
            raise ConfigError(f"{self.shown}: [[exclude]] leaves no cell; expected at least one")
        return left


def _has(cell: Mapping[str, Any], rule: Mapping[str, list[Any]]) -> bool:
    return all(cell[name] in values for name, values in rule.items())


def _shown(rule: Mapping[str, list[Any]]) -> str:
    return ", ".join(f"{name} = {quote(values)}" for name, values in rule.items())


def read_spec(path: str) -> Spec:
    """Answer the sweep that the TOML (or JSON) file *path* describes.

    Raises:
        FileError: it cannot be read.
        ConfigError: it is not of that format, or asks for what there is not: table, setting, value.
    """
    shown = plain(path)
    content = parse_file(path, shown)
    if not isinstance(content, dict):
        raise ConfigError(f"{shown}: expected tables, like [grid], got {quote(content)}")
    for name in content:
        if name not in _TABLES:
            raise ConfigError(
                f"{shown}: key {quote(name)} is unknown; {did_you_mean(name, _TABLES)}"
            )
    fixed = {
        s.name: _value(s, value, f"{shown}: [fixed] {s.name}")
        for s, value in _settings_of(content.get("fixed", {}), f"{shown}: [fixed]")
    }
    grid = {
        s.name: _values(s, values, f"{shown}: [grid] {s.name}", once=True)
        for s, values in _settings_of(content.get("grid", {}), f"{shown}: [grid]")
    }
    zips = [
        _zip(group, f"{shown}: [[zip]] {place}")
        for place, group in enumerate(_list_of(content, "zip", shown), 1)
    ]
    _refuse_shared([("[fixed]", fixed), ("[grid]", grid), *(("[[zip]]", z) for z in zips)], shown)
    spec = Spec(Path(path), fixed, grid, zips, [], _find(content, shown))
    if not spec.swept:
        raise ConfigError(
            f"{shown}: nothing to sweep: expected values in [grid] or [[zip]], "
            "like block_size = [8, 16]"
        )
    count = math.prod([*map(len, grid.values()), *(len(next(iter(z.values()))) for z in zips)])
    if count > MAX_CELLS:
        raise ConfigError(f"{shown}: {count:,} cells; expected at most {MAX_CELLS:,}")
    for place, rule in enumerate(_list_of(content, "exclude", shown), 1):
        spec.excludes.append(_exclude(rule, spec, f"{shown}: [[exclude]] {place}"))
    if spec.find is not None:
        for name in ("request_rate", "goodput"):
            if name in spec.fixed or name in spec.swept:
                raise ConfigError(f"{shown}: [find] decides {name}: leave it out elsewhere")
    return spec


def _list_of(content: Mapping[str, Any], name: str, shown: str) -> list[Any]:
    tables = content.get(name, [])
    if not isinstance(tables, list):
        raise ConfigError(f"{shown}: {name}: expected [[{name}]] tables, got {quote(tables)}")
    return tables


def _settings_of(table: Any, where: str) -> Iterator[tuple[Setting, Any]]:
    """Answer the settings named in *table* and what is there."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table of settings, got {quote(table)}")
    known = {setting.name: setting for setting in settings() if setting.concern != "output"}
    seen: set[str] = set()
    for key, value in table.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where} {quote(key)} is unknown; {did_you_mean(name, known)}")
        if name in seen:
            raise ConfigError(f"{where} {name} is there twice, with a dash and with an underscore")
        seen.add(name)
        yield known[name], value


def _value(setting: Setting, value: Any, where: str) -> Any:
    return convert(setting, Given(value, FILE_RANK, where))


def _values(setting: Setting, values: Any, where: str, *, once: bool) -> list[Any]:
    """Answer the list *values*, each converted; *once*: none may come twice."""
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: expected a list of values, at least one, got {quote(values)}")
    if len(values) > MAX_CELLS:
        raise ConfigError(f"{where}: {len(values):,} values; expected at most {MAX_CELLS:,}")
    converted = [_value(setting, value, where) for value in values]
    for value in _repeated(converted) if once else ():
        raise ConfigError(f"{where}: {quote(value)} is there twice; expected each value once")
    return converted


def _repeated(values: list[Any]) -> list[Any]:
    """Answer those of *values* that came before."""
    seen: set[Any] = set()
    again = []
    for value in values:
        if value in seen:
            again.append(value)
        seen.add(value)
    return again


def _zip(group: Any, where: str) -> dict[str, list[Any]]:
    lists = {
        s.name: _values(s, values, f"{where} {s.name}", once=False)
        for s, values in _settings_of(group, where)
    }
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1:
        raise ConfigError(f"{where}: expected lists of one length, got {quote(lengths)}")
    rows = list(zip(*lists.values(), strict=True))
    for row in _repeated(rows):
        raise ConfigError(f"{where}: {quote(row)} is there twice; expected each row once")
    return lists


def _exclude(rule: Any, spec: Spec, where: str) -> dict[str, list[Any]]:
    found = {}
    swept = spec.swept
    for setting, value in _settings_of(rule, where):
        name = setting.name
        if name not in swept:
            raise ConfigError(f"{where} {name} is not swept; {did_you_mean(name, swept)}")
        values = value if isinstance(value, list) else [value]
        found[name] = _values(setting, values, f"{where} {name}", once=True)
    if not found:
        raise ConfigError(f"{where}: empty; expected settings and values, like block_size = 8")
    return found


def _refuse_shared(tables: Iterable[tuple[str, Mapping[str, Any]]], shown: str) -> None:
    """Refuse a setting that two tables give."""
    seen: dict[str, str] = {}
    for table, values in tables:
        for name in values:
            if name in seen:
                raise ConfigError(
                    f"{shown}: {name} is in {seen[name]} and in {table}: leave one of them out"
                )
            seen[name] = table


def _find(content: Mapping[str, Any], shown: str) -> Find | None:
    if "find" not in content:
        return None
    where, table = f"{shown}: [find]", content["find"]
    fields = Find.__struct_fields__
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, got {quote(table)}")
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where} {quote(key)} is unknown; {did_you_mean(key, fields)}")
    goodput = table.get("goodput")
    if not isinstance(goodput, str):
        raise ConfigError(
            f"{where} goodput: expected text like 'ttft:500 tpot:50', got {goodput!r}"
        )
    parse_goodput(goodput, f"{where} goodput")
    for key, most in (("share", 1.0), ("tolerance", 1.0)):
        value = table.get(key, most)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise ConfigError(
                f"{where} {key}: expected a number above 0, at most {most:g}, got {quote(value)}"
            )
    if table.get("tolerance", 1) < 1e-6:
        raise ConfigError(f"{where} tolerance: expected at least 1e-6, got {table['tolerance']}")
    return Find(**table)
