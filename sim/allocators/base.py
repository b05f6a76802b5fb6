"""The contract of an allocator of KV memory, and the values it answers with."""

from typing import NamedTuple, Protocol, runtime_checkable

from sim.request import Request


class Allocation(NamedTuple):
    """What one `Allocator.allocate_slots` granted.

    Attributes:
        new_blocks: ids of the blocks taken now, in table order (paged families).
        start: first slot of a contiguous reservation made now, else -1.
        size: slots of that reservation, else 0.
    """

    new_blocks: tuple[int, ...] = ()
    start: int = -1
    size: int = 0


NOTHING_NEW = Allocation()
"""The grant of a request that already holds room for its new tokens."""


class MemoryStats(NamedTuple):
    """Where every token slot of the pool is. live + reserved + internal + cached + free = capacity.

    Attributes:
        capacity: slots that requests can use.
        live: hold KV of unfinished requests; a shared slot counts once.
        reserved: held, and written later by their owner.
        internal: held, and never written (internal fragmentation).
        cached: hold KV of no unfinished request, kept for reuse and evictable at any time.
        free: hold nothing of use.
        external: of the free slots, those that cannot be given to the request that wants memory
            (external fragmentation; 0 where no allocator needs contiguity).
    """

    capacity: int
    live: int
    reserved: int
    internal: int
    cached: int
    free: int
    external: int = 0

    @property
    def held(self) -> int:
        """Slots that belong to unfinished requests."""
        return self.live + self.reserved + self.internal


class IntegrityError(AssertionError):
    """An allocator's books do not agree with a recount; the message has both numbers."""


class Allocator(Protocol):
    """KV memory of one engine, counted in token slots. Takes no simulated time.

    Constructors raise `sim.errors.ConfigError` unless one request of max_model_len tokens fits an
    empty pool (vLLM's start-up check, ``v1/core/kv_cache_utils.py``): this rules out livelock.
    """

    enable_caching: bool
    """Whether prompts are looked up; if not, no look-up is counted."""

    def find_longest_cache_hit(self, request: Request) -> int:
        """Answer how many leading tokens of *request* are in memory already.

        Pure. A multiple of block_size, at most ``num_tokens - 1``; 0 without sharing.
        """
        ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = False,
    ) -> Allocation | None:
        """Make room for *num_new_tokens* to be computed in this step. All or nothing.

        Args:
            request: holds nothing when it is admitted, else what earlier calls granted.
            num_new_tokens: tokens after ``request.num_computed_tokens`` and the hit.
            num_new_computed_tokens: the cache hit, as `find_longest_cache_hit` answered it in this
                step; only at admission.
            full_sequence_must_fit: also refuse unless all present tokens of the request would fit
                (vLLM's ``scheduler_reserve_full_isl``).
            keep_watermark: also refuse unless the watermark stays free.

        Returns:
            The grant, or None: then nothing has changed.
        """
        ...

    def free(self, request: Request) -> None:
        """Take back all that *request* holds (finished or preempted); its counters still stand.

        Raises:
            KeyError: if it holds nothing.
        """
        ...

    def stats(self) -> MemoryStats:
        """Answer the split of the pool, in O(1), as of the last grant."""
        ...

    def check_integrity(self) -> None:
        """Recount everything from scratch, between steps.

        Raises:
            IntegrityError: where the books differ.
        """
        ...


class Taken(NamedTuple):
    """Slots that changed hands in one step of a run, beyond the token a request writes.

    Attributes:
        offset: the step, counted from the first of the run.
        held: slots taken from the free list.
        internal: of those, never written.
        cached: of those, cached before: evicted.
    """

    offset: int
    held: int
    internal: int
    cached: int


@runtime_checkable
class DecodeRuns(Protocol):
    """Optional capability: serve many consecutive decode steps of a whole batch at once.

    The requests that joined write one token each in every step. The allocator counts the steps, so
    that it knows who needs memory when; decisions and block order are those of single steps.
    """

    @property
    def generation(self) -> int:
        """Changes when an admission that was refused might now be granted."""

    @property
    def taken(self) -> list[Taken]:
        """What the last `grant` took, by step; steps that took nothing are left out."""

    def join(self, request: Request) -> None:
        """Let *request* decode from the next step on; it holds room for what it has computed."""
        ...

    def leave(self, request: Request) -> None:
        """Let *request* decode no more, before its next step; it keeps what it holds.

        Its ``num_computed_tokens`` is brought up to date.
        """
        ...

    def grant(self, max_steps: int) -> int:
        """Take the memory of as many steps as there is room for, up to *max_steps*; answer them.

        Several only if none of them changes `generation`. Answers 0, and takes nothing, if the next
        step does not fit: then serve the requests of `touched` one by one, and `advance`.
        """
        ...

    def touched(self) -> list[Request]:
        """Answer, in running order, the requests that take or fill memory in the next step."""
        ...

    def serve(self, request: Request) -> bool:
        """Do what the next step needs for one request of `touched`; False if there is no room."""
        ...

    def advance(self) -> None:
        """Count the step whose requests were served one by one."""
        ...


@runtime_checkable
class HasBlockTables(Protocol):
    """Optional capability: memory in blocks that can be listed."""

    def block_table(self, request: Request) -> list[int]:
        """Answer the block ids of *request* in token order."""
        ...


def require_equal(what: str, booked: int, counted: int) -> None:
    """Raise `IntegrityError` unless the books and the recount agree."""
    if booked != counted:
        raise IntegrityError(f"{what}: booked {booked}, counted {counted}")
