"""A server's start-up log beside what is computed here, line by line (``capacity --from-log``)."""

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import GIB, GpuSpec, get_gpu
from sim.kv_groups import CacheGroups
from sim.kv_pool import KVPool, kv_cache_figures
from sim.kv_spec import check_tensor_parallel, kv_bytes_per_token, weight_bytes
from sim.memory import (
    RULES,
    Engine,
    activation_bytes,
    graph_bytes,
    graph_estimate_bytes,
    non_torch_bytes,
)
from sim.models import ModelSpec, get_model, model_of
from sim.pool_sizing import engine_of, groups_of, one_table, pool_of, stages_of
from sim.server_log import Said, ServerLog, Startup, Word, explain
from sim.server_log.identities import block_size
from sim.server_log.records import most
from sim.settings import FILE_RANK, Given, resolve
from sim.stages import groups_of_stage

SUFFIXES = ("-Instruct", "-instruct", "-it", "-chat", "-Chat")
"""Ends of a name under which the model has the shapes of the name without."""


WORDINGS = {"0.28 or later": "0.33", "0.21 or later": "0.33", "V0": "0.11"}
"""``--vllm-version`` by what the wording of a log tells of it; 0.19 by any other."""

Answer = dict[str, Any]


class Line(NamedTuple):
    """A figure of a log and ours.

    Attributes:
        what: the figure and its unit.
        said: by the server; None for one that it does not print.
        line: of the log.
        ours: computed; None where something is not known.
        percent: by which ours is above.
        origin: what ours follows from.
    """

    what: str
    said: float | None
    line: int | None
    ours: float | None
    percent: float | None
    origin: str


def rules_of(version: str) -> str:
    """Answer the ``--vllm-version`` whose rules are those of *version*: the last one not later."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    known = sorted(RULES, key=lambda name: [int(part) for part in name.split(".")])
    if len(numbers) < 2:
        return known[-1]
    if numbers >= [0, 21]:  # since then CUDA graphs are subtracted
        return known[-1]
    before = [name for name in known if [int(part) for part in name.split(".")] <= numbers]
    return before[-1] if before else known[0]


def named_model(name: str) -> str | None:
    """Answer the model here that a log's *name* or path means; None if there is none."""
    last = name.rstrip("/").rpartition("/")[2]
    shorter = [last.removesuffix(end) for end in SUFFIXES if last.endswith(end)]
    for tried in (last, *shorter):
        try:
            return get_model(tried).name if tried and not tried.endswith(".json") else None
        except ConfigError:
            continue
    return None


def named_gpu(name: str) -> str | None:
    """Answer the GPU here that a log's *name* means; None if there is none."""
    try:
        return None if name.lower().endswith(".toml") else get_gpu(name).name
    except ConfigError:
        return None


def settings_of(
    startup: Startup, where: str, flags: Collection[str] = ()
) -> tuple[dict[str, Given], list[str]]:
    """Answer the settings that *startup* tells, and what the user should know of them.

    *flags* are given by the user anyway.
    """
    given: dict[str, Given] = {}
    notes: list[str] = []

    def take(name: str, word: Word | None, value: Any = None) -> None:
        if word is not None:
            shown = f"{where}: line {word.line}"
            given[name] = Given(word.value if value is None else value, FILE_RANK, shown)

    for name, word, known in (
        ("model", startup.model, named_model),
        ("gpu", startup.gpu, named_gpu),
    ):
        if word is None:
            continue
        found = known(str(word.value))
        if found is None and name not in flags:
            notes.append(f"line {word.line}: {word.value} is not known here: add --{name}")
        elif found is not None:
            take(name, word, found)
    if startup.total_gib:
        total = most(startup.total_gib)
        assert total is not None, "there are some"
        take("gpu_memory_gib", Word(total.value, total.line))
    if startup.version is not None:
        take("vllm_version", startup.version, rules_of(str(startup.version.value)))
    elif startup.wording is not None:
        take("vllm_version", startup.wording, WORDINGS.get(startup.wording.value, "0.19"))
    take("max_model_len", startup.max_model_len)
    if startup.engine == "vllm":
        take("gpu_memory_utilization", startup.gpu_memory_utilization)
    take("tensor_parallel_size", startup.tensor_parallel_size)
    take("pipeline_parallel_size", startup.pipeline_parallel_size)
    named = ("max_num_seqs", "max_num_batched_tokens", "enforce_eager", "kv_cache_dtype")
    words: dict[str, Word | None] = {**startup.fixed_pool, **{n: startup.setting(n) for n in named}}
    for name, word in words.items():
        take(name, word)
    if startup.batched_tokens and "max_num_batched_tokens" not in given:
        batched = startup.batched_tokens[-1]
        take("max_num_batched_tokens", Word(int(batched.value), batched.line))
    dtype = given.get("kv_cache_dtype")
    if dtype is not None and str(dtype.value).startswith("fp8"):
        given["kv_cache_dtype"] = dtype._replace(value="fp8")
    size = block_size(startup)
    if size is not None:
        given["block_size"] = Given(size, FILE_RANK, where)
    return given, notes


def _line(what: str, said: Said | Word | None, ours: float | None, origin: str) -> Line | None:
    """Answer a line of the table; None where nothing was said."""
    if said is None or not isinstance(said.value, int | float):
        return None
    percent = None
    if ours is not None and said.value:
        percent = 100 * (ours / said.value - 1)
    return Line(what, said.value, said.line, ours, percent, origin)


def said_lines(startup: Startup) -> list[Line]:
    """Answer what *startup* said, without anything of ours."""
    figures = (
        ("weights, GiB", startup.weights_gib),
        ("peak activation, GiB", most(startup.activation_gib)),
        ("non-torch, GiB", most(startup.non_torch_gib)),
        ("CUDA graphs, GiB", most(startup.graph_gib)),
        ("CUDA graphs after start, GiB", most(startup.graph_taken_gib)),
        ("KV cache, GiB", startup.kv_cache_gib),
        ("blocks", startup.num_gpu_blocks),
        ("tokens", startup.kv_cache_tokens),
        ("concurrency", min(startup.concurrency, default=None)),
        ("max_model_len", startup.max_model_len),
        ("utilization", startup.gpu_memory_utilization),
    )
    lines = [_line(what, said, None, "") for what, said in figures]
    return [line for line in lines if line is not None]


class _Computed:
    """The figures of one start, from its model and flags, and its card if that is known."""

    def __init__(self, startup: Startup, config: RunConfig, gpu: GpuSpec | None) -> None:
        self._startup, self._config, self._gpu = startup, config, gpu
        self._model: ModelSpec = model_of(config.model)
        check_tensor_parallel(
            self._model,
            config.model.tensor_parallel_size,
            enable_expert_parallel=config.model.enable_expert_parallel,
        )
        assert config.model.max_model_len is not None, "resolved"
        self._length: int = config.model.max_model_len
        self._stages = list(stages_of(self._model, engine_of(config)))

    def lines(self, notes: list[str]) -> Iterator[Line | None]:
        """Answer the table; what cannot be computed goes to *notes*."""
        startup = self._startup
        weights = self._try(
            notes, lambda: self._most(lambda part, e: weight_bytes(part, e.tensor_parallel_size))
        )
        yield _line("weights, GiB", startup.weights_gib, weights, "model")
        if startup.engine == "vllm":
            yield from self._card(notes)
        yield from self._pool(notes)

    def _most(self, size: Callable[[ModelSpec, Engine], int]) -> float:
        """Answer the GiB of the stage with most."""
        return max(size(part, engine) for _, part, engine in self._stages) / GIB

    def _try(self, notes: list[str], compute: Callable[[], float]) -> float | None:
        try:
            return compute()
        except (ConfigError, CapacityError) as error:
            notes.append(str(error))
            return None

    def _card(self, notes: list[str]) -> Iterator[Line | None]:
        """The terms of the card, and the cache that they leave."""
        startup, gpu = self._startup, self._gpu
        ours = self._most(lambda part, engine: activation_bytes(part, gpu, engine))
        yield _line("peak activation, GiB", most(startup.activation_gib), ours, "model and flags")
        if gpu is None:
            return
        ours = self._most(lambda _, engine: non_torch_bytes(gpu, engine))
        yield _line("non-torch, GiB", most(startup.non_torch_gib), ours, "GPU and flags")
        estimate = self._most(graph_estimate_bytes) or None
        yield _line("CUDA graphs, GiB", most(startup.graph_gib), estimate, "model and flags")
        ours = self._most(graph_bytes)
        said = most(startup.graph_taken_gib)
        yield _line("CUDA graphs after start, GiB", said, ours, "model and flags")
        pool: list[KVPool] = []

        def size() -> float:
            pool.append(pool_of(self._config, self._model, gpu, grouped=True))
            return (pool[0].kv_cache_bytes or 0) / GIB

        kv_gib = self._try(notes, size) or None  # of blocks that were given it is not known
        yield _line("KV cache, GiB", startup.kv_cache_gib, kv_gib, "GPU, model and flags")
        if pool:
            yield from self._figures(pool[0], "GPU, model and flags")

    def _pool(self, notes: list[str]) -> Iterator[Line | None]:
        """What the memory that the server found holds, and what a refused request needs."""
        said, engine = self._startup.kv_cache_gib, engine_of(self._config)
        try:
            whole = self._groups(notes)
            parts = (groups_of_stage(whole, span) for span, _, _ in self._stages)
            groups = max(parts, key=lambda part: part.bytes_per_block)
        except ConfigError as error:
            notes.append(str(error))
            return
        num_bytes = 0 if said is None else max(0, int(said.value * GIB))
        pool = KVPool(
            num_gpu_blocks=num_bytes // groups.bytes_per_block,
            block_size=groups.block_size,
            contiguous_slots=0,
            kv_cache_bytes=num_bytes,
            breakdown=(),
            provenance="",
            groups=groups,
            in_flight_tokens=engine.in_flight_tokens,
            counts_a_group=engine.rules.counts_a_group,
        )
        if said is not None and pool.num_gpu_blocks:
            yield from self._figures(pool, f"{said.value:g} GiB of line {said.line}")
        longest = pool.longest_request(pool.num_gpu_blocks)
        for refusal in self._startup.refusals:
            if refusal.kind != "max_model_len":
                continue
            ours = pool.blocks_for(self._length) * groups.bytes_per_block / GIB
            for what, figure, computed in (
                ("a longest request, GiB", refusal.needed_gib, ours),
                (
                    "max_model_len that fits",
                    refusal.estimated_max_model_len,
                    longest,
                ),
            ):
                if figure is not None:
                    yield _line(what, Word(figure, refusal.line), computed, "model and flags")

            if refusal.estimated_max_model_len is None:
                notes.append(f"line {refusal.line}: at most {longest:,} tokens fit, as computed")

    def _groups(self, notes: list[str]) -> CacheGroups:
        """The block tables of the engine that spoke."""
        if self._startup.engine == "vllm" or self._model.layout.is_uniform:
            return groups_of(self._config, self._model)
        notes.append(
            f"{self._startup.engine}: layers with windows are taken to keep every token, "
            "which its newer versions do not"
        )
        cache = self._config.cache
        return one_table(
            self._model, engine_of(self._config), cache.block_size, cache.kv_cache_dtype
        )

    def _figures(self, pool: KVPool, origin: str) -> Iterator[Line | None]:
        startup = self._startup
        tokens, concurrency = kv_cache_figures(pool, self._length)
        yield _line("blocks", startup.num_gpu_blocks, pool.num_gpu_blocks, origin)
        yield _line("tokens", startup.kv_cache_tokens, tokens, origin)
        yield _line("concurrency", min(startup.concurrency, default=None), concurrency, origin)


def reconcile(
    startup: Startup, config: RunConfig, gpu: GpuSpec | None
) -> tuple[list[Line], list[str]]:
    """Answer the table of one start, and what could not be computed.

    *gpu* None: nobody named one; what follows from it is left out.

    Raises:
        ConfigError: a model that the cards cannot share.
    """
    notes: list[str] = []
    lines = [line for line in _Computed(startup, config, gpu).lines(notes) if line is not None]
    return lines, list(dict.fromkeys(notes))


def token_bytes(config: RunConfig) -> float | None:
    """Answer the bytes of a token on one card; None where tokens do not tell the bytes."""
    model = model_of(config.model)
    if not model.layout.is_uniform:
        return None
    return max(
        kv_bytes_per_token(
            part,
            tensor_parallel_size=config.model.tensor_parallel_size,
            kv_cache_dtype=config.cache.kv_cache_dtype,
        )
        for _, part, _ in stages_of(model, engine_of(config))
    )


def reconcile_log(
    log: ServerLog, flags: dict[str, Given], where: str
) -> tuple[list[Answer], list[str]]:
    """Answer each start of *log* beside ours, and the findings.

    *flags* win over what the log says of model, GPU and settings; *where* names the log.

    Raises:
        ConfigError: flags that cannot be used, whatever the log says.
    """
    starts = [_start(startup, flags, where) for startup in log.startups]
    rates = {start.pop("bytes_per_token") for start in starts}
    rate = rates.pop() if len(rates) == 1 else None
    return starts, explain(log, bytes_per_token=rate)


def _start(startup: Startup, flags: dict[str, Given], where: str) -> Answer:
    told, notes = settings_of(startup, where, flags)
    given = {**told, **flags}
    lines: list[Line] = []
    answer: Answer = {
        "engine": startup.engine,
        "name": startup.name,
        "version": None if startup.version is None else str(startup.version.value),
        "model": None,
        "gpu": None,
        "settings": {name: value.value for name, value in given.items() if name != "json"},
        "bytes_per_token": None,
    }
    partition = startup.setting("VLLM_PP_LAYER_PARTITION")
    if "model" not in given:
        if startup.model is None:
            notes.append(
                "no model is named: add --model, and --gpu for the whole card, to compare with "
                "what is computed"
            )
    elif partition is not None:
        notes.append(
            f"line {partition.line}: stages of {partition.value} layers, and only even ones are "
            "modelled: nothing is compared"
        )
    else:
        lines = _compared(startup, given, flags, answer, notes)
    compared = {line.what for line in lines}
    rest = [line for line in said_lines(startup) if line.what not in compared]
    return answer | {"lines": [line._asdict() for line in (*lines, *rest)], "notes": notes}


def _compared(
    startup: Startup,
    given: dict[str, Given],
    flags: dict[str, Given],
    answer: Answer,
    notes: list[str],
) -> list[Line]:
    """Answer the table, name model and GPU in *answer*; what is not known goes to *notes*."""
    try:
        config = resolve(given, shipped_workload=False, runs=False).run
        gpu = get_gpu(config.model.gpu, config.model.gpu_memory_gib) if "gpu" in given else None
        lines, missing = reconcile(startup, config, gpu)
        answer["bytes_per_token"] = token_bytes(config)
    except ConfigError as error:
        resolve(flags, shipped_workload=False, runs=False)  # whoever gave them is told
        notes.append(f"nothing is compared: {error}")
        return []
    answer["model"] = model_of(config.model).name
    answer["gpu"] = None if gpu is None else gpu.name
    named = startup.model is not None and "model" not in flags
    if named and startup.model is not None and startup.model.value != answer["model"]:
        notes.append(f"{startup.model.value} is computed as {answer['model']}")
    quantized = startup.setting("quantization")
    if quantized is not None:
        notes.append(
            f"line {quantized.line}: quantization {quantized.value}: weights are computed as the "
            "model's own configuration has them"
        )
    if startup.engine == "vllm":
        counted = f"memory as vLLM {config.cache.vllm_version} counts it"
        if startup.version is None and "vllm_version" not in flags:
            counted = f"no version is said: {counted}; else add --vllm-version"
        notes.append(counted)
    if gpu is None:
        notes.append("no GPU is named: add --gpu to compare activation, non-torch and the cache")
    notes += missing
    return lines
