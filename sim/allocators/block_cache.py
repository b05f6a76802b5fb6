"""Which blocks hold which prefix, who holds them, and in which order they are evicted.

vLLM 0.33.0, ``v1/core/block_pool.py``: ``cached_block_hash_to_block``, ``get_cached_block``,
``touch``, ``free_blocks``, ``_maybe_evict_cached_block``. In arrays, so that what happens to a
prefix of hundreds of blocks is a few operations on slices.
"""

import struct
from collections import deque
from typing import NamedTuple

import numpy as np

from sim.allocators.base import require_equal
from sim.request import Request
from workloads.record import IntArray

NO_BLOCK = 0
"""The null block, which holds nothing."""

NO_KEY = -1

# Of no dimension: with a Python integer NumPy takes twice as long to find out what to do.
_NOBODY = np.array(0)
_NO_BLOCK = np.array(NO_BLOCK)
_NO_KEY = np.array(NO_KEY)
_ONE = np.array(1)

FEW = 8
"""Up to so many blocks, going through them is faster than starting operations on arrays."""

WINDOW = 16
"""Entries of the queue that are looked at together, at least: stale ones may lie between."""


def as_array(blocks: list[int]) -> IntArray:
    """Answer *blocks* as an array; of many, in a third of the time that NumPy takes."""
    if len(blocks) <= FEW:
        return np.array(blocks, dtype=np.int64)
    return np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), dtype=np.int64)


class Keys(NamedTuple):
    """Blocks *first* to *end* of a request have the keys ``base + first`` to ``base + end``."""

    first: int
    end: int
    base: int


def key_at(keys: list[Keys], place: int) -> int:
    """Answer the key of block *place*, which is one of those of *keys*."""
    return next(base + place for first, end, base in keys if first <= place < end)


def place_of(keys: list[Keys], key: int) -> int:
    """Answer the block that has *key*; -1 if none of *keys* is it."""
    for first, end, base in keys:
        if base + first <= key < base + end:
            return key - base
    return -1


class PrefixKeys:
    """Numbers blocks by the prefix they end: equal numbers, equal prefixes, within one trace.

    Blocks that follow each other in a prompt have consecutive numbers as far as may be. A segment
    of a prompt has a node that names it and all before it (`workloads.record`), so a block is its
    node and its place in the request.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._of_node: dict[int, Keys] = {}
        self._longer: dict[int, list[Keys]] = {}  # of a node that was shorter when it was new
        self.num_keys = 0

    def of(self, request: Request, num_blocks: int) -> list[Keys]:
        """Answer the keys of the first *num_blocks* blocks; each is of the segment it ends in."""
        size, of_node = self._block_size, self._of_node
        keys: list[Keys] = []
        first = start = base = 0  # of a piece that goes on from segment to segment
        for node, num_tokens in request.segments():
            end = num_tokens // size
            if end > num_blocks:  # noqa: PLR1730  # min takes its time for every segment
                end = num_blocks
            if first == end:
                continue
            piece = of_node.get(node)
            if piece is None:
                piece = of_node[node] = self._new(first, end)
            if piece.end != end or piece.base != base:
                if start < first:
                    keys.append(Keys(start, first, base))
                if piece.end != end:
                    keys += self._pieces(node, end)
                    first = start = end
                    continue  # whatever follows begins a piece of its own
                start, base = first, piece.base
            first = end
            if end == num_blocks:
                break
        if start < first:
            keys.append(Keys(start, first, base))
        return keys

    def _new(self, first: int, end: int) -> Keys:
        base = self.num_keys - first
        self.num_keys += end - first
        return Keys(first, end, base)

    def _pieces(self, node: int, end: int) -> list[Keys]:
        """Answer the keys of the blocks of *node*, which is now shorter or longer than before."""
        pieces = self._longer.setdefault(node, [self._of_node[node]])
        if pieces[-1].end < end:
            pieces.append(self._new(pieces[-1].end, end))
        return [Keys(k.first, min(k.end, end), k.base) for k in pieces if k.first < end]


class BlockCache:
    """Blocks with a key: found by it, counted by their holders, evicted in order.

    Blocks with equal keys are not merged: look-up answers the first one entered, and when that is
    evicted the next one. An evictable block is one that nobody holds, with a key or without one
    (*private*: nobody will look for it). The oldest are evicted first.

    Attributes:
        num_evictable: blocks in the queue.
    """

    def __init__(self) -> None:
        self.num_evictable = 0
        self._block_of: IntArray = np.empty(0, dtype=np.int64)  # by key
        self._has_copies = np.empty(0, dtype=np.bool_)
        self._copies: dict[int, list[int]] = {}
        self._key_of: IntArray = np.empty(0, dtype=np.int64)  # by block
        self._ref_cnt: IntArray = np.empty(0, dtype=np.int64)
        # The number of a block's valid entry in the queue. An entry goes stale, and is passed over
        # when it comes to the front, when somebody takes the block up again.
        self._entry_of: IntArray = np.empty(0, dtype=np.int64)
        self._num_entries = 0
        # Private blocks, taken from the end; or blocks and the numbers of their entries, from the
        # front.
        self._queue: deque[list[int] | tuple[IntArray, IntArray]] = deque()
        self._look_at_arrays()

    def reserve(self, num_keys: int, num_blocks: int) -> None:
        """Make room for keys below *num_keys* and blocks below *num_blocks*."""
        if num_keys > len(self._block_of):
            more = max(num_keys, 2 * len(self._block_of), 1024) - len(self._block_of)
            self._block_of = np.append(self._block_of, np.full(more, NO_BLOCK))
            self._has_copies = np.append(self._has_copies, np.zeros(more, dtype=np.bool_))
            self._look_at_arrays()
        if num_blocks > len(self._key_of):
            more = max(num_blocks, 2 * len(self._key_of), 1024) - len(self._key_of)
            self._key_of = np.append(self._key_of, np.full(more, NO_KEY))
            self._ref_cnt = np.append(self._ref_cnt, np.zeros(more, dtype=np.int64))
            self._entry_of = np.append(self._entry_of, np.full(more, NO_KEY))
            self._look_at_arrays()

    def _look_at_arrays(self) -> None:
        """Make the views by which single elements are read and written, at half the time."""
        self._block_at = self._block_of.data
        self._copied_at = self._has_copies.data
        self._key_at = self._key_of.data
        self._ref_cnt_at = self._ref_cnt.data
        self._entry_at = self._entry_of.data

    def num_found(self, keys: list[Keys], num_blocks: int) -> int:
        """Answer how many of the first *num_blocks* blocks are here, up to the first gap."""
        num_found = 0
        for first, end, base in keys:
            if first >= num_blocks:
                break
            num_found = min(end, num_blocks)
            there = self._block_of[base + first : base + num_found]
            if np.count_nonzero(there) < len(there):
                return first + int((there == _NO_BLOCK).argmax())
        return num_found

    def find(self, keys: list[Keys], num_blocks: int) -> IntArray:
        """Answer the first *num_blocks* blocks, as a copy; `num_found` says that they are there."""
        pieces = [
            self._block_of[base + first : base + min(end, num_blocks)]
            for first, end, base in keys
            if first < num_blocks
        ]
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0].copy()

    def num_unheld(self, blocks: IntArray) -> int:
        """Answer how many of *blocks* nobody holds."""
        return len(blocks) - int(np.count_nonzero(self._ref_cnt[blocks]))

    def hold(self, blocks: IntArray) -> int:
        """Count one more holder of *blocks*; answer how many had none."""
        ref_cnt = self._ref_cnt[blocks]
        self._ref_cnt[blocks] = ref_cnt + _ONE
        unheld = blocks[ref_cnt == _NOBODY]
        self._entry_of[unheld] = _NO_KEY
        self.num_evictable -= len(unheld)
        return len(unheld)

    def enter(self, keys: list[Keys], first: int, blocks: IntArray) -> None:
        """Give keys to *blocks*, number *first* and on of a request, which is their one holder."""
        end = first + len(blocks)
        self._ref_cnt[blocks] = _ONE
        for piece_first, piece_end, base in keys:
            start, stop = max(first, piece_first), min(end, piece_end)
            if start >= stop:
                continue
            entered = blocks[start - first : stop - first]
            self._key_of[entered] = np.arange(base + start, base + stop)
            entries = self._block_of[base + start : base + stop]
            if np.count_nonzero(entries):
                self._enter_copies(base + start, entries, entered)
            else:
                entries[:] = entered

    def _enter_copies(self, first_key: int, entries: IntArray, blocks: IntArray) -> None:
        """Enter *blocks* under consecutive keys; some have their first block in *entries*."""
        there = entries != _NO_BLOCK
        for place in np.flatnonzero(there).tolist():
            key = first_key + place
            self._copies.setdefault(key, []).append(int(blocks[place]))
            self._has_copies[key] = True
        entries[~there] = blocks[~there]

    def enter_few(self, keys: list[Keys], first: int, blocks: list[int]) -> None:
        """Do as `enter`, one by one."""
        place, end = first, first + len(blocks)
        for piece_first, piece_end, base in keys:
            while piece_first <= place < min(end, piece_end):
                block, key = blocks[place - first], base + place
                self._ref_cnt_at[block] = 1
                self._key_at[block] = key
                if self._block_at[key] == NO_BLOCK:
                    self._block_at[key] = block
                else:
                    self._copies.setdefault(key, []).append(block)
                    self._copied_at[key] = True
                place += 1

    def enter_private(self, blocks: list[int]) -> None:
        """Queue *blocks* that nobody will look for, the last one to be evicted first."""
        self._queue.append(blocks)
        self.num_evictable += len(blocks)

    def release(self, blocks: IntArray) -> int:
        """Count one holder less of *blocks*; queue those without, in order, and answer how many."""
        ref_cnt = self._ref_cnt[blocks] - _ONE
        self._ref_cnt[blocks] = ref_cnt
        unheld = blocks[ref_cnt == _NOBODY] if np.count_nonzero(ref_cnt) else blocks
        if len(unheld):
            first, self._num_entries = self._num_entries, self._num_entries + len(unheld)
            numbers = np.arange(first, self._num_entries)
            self._entry_of[unheld] = numbers
            self._queue.append((unheld, numbers))
            self.num_evictable += len(unheld)
        return len(unheld)

    def evict(self, num_blocks: int) -> tuple[list[int], int]:
        """Take *num_blocks* from the queue, of which it has enough.

        Answers them in order, and how many of them had a key, which is forgotten.
        """
        evicted: list[int] = []
        num_keyed = 0
        while len(evicted) < num_blocks:
            missing = num_blocks - len(evicted)
            entry = self._queue[0]
            if isinstance(entry, list):
                private = entry[-missing:]
                del entry[-missing:]
                private.reverse()
                evicted += private
                if not entry:
                    self._queue.popleft()
                continue
            blocks, numbers = entry
            if missing <= FEW:
                num_passed, taken = self._next_few(blocks, numbers, missing)
            else:
                num_passed, taken = self._next(blocks, numbers, missing)
            if num_passed == len(blocks):
                self._queue.popleft()
            else:
                self._queue[0] = (blocks[num_passed:], numbers[num_passed:])
            evicted += taken
            num_keyed += len(taken)
        self.num_evictable -= num_blocks
        return evicted, num_keyed

    def _next(self, blocks: IntArray, numbers: IntArray, missing: int) -> tuple[int, list[int]]:
        """Forget the first *missing* of *blocks* whose entries, *numbers*, are valid.

        Answers how many were passed, stale ones included, and which; fewer if it meets too few.
        """
        taken = blocks[:missing]
        num_passed = len(taken)
        # As bytes: a comparison of arrays takes five times as long, and mostly they are equal.
        if self._entry_of[taken].tobytes() != numbers[:missing].tobytes():
            ahead = blocks[: max(missing, WINDOW)]
            valid = (self._entry_of[ahead] == numbers[: len(ahead)]).nonzero()[0]
            num_passed = len(ahead)
            if len(valid) >= missing:
                valid = valid[:missing]
                num_passed = int(valid[-1]) + 1
            taken = ahead[valid]
        keys = self._key_of[taken]
        self._key_of[taken] = _NO_KEY
        copied = self._has_copies[keys] if self._copies else None
        if copied is not None and np.count_nonzero(copied):
            self._block_of[keys[~copied]] = _NO_BLOCK
            for key, block in zip(keys[copied].tolist(), taken[copied].tolist(), strict=True):
                self._forget_copy(key, block)
        else:
            self._block_of[keys] = _NO_BLOCK
        return num_passed, taken.tolist()

    def _next_few(self, blocks: IntArray, numbers: IntArray, missing: int) -> tuple[int, list[int]]:
        """Do as `_next`, in a time that one block does not share with others."""
        entry_at, key_at = self._entry_at, self._key_at
        taken: list[int] = []
        first = number = int(numbers[0])
        for block in blocks[:WINDOW].tolist():
            if entry_at[block] == number:
                key = key_at[block]
                key_at[block] = NO_KEY
                if self._copied_at[key]:
                    self._forget_copy(key, block)
                else:
                    self._block_at[key] = NO_BLOCK
                taken.append(block)
            number += 1
            if len(taken) == missing:
                break
        return number - first, taken

    def _forget_copy(self, key: int, block: int) -> None:
        """Drop *block* from those under *key*; the next copy takes the place of the first."""
        copies = self._copies.get(key)
        if copies is None:  # an earlier one left it the only one
            self._block_of[key] = NO_BLOCK
            return
        if self._block_of[key] == block:
            self._block_of[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]
            self._has_copies[key] = False

    def key_of(self, block: int) -> int:
        """Answer the key of *block*, or `NO_KEY`."""
        return int(self._key_of[block]) if block < len(self._key_of) else NO_KEY

    def evictable(self) -> list[int]:
        """Answer the blocks in the queue, the oldest first, by walking it."""
        blocks: list[int] = []
        for entry in self._queue:
            if isinstance(entry, list):
                blocks += reversed(entry)
            else:
                ahead, numbers = entry
                blocks += ahead[self._entry_of[ahead] == numbers].tolist()
        return blocks

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Recount keys, holders and queue; *holders* counts the owners of every held block.

        Raises:
            IntegrityError: where the books differ.
        """
        keyed = np.flatnonzero(self._key_of != NO_KEY).tolist()
        for block in keyed:
            owners = holders.get(block, 0)
            require_equal(f"owners of block {block}", int(self._ref_cnt[block]), owners)
        of_keyed = sum(holders.get(block, 0) for block in keyed)
        of_others = [n for block, n in holders.items() if self.key_of(block) == NO_KEY]
        require_equal("owners in all", int(self._ref_cnt.sum()), of_keyed)
        require_equal("most owners of a block without a key", 1, max(of_others, default=1))
        first = self._block_of[self._block_of != NO_BLOCK].tolist()
        entered = [*first, *(block for copies in self._copies.values() for block in copies)]
        require_equal("entries of the cache", len(entered), len(set(entered)))
        require_equal("blocks without their entry", 0, len(set(keyed) ^ set(entered)))
        for key in np.flatnonzero(self._block_of != NO_BLOCK).tolist():
            for block in [int(self._block_of[key]), *self._copies.get(key, ())]:
                require_equal(f"key of the cached block {block}", key, self.key_of(block))
        evictable = self.evictable()
        require_equal("evictable blocks", self.num_evictable, len(evictable))
        require_equal("different evictable blocks", len(set(evictable)), len(evictable))
        unheld = {block for block in keyed if not holders.get(block, 0)}
        require_equal("unheld blocks that are not evictable", 0, len(unheld - set(evictable)))
