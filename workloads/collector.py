"""When Python looks for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_collections() -> Iterator[None]:
    """Look for garbage seldom: runs and readers make no cycles, and much that takes long to search.

    The thresholds are those of the process, and what they were at the end.
    """
    before = gc.get_threshold()
    if before[0]:  # else it is off
        gc.set_threshold(max(before[0], 100_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
