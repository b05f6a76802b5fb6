"""CSV files with a header, a block of lines at a time, as columns.

Arrow parses; where it refuses a block, the first line and column at fault are looked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc

from workloads.errors import TraceError, plain, quote
from workloads.readers.source import Source
from workloads.record import MAX_TOKENS, IntArray

Kind = Literal["count", "count or 0", "whole", "seconds", "time", "text"]


class _Form(NamedTuple):
    expected: str
    arrow: pa.DataType
    least: int = 0


_FORMS = {
    "count": _Form(f"an integer, 1 to {MAX_TOKENS}", pa.int64(), 1),
    "count or 0": _Form(f"an integer, 0 to {MAX_TOKENS}", pa.int64()),
    "whole": _Form(f"a whole number, 1 to {MAX_TOKENS}", pa.float64(), 1),
    "seconds": _Form("a number of seconds, below 1e15", pa.float64()),
    "time": _Form("YYYY-MM-DD HH:MM:SS.fffffff", pa.timestamp("ns")),
    "zoned time": _Form("YYYY-MM-DD HH:MM:SS.fffffff+00:00", pa.timestamp("ns", "UTC")),
    "text": _Form("text", pa.string()),
}


class Columns(NamedTuple):
    """The rows of a CSV file: their lines, and the columns asked for, by name.

    Counts and times are int64, times in nanoseconds since 1970; texts are lists.
    """

    lines: IntArray
    values: dict[str, Any]


def read_columns(
    source: Source, kinds: Mapping[str, Kind], optional: Sequence[str] = ()
) -> Columns:
    """Answer the columns *kinds* of a CSV file; those of *optional* only if the header has them.

    Raises:
        TraceError: a column is missing, a row has more or fewer than the header, or a value is
            none of its kind.
    """
    reader = _Reader(source, kinds, optional)
    parts = [reader.block(numbers, texts) for numbers, texts in reader.blocks()]
    if not parts:
        return Columns(np.empty(0, dtype=np.int64), {name: [] for name in reader.forms})
    values: dict[str, Any] = {}
    for name in reader.forms:
        found = [part.values[name] for part in parts]
        is_text = isinstance(found[0], list)
        values[name] = [v for part in found for v in part] if is_text else np.concatenate(found)
    return Columns(np.concatenate([part.lines for part in parts]), values)


class _Reader:
    def __init__(self, source: Source, kinds: Mapping[str, Kind], optional: Sequence[str]) -> None:
        self._source = source
        self.header = [name.strip().strip('"') for name in source.first.decode().split(",")]
        missing = [name for name in kinds if name not in self.header and name not in optional]
        if missing or len(set(self.header)) != len(self.header):
            raise TraceError(
                f"header {quote(source.first.decode())}: expected columns {', '.join(kinds)}"
            )
        self._has_begun = False
        self.forms: dict[str, _Form] = {
            name: _FORMS[kind] for name, kind in kinds.items() if name in self.header
        }

    def blocks(self) -> Iterator[tuple[Sequence[int], list[bytes]]]:
        """Yield the lines behind the header."""
        skipped = 1
        for numbers, texts in self._source.chunks():
            if len(texts) > skipped:
                if not self._has_begun:
                    self._has_begun = True
                    self._choose_time(texts[skipped])
                yield numbers[skipped:], texts[skipped:]
            skipped = 0

    def _choose_time(self, line: bytes) -> None:
        """Take times with a zone where the first row has one."""
        for name, form in self.forms.items():
            if form is _FORMS["time"]:
                cells = line.decode().split(",")
                cell = cells[min(self.header.index(name), len(cells) - 1)]
                if cell.endswith("Z") or "+" in cell:
                    self.forms[name] = _FORMS["zoned time"]

    def _parse(self, texts: Sequence[bytes], columns: Sequence[str]) -> pa.Table:
        return pc.read_csv(
            pa.py_buffer(b"\n".join(texts)),
            read_options=pc.ReadOptions(column_names=self.header, use_threads=False),
            convert_options=pc.ConvertOptions(
                include_columns=columns,
                column_types={name: self.forms[name].arrow for name in columns},
                null_values=[],
            ),
        )

    def block(self, numbers: Sequence[int], texts: list[bytes]) -> Columns:
        """Answer the rows in *texts*."""
        try:
            table = self._parse(texts, list(self.forms))
            is_whole = table.num_rows == len(texts)
        except (pa.ArrowException, OSError):
            is_whole = False
        if not is_whole:
            self._refuse(numbers, texts)
        values: dict[str, Any] = {}
        for name, form in self.forms.items():
            column = table.column(name)
            if form is _FORMS["text"]:
                values[name] = column.to_pylist()
                continue
            array = column.to_numpy()
            values[name], good = _checked(form, array)
            if not good.all():
                row = int(np.argmin(good))
                self._refuse_value(numbers[row], texts[row], name)
        if isinstance(numbers, range):  # which NumPy would walk through
            return Columns(np.arange(numbers.start, numbers.stop), values)
        return Columns(np.array(numbers, dtype=np.int64), values)

    def _refuse(self, numbers: Sequence[int], texts: list[bytes]) -> None:
        """Raise `TraceError` for the first of *texts* that Arrow refuses."""
        low, high = 0, len(texts)
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_good(texts[low:middle], list(self.forms)):
                low = middle
            else:
                high = middle
        number, line = numbers[low], texts[low]
        num_cells = line.count(b",") + 1
        expected = f"expected {len(self.header)} columns, {plain(','.join(self.header))}"
        if num_cells != len(self.header):
            hint = " (truncated?)" if num_cells < len(self.header) else ""
            self._at(number, line)
            raise TraceError(f"row {quote(line.decode())}: {expected}{hint}")
        for name in self.forms:
            if not self._is_good([line], [name]):
                self._refuse_value(number, line, name)
        self._at(number, line)
        raise TraceError(f"row {quote(line.decode())}: {expected}, without line ends in quotes")

    def _is_good(self, texts: Sequence[bytes], columns: Sequence[str]) -> bool:
        try:
            return self._parse(texts, columns).num_rows == len(texts)  # type: ignore[no-any-return]
        except (pa.ArrowException, OSError):
            return False

    def _at(self, number: int, line: bytes) -> None:
        self._source.number, self._source.text = number, line

    def _refuse_value(self, number: int, line: bytes, name: str) -> None:
        self._at(number, line)
        cells = line.decode().split(",")
        cell = cells[self.header.index(name)] if len(cells) == len(self.header) else line.decode()
        is_cut = not cell and name == self.header[-1]
        hint = " (truncated?)" if is_cut else ""
        raise TraceError(f"{name} {quote(cell)}: expected {self.forms[name].expected}{hint}")


def _checked(form: _Form, array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Answer *array* in the type of its kind, and which of its values are of that kind."""
    if array.dtype.kind == "M":
        return array.astype(np.int64), np.ones(len(array), dtype=bool)
    if form is _FORMS["seconds"]:
        return array, np.abs(array) < 1e15  # nan is not
    good = (array >= form.least) & (array <= MAX_TOKENS)
    good &= np.where(good, array, 0) == np.floor(np.where(good, array, 0))
    return np.where(good, array, 0).astype(np.int64), good
