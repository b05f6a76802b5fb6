"""A run in which every call of the allocator and every step of the scheduler is checked.

The checks keep their own books: owners of blocks and extents as they were granted, contents of
blocks as token identities, free room by counting. Nothing here reads a private field.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from unittest import mock

import pytest

from sim.allocators import ALLOCATORS
from sim.allocators.base import Allocator, HasBlockTables
from sim.allocators.values import Allocation, MemoryStats
from sim.config import RunConfig, SchedulerConfig
from sim.request import Request, RequestStatus
from sim.result_tables import request_table, step_table
from sim.scheduler import Scheduler
from sim.scheduler_output import SchedulerOutput
from sim.simulation import RunResult, Simulation
from sim.static_batching import StaticScheduler
from workloads.record import Trace

Row = dict[str, Any]
Scheduled = list[tuple[Request, int]]


@dataclass
class Call:
    """One call of `allocate_slots`, as the scheduler made it."""

    request: Request
    num_new_tokens: int
    num_hit_tokens: int
    is_admission: bool
    allocation: Allocation | None


class CheckingAllocator:
    """Passes every call on to *inner* and checks it against books of its own (I1, I2, I4)."""

    def __init__(self, inner: Allocator, config: RunConfig) -> None:
        self.inner = inner
        self.enable_caching = inner.enable_caching
        self.config = config
        self.block_size = config.cache.block_size
        self.is_paged = config.cache.allocator in {"paged", "prefix"}  # whose needs are known
        self.calls: list[Call] = []
        self.hit_of: dict[Request, int] = {}
        self.extents: dict[Request, tuple[int, int]] = {}
        self.blocks: dict[Request, list[int]] = {}

    def find_longest_cache_hit(self, request: Request) -> int:
        before = self._books()
        hit = self.inner.find_longest_cache_hit(request)
        assert self.inner.find_longest_cache_hit(request) == hit, "pure"
        assert self._books() == before, "pure"
        assert hit % self.block_size == 0
        assert 0 <= hit <= request.num_tokens - 1
        assert self.enable_caching or hit == 0
        return hit

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
        keep_watermark: bool = False,
    ) -> Allocation | None:
        assert num_new_tokens >= 1
        is_admission = request not in self.blocks
        before, stats = self._books(), self.inner.stats()
        allocation = self.inner.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            keep_watermark=keep_watermark,
        )
        self.calls.append(
            Call(request, num_new_tokens, num_new_computed_tokens, is_admission, allocation)
        )
        if allocation is None:
            # What can be given to the request that wants memory depends on who that is.
            slots, tables = self._books()
            assert (slots[:-1], tables) == (before[0][:-1], before[1]), "I2"
            needed = self._slots_needed(
                request, num_new_tokens, num_new_computed_tokens, full_sequence_must_fit
            )
            if needed is not None:
                assert needed > self._room(stats, keep_watermark), "refused although there is room"
            return None
        self._note(request, allocation, num_new_computed_tokens, is_admission)
        granted = self.inner.stats()
        assert granted.capacity == stats.capacity
        _check_stats(granted)
        assert granted.held >= stats.held
        return allocation

    def free(self, request: Request) -> None:
        del self.blocks[request]
        self.extents.pop(request, None)
        self.hit_of.pop(request, None)
        self.inner.free(request)
        _check_stats(self.inner.stats())

    def stats(self) -> MemoryStats:
        return self.inner.stats()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def check_owners(self) -> None:
        """I4: one owner a slot; several of a block only where all hold the same full content."""
        stats = self.stats()
        _check_stats(stats)
        if self.extents:
            end = 0
            for start, size in sorted(self.extents.values()):
                assert start >= end, "extents overlap"
                end = start + size
            assert end <= stats.capacity
            assert stats.held == sum(size for _, size in self.extents.values())
            assert stats.live == sum(r.num_computed_tokens for r in self.extents)
            final = sum(r.final_num_computed_tokens for r in self.extents)
            assert stats.internal == stats.held - final
        if not isinstance(self.inner, HasBlockTables):
            return
        size = self.block_size
        content: dict[int, int | None] = {}
        filled: dict[int, int] = {}
        owners: Counter[int] = Counter()
        internal = 0
        for request, blocks in self.blocks.items():
            assert self.inner.block_table(request) == blocks
            computed = request.num_computed_tokens
            assert len(blocks) >= -(-computed // size)
            assert len(blocks) == -(-computed // size) or not self.is_paged
            assert len(set(blocks)) == len(blocks)
            internal += max(0, len(blocks) * size - request.final_num_computed_tokens)
            for position, block in enumerate(blocks):
                assert 1 <= block <= stats.capacity // size, "the null block is never granted"
                owners[block] += 1
                here = max(0, min(size, computed - position * size))
                prefix = request.prefix_key((position + 1) * size) if here == size else None
                if owners[block] > 1:
                    assert self.enable_caching
                    assert here == size, "only full blocks are shared"
                    assert content[block] == prefix, "shared by requests of other content"
                filled[block], content[block] = here, prefix
        assert stats.held == len(owners) * size
        assert stats.live == sum(filled.values())
        assert stats.internal == internal

    def _note(self, request: Request, allocation: Allocation, hit: int, is_admission: bool) -> None:
        """Enter a grant: what it names belongs to nobody."""
        if is_admission:
            self.hit_of[request] = hit
            self.blocks[request] = []
            if allocation.size:
                self.extents[request] = (allocation.start, allocation.size)
            elif isinstance(self.inner, HasBlockTables):
                table = self.inner.block_table(request)
                num_hit = len(table) - len(allocation.new_blocks)
                assert num_hit * self.block_size == hit
                self.blocks[request] = table[:num_hit]
        else:
            assert not allocation.size, "a reservation is made once"
        taken = {block for blocks in self.blocks.values() for block in blocks}
        assert not taken & set(allocation.new_blocks), "granted while somebody holds it"
        self.blocks[request] += allocation.new_blocks

    def _books(self) -> tuple[tuple[int, ...], dict[Request, list[int]]]:
        tables = {}
        if isinstance(self.inner, HasBlockTables):
            tables = {request: self.inner.block_table(request) for request in self.blocks}
        return self.inner.stats().as_tuple(), tables

    def _slots_needed(
        self, request: Request, num_new_tokens: int, num_hit_tokens: int, full: bool
    ) -> int | None:
        """Answer the fewest free slots that this request needs, None where it is not known."""
        if self.config.cache.allocator == "contiguous":
            return self._extent_needed(request)
        if not self.is_paged:
            return None
        size = self.block_size
        tokens = request.num_computed_tokens + num_hit_tokens + num_new_tokens
        if full:
            tokens = max(tokens, request.num_tokens)
        held = len(self.blocks.get(request, ()))
        needed = -(-tokens // size) - held
        # Hit blocks that somebody holds need no room; no more than the cached ones are unheld.
        num_cached = self.stats().cached // size
        return (needed - max(0, num_hit_tokens // size - num_cached)) * size

    def _extent_needed(self, request: Request) -> int | None:
        """Answer the reservation if a large enough gap is there; None if there is none."""
        cache = self.config.cache
        assert self.config.model.max_model_len is not None
        longest = self.config.model.max_model_len
        size = {
            "max": longest,
            "oracle": request.num_prompt_tokens + request.max_tokens - 1,
            "pow2": min(longest, request.num_prompt_tokens + _power_of_two(request.max_tokens)),
        }[cache.reservation]
        capacity = self.stats().capacity
        taken = [False] * capacity
        buddy = cache.placement == "buddy"
        for start, held in self.extents.values():
            for slot in range(start, start + (_power_of_two(held) if buddy else held)):
                taken[slot] = True
        extent = _power_of_two(size) if buddy else size
        starts = range(0, capacity - extent + 1, extent if buddy else 1)
        there = any(not any(taken[start : start + extent]) for start in starts)
        return size if there else None

    def _room(self, stats: MemoryStats, keep_watermark: bool) -> int:
        free = stats.free + stats.cached
        if not keep_watermark:
            return free
        watermark = self.config.scheduler.watermark
        if isinstance(self.inner, HasBlockTables):
            assert self.config.cache.num_gpu_blocks_override is not None
            blocks = int(watermark * self.config.cache.num_gpu_blocks_override)
            return free - blocks * self.block_size
        return free - int(watermark * stats.capacity)


def _power_of_two(number: int) -> int:
    power = 1
    while power < number:
        power *= 2
    return power


def _check_stats(stats: MemoryStats) -> None:
    """I1, of the answer itself."""
    assert min(stats.as_tuple()) >= 0
    assert stats.live + stats.reserved + stats.internal + stats.cached + stats.free == (
        stats.capacity
    )
    assert stats.external <= stats.free + stats.cached


class CheckedScheduler(Scheduler):
    """Checks what `schedule` decided (limits, order, I8) and the books after each half of a step.

    `runs` has the scheduler of every run since it was last cleared.
    """

    runs: list["CheckedScheduler"] = []  # noqa: RUF012  # one list on purpose

    def __init__(self, config: SchedulerConfig, max_model_len: int, allocator: Allocator) -> None:
        super().__init__(config, max_model_len, allocator)
        assert isinstance(allocator, CheckingAllocator)
        self.config = config
        self.max_model_len = max_model_len
        self.checking = allocator
        self.num_steps = 0
        self.num_recomputed = 0
        self._computed_once: Counter[Request] = Counter()
        self._complete: set[Request] = set()  # have all their tokens, and hold memory
        self._members: list[Request] = []  # of a static batch
        CheckedScheduler.runs.append(self)

    def schedule(self, max_steps: Callable[[int], int] | None = None) -> SchedulerOutput:
        self.checking.calls.clear()
        running, waiting = list(self.running), list(self.waiting)
        if not running:
            self._members = waiting[: self.config.max_num_seqs]
        computed = {request: request.num_computed_tokens for request in running}
        self.checking.check_integrity()
        output = super().schedule(max_steps)
        assert output.num_steps == 1, "the checking allocator has no runs"
        scheduled = self.scheduled(output)
        self.checking.check_integrity()
        self.checking.check_owners()
        self._check_limits(output, scheduled)
        self._check_preemptions(output, running)
        self._check_waiting(output, scheduled, waiting, alone=len(running) + len(waiting) <= 1)
        self._check_progress(output, scheduled, computed)
        self.num_steps += 1
        return output

    def update_from_output(self, output: SchedulerOutput) -> list[Request]:
        finished = super().update_from_output(output)
        self.checking.check_integrity()
        self.checking.check_owners()
        assert self.checking.blocks.keys() == set(self.running), "who runs holds memory, only they"
        for request in finished:
            assert request.num_output_tokens == request.max_tokens
            assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        assert not set(finished) & {*self.running, *self.waiting}
        for request in self.running:
            assert request.num_output_tokens <= request.max_tokens
        before, self._complete = (
            self._complete,
            {r for r in self.running if r.num_output_tokens == r.max_tokens},
        )
        if self.config.batching == "static":  # all at once
            assert not finished or not self.running
            assert self._complete != set(self.running) or not self.running
        else:  # asynchronously, for one step
            assert before <= set(finished)
            assert self.config.async_scheduling or not self._complete
        return finished

    def _check_limits(self, output: SchedulerOutput, scheduled: Scheduled) -> None:
        budget, max_num_seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        assert budget is not None
        assert max_num_seqs is not None
        names = [request for request, _ in scheduled]
        tokens = sum(n for _, n in scheduled)
        assert len(set(names)) == len(names)
        assert min((n for _, n in scheduled), default=1) >= 1
        assert tokens <= budget
        assert tokens == (output.batch.num_tokens if output.prefills else output.num_decodes)
        assert len(self.running) <= max_num_seqs
        assert len(set(self.running)) == len(self.running)
        assert not set(self.running) & set(self.waiting)
        for request in names:
            assert request in self.running
            assert request not in self._complete
            assert request.num_tokens <= self.max_model_len
            assert request.num_computed_tokens <= request.final_num_computed_tokens
        prefilled = [request for request, _ in output.prefills]
        assert len(names) == len(prefilled) + output.num_decodes
        for request in prefilled:
            samples = request.num_computed_tokens == request.num_tokens
            assert (request in output.sampled) == samples

    def _check_preemptions(self, output: SchedulerOutput, running: list[Request]) -> None:
        """The latest admitted go first, and nobody comes in instead."""
        victims = output.preempted
        if self.config.batching == "static":
            running = [request for request in running if request not in self._complete]
            assert not victims or not self._complete & set(self.running), "memory of no use"
        assert victims == running[: -len(victims) - 1 : -1]
        for request in victims:
            assert request.status is RequestStatus.PREEMPTED
            assert request.num_computed_tokens == 0
        if victims:
            assert not output.admitted
            assert not output.resumed
            assert list(self.waiting)[: len(victims)] == victims[::-1]

    def _check_waiting(
        self,
        output: SchedulerOutput,
        scheduled: Scheduled,
        waiting: list[Request],
        *,
        alone: bool,
    ) -> None:
        """First come first served, and I8: the queue stops for a reason that holds."""
        came = [r for r, _ in scheduled if r in [*output.admitted, *output.resumed]]
        assert came == waiting[: len(came)], "nobody passes the head of the queue"
        there = self.running or self.waiting
        assert scheduled or not there or self._complete, "a step without work"
        if self.config.batching == "static":
            assert set(came) <= set(self._members), "nobody joins a batch"
            if output.preempted or output.num_refusals:
                self._members = []
            if not self.waiting or self.waiting[0] not in self._members:
                return
        if output.preempted or not self.waiting or len(self.running) == self.config.max_num_seqs:
            return
        budget = self.config.max_num_batched_tokens
        assert budget is not None
        left = budget - sum(n for _, n in scheduled)
        head, last = self.waiting[0], self.checking.calls[-1]
        refused = last.allocation is None and last.request is head
        too_long = not self.config.enable_chunked_prefill and self._wanted(head, alone) > left
        assert left == 0 or refused or too_long, "I8"

    def _wanted(self, head: Request, alone: bool) -> int:
        wanted = head.num_tokens - self.checking.find_longest_cache_hit(head)
        threshold = 0 if alone else self.config.long_prefill_token_threshold
        return min(wanted, threshold) if threshold else wanted

    def _check_progress(
        self, output: SchedulerOutput, scheduled: Scheduled, before: dict[Request, int]
    ) -> None:
        """Count recomputed tokens apart from the scheduler: positions computed before."""
        recomputed = 0
        for request in output.preempted:
            assert before[request] < request.num_tokens
        for request, num_new_tokens in scheduled:
            start = before.get(request, self.checking.hit_of[request])
            assert request.num_computed_tokens == start + num_new_tokens
            again = min(request.num_computed_tokens, self._computed_once[request]) - start
            recomputed += max(0, again)
            self._computed_once[request] = max(
                self._computed_once[request], request.num_computed_tokens
            )
        assert output.recomputed_tokens == recomputed
        self.num_recomputed += recomputed


class CheckedStaticScheduler(CheckedScheduler, StaticScheduler):
    """Checks the decisions of static batching."""


def replay(
    config: RunConfig, trace: Trace, *, on_step: Callable[[], None] | None = None
) -> RunResult:
    """Run *trace* with every check on."""
    if not isinstance(Scheduler.schedule, FunctionType):
        pytest.skip("compiled classes have no subclasses that check them")

    def checking(*arguments: Any) -> Allocator:
        return CheckingAllocator(inner(*arguments), config)

    name = str(config.cache.allocator)
    inner = ALLOCATORS[name]
    CheckedScheduler.runs.clear()
    with (
        mock.patch.dict(ALLOCATORS, {name: checking}),
        mock.patch("sim.simulation.Scheduler", CheckedScheduler),
        mock.patch("sim.simulation.StaticScheduler", CheckedStaticScheduler),
    ):
        result = Simulation(config, trace, save_steps=True).run(on_step)
    (scheduler,) = CheckedScheduler.runs
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.checking.blocks
    assert scheduler.num_steps == result.recorder.totals.num_steps
    assert scheduler.num_recomputed == result.recorder.totals.recomputed_tokens
    stats = scheduler.checking.stats()
    assert stats.held == 0
    assert stats.cached + stats.free == stats.capacity
    return result


def plain_run(config: RunConfig, trace: Trace) -> RunResult:
    """Run *trace* as a user does, recording every step."""
    return Simulation(config, trace, save_steps=True).run()


def steps_of(result: RunResult) -> list[Row]:
    rows: list[Row] = step_table(result.recorder).to_pylist()
    return rows


def requests_of(result: RunResult) -> list[Row]:
    rows: list[Row] = request_table(result.recorder).to_pylist()
    return rows


@dataclass
class Driver:
    """A scheduler and its allocator by hand, for looking at them in the middle of a run."""

    config: RunConfig
    allocator: Allocator
    requests: list[Request]
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        assert self.config.model.max_model_len is not None
        self.scheduler = Scheduler(
            self.config.scheduler, self.config.model.max_model_len, self.allocator
        )
        for request in self.requests:
            assert self.scheduler.add_request(request) is None

    def step(self, times: int = 1) -> SchedulerOutput:
        """Run *times* steps; answer the last one's decisions."""
        for _ in range(times):
            output = self.scheduler.schedule()
            self.scheduler.update_from_output(output)
        return output
