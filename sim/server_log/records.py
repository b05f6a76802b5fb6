"""What is kept of a server's log: figures with the line and the worker that said them.

Every GiB is 2**30 bytes. vLLM and SGLang print such as "GB" in places; `Said.unit` keeps what stood
there.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

Engine = Literal["vllm", "sglang", "trtllm", "unknown"]

RefusalKind = Literal[
    "max_model_len",  # one request of the longest length does not fit
    "no_memory",  # nothing, or less, is left for the cache
    "free_memory",  # others hold so much of the card that the share asked for is not free
    "out_of_memory",  # an allocation failed
    "other",  # a ValueError in other words
]


class Said(NamedTuple):
    """A figure, where it stands, and who said it.

    Attributes:
        value: GiB, or a count, or a share, as the field says.
        line: of the file, from 1.
        worker: as the prefix names it, or "" where there was none.
        unit: as printed.
    """

    value: float
    line: int
    worker: str = ""
    unit: str = ""


class Word(NamedTuple):
    """A word, or the value of a setting, and the line it stands in."""

    value: Any
    line: int


class Statistics(NamedTuple):
    """One of the lines that a running server prints every few seconds.

    Attributes:
        clock_s: seconds of the line's timestamp, from an arbitrary origin; None without one.
        running, waiting, swapped: requests; V0 counts groups of sequences.
        kv_usage_pct, hit_rate_pct: per cent; the hit rate is of the last requests, not of the run.
        preempted: requests that were since the line before; None where it is not printed.
    """

    line: int
    engine: str
    clock_s: int | None
    running: int
    waiting: int | None
    swapped: int | None
    kv_usage_pct: float
    hit_rate_pct: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    preempted: int | None = None


class Refusal(NamedTuple):
    """Why the server did not start, in its figures; None for what the message does not say.

    Attributes:
        needed_gib, available_gib: per worker: for the cache, or of the card for "free_memory".
        max_model_len: that was asked for, tokens.
        estimated_max_model_len: that would fit, as the server estimates.
        pool_tokens: that the cache would hold.
    """

    kind: RefusalKind
    line: int
    worker: str
    message: str
    needed_gib: float | None = None
    available_gib: float | None = None
    total_gib: float | None = None
    utilization: float | None = None
    max_model_len: int | None = None
    estimated_max_model_len: int | None = None
    pool_tokens: int | None = None

    @property
    def figures(self) -> tuple[float | str | None, ...]:
        """What two reports of one refusal have in common."""
        return (self.kind, *self[4:])


def least(said: Sequence[Said]) -> Said | None:
    """Answer the smallest of what was *said*: of a pool, the one that all workers get."""
    return min(said, default=None)


def most(said: Sequence[Said]) -> Said | None:
    """Answer the largest of what was *said*: of what takes memory, the one that leaves least."""
    return max(said, default=None)


class Startup(msgspec.Struct):
    """One start of one engine (one data-parallel rank, one stage), in the order of the log.

    The lists hold every figure that was said, by every worker; the properties answer the one that
    counts. All memory is per worker.

    Attributes:
        settings: what the user gave: commands and "non-default args" lines.
        config: what the engine says it runs with, defaults included.
        load_gib, profile_gib: weights, as loaded and as profiled.
        total_gib: of the card, as visible. free_gib: at the start.
        requested_gib: utilization times total.
        activation_gib: peak above the weights. torch_peak_gib: peak with the weights.
        consumed_gib: weights and non-torch together. non_kv_gib: all but the cache.
        graph_gib: CUDA graphs as estimated before the pool is sized. graph_taken_gib: as captured.
        kv_gib: left for the cache. k_gib, v_gib: its halves. reserved_gib: as the user fixed it.
        gpu_blocks, cpu_blocks: of the pool. tokens: that it holds, as this version counts.
        concurrency: requests of request_tokens each.
        utilization: as asked for. utilization_without_graphs: the same share less the graphs.
        padding_pct: of the cache that padded layers may waste, a line each.
        preemption: how V0 preempts for want of cache, SWAP or RECOMPUTE.
        left_gib: free when all is allocated. suggested_gib: ``--kv-cache-memory`` that the server
            advises, to fit into what was requested.
    """

    engine: Engine = "unknown"
    name: str = ""
    version: Word | None = None
    wording: Word | None = None
    model: Word | None = None
    gpu: Word | None = None
    platform: Word | None = None
    preemption: Word | None = None
    settings: dict[str, Word] = {}
    config: dict[str, Word] = {}
    load_gib: list[Said] = []
    profile_gib: list[Said] = []
    total_gib: list[Said] = []
    free_gib: list[Said] = []
    requested_gib: list[Said] = []
    activation_gib: list[Said] = []
    torch_peak_gib: list[Said] = []
    non_torch_gib: list[Said] = []
    consumed_gib: list[Said] = []
    non_kv_gib: list[Said] = []
    graph_gib: list[Said] = []
    graph_taken_gib: list[Said] = []
    kv_gib: list[Said] = []
    k_gib: list[Said] = []
    v_gib: list[Said] = []
    reserved_gib: list[Said] = []
    left_gib: list[Said] = []
    suggested_gib: list[Said] = []
    gpu_blocks: list[Said] = []
    cpu_blocks: list[Said] = []
    override_blocks: list[Said] = []
    tokens: list[Said] = []
    concurrency: list[Said] = []
    request_tokens: list[Said] = []
    block_size: list[Said] = []
    utilization: list[Said] = []
    utilization_without_graphs: list[Said] = []
    padding_pct: list[Said] = []
    context_parallel: list[Said] = []
    batched_tokens: list[Said] = []
    statistics: list[Statistics] = []
    refusals: list[Refusal] = []

    @property
    def weights_gib(self) -> Said | None:
        """Weights of the fullest worker; as loaded, else as profiled, which is rounded more."""
        return most(self.load_gib or self.profile_gib)

    @property
    def kv_cache_gib(self) -> Said | None:
        """Memory for the cache of the worker that has least, from any line that tells it."""
        stated = least(self.kv_gib) or least(self.reserved_gib)
        if stated is None and self.k_gib and self.v_gib:
            k, v = self.k_gib[0], self.v_gib[0]
            stated = Said(k.value + v.value, k.line, k.worker, k.unit)
        if stated is None:
            refused = [r for r in self.refusals if r.kind == "max_model_len"]
            stated = least([
                Said(r.available_gib, r.line, r.worker, "GiB")
                for r in refused
                if r.available_gib is not None
            ])  # fmt: skip
        return stated

    @property
    def num_gpu_blocks(self) -> Said | None:
        """Blocks of the pool: the override, else the smallest that a worker has."""
        return least(self.override_blocks) or least(self.gpu_blocks)

    @property
    def kv_cache_tokens(self) -> Said | None:
        """Tokens of the pool as printed: the smallest of the workers' lines."""
        stated = least(self.tokens)
        if stated is None:
            stated = least([
                Said(r.pool_tokens, r.line, r.worker)
                for r in self.refusals
                if r.pool_tokens is not None
            ])  # fmt: skip
        return stated

    @property
    def max_model_len(self) -> Word | None:
        """The longest request, tokens."""
        if self.request_tokens:
            return Word(int(self.request_tokens[0].value), self.request_tokens[0].line)
        for refusal in self.refusals:
            if refusal.max_model_len is not None:
                return Word(refusal.max_model_len, refusal.line)
        return self.setting("max_model_len", "max_seq_len", "context_length")

    @property
    def gpu_memory_utilization(self) -> Word | None:
        """The share of the card that was asked for."""
        given = self.setting("gpu_memory_utilization", "mem_fraction_static")
        if given is None and self.utilization:
            given = Word(self.utilization[0].value, self.utilization[0].line)
        return given

    @property
    def fixed_pool(self) -> dict[str, Word]:
        """What the user fixed the pool to, by its setting: then no utilization sizes it."""
        reserved, blocks = least(self.reserved_gib), least(self.override_blocks)
        found = {
            "kv_cache_memory_bytes": self.setting("kv_cache_memory_bytes")
            or (reserved and Word(int(reserved.value * 2**30), reserved.line)),
            "num_gpu_blocks_override": self.setting("num_gpu_blocks_override")
            or (blocks and Word(int(blocks.value), blocks.line)),
        }
        return {name: word for name, word in found.items() if word is not None}

    @property
    def tensor_parallel_size(self) -> Word | None:
        """Cards that share every layer, if it was said."""
        return self.setting("tensor_parallel_size", "tp_size", "tp")

    @property
    def pipeline_parallel_size(self) -> Word | None:
        """Stages of layers, if it was said."""
        return self.setting("pipeline_parallel_size", "pp_size", "pp")

    @property
    def data_parallel_size(self) -> Word | None:
        """Engines with a pool each, if it was said."""
        return self.setting("data_parallel_size", "dp_size", "dp")

    @property
    def refused(self) -> bool:
        """Whether the engine said that it does not start."""
        return bool(self.refusals)

    @property
    def workers(self) -> list[str]:
        """The workers that said anything of their memory, in order; "" for one without prefix."""
        every = (*self.load_gib, *self.profile_gib, *self.kv_gib)
        return list(dict.fromkeys(said.worker for said in every))

    def setting(self, *names: str) -> Word | None:
        """Answer the value of the first of *names* that the user gave, or the engine stated."""
        for given in (self.settings, self.config):
            for name in names:
                if (word := given.get(name)) is not None and word.value is not None:
                    return word
        return None


FIGURES = tuple(field.name for field in msgspec.structs.fields(Startup) if field.type == list[Said])
"""The fields of `Startup` that hold figures."""


class ServerLog(msgspec.Struct):
    """A log: its starts, in order, and how many lines it has.

    Attributes:
        forgotten: starts before these, that a log of a crash loop had more of than are kept.
        cut: the last line if it ends within a message.
    """

    startups: list[Startup]
    num_lines: int
    forgotten: int = 0
    cut: int | None = None

    @property
    def engine(self) -> Engine:
        """The engine of the first start that is known."""
        return next((s.engine for s in self.startups if s.engine != "unknown"), "unknown")

    @property
    def version(self) -> Word | None:
        """The first version that is said."""
        return first(start.version for start in self.startups)

    @property
    def model(self) -> Word | None:
        """The first model that is named."""
        return first(start.model for start in self.startups)

    @property
    def gpu(self) -> Word | None:
        """The first card that is named."""
        return first(start.gpu for start in self.startups)


def first(words: Iterable[Word | None]) -> Word | None:
    """Answer the first of *words* that is there."""
    return next((word for word in words if word is not None), None)
