"""What is known of a server, whatever it was read from, and what a check finds in it."""

from typing import Any, Literal, NamedTuple

import msgspec

from workloads.breaks import PrefixBreak

Severity = Literal["error", "warning", "info"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Error: does not start, may run out of memory, loses requests, or got worse while it ran.
Warning: memory or time is lost. Info: worth knowing. The gravest comes first."""

LEAST_POINTS = 2
"""Intervals that there must be before and after a change of the hit rate."""

BLOCK_OF_STATE = 256
"""Tokens: attention blocks above this exist only beside states, whose page they are as large as."""

Source = Literal["configuration", "run", "log", "metrics"]


class Point(NamedTuple):
    """What happened in one interval; None where the source does not tell.

    Attributes:
        where: a line of a log, or the seconds at which a run's interval starts or a scrape was.
        running, waiting: requests.
        usage: share of the pool, 0 to 1. hit_rate: of the tokens that were looked up, 0 to 1.
        weight: tokens looked up, or 1 where only rates are told.
        preempted: times that a request was.
    """

    where: str
    running: float | None = None
    waiting: float | None = None
    usage: float | None = None
    hit_rate: float | None = None
    weight: float = 1.0
    preempted: float | None = None


class Facts(msgspec.Struct, kw_only=True):
    """One server, start or run; None where it is not known.

    Sizes in GiB are of one GPU, lengths in tokens, shares from 0 to 1.

    Attributes:
        places: where a figure stands, by the name of the field, for the report.
        allocator: as in tables: ``prefix``, ``paged``, ``reserve-max``, ...
        is_sized: the pool follows from utilization; kv_cache_memory_bytes and
            num_gpu_blocks_override were not given.
        total_gib: of the card. outside_gib: of it, what utilization leaves out.
        activation_gib: peak of the profiling run above the weights.
        room_gib: what weights, graphs and pool leave for activation; negative if they do not fit.
        step_gib: the most that a step of a run took of it. steps_overrun: share of all steps.
        graph_gib: CUDA graphs. graphs_outside: they live in what utilization leaves out.
        bytes_per_token: of the cache, on one GPU.
        own_rates: bytes a token that the model has, all layers whole and as its layers are.
        padding: share of the pool that padded layers may waste.
        concurrency: requests of max_model_len that the pool holds.
        longest, mean_len: of prompt and output, as the load asks for them.
        num_clipped: outputs cut at max_model_len. num_refused: requests that were not served.
        shared_prefixes: (requests, tokens) that prompts start with together, the most first.
        queries, hits: tokens looked up in the prefix cache and found. possible_hit_rate: of a cache
            without limit, in whole blocks; possible_by_token: in blocks of one token.
        possible_series: hit rates of a cache without limit, by the time of arrival.
        num_compared: prompts whose contents were compared for prefix_break.
        refusals: why it does not start, and the flag that helps.
        remarks: (check, what it says), of what only this source can tell.
    """

    source: Source
    name: str
    engine: str = "vllm"
    places: dict[str, str] = {}
    allocator: str | None = None
    block_size: int | None = None
    kernel_block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    is_sized: bool | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    total_gib: float | None = None
    outside_gib: float | None = None
    activation_gib: float | None = None
    room_gib: float | None = None
    step_gib: float | None = None
    steps_overrun: float | None = None
    graph_gib: float | None = None
    graphs_outside: bool | None = None
    kv_gib: float | None = None
    kv_tokens: int | None = None
    bytes_per_token: float | None = None
    own_rates: tuple[float, float] | None = None
    padding: float | None = None
    concurrency: float | None = None
    num_tables: int | None = None
    longest: int | None = None
    mean_len: float | None = None
    num_requests: int | None = None
    num_clipped: int | None = None
    num_refused: int | None = None
    shared_prefixes: list[tuple[int, int]] | None = None
    possible_hit_rate: float | None = None
    possible_by_token: float | None = None
    num_compared: int | None = None
    prefix_break: PrefixBreak | None = None
    queries: float | None = None
    hits: float | None = None
    hit_rate: float | None = None
    num_preemptions: int | None = None
    recomputed: float | None = None
    series: list[Point] = []
    possible_series: list[Point] = []
    refusals: list[tuple[str, str]] | None = None
    remarks: list[tuple[str, str]] = []

    @property
    def is_paged(self) -> bool:
        """Whether memory is in blocks, as on any server; contiguous allocators are of kvsim."""
        return self.allocator in {None, "paged", "prefix"}

    @property
    def is_state_sized(self) -> bool:
        """Whether a block is as large as a state, which --block-size does not change."""
        return (self.num_tables or 1) > 1 and (self.block_size or 0) > BLOCK_OF_STATE

    @property
    def started_with(self) -> float | None:
        """The utilization of a server that starts: of another it tells nothing of what fits."""
        return None if self.refusals else self.gpu_memory_utilization

    @property
    def hit_series(self) -> list[Point]:
        """The intervals that tell a hit rate; none if they are too few to tell a change."""
        told = [point for point in self.series if point.hit_rate is not None and point.weight > 0]
        return told if len(told) >= 2 * LEAST_POINTS else []

    def at(self, *names: str) -> str:
        """Answer " (line 3, line 5)": where *names* stand; nothing if they are computed."""
        places = dict.fromkeys(self.places[name] for name in names if name in self.places)
        return f" ({', '.join(places)})" if places else ""


class Finding(msgspec.Struct, kw_only=True):
    """What is not as it should be.

    Attributes:
        check: name of the check that found it.
        figure: what was seen, with where it stands.
        reason: why that matters.
        change: which flag to change, in words.
        settings: the same as settings of a run, for the simulator; none if it cannot tell.
        gain: figures of the run that the change moves, by name, before and after, as the simulator
            says; None if it was not asked. unknown_gain: why it could not be. timing: how the times
            of both runs are known. gain_requests: of how many requests, the first of the load, both
            are; None: of all.
    """

    check: str
    severity: Severity
    figure: str
    reason: str
    change: str
    settings: dict[str, Any] = {}
    gain: dict[str, tuple[float, float]] | None = None
    unknown_gain: str | None = None
    timing: str | None = None
    gain_requests: int | None = None


def merged(below: Facts, above: Facts) -> Facts:
    """Answer the facts *above*, and those of *below* where it has none."""
    both = Facts(source=above.source, name=above.name)
    for name in both.__struct_fields__:
        value, other = getattr(above, name), getattr(below, name)
        is_missing = value is None or (isinstance(value, list | dict) and not value and other)
        setattr(both, name, other if is_missing else value)
    return both
