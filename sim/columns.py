"""Rows of numbers that take little memory: the newest as they came, older ones packed."""

import struct
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Columns = dict[str, Column]

SLOT_STATES = ("live", "reserved", "internal", "external", "cached", "free")
"""Where a token slot can be, as reported; ``free`` without ``external``, so that they add up."""


_ROWS_AT_ONCE = 256
"""Rows that are turned into bytes together: one call for each takes as long as the bytes do."""


class Rows:
    """Rows of int64 (``q``) or float64 (``d``), packed as columns of the narrowest type."""

    def __init__(self, names: tuple[str, ...], typecode: Literal["q", "d"]) -> None:
        self._names = names
        self._typecode = typecode
        self._row_size = 8 * len(names)
        self._numbers: list[float] = []  # of the newest rows
        self._most_numbers = _ROWS_AT_ONCE * len(names)
        self._newest = bytearray()  # those before
        self._packed: list[Columns] = []

    def add(self, row: Iterable[float]) -> None:
        """Append one row, in the order of *names*."""
        self._numbers += row
        if len(self._numbers) >= self._most_numbers:
            self._write()

    def _write(self) -> None:
        """Turn the newest rows into bytes."""
        numbers, self._numbers = self._numbers, []
        self._newest += struct.pack(f"{len(numbers)}{self._typecode}", *numbers)

    def pack(self) -> None:
        """Pack the newest rows, which may be none, into a chunk of their own."""
        self._packed.append(self._pack())
        self._newest.clear()

    def chunks(self) -> list[Columns]:
        """Answer the columns of all rows in the order they came: as packed, and the newest."""
        return [*self._packed, self._pack()]

    def chunk(self, place: int, start: int) -> Columns:
        """Answer one of `chunks` from row *start* of it on."""
        if place == len(self._packed):
            return self._pack(start)
        return {name: column[start:] for name, column in self._packed[place].items()}

    def _pack(self, start: int = 0) -> Columns:
        self._write()
        newest = bytes(self._newest[start * self._row_size :])
        rows = np.frombuffer(newest, self._typecode).reshape(-1, len(self._names))
        return {name: _narrow(rows[:, place]) for place, name in enumerate(self._names)}


def _narrow(column: Column) -> Column:
    """Answer a copy in the narrowest type that holds every number exactly."""
    low, high = column.min(initial=0), column.max(initial=0)
    if column.dtype.kind == "f":
        return column.astype(np.float16 if low == high == 0 else np.float64)
    # Signed, so that a difference of two columns is what it looks like.
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return column.astype(kind)
    return column.copy()
