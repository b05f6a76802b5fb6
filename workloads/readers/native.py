"""kvsim's own format: the prompt as segments, token ids or a length; JSON lines or Parquet."""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from workloads.errors import TraceError, did_you_mean, quote
from workloads.readers.jsonlines import Count, Seconds, rows
from workloads.readers.source import Source
from workloads.readers.tokens import TokenTree
from workloads.record import PS_PER_S, RequestRecord, Segment

MAX_ROWS = 1 << 28
"""Requests of a Parquet file, and elements of its lists in one row group: a small file of either
could fill any memory."""


class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line. null counts as not given, which is what table libraries write."""

    arrival_time: Seconds
    request_id: Annotated[str, Meta(min_length=1)] | None = None
    prompt: Annotated[list[tuple[str | int, Count]], Meta(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    input_length: Count | None = None
    output_len: Count | None = None
    output_length: Count | None = None
    session_id: Annotated[str, Meta(min_length=1)] | None = None
    think_time: Seconds | None = None


_PROMPT = ("prompt", "prompt_token_ids", "input_length")
_OUTPUT = ("output_len", "output_length")


def _exactly_one(keys: tuple[str, ...], *values: object) -> None:
    """Raise `TraceError` unless one of *values*, those of *keys*, is given and no other."""
    if values.count(None) != len(keys) - 1:
        given = [key for key, value in zip(keys, values, strict=True) if value is not None]
        found = f"{' and '.join(given)} are given" if given else f"{keys[0]} is missing"
        raise TraceError(f"{found}: expected exactly one of {', '.join(keys)}")


def read_native(source: Source) -> Iterator[RequestRecord]:
    """Yield the native requests of a file of lines; times are seconds.

    ``input_length`` gives a prompt of unknown content.

    Raises:
        TraceError: on an unknown key, or a value that is missing, given twice or out of range.
    """
    tree = TokenTree()
    for number, request in rows(_Request, source):
        yield _record(number, request, tree)


def _record(number: int, request: _Request, tree: TokenTree) -> RequestRecord:
    prompt, token_ids = request.prompt, request.prompt_token_ids
    _exactly_one(_PROMPT, prompt, token_ids, request.input_length)
    _exactly_one(_OUTPUT, request.output_len, request.output_length)
    segments: list[Segment] | None = None
    if prompt is not None:
        segments = [*prompt]
    elif token_ids is not None:
        segments = [*tree.prompt(token_ids)]
    think = request.think_time
    return RequestRecord(
        number,
        round(request.arrival_time * PS_PER_S),
        request.input_length or sum([length for _, length in segments or ()]),
        request.output_len or request.output_length or 0,
        request.request_id,
        segments,
        request.session_id,
        None if think is None else round(think * PS_PER_S),
    )


def read_native_parquet(source: Source) -> Iterator[RequestRecord]:
    """Yield the requests of a Parquet file whose columns are the keys of a native line.

    ``prompt`` is a list of structs (content, length); a message calls a row a line.

    Raises:
        TraceError: as `read_native`; or the file is no Parquet, or too much for any memory.
    """
    import pyarrow as pa  # noqa: PLC0415  # other formats need not wait for it
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with source.file() as stream:
            file = pq.ParquetFile(stream)
            _check_size(file.metadata)
            known = _Request.__struct_fields__
            for name in file.schema_arrow.names:
                if name not in known:
                    raise TraceError(f"unknown column {quote(name)}: {did_you_mean(name, known)}")
            tree = TokenTree()
            for batch in file.iter_batches(batch_size=1024, use_threads=False):
                for row in batch.to_pylist():
                    source.number += 1
                    yield _record(source.number, _converted(row), tree)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"no Parquet file that can be read ({error})") from error


def _check_size(metadata: Any) -> None:
    sizes = [metadata.num_rows]
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        sizes += [row_group.column(i).num_values for i in range(row_group.num_columns)]
        sizes += [row_group.column(i).total_uncompressed_size for i in range(row_group.num_columns)]
    if max(sizes) > MAX_ROWS:
        raise TraceError(f"{max(sizes):,} rows, values or bytes in a group: expected {MAX_ROWS:,}")


def _converted(row: dict[str, Any]) -> _Request:
    if row.get("prompt") is not None:
        row["prompt"] = [tuple(s.values()) if isinstance(s, dict) else s for s in row["prompt"]]
    try:
        return msgspec.convert(row, _Request)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        value = quote(row.get(field)) if field else "row"
        reason = reason.replace("`", "").replace("Expected", "expected", 1)
        raise TraceError(f"{field} {value}: {reason}".strip()) from error
