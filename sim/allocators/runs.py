"""Decode runs for an allocator that has no way of its own: one request, one step at a time."""

from collections.abc import Sequence

from sim.allocators.base import Allocator, DecodeRuns
from sim.allocators.values import NOTHING_TAKEN
from sim.request import Request


class SingleSteps:
    """Serves decode steps through `Allocator.allocate_slots`; a step costs its batch.

    Always right, so that an allocator needs only the five methods of the contract. Nothing is known
    of what a step changes, so `generation` never stands still.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._decoding: dict[Request, None] = {}
        self._asked = 0
        self.taken = NOTHING_TAKEN

    @property
    def generation(self) -> int:
        """A new number every time (see `DecodeRuns.generation`)."""
        self._asked += 1
        return self._asked

    def join(self, requests: Sequence[Request], step: int) -> None:
        """See `DecodeRuns.join`."""
        del step
        self._decoding.update(dict.fromkeys(requests))

    def leave(self, requests: Sequence[Request]) -> None:
        """See `DecodeRuns.leave`."""
        for request in requests:
            del self._decoding[request]

    def grant(self, step: int, max_steps: int) -> int:
        """Answer 0 always (see `DecodeRuns.grant`): every step is served one by one."""
        del step, max_steps
        return 0

    def touched(self, step: int) -> list[Request]:
        """Answer everybody, in running order (see `DecodeRuns.touched`)."""
        del step
        return sorted(self._decoding, key=lambda request: request.order)

    def serve(self, requests: Sequence[Request], step: int) -> int:
        """See `DecodeRuns.serve`."""
        del step
        for num_served, request in enumerate(requests):
            if self._allocator.allocate_slots(request, 1) is None:
                return num_served
        return len(requests)

    def advance(self, step: int) -> None:
        """See `DecodeRuns.advance`."""
        del step
        for request in self._decoding:
            request.num_computed_tokens += 1


def decode_runs(allocator: Allocator) -> DecodeRuns:
    """Answer what serves the decode runs of *allocator*: itself if it can."""
    return allocator if isinstance(allocator, DecodeRuns) else SingleSteps(allocator)
