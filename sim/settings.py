"""From what the user gave (flags, a configuration file) to one checked `RunConfig`.

Every value is converted and checked in one place, so that a flag and a file are refused in the same
words: what, where, what was expected, the nearest valid choice.
"""

import codecs
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sim.config import (
    CONTIGUOUS_ONLY,
    CacheConfig,
    LoadConfig,
    ModelConfig,
    OutputConfig,
    RunConfig,
    SchedulerConfig,
    TimingConfig,
)
from sim.errors import ConfigError, FileError
from sim.files import refuse_twice, regular
from sim.goodput import parse_goodput
from sim.hardware import GIB, GpuSpec, get_gpu
from sim.memory import memory_rules
from sim.modelled import modelled_notes
from sim.models import ModelSpec, model_of
from sim.options import RESERVING, Setting, settings
from workloads.errors import MAX_QUOTE, did_you_mean, plain, quote

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

SHIPPED_MAX_MODEL_LEN = 8192
"""Of the shipped workload: its longest request fits, and a small GPU can reserve several."""


class Given(NamedTuple):
    """A value that somebody gave *where*; of two that disagree the higher *rank* wins."""

    value: Any
    rank: int
    where: str

    @property
    def shown(self) -> str:
        """Place and value, for a message."""
        if self.rank == FILE_RANK:
            return f"{self.where} ({quote(self.value)})"
        if isinstance(self.value, bool):
            return self.where
        text = str(self.value)
        return f"{self.where} {plain(text) if len(text) <= MAX_QUOTE else quote(text)}"


class Resolved(NamedTuple):
    """A checked configuration, what is written where, and what the user should be told."""

    run: RunConfig
    output: OutputConfig
    notes: list[str]


def read_config_file(path: str, own: Collection[str] = ()) -> dict[str, Given]:
    """Answer the settings of a JSON or TOML file, by name; *own* are those of one command alone.

    Raises:
        FileError: it cannot be read.
        ConfigError: it is not of that format, or has a key that is no setting.
    """
    shown = f"--config {plain(path)}"
    return given_in(parse_file(path, shown), shown, own)


def given_in(values: Any, shown: str, own: Collection[str] = ()) -> dict[str, Given]:
    """Answer the settings in *values*, an object from a file that refusals call *shown*, by name.

    Raises:
        ConfigError: it is no object, or has a key that is no setting.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"{shown}: expected an object of settings, "
            f'like {{"block_size": 16}}, got {quote(values)}'
        )
    known = [*(setting.name for setting in settings()), *own]
    given: dict[str, Given] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        where = f"{shown}: key {quote(key)}"
        if name not in known:
            raise ConfigError(f"{where} is unknown; {did_you_mean(name, known)}")
        if name in given:
            raise ConfigError(f"{where} is there twice, with a dash and with an underscore")
        if value is not None:  # null, as in a manifest: the default
            given[name] = Given(value, FILE_RANK, where)
    return given


def _json(data: bytes) -> Any:
    """Answer the value of a JSON text; of a key given twice, neither is taken."""
    msgspec.json.decode(data)  # stricter than the standard library, which keeps large integers
    refuse_twice(data)
    return json.loads(data)


def parse_file(path: str, shown: str) -> Any:
    """Answer what the JSON or TOML file *path* holds; refusals call it *shown*.

    Raises:
        FileError: it cannot be read.
        ConfigError: its name ends otherwise, or it is not of that format.
    """
    parsers: dict[str, Callable[[bytes], Any]] = {
        ".json": _json,
        ".toml": lambda data: tomllib.loads(data.decode()),
    }
    suffix = Path(path).suffix.lower()
    if suffix not in parsers:
        raise ConfigError(f"{shown}: expected a name ending in .json or .toml")
    try:
        return parsers[suffix](regular(Path(path)).read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise FileError(
            f"{shown}: {error.strerror or error}; expected a file that can be read"
        ) from None
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply; expected a flat object") from None
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{shown}: not {suffix[1:].upper()}: {reason}") from None


def resolve(
    given: Mapping[str, Given], *, shipped_workload: bool = True, runs: bool = True
) -> Resolved:
    """Answer the configuration that *given* and the defaults make.

    *shipped_workload*: without a trace the shipped one runs, whose requests are short. *runs*: what
    allocators and step times do not model of the model is refused or noted.

    Raises:
        ConfigError: on the first value or combination that cannot be used.
    """
    values = {s.name: convert(s, given[s.name]) for s in settings() if s.name in given}
    if shipped_workload and "trace" not in given:
        values.setdefault("max_model_len", SHIPPED_MAX_MODEL_LEN)
    notes: list[str] = []
    _choose_allocator(values, given, notes)
    _note_overridden(given, notes, runs=runs)

    def concern(name: str) -> dict[str, Any]:
        return {
            s.name: values[s.name] for s in settings() if s.concern == name and s.name in values
        }

    model = ModelConfig(**concern("model"))
    scheduler = SchedulerConfig(**concern("scheduler"))
    spec = model_of(model)
    if spec.note:
        notes.append(f"--model {spec.name}: {spec.note}")
    notes += _idle_settings(values, given, spec)
    if model.max_model_len is None:
        model = msgspec.structs.replace(model, max_model_len=spec.max_position_embeddings)
    assert model.max_model_len is not None
    cache = CacheConfig(**concern("cache"))
    if cache.gpu_memory_utilization is None:
        default = memory_rules(cache.vllm_version).utilization
        cache = msgspec.structs.replace(cache, gpu_memory_utilization=default)
    if cache.block_size % KERNEL_BLOCK_SIZE and cache.allocator != "contiguous":
        notes.append(
            f"--block-size {cache.block_size}: simulated, but FlashAttention and Triton kernels "
            f"need multiples of {KERNEL_BLOCK_SIZE}"
        )
    if cache.allocator == "contiguous" and not scheduler.scheduler_reserve_full_isl:
        where = given["scheduler_reserve_full_isl"].where
        notes.append(f"{where} has no effect: a contiguous reservation covers the whole sequence")
    if scheduler.batching == "static" and scheduler.async_scheduling:
        raise ConfigError(
            f"{given['batching'].shown} contradicts {given['async_scheduling'].shown}: "
            "leave one of them out"
        )
    timing = TimingConfig(**concern("timing"))
    load = LoadConfig(**concern("load"))
    if load.goodput is not None:
        parse_goodput(load.goodput, given["goodput"].where)
    if runs:
        notes += modelled_notes(
            spec,
            max_model_len=model.max_model_len,
            pipeline_parallel_size=model.pipeline_parallel_size,
            prices_kernels=timing.step_time == "roofline",
        )
    run = RunConfig(
        load=load,
        model=model,
        cache=cache,
        scheduler=_complete(
            scheduler, get_gpu(model.gpu, model.gpu_memory_gib), model.max_model_len
        ),
        timing=timing,
    )
    return Resolved(run, OutputConfig(**concern("output")), notes)


def convert(setting: Setting, given: Given) -> Any:
    """Answer the value in the setting's own type, checked against its bounds.

    Raises:
        ConfigError: it is none; with what was expected.
    """
    value, kind = given.value, setting.type
    chosen = value
    if setting.name == "trace_format":  # which may set options of the format
        chosen = str(value).partition(":")[0]
    if setting.choices and chosen not in setting.choices:
        raise ConfigError(
            f"{given.where}: unknown value {quote(value)}; "
            f"{did_you_mean(str(value), setting.choices)}"
        )
    suffixes = ""
    if setting.name == "speed" and isinstance(value, str):
        value, suffixes = _float(value.removesuffix("x")), " (60x is 60)"
    if given.rank == FLAG_RANK and kind in (int, float) and isinstance(value, str):
        suffixes = " (1k is 1000, 1K is 1024)" if kind is int else ""
        value = _float(value) if kind is float else parse_whole(value.strip())
    if setting.has_inf and value == math.inf:
        value = "inf"
    try:
        value = msgspec.convert(value, setting.annotation)
        infinite = isinstance(value, float) and not math.isfinite(value)
        usable = value not in {None, ""} and not infinite
    except msgspec.ValidationError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{given.where}: expected {setting.expected}{suffixes}, got {quote(given.value)}"
        )
    return value


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_whole(text: str) -> int | None:
    """Answer the whole number that *text* is, ``1k`` being 1000 and ``1K`` 1024; None if none."""
    match = re.fullmatch(r"([+-]?[0-9][0-9_]{0,30})(\.[0-9]{1,15})? ?([A-Za-z]*)", text)
    if match is None or match[3] not in _MULTIPLES or (match[2] and not match[3]):
        return None
    decimals = (match[2] or ".")[1:]
    number = int(match[1].replace("_", "") + decimals) * _MULTIPLES[match[3]]
    scale = 10 ** len(decimals)
    return None if number % scale else number // scale


def _choose_allocator(values: dict[str, Any], given: Mapping[str, Given], notes: list[str]) -> None:
    """Settle allocator, reservation and enable_prefix_caching; refuse contradictions.

    A flag overrules the configuration file, with a note; equals that disagree are refused.
    """
    name = values.get("allocator")
    if name is None:
        name = "prefix" if values.get("enable_prefix_caching", True) else "paged"
    values["allocator"] = "contiguous" if name in RESERVING else name
    implied: dict[str, Any] = {"enable_prefix_caching": name == "prefix"}
    if name in RESERVING:
        implied["reservation"] = RESERVING[name]
    for setting, value in implied.items():
        if setting in given and values[setting] != value:
            _overrule(name, given, setting, notes)
        values[setting] = value
    for setting in CONTIGUOUS_ONLY:
        if setting in given and values["allocator"] != "contiguous":
            _overrule(name, given, setting, notes)


def _overrule(name: str, given: Mapping[str, Given], setting: str, notes: list[str]) -> None:
    """Note that *setting* has no effect beside allocator *name*; refuse unless a flag named it."""
    loser, by = given[setting], given.get("allocator")
    if by is None:
        raise ConfigError(
            f"{loser.shown} has no effect on allocator {name}: "
            f"add --allocator contiguous, or leave it out"
        )
    if by.rank <= loser.rank:
        raise ConfigError(f"{loser.shown} contradicts {by.shown}: leave one of them out")
    notes.append(f"{loser.shown} has no effect: {by.shown} wins")


def _note_overridden(given: Mapping[str, Given], notes: list[str], *, runs: bool) -> None:
    """Say which of the ways to size the pool has no effect, in vLLM's order of precedence."""
    ways = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
    present = [given[way] for way in ways if way in given]
    notes += [f"{loser.shown} has no effect: {present[0].shown} wins" for loser in present[1:]]
    if runs and "num_gpu_blocks_override" in given and "vllm_version" in given:
        notes.append(f"{given['vllm_version'].shown} has no effect: {present[0].shown} wins")


def _idle_settings(
    values: Mapping[str, Any], given: Mapping[str, Given], model: ModelSpec
) -> Iterator[str]:
    """Say which settings of kernels and of ranks change nothing of this run."""
    step_time = values.get("step_time", "roofline")
    for name in ("timing_fallback", "host_overhead", "enforce_eager"):
        if name not in given or not values[name]:
            continue
        if step_time != "roofline":
            yield f"{given[name].shown} has no effect: --step-time {step_time} knows no kernels"
        elif name == "timing_fallback" and "timing_table" not in given:
            yield f"{given[name].shown} has no effect without --timing-table"
    if values.get("enable_expert_parallel"):
        shown = given["enable_expert_parallel"].shown
        if not model.is_moe:
            yield f"{shown} has no effect: {model.name} has no experts"
        elif values.get("tensor_parallel_size", 1) == 1:
            yield f"{shown} has no effect on one GPU"


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
