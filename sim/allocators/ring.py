"""When decoding requests need their next block, without looking at every one in every step."""

from collections.abc import Mapping, Sequence

from sim.request import Request

Bucket = dict[Request, list[int]]
"""Requests that take a block in the same steps, in running order, and their block tables."""

_NOBODY: Bucket = {}


class DecodeRing:
    """A request needs a block every *block_size* steps: buckets by step modulo *block_size*."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._buckets: dict[int, Bucket] = {}
        self._last_order = -1
        self.num_requests = 0

    def join(self, requests: Sequence[Request], tables: Mapping[Request, list[int]]) -> None:
        """Enter *requests*, which decode from now on, with the tables that their blocks go to."""
        size, buckets, last_order = self._size, self._buckets, self._last_order
        for request in requests:
            phase = -request.offset % size
            bucket = buckets.get(phase)
            if bucket is None:
                bucket = buckets[phase] = {}
            bucket[request] = tables[request]
            if request.order > last_order:
                last_order = request.order
            else:  # only where a threshold lets several prompts run at once
                buckets[phase] = dict(sorted(bucket.items(), key=lambda item: item[0].order))
        self._last_order = last_order
        self.num_requests += len(requests)

    def leave(self, requests: Sequence[Request]) -> None:
        """Take *requests* out."""
        size, buckets = self._size, self._buckets
        for request in requests:
            phase = -request.offset % size
            bucket = buckets[phase]
            del bucket[request]
            if not bucket:
                del buckets[phase]
        self.num_requests -= len(requests)

    def at(self, step: int) -> Bucket:
        """Answer the requests that need a block in *step*."""
        return self._buckets.get(step % self._size, _NOBODY)

    def needs(self, step: int, num_steps: int) -> tuple[list[list[int]], int, int, int]:
        """Answer what *num_steps* steps from *step* on need, in time that is not theirs.

        The block tables in the order in which they take blocks (they come round in the same order,
        so block i of the run goes to table ``i % len(tables)``); the number of blocks; and the sums
        over those blocks of j and of j (j - 1) / 2, j being the step (`Taken`).
        """
        size, buckets = self._size, self._buckets
        phase, rounds = step % size, 0
        tables: list[list[int]] = []
        num_blocks = first = second = 0
        for offset in self._offsets(phase, num_steps):
            bucket = buckets.get((phase + offset) % size)
            if not bucket:
                continue
            tables += bucket.values()
            num = len(bucket)
            if num_steps > size:
                rounds = (num_steps - 1 - offset) // size
            if rounds:
                # j = offset + r * size for r from 0 to rounds.
                times, pairs = rounds + 1, rounds * (rounds + 1) // 2
                steps = times * offset + size * pairs
                squares = times * offset * offset + 2 * offset * size * pairs
                squares += size * size * pairs * (2 * rounds + 1) // 3
                num_blocks += num * times
                first += num * steps
                second += num * (squares - steps) // 2
            else:
                num_blocks += num
                first += num * offset
                second += num * (offset * (offset - 1) // 2)
        return tables, num_blocks, first, second

    def _offsets(self, phase: int, num_steps: int) -> list[int]:
        """Answer the steps of the first round in which somebody may need a block, in order."""
        window = min(num_steps, self._size)
        if 2 * len(self._buckets) >= window:
            return list(range(window))
        offsets = [(at - phase) % self._size for at in self._buckets]
        return sorted([offset for offset in offsets if offset < window])

    def steps_within(self, step: int, num_steps: int, num_blocks: int) -> int:
        """Answer how many steps from *step* on, up to *num_steps*, need at most *num_blocks*."""
        buckets, size = self._buckets, self._size
        for at in range(step, step + num_steps):
            num_blocks -= len(buckets.get(at % size, _NOBODY))
            if num_blocks < 0:
                return at - step
        return num_steps

    def moments_of_first(self, step: int, num_blocks: int) -> tuple[int, int]:
        """Answer the sums of `needs` for the first *num_blocks* blocks taken from *step* on."""
        first = second = offset = 0
        while num_blocks:
            num = min(len(self.at(step + offset)), num_blocks)
            first += num * offset
            second += num * (offset * (offset - 1) // 2)
            num_blocks -= num
            offset += 1
        return first, second
