"""The contract of an allocator of KV memory; `sim.allocators.values` has what it answers with."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from sim.allocators.values import Allocation, MemoryStats, Taken
from sim.request import Request


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


@runtime_checkable
class DecodeRuns(Protocol):
    """Optional capability: serve many consecutive decode steps of a whole batch at once.

    The requests that joined write one token each in every step; before step s they have computed
    ``request.offset + s``. Decisions and block order are those of single steps.
    """

    @property
    def generation(self) -> int:
        """Changes when an admission that was refused might now be granted."""

    @property
    def taken(self) -> Taken:
        """What the last `grant` took during its steps."""

    def join(self, requests: Sequence[Request], step: int) -> None:
        """Let *requests* decode from *step* on; they hold room for what they have computed."""
        ...

    def leave(self, requests: Sequence[Request]) -> None:
        """Let *requests* decode no more, before their next step; they keep what they hold.

        Their ``num_computed_tokens`` is up to date.
        """
        ...

    def grant(self, step: int, max_steps: int) -> int:
        """Take the memory of as many steps from *step* on as there is room for, up to *max_steps*.

        Answers how many; several only if none of them changes `generation`. Answers 0, and takes
        nothing, if *step* does not fit: then serve the requests of `touched` one by one, and
        `advance`.
        """
        ...

    def touched(self, step: int) -> list[Request]:
        """Answer, in running order, the requests that take or fill memory in *step*."""
        ...

    def serve(self, requests: Sequence[Request], step: int) -> int:
        """Do what *step* needs for *requests* of `touched`, in order, as far as there is room.

        Answers for how many of them.
        """
        ...

    def advance(self, step: int) -> None:
        """Count *step*, whose requests were served one by one."""
        ...


@runtime_checkable
class HasBlockTables(Protocol):
    """Optional capability: memory in blocks that can be listed."""

    def block_table(self, request: Request) -> list[int]:
        """Answer the block ids of *request* in token order."""
        ...


class Holding(NamedTuple):
    """What one request holds of the pool.

    Attributes:
        request: the owner; several requests may hold one place.
        places: in token order (`MemoryMap`).
        num_computed: tokens whose KV is in them once the step that was scheduled has run.
    """

    request: Request
    places: Sequence[int]
    num_computed: int


class MemoryMap(NamedTuple):
    """Whose each place of the pool is. It says where what `MemoryStats` counts.

    Attributes:
        unit: token slots of a place: those of a block, or 1.
        first: id of the first place; they are numbered without a gap.
        num_places: how many there are.
        holdings: of every request that holds memory.
        cached: places that nobody holds, kept for reuse.
        unusable: free places that cannot be given to the request that wants memory.
    """

    unit: int
    first: int
    num_places: int
    holdings: Sequence[Holding]
    cached: Sequence[int] = ()
    unusable: Sequence[range] = ()


@runtime_checkable
class HasMemoryMap(Protocol):
    """Optional capability: memory that can be drawn."""

    def memory_map(self) -> MemoryMap:
        """Answer whose what is, as of the last grant; changes nothing, walks all that is held."""
        ...


def require_equal(what: str, booked: int, counted: int) -> None:
    """Raise `IntegrityError` unless the books and the recount agree."""
    if booked != counted:
        raise IntegrityError(f"{what}: booked {booked}, counted {counted}")
