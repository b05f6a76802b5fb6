"""Columns as Arrow tables. The only file that makes Arrow arrays: of the memory they are in.

``pyarrow.array`` would do, and imports pandas first if it is installed: longer than a short run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

MAX_CHUNK_BYTES = 2**31 - 1
"""Most text in one array: Arrow's offsets have 32 bits."""


def array(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Answer *values*, int64 or float64 [n], null where *missing*. Shares their memory."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [_validity(missing), data])


def strings(values: Sequence[str | None]) -> pa.ChunkedArray:
    """Answer *values* as text, null where None."""
    texts = [b"" if value is None else value.encode() for value in values]
    missing = np.array([value is None for value in values], dtype=np.bool_)
    ends = np.cumsum([0, *map(len, texts)])
    chunks: list[pa.Array] = []
    first = 0
    while first < len(texts) or not chunks:
        after = int(np.searchsorted(ends, ends[first] + MAX_CHUNK_BYTES, side="right")) - 1
        if after == first < len(texts):
            raise MemoryError(f"a text of {len(texts[first])} bytes for one row of a table")
        offsets = (ends[first : after + 1] - ends[first]).astype(np.int32)
        buffers = [
            _validity(missing[first:after]),
            pa.py_buffer(offsets),
            pa.py_buffer(b"".join(texts[first:after])),
        ]
        chunks.append(pa.Array.from_buffers(pa.string(), after - first, buffers))
        first = after
    return pa.chunked_array(chunks, pa.string())


def table(columns: Mapping[str, Any]) -> pa.Table:
    """Answer *columns* by name, each of the above or int64 or float64 [n], as a table."""
    arrays = {
        name: array(column) if isinstance(column, np.ndarray) else column
        for name, column in columns.items()
    }
    return pa.table(arrays)


def read_parquet(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Answer those columns of a file that it has, each as `values` answers it.

    Raises:
        OSError, ValueError: a file that cannot be read, or is none.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415  # slow to import

    with pq.ParquetFile(path) as file:
        there = [name for name in names if name in file.schema_arrow.names]
        read = file.read(there)
    return {name: values(read.column(name)) for name in there}


def values(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Answer *column*, numbers or text; numbers that are null are NaN. Equal texts are one object.

    Raises:
        ValueError: texts that are null.
    """
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        wide = pa.int64() if pa.types.is_integer(column.type) else pa.float64()
        chunks = (column if column.type == wide else column.cast(wide)).chunks
        none = np.array([], wide.to_pandas_dtype())
        return np.concatenate([none, *(_numbers(chunk) for chunk in chunks)])
    if column.null_count:
        raise ValueError("texts that are null")
    column = column if column.type == pa.string() else column.cast(pa.string())
    coded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    if isinstance(coded, pa.ChunkedArray):  # of no rows
        return np.array([], dtype=object)
    texts = np.array(coded.dictionary.to_pylist(), dtype=object)
    chosen: npt.NDArray[Any] = texts[_numbers(coded.indices)]
    return chosen


def _numbers(chunk: pa.Array) -> npt.NDArray[Any]:
    """Answer numbers in an array of NumPy's, in the memory they are in unless some are null.

    ``to_numpy`` would do, and imports pandas.
    """
    validity, data = chunk.buffers()
    dtype = {"int32": np.int32, "int64": np.int64, "double": np.float64}[str(chunk.type)]
    place = slice(chunk.offset, chunk.offset + len(chunk))
    numbers: npt.NDArray[Any] = np.frombuffer(data or b"", dtype)[place]
    if chunk.null_count:
        there = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[place]
        numbers = np.where(there, numbers, np.nan)
    return numbers


def _validity(missing: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Answer Arrow's bitmap of what is there; None where nothing is missing."""
    if missing is None or not missing.any():
        return None
    return pa.py_buffer(np.packbits(~missing, bitorder="little"))
