"""Who sends the requests of a run, and when: at recorded times, or when others have ended.

Users wait for an answer before they ask again, so that a slow server slows them down. Under a
closed loop the next turn of a session comes its think time after the turn before has ended, and
under ``max_concurrency`` nothing is sent while so many requests are under way (as in vLLM's
``bench serve``).
"""

import heapq
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from sim.config import LoadConfig
from sim.errors import ConfigError
from sim.refusal import can_be_served
from sim.request import Request, make_request, make_requests
from sim.timing.base import TICKS_PER_PS
from workloads.errors import TraceError, quote
from workloads.record import MAX_ARRIVAL_S, PS_PER_S, IntArray, Trace

NEVER = 1 << 100
"""Later than any time, in ticks."""


class Clients(Protocol):
    """Where the engine gets its requests from.

    Attributes:
        next_arrival: when the next request arrives, in ticks; `NEVER` if none comes, or none before
            another has ended.
        arrival_ps: int64 [num_requests], picoseconds, when each row of the trace arrives, as far as
            it has.
    """

    next_arrival: int
    arrival_ps: IntArray

    def due(self, ticks: int) -> list[Request]:
        """Answer the requests that arrive up to *ticks*, those of that instant included."""

    def ended(self, requests: Iterable[Request], time_ps: int) -> None:
        """Take in that *requests* ended at *time_ps*; who is refused, they know themselves."""


def make_clients(load: LoadConfig, trace: Trace, max_model_len: int) -> Clients:
    """Answer who sends the requests of *trace* as *load* says.

    Raises:
        ConfigError: a closed loop of a trace without sessions.
    """
    if load.closed_loop and not (trace.previous_turn >= 0).any():
        raise ConfigError(
            f"--closed-loop: {trace.name} has no sessions of several turns; expected a format that "
            "tells who follows whom, or --max-concurrency"
        )
    if not load.closed_loop and load.max_concurrency is None:
        return OpenLoop(trace, max_model_len)
    return ClosedLoop(
        trace, max_model_len, sessions=load.closed_loop, max_concurrency=load.max_concurrency
    )


class OpenLoop:
    """Requests come at the times of the trace, whatever the server does."""

    def __init__(self, trace: Trace, max_model_len: int) -> None:
        self.arrival_ps = trace.arrival_ps
        self._requests = make_requests(trace, max_model_len)
        self._next: Request | None = None
        self.next_arrival = NEVER
        self._advance()

    def due(self, ticks: int) -> list[Request]:
        """Answer the requests that arrive up to *ticks*, those of that instant included."""
        due: list[Request] = []
        while self._next is not None and self.next_arrival <= ticks:
            due.append(self._next)
            self._advance()
        return due

    def ended(self, requests: Iterable[Request], time_ps: int) -> None:
        """Change nothing: nobody waits for an answer."""

    def _advance(self) -> None:
        self._next = request = next(self._requests, None)
        self.next_arrival = NEVER if request is None else request.arrival_ps * TICKS_PER_PS


class ClosedLoop:
    """Requests come when others have ended.

    Args:
        trace: what is asked.
        max_model_len: prompt and output together are cut to this many tokens.
        sessions: the next turn of a session arrives its think time after the turn before has ended
            or was refused, instead of at its recorded time.
        max_concurrency: the most requests under way; the others are sent as those end, in the order
            in which they would have arrived. None: no limit.
    """

    def __init__(
        self, trace: Trace, max_model_len: int, *, sessions: bool, max_concurrency: int | None
    ) -> None:
        self._trace, self._max_model_len = trace, max_model_len
        self._after: dict[int, list[int]] = {}
        waits = np.zeros(len(trace), dtype=bool)
        if sessions:
            waits = trace.previous_turn >= 0
            for row in np.flatnonzero(waits).tolist():
                self._after.setdefault(int(trace.previous_turn[row]), []).append(row)
        first = np.flatnonzero(~waits)
        arrivals = trace.arrival_ps[first].tolist()
        self._ready = list(zip(arrivals, first.tolist(), strict=True))  # sorted: a heap
        self._room = len(trace) if max_concurrency is None else max_concurrency
        self._freed_ps = 0  # when the last of them ended
        self._sent: list[tuple[int, int]] = []  # and not taken by the engine yet
        self.arrival_ps = trace.arrival_ps.copy()
        self.next_arrival = NEVER
        self._look()

    def due(self, ticks: int) -> list[Request]:
        """Answer the requests that arrive up to *ticks*, those of that instant included."""
        self._send(ticks // TICKS_PER_PS)
        sent, self._sent = self._sent, []
        self._look()
        for arrival_ps, row in sent:
            self.arrival_ps[row] = arrival_ps
        return [
            make_request(self._trace, row, arrival_ps, self._max_model_len)
            for arrival_ps, row in sent
        ]

    def ended(self, requests: Iterable[Request], time_ps: int) -> None:
        """Let those come who waited for *requests*, which ended at *time_ps*."""
        self._send(time_ps)
        for request in requests:
            self._room += 1
            self._freed_ps = time_ps
            self._let_follow(request.index, time_ps)
        self._look()

    def _let_follow(self, row: int, time_ps: int) -> None:
        """Let the turns after *row*, which ended at *time_ps*, come after their think times."""
        for turn in self._after.pop(row, ()):
            arrival_ps = time_ps + int(self._trace.think_ps[turn])
            if arrival_ps > MAX_ARRIVAL_S * PS_PER_S:
                raise TraceError(
                    f"{self._trace.name}: request {quote(self._trace.request_ids[turn])} would "
                    f"arrive after {arrival_ps / PS_PER_S:.6g} s: expected think times that end "
                    f"within {MAX_ARRIVAL_S:,} s"
                )
            heapq.heappush(self._ready, (arrival_ps, turn))

    def _send(self, until_ps: int) -> None:
        """Send what is ready by *until_ps*, as far as there is room."""
        while self._room and self._ready:
            arrival_ps, row = self._ready[0]
            arrival_ps = max(arrival_ps, self._freed_ps)
            if arrival_ps > until_ps:
                break
            heapq.heappop(self._ready)
            self._sent.append((arrival_ps, row))
            if can_be_served(int(self._trace.num_prompt_tokens[row]), self._max_model_len):
                self._room -= 1
            else:  # refused at once, so that it takes nobody's room
                self._let_follow(row, arrival_ps)

    def _look(self) -> None:
        """Find when the next request arrives."""
        self.next_arrival = NEVER
        if self._sent:
            self.next_arrival = self._sent[0][0] * TICKS_PER_PS
        elif self._room and self._ready:
            self.next_arrival = max(self._ready[0][0], self._freed_ps) * TICKS_PER_PS
