"""Make the sample traces: ``python -m workloads.samples.make_samples [FOLDER]``.

The same bytes come out on every run. `conversation.jsonl` follows the published statistics of the
Azure 2023 conversation trace (https://github.com/Azure/AzurePublicDataset, 19,366 requests;
Patel et al., Splitwise, ISCA 2024):

====== === ==== ==== ==== ==== ===== =======
tokens min p50  p90  p95  p99  max   mean
====== === ==== ==== ==== ==== ===== =======
prompt 2   1020 2735 4083 4142 14050 1154.70
output 7   129  424  --   601  1000  211.13
====== === ==== ==== ==== ==== ===== =======

Its longest prompts are cut at 7,000 tokens, so that prompts fit small contexts.
"""

import json
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workloads.formats import AZURE2023_HEADER as HEADER
from workloads.readers.mooncake import BLOCK_TOKENS

NUM_CONVERSATIONS = 1000
ARRIVALS_PER_S = 12.0
SYSTEM_PROMPT_TOKENS = 512
SEED = 2023

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """A quantile function from a knot to the next: ``low + (high - low) * u**exponent``.

    Its mean is ``low + (high - low) / (exponent + 1)``; the exponents are those which give each
    piece the mean of the trace there (451.0, 1313.8, 3790.9, 4094.5, 5026.8 prompt tokens; 79.8,
    305.0, 468.3, 709.6 output tokens), so the mean of the whole holds too.
    """

    share: float
    low: int
    high: int
    exponent: float


PROMPT = (
    Piece(0.50, 2, 1020, 1.267),
    Piece(0.40, 1020, 2735, 4.836),
    Piece(0.05, 2735, 4083, 0.277),
    Piece(0.04, 4083, 4142, 4.114),
    Piece(0.01, 4142, 7000, 2.230),
)
OUTPUT = (
    Piece(0.50, 7, 129, 0.677),
    Piece(0.40, 129, 424, 0.676),
    Piece(0.09, 424, 601, 2.996),
    Piece(0.01, 601, 1000, 2.673),
)


def lengths(pieces: tuple[Piece, ...], uniforms: FloatArray) -> IntArray:
    """Answer the lengths in tokens at the quantiles *uniforms*, each in [0, 1)."""
    result = np.empty(len(uniforms))
    start = 0.0
    for piece in pieces:
        inside = uniforms >= start
        u = (uniforms[inside] - start) / piece.share
        result[inside] = piece.low + (piece.high - piece.low) * u**piece.exponent
        start += piece.share
    return np.rint(result).astype(np.int64)


def stratified(count: int, rng: np.random.Generator) -> FloatArray:
    """Answer one uniform from each of *count* equal slices of [0, 1), in random order."""
    # Only random() is used: numpy promises other methods' streams for one version only.
    order = np.argsort(rng.random(count))
    return (order + rng.random(count)) / count


def conversation() -> str:
    """Answer `conversation.jsonl`: Poisson arrivals, one shared system prompt, private rest."""
    arrival_rng, length_rng = map(np.random.default_rng, np.random.SeedSequence(SEED).spawn(2))
    gaps = -np.log1p(-arrival_rng.random(NUM_CONVERSATIONS)) / ARRIVALS_PER_S
    prompts = lengths(PROMPT, stratified(NUM_CONVERSATIONS, length_rng))
    outputs = lengths(OUTPUT, stratified(NUM_CONVERSATIONS, length_rng))
    rows = zip(np.cumsum(gaps).tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return _json_lines(
        {
            "arrival_time": round(arrival, 6),
            "prompt": [["system", SYSTEM_PROMPT_TOKENS], [f"u{row}", prompt]],
            "output_len": output,
        }
        for row, (arrival, prompt, output) in enumerate(rows)
    )


def azure() -> str:
    """Answer `azure2023.csv`: twenty rows in the form of the Azure trace, made up."""
    start = datetime.fromisoformat("2023-11-16 18:00:00")
    rows = [HEADER]
    for row in range(20):
        ticks = row * 7_654_321 + row**2 * 1_003
        at = start + timedelta(seconds=ticks // 10**7)
        prompt, output = 40 + row * 397 % 4100, 8 + row * 61 % 590
        rows.append(f"{at:%Y-%m-%d %H:%M:%S}.{ticks % 10**7:07d},{prompt},{output}")
    return "\r\n".join(rows)


def mooncake() -> str:
    """Answer `mooncake.jsonl`: five conversations of four turns; each turn repeats the last."""
    free = iter(range(1, 10**6))
    histories: list[list[int]] = [[0] for _ in range(5)]
    rows = []
    for row in range(20):
        history = histories[row % 5]
        history += [next(free) for _ in range(2 + row % 3)]
        # The last block of a turn is partial, so the next turn starts from the full ones.
        prompt = len(history) * BLOCK_TOKENS - (37 * row + 11) % BLOCK_TOKENS
        rows.append(
            {
                "timestamp": row // 2 * 3000,
                "input_length": prompt,
                "output_length": 20 + row * 53 % 400,
                "hash_ids": list(history),
            }
        )
        if prompt % BLOCK_TOKENS:
            history.pop()
    return _json_lines(rows)


def tokens() -> str:
    """Answer `tokens.jsonl`: prompts as token ids; rows 1 to 3 repeat the start of row 0."""
    base = [1000 + 37 * i % 997 for i in range(40)]
    prompts = [base, [*base[:32], 7, 8, 9], [*base, 11, 12], base[:16], [5, 4, 3, 2, 1]]
    return _json_lines(
        {
            "request_id": f"chat-{row}",
            "arrival_time": row * 0.25,
            "prompt_token_ids": prompt,
            "output_len": 10 + row,
        }
        for row, prompt in enumerate(prompts)
    )


def _json_lines(rows: Iterable[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SAMPLES = {
    "azure2023.csv": azure,
    "conversation.jsonl": conversation,
    "mooncake.jsonl": mooncake,
    "tokens.jsonl": tokens,
}
"""What makes each file."""


def main(folder: Path) -> None:
    """Write every sample into *folder*."""
    for name, make in SAMPLES.items():
        (folder / name).write_bytes(make().encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
