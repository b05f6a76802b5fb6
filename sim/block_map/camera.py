"""What the KV pool looks like at chosen instants of a run: whose each place is, and since when."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.allocators import ALLOCATORS
from sim.allocators.base import HasMemoryMap, MemoryMap
from sim.clients import NEVER
from sim.columns import SLOT_STATES
from sim.request import Request
from sim.scheduler_output import SchedulerOutput
from sim.simulation import Simulation
from workloads.record import IntArray

COUNTERS = ("refusals", "preemptions", "queries", "hits")
"""Added up from the start of the run: allocations refused, requests preempted, prompt tokens looked
up in the prefix cache, and of those found."""

COLUMNS = ("step", "running", "waiting", *SLOT_STATES, *COUNTERS)
"""Numbers of a frame; slots as right after scheduling, as in the step table of single steps."""


@dataclass(slots=True)
class Tenancy:
    """A request's hold on memory, from admission until it gives everything back.

    Attributes:
        request: the owner.
        first: the first frame in which it is seen.
        places: all it has held so far, in token order.
        held: in each frame from the first on, how many of them.
        computed: likewise, tokens written.
    """

    request: Request
    first: int
    places: Sequence[int] = ()
    held: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


class MapCamera:
    """Takes a frame at each of *instants* (`sim.engine.Camera`).

    A frame is of the step that runs then, as it was scheduled. The engine lets a run of steps end
    with that step, so no frame lies inside one; of idle time it is what the last step left. Call
    `finish` when the run is over.

    Args:
        simulation: whose run it looks at.
        instants: in ticks, rising.

    Attributes:
        rows: `COLUMNS` of each frame.
        tenancies: in order of appearance.
        cached: of each frame, the places kept for reuse, rising.
        unusable: of each frame, see `MemoryMap`.
        why: of each frame, why the head of the queue is not admitted; "" if nobody waits.
    """

    def __init__(self, simulation: Simulation, instants: Sequence[int]) -> None:
        allocator = simulation.allocator
        assert isinstance(allocator, HasMemoryMap), "asked by who makes it"
        self._allocator, self._has_map = allocator, allocator
        self._simulation = simulation
        self._instants = instants
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._num_steps = 0
        self._current: dict[Request, Tenancy] = {}
        self.rows: list[tuple[int, ...]] = []
        self.tenancies: list[Tenancy] = []
        self.cached: list[IntArray] = []
        self.unusable: list[Sequence[range]] = []
        self.why: list[str] = []
        self._next_instant = instants[0]

    @property
    def next_at(self) -> int:
        """See `sim.engine.Camera`; also where somebody arrives, who waits from then on."""
        return min(self._next_instant, self._simulation.clients.next_arrival - 1)

    def look(
        self, end: int, num_running: int, num_waiting: int, output: SchedulerOutput | None = None
    ) -> None:
        """See `sim.engine.Camera`."""
        if output is not None:
            counts = self._counts
            counts["refusals"] += output.num_refusals
            counts["preemptions"] += len(output.preempted)
            counts["queries"] += output.prefix_cache_queries
            counts["hits"] += output.prefix_cache_hits
            self._num_steps += output.num_steps
        while self._next_instant < end:
            self._take(num_running, num_waiting)
            self.why.append("" if output is None else why_waiting(self._simulation, output))
            place = len(self.rows)
            self._next_instant = self._instants[place] if place < len(self._instants) else NEVER

    def finish(self) -> None:
        """Take the frames after the end of the run."""
        self.look(NEVER, 0, 0)

    @property
    def memory(self) -> MemoryMap:
        """What the pool looks like now."""
        return self._has_map.memory_map()

    def _take(self, num_running: int, num_waiting: int) -> None:
        memory, stats = self.memory, self._allocator.stats()
        frame = len(self.rows)
        free = stats.free - stats.external
        slots = (stats.live, stats.reserved, stats.internal, stats.external, stats.cached, free)
        self.rows.append(
            (self._num_steps - 1, num_running, num_waiting, *slots, *self._counts.values())
        )
        current = {}
        for request, places, num_computed in memory.holdings:
            tenancy = self._current.get(request)
            # Memory that was lost and got again between two frames may lie elsewhere.
            if tenancy is None or places[: len(tenancy.places)] != tenancy.places:
                tenancy = Tenancy(request, frame)
                self.tenancies.append(tenancy)
            tenancy.places = places
            tenancy.held.append(len(places))
            tenancy.computed.append(num_computed)
            current[request] = tenancy
        self._current = current
        self.cached.append(np.sort(np.array(memory.cached, dtype=np.int64)))
        self.unusable.append(memory.unusable)


def why_waiting(simulation: Simulation, output: SchedulerOutput) -> str:
    """Answer why *output*, just scheduled, left the head of the queue where it is; "" if none is.

    The reasons are those of `Scheduler.schedule`, in its order.
    """
    scheduler, config = simulation.scheduler, simulation.result.config.scheduler
    assert config.max_num_seqs is not None, "resolved"
    if not scheduler.waiting:
        reason = ""
    elif config.batching == "static":
        reason = "Static batching: nobody joins before all of the batch have finished."
    elif output.preempted:
        reason = "Nobody is admitted in a step that preempts."
    elif len(scheduler.running) >= config.max_num_seqs:
        reason = f"max_num_seqs ({config.max_num_seqs:,}) is reached."
    else:
        reason = _why_refused(simulation, output, scheduler.waiting[0])
    return reason


def _why_refused(simulation: Simulation, output: SchedulerOutput, head: Request) -> str:
    """Answer what is short for *head*, which has a seat: budget or memory."""
    config = simulation.result.config.scheduler
    budget = config.max_num_batched_tokens
    assert budget is not None, "resolved"
    left = budget - output.num_decodes - sum(num_tokens for _, num_tokens in output.prefills)
    if not left:
        return f"max_num_batched_tokens ({budget:,}) is used up."
    num_found = simulation.allocator.find_longest_cache_hit(head)
    chunk = head.num_tokens - num_found
    if config.long_prefill_token_threshold:
        chunk = min(chunk, config.long_prefill_token_threshold)
    if chunk > left and not config.enable_chunked_prefill:
        return (
            f"Next in line computes {chunk:,} tokens at once; "
            f"left of max_num_batched_tokens ({budget:,}): {left:,}."
        )
    num_tokens = num_found + min(chunk, left)
    if config.scheduler_reserve_full_isl:
        num_tokens = head.num_tokens
    return _why_no_room(simulation, head, num_tokens, num_found)


def _why_no_room(simulation: Simulation, head: Request, num_tokens: int, num_found: int) -> str:
    """Answer how memory falls short of *num_tokens* of *head*, of which *num_found* are cached."""
    config, pool = simulation.result.config, simulation.result.pool
    stats = simulation.allocator.stats()
    cache, watermark, max_model_len = (
        config.cache,
        config.scheduler.watermark,
        config.model.max_model_len,
    )
    assert max_model_len is not None, "resolved"
    empty = ALLOCATORS[str(cache.allocator)](cache, config.scheduler, pool, max_model_len)
    grant = empty.allocate_slots(head, num_tokens)
    assert grant is not None, "an empty pool has room for one request of max_model_len"
    if grant.size:  # a reservation
        kept = int(watermark * stats.capacity)
        needs, free = f"{grant.size:,} slots in one piece", f"free: {stats.free:,}"
        if stats.free - kept >= grant.size:
            free += ", in shorter holes"
    else:
        kept, size = int(watermark * pool.num_gpu_blocks), cache.block_size
        needed, room = len(grant.new_blocks), (stats.free + stats.cached) // size
        needs = f"{needed:,} blocks"
        free = f"{'free or cached' if stats.cached else 'free'}: {room:,}"
        if num_found:
            needed -= num_found // size
            needs += f", {num_found // size:,} of which are cached"
            if room - kept >= needed:
                free += ", with these"
    kept_words = f", {kept:,} of which the watermark keeps" if kept else ""
    return f"Next in line needs {needs}; {free}{kept_words}."
