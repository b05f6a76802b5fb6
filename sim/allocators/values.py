"""The values that an allocator answers with.

Plain classes: these are made in every step, and a named tuple takes longer, compiled ten times.
"""

from collections.abc import Sequence


class Allocation:
    """What one `Allocator.allocate_slots` granted.

    Attributes:
        new_blocks: ids of the blocks taken now, in table order (paged families).
        start: first slot of a contiguous reservation made now, else -1.
        size: slots of that reservation, else 0.
    """

    __slots__ = ("new_blocks", "size", "start")

    def __init__(self, new_blocks: Sequence[int] = (), start: int = -1, size: int = 0) -> None:
        self.new_blocks, self.start, self.size = new_blocks, start, size


NOTHING_NEW = Allocation()
"""The grant of a request that already holds room for its new tokens."""


class MemoryStats:
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

    __slots__ = ("cached", "capacity", "external", "free", "internal", "live", "reserved")

    def __init__(
        self,
        capacity: int,
        live: int,
        reserved: int,
        internal: int,
        cached: int,
        free: int,
        external: int = 0,
    ) -> None:
        self.capacity, self.live, self.reserved = capacity, live, reserved
        self.internal, self.cached, self.free, self.external = internal, cached, free, external

    @property
    def held(self) -> int:
        """Slots that belong to unfinished requests."""
        return self.live + self.reserved + self.internal

    def as_tuple(self) -> tuple[int, int, int, int, int, int, int]:
        """Answer all of them, in the order in which they are made."""
        return (
            self.capacity,
            self.live,
            self.reserved,
            self.internal,
            self.cached,
            self.free,
            self.external,
        )


class Taken:
    """Slots that changed hands during a run of steps, beyond the token that a request writes.

    What was taken in step j of a run was not held before it, for a time of ``first * j + increment
    * j (j - 1) / 2`` where step j lasts ``first + j * increment``. Each pair therefore has the sum
    over the slots of j, and of j (j - 1) / 2.

    Attributes:
        held: slots taken from the free list.
        internal: of those, never written.
        cached: of those, cached before: evicted.
    """

    __slots__ = ("cached", "held", "internal")

    def __init__(
        self, held: tuple[int, int], internal: tuple[int, int], cached: tuple[int, int]
    ) -> None:
        self.held, self.internal, self.cached = held, internal, cached


NOTHING_TAKEN = Taken((0, 0), (0, 0), (0, 0))
"""Of a single step, too: what it takes is there from its beginning."""
