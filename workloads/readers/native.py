"""kvsim's own format: the prompt as segments, token ids or a length; JSON lines or Parquet."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
from msgspec import Meta

from workloads.errors import TraceError, did_you_mean, quote
from workloads.readers.jsonlines import Count, Seconds, decode_lines, decoded
from workloads.readers.source import Source
from workloads.readers.tokens import TokenTree
from workloads.record import PS_PER_S, IntArray, RequestRecord, Rows, Segment

MAX_ROWS = 1 << 28
"""Requests of a Parquet file, and elements of its lists in one row group: a small file of either
could fill any memory."""


_Segments = Annotated[list[tuple[str | int, Count]], Meta(min_length=1, max_length=1 << 20)]


class _Lengths(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line of lengths and nothing else, as most are."""

    arrival_time: Seconds
    input_length: Count
    output_len: Count


class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line. null counts as not given, which is what table libraries write."""

    arrival_time: Seconds
    request_id: Annotated[str, Meta(min_length=1)] | None = None
    prompt: _Segments | None = None
    prompt_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    input_length: Count | None = None
    output_len: Count | None = None
    output_length: Count | None = None
    session_id: Annotated[str, Meta(min_length=1)] | None = None
    think_time: Seconds | None = None


_GETTERS = {name: attrgetter(name) for name in _Request.__struct_fields__}
_PROMPT = ("prompt", "prompt_token_ids", "input_length")
_OUTPUT = ("output_len", "output_length")


def _refuse(keys: tuple[str, ...], *values: object) -> NoReturn:
    """Raise `TraceError`: not one of *values*, those of *keys*, is given."""
    given = [key for key, value in zip(keys, values, strict=True) if value is not None]
    found = f"{' and '.join(given)} are given" if given else f"{keys[0]} is missing"
    raise TraceError(f"{found}: expected exactly one of {', '.join(keys)}")


def read_native(source: Source) -> Iterator[RequestRecord | Rows]:
    """Yield the native requests of a file of lines; times are seconds.

    ``input_length`` gives a prompt of unknown content. Requests of one ``session_id`` are turns;
    ``think_time`` is seconds from the end of the turn before.

    Raises:
        TraceError: on an unknown key, or a value that is missing, given twice or out of range.
    """
    tree = TokenTree()
    quick = msgspec.json.Decoder(_Lengths)
    for numbers, texts in source.chunks():
        lengths = decode_lines(quick, texts)
        if lengths is not None:
            yield _rows(numbers, lengths)
        else:
            yield from _records(source, tree, numbers, texts)


def _rows(numbers: Sequence[int], requests: Sequence[_Lengths]) -> Rows:
    """Answer *requests* as columns."""
    return Rows(
        numbers,
        _picoseconds([request.arrival_time for request in requests]),
        [request.input_length for request in requests],
        [request.output_len for request in requests],
    )


def _picoseconds(seconds: Sequence[float]) -> IntArray:
    ticks: IntArray = np.rint(np.array(seconds) * PS_PER_S).astype(np.int64)
    return ticks


def _records(
    source: Source, tree: TokenTree, numbers: Sequence[int], texts: Sequence[bytes]
) -> Iterator[RequestRecord | Rows]:
    for places, some, requests in decoded(_Request, source, numbers, texts):
        rows = _columns(places, requests)
        if rows is not None:
            yield rows
            continue
        for source.number, source.text, request in zip(places, some, requests, strict=True):
            yield _record(source.number, request, tree)


def _columns(numbers: Sequence[int], requests: Sequence[_Request]) -> Rows | None:
    """Answer *requests* as columns, which is fast, if all give segments, or all lengths alone."""
    columns = {name: list(map(get, requests)) for name, get in _GETTERS.items()}
    given = {name: of for name, of in columns.items() if of.count(None) < len(requests)}
    prompts, outputs = ([name for name in names if name in given] for names in (_PROMPT, _OUTPUT))
    if len(prompts) != 1 or len(outputs) != 1 or prompts[0] == "prompt_token_ids":
        return None
    prompt, output = given[prompts[0]], given[outputs[0]]
    if None in prompt or None in output:
        return None
    is_length = prompts[0] == "input_length"
    return Rows(
        numbers,
        _picoseconds(columns["arrival_time"]),
        prompt if is_length else [sum([length for _, length in own]) for own in prompt],
        output,
        given.get("request_id"),
        None if is_length else prompt,
        given.get("session_id"),
        [t if t is None else round(t * PS_PER_S) for t in given.get("think_time", ())] or None,
    )


def _record(number: int, request: _Request, tree: TokenTree) -> RequestRecord:
    prompt, token_ids, length = request.prompt, request.prompt_token_ids, request.input_length
    if (prompt is None) + (token_ids is None) + (length is None) != 2:
        _refuse(_PROMPT, prompt, token_ids, length)
    if (request.output_len is None) is (request.output_length is None):
        _refuse(_OUTPUT, request.output_len, request.output_length)
    segments: Sequence[Segment] | None = prompt
    if token_ids is not None:
        segments = tree.prompt(token_ids)
    think = request.think_time
    return RequestRecord(
        number,
        round(request.arrival_time * PS_PER_S),
        sum([tokens for _, tokens in segments]) if segments else length or 0,
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
