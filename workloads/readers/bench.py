"""Results of vLLM's ``bench serve --save-result --save-detailed``: what was sent, and when.

Source: vLLM 0.33.0, ``benchmarks/serve.py`` (1319 to 1341, 2306 to 2330).
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from workloads.errors import TraceError
from workloads.readers.jsonlines import rows
from workloads.readers.source import Source
from workloads.record import MAX_ARRIVAL_S, MAX_TOKENS, PS_PER_S, RequestRecord

_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Clock = Annotated[float, Meta(ge=-1e12, le=1e12)]


class _Result(msgspec.Struct, gc=False):
    start_times: list[_Clock]
    input_lens: list[_Tokens]
    output_lens: list[_Tokens]
    errors: list[str] | None = None


def read_bench_serve(source: Source) -> Iterator[RequestRecord | str]:
    """Yield the requests of one result, as long as they were and when they were sent.

    Arrivals count from the first. Failed requests are left out. What prompts said is not in it.

    Raises:
        TraceError: the result has no details, or lists of unequal length, or there is another.
    """
    result = None
    for number, found in rows(_Result, source):
        if result is not None:
            raise TraceError("another result: expected one a file")
        result = found
        lengths = {len(found.start_times), len(found.input_lens), len(found.output_lens)}
        if found.errors is not None:
            lengths.add(len(found.errors))
        if len(lengths) > 1:
            raise TraceError(
                f"start_times, input_lens, output_lens and errors have {sorted(lengths)} values: "
                "expected as many of each"
            )
        errors = found.errors or [""] * len(found.start_times)
        columns = zip(found.start_times, found.input_lens, found.output_lens, errors, strict=True)
        good = [row[:3] for row in columns if row[1] and row[2] and not row[3]]
        if len(good) < len(errors):
            yield f"{len(errors) - len(good)} failed requests are left out"
        first = min((start for start, _, _ in good), default=0.0)
        for start, prompt, output in good:
            seconds = min(start - first, MAX_ARRIVAL_S + 1)
            yield RequestRecord(number, round(seconds * PS_PER_S), prompt, output)
