"""From what the user gave (flags, a configuration file) to one checked `RunConfig`.

Every value is converted and checked in one place, so that a flag and a file are refused in the same
words: what, where, what was expected, the nearest valid choice.
"""

import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from sim.config import (
    CONCERNS,
    CacheConfig,
    LoadConfig,
    ModelConfig,
    OutputConfig,
    RunConfig,
    SchedulerConfig,
    TimingConfig,
)
from sim.errors import ConfigError
from sim.hardware import GIB, GpuSpec, get_gpu
from sim.models import get_model
from workloads.errors import did_you_mean
from workloads.samples import CONVERSATION

FILE_RANK, FLAG_RANK = 1, 2

KERNEL_BLOCK_SIZE = 16
"""vLLM 0.33.0's attention backends on a GPU take multiples (``v1/attention/backends``)."""

_MULTIPLES = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
"""``1k`` is 1000 and ``1K`` 1024, as in vLLM (``utils/argparse_utils.py``)."""


class Setting(NamedTuple):
    """One field of one concern, as the command line and the configuration file see it."""

    name: str
    concern: str
    annotation: Any
    default: Any
    help: str

    @property
    def type(self) -> Any:
        """The bare type: bool, int, float, str or a Literal."""
        kind = _bare(self.annotation)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            kind = next(_bare(a) for a in typing.get_args(kind) if a is not type(None))
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal, else nothing."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def flag(self) -> str:
        """As it is written on the command line."""
        return "--" + self.name.replace("_", "-")


class Given(NamedTuple):
    """A value that somebody gave; of two sources that disagree the higher *rank* wins."""

    value: Any
    rank: int
    where: str


class Resolved(NamedTuple):
    """A checked configuration, what is written where, and what the user should be told."""

    run: RunConfig
    output: OutputConfig
    notes: list[str]


def _bare(annotation: Any) -> Any:
    """Answer a type without its msgspec constraints."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def settings() -> Iterator[Setting]:
    """Answer every setting, concern by concern."""
    for concern, model in CONCERNS.items():
        hints = typing.get_type_hints(model, include_extras=True)
        for field in msgspec.structs.fields(model):
            annotation = hints[field.name]
            description = annotation.__metadata__[-1].description
            yield Setting(field.name, concern, annotation, field.default, description)


def read_config_file(path: str) -> dict[str, Given]:
    """Answer the settings of a JSON or TOML file, by name.

    Raises:
        ConfigError: unreadable, not of that format, or with a key that is no setting.
    """
    try:
        data = Path(path).read_bytes()
        if Path(path).suffix == ".toml":
            values = tomllib.loads(data.decode())
        elif Path(path).suffix == ".json":
            values = msgspec.json.decode(data)
        else:
            raise ConfigError(f"--config {path}: expected a name ending in .json or .toml")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not valid: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected one object of settings")
    known = [setting.name for setting in settings()]
    given = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--config {path}: unknown key {key!r}; {did_you_mean(name, known)}")
        if value is not None:
            given[name] = Given(value, FILE_RANK, f"{path}: key {key!r}")
    return given


def resolve(given: Mapping[str, Given]) -> Resolved:
    """Answer the configuration that *given* and the defaults make.

    Raises:
        ConfigError: on the first value or combination that cannot be used.
    """
    values = {s.name: _convert(s, given[s.name]) for s in settings() if s.name in given}
    if "trace" not in given:
        values.setdefault("trace", str(CONVERSATION))
        values.setdefault("max_model_len", 8192)
    notes: list[str] = []
    _choose_allocator(values, given, notes)
    _note_overridden(given, notes)

    def concern(name: str) -> dict[str, Any]:
        return {
            s.name: values[s.name] for s in settings() if s.concern == name and s.name in values
        }

    model = ModelConfig(**concern("model"))
    scheduler = SchedulerConfig(**concern("scheduler"))
    if model.max_model_len is None:
        longest = get_model(model.model).max_position_embeddings
        model = msgspec.structs.replace(model, max_model_len=longest)
    assert model.max_model_len is not None
    cache = CacheConfig(**concern("cache"))
    if cache.block_size % KERNEL_BLOCK_SIZE and cache.allocator != "contiguous":
        notes.append(
            f"--block-size {cache.block_size}: simulated, but FlashAttention and Triton kernels "
            f"need multiples of {KERNEL_BLOCK_SIZE}"
        )
    if cache.allocator == "contiguous" and not scheduler.scheduler_reserve_full_isl:
        where = given["scheduler_reserve_full_isl"].where
        notes.append(f"{where} has no effect: a contiguous reservation covers the whole sequence")
    run = RunConfig(
        load=LoadConfig(**concern("load")),
        model=model,
        cache=cache,
        scheduler=_complete(scheduler, get_gpu(model.gpu), model.max_model_len),
        timing=TimingConfig(**concern("timing")),
    )
    return Resolved(run, OutputConfig(**concern("output")), notes)


def _convert(setting: Setting, given: Given) -> Any:
    """Answer the value in the setting's own type, checked against its bounds."""
    value, kind = given.value, setting.type
    if setting.choices and value not in setting.choices:
        raise ConfigError(
            f"{given.where}: unknown value {value!r}; {did_you_mean(str(value), setting.choices)}"
        )
    if given.rank == FLAG_RANK and kind in (int, float) and isinstance(value, str):
        value = _number(kind, value, given.where)
    try:
        value = msgspec.convert(value, setting.annotation)
    except msgspec.ValidationError as error:
        expected = str(error).replace("`", "").partition(" - at ")[0]
        raise ConfigError(
            f"{given.where}: {expected[:1].lower()}{expected[1:]}, got {_shown(given.value)}"
        ) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{given.where}: expected a finite number, got {_shown(given.value)}")
    return value


def _number(kind: type, text: str, where: str) -> int | float:
    """Answer the number in *text*; an int may have a suffix of `_MULTIPLES`."""
    number = _float(text) if kind is float else _whole(text.strip())
    if number is None:
        what = "a number" if kind is float else "a whole number (1k is 1000, 1K is 1024)"
        raise ConfigError(f"{where}: expected {what}, got {_shown(text)}")
    return number


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    match = re.fullmatch(r"([+-]?[0-9][0-9_]{0,30})(\.[0-9]{1,15})? ?([A-Za-z]*)", text)
    if match is None or match[3] not in _MULTIPLES or (match[2] and not match[3]):
        return None
    number = Fraction(match[1].replace("_", "") + (match[2] or "")) * _MULTIPLES[match[3]]
    return int(number) if number.denominator == 1 else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _choose_allocator(values: dict[str, Any], given: Mapping[str, Given], notes: list[str]) -> None:
    """Settle allocator, reservation and enable_prefix_caching; refuse contradictions.

    A flag overrules the configuration file, with a note; equals that disagree are refused.
    """
    if "allocator" not in values:
        values["allocator"] = "prefix" if values.get("enable_prefix_caching", True) else "paged"
    name = values["allocator"]
    implied: dict[str, Any] = {"enable_prefix_caching": name == "prefix"}
    if name.startswith("reserve-"):
        values["allocator"] = "contiguous"
        implied["reservation"] = name.removeprefix("reserve-")
        choices = next(s.choices for s in settings() if s.name == "reservation")
        if implied["reservation"] not in choices:
            names = [f"reserve-{choice}" for choice in choices]
            raise ConfigError(f"--allocator {name!r} is unknown; {did_you_mean(name, names)}")
    for setting, value in implied.items():
        if setting in given and values[setting] != value:
            _overrule(f"allocator {name}", given.get("allocator"), given[setting], notes)
        values[setting] = value
    for setting in ("reservation", "placement"):
        if setting in given and values["allocator"] != "contiguous":
            _overrule(f"allocator {name}", given.get("allocator"), given[setting], notes)


def _overrule(winner: str, by: Given | None, loser: Given, notes: list[str]) -> None:
    """Note that *loser* has no effect beside *winner*; refuse unless *by* stands above it."""
    if by is None or by.rank <= loser.rank:
        raise ConfigError(f"{loser.where} contradicts {winner}: leave one of them out")
    notes.append(f"{loser.where} has no effect: {winner} was given on the command line")


def _note_overridden(given: Mapping[str, Given], notes: list[str]) -> None:
    """Say which of the ways to size the pool has no effect, in vLLM's order of precedence."""
    ways = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
    present = [given[way] for way in ways if way in given]
    notes += [f"{loser.where} has no effect: {present[0].where} wins" for loser in present[1:]]


def _complete(scheduler: SchedulerConfig, gpu: GpuSpec, max_model_len: int) -> SchedulerConfig:
    """Answer the settings with vLLM's defaults for an API server on that GPU filled in.

    vLLM 0.33.0, ``engine/arg_utils.py:2940-3006`` and ``config/scheduler.py:318-331``.
    """
    large = gpu.memory_visible_bytes >= 70 * GIB and not gpu.name.startswith("A100")
    huge = gpu.memory_visible_bytes >= 160 * GIB
    budget = scheduler.max_num_batched_tokens
    if budget is None:
        budget = 16384 if huge else 8192 if large else 2048
        if not scheduler.enable_chunked_prefill:
            budget = max(budget, max_model_len)
    seqs = scheduler.max_num_seqs
    if seqs is None:
        seqs = min(1024 if large else 256, budget)
    if budget < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is less than --max-num-seqs {seqs}: "
            "expected room for one token of every running request"
        )
    if not scheduler.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is less than --max-model-len {max_model_len}: "
            "without chunked prefill a whole prompt must fit a step; raise it, or drop "
            "--no-enable-chunked-prefill"
        )
    return msgspec.structs.replace(scheduler, max_num_batched_tokens=budget, max_num_seqs=seqs)
