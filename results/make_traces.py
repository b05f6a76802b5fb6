"""Make the traces of the experiments: ``python results/make_traces.py [FOLDER]``.

The same bytes come out on every run. All are 1,000 requests with Poisson arrivals at one request a
second, which ``request_rate`` of an experiment rescales. Nothing is copied from a real trace.

============== ====================== ====================================================
file           prompt, output tokens  lengths
============== ====================== ====================================================
fixed.jsonl    512, 128               all alike
spread.jsonl   300±150, 200±100       normal, at least 16, assumed to be independent
sharegpt.jsonl means 161.31, 337.99   PagedAttention paper, figure 11 (Kwon et al., SOSP 2023)
alpaca.jsonl   means 19.31, 58.45     the same figure
chat.jsonl     sharegpt's behind 341  the paper's five-shot prefix (figure 16), one of eight
============== ====================== ====================================================

The paper prints means and histograms, no percentiles. ASSUMED: both lengths are exponential, which
has one parameter, independent, and cut where vLLM's own benchmark cuts (prompt below 1,024, whole
below 2,048 tokens); the means of the cut samples are the published ones. ASSUMED: eight prefixes,
each as likely as the others.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

NUM_REQUESTS = 1000
SEED = 2023
MIN_SPREAD_TOKENS = 16
MAX_PROMPT_TOKENS = 1023
MAX_TOTAL_TOKENS = 2047
PREFIX_TOKENS = 341
NUM_PREFIXES = 8

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Lengths = tuple[IntArray, IntArray]


def stratified(rng: np.random.Generator) -> FloatArray:
    """Answer one uniform from each of as many equal slices of (0, 1), in random order."""
    # Only random() is used: numpy promises other methods' streams for one version only.
    order = np.argsort(rng.random(NUM_REQUESTS))
    return (order + rng.random(NUM_REQUESTS)) / NUM_REQUESTS


def normal(mean: float, deviation: float, uniforms: FloatArray) -> IntArray:
    """Answer normal lengths in tokens at the quantiles *uniforms*."""
    quantiles = [NormalDist(mean, deviation).inv_cdf(u) for u in uniforms.tolist()]
    return np.maximum(np.rint(quantiles), MIN_SPREAD_TOKENS).astype(np.int64)


def exponential(mean: float, most: IntArray, uniforms: FloatArray) -> IntArray:
    """Answer exponential lengths of 1 to *most* tokens, whose sample has *mean*, by bisection."""
    low, high = mean / 2, mean * 4
    lengths = np.ones(len(uniforms), np.int64)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = np.clip(np.rint(-scale * np.log1p(-uniforms)), 1, most).astype(np.int64)
        low, high = (scale, high) if lengths.mean() < mean else (low, scale)
    return lengths


def published(prompt_mean: float, output_mean: float, rng: np.random.Generator) -> Lengths:
    """Answer prompts and outputs with the paper's means and the benchmark's limits."""
    most = np.full(NUM_REQUESTS, MAX_PROMPT_TOKENS)
    prompts = exponential(prompt_mean, most, stratified(rng))
    return prompts, exponential(output_mean, MAX_TOTAL_TOKENS - prompts, stratified(rng))


def fixed(_: np.random.Generator) -> Lengths:
    """Answer prompts of 512 and outputs of 128 tokens: multiples of every block size to 128."""
    return np.full(NUM_REQUESTS, 512), np.full(NUM_REQUESTS, 128)


def spread(rng: np.random.Generator) -> Lengths:
    """Answer prompts of 300±150 and outputs of 200±100 tokens."""
    return normal(300, 150, stratified(rng)), normal(200, 100, stratified(rng))


def sharegpt(rng: np.random.Generator) -> Lengths:
    """Answer lengths with ShareGPT's means."""
    return published(161.31, 337.99, rng)


def alpaca(rng: np.random.Generator) -> Lengths:
    """Answer lengths with Alpaca's means."""
    return published(19.31, 58.45, rng)


TRACES: dict[str, tuple[Callable[[np.random.Generator], Lengths], int]] = {
    "fixed.jsonl": (fixed, 0),
    "spread.jsonl": (spread, 0),
    "sharegpt.jsonl": (sharegpt, 0),
    "alpaca.jsonl": (alpaca, 0),
    "chat.jsonl": (sharegpt, NUM_PREFIXES),
}
"""What makes the lengths of each file, and how many prefixes its prompts share."""


def make(name: str) -> str:
    """Answer the text of the trace *name*."""
    lengths, num_prefixes = TRACES[name]
    arrival_rng, length_rng, prefix_rng = map(
        np.random.default_rng, np.random.SeedSequence(SEED).spawn(3)
    )
    arrivals = np.cumsum(-np.log1p(-arrival_rng.random(NUM_REQUESTS)))
    prompts, outputs = lengths(length_rng)
    prefixes = np.floor(prefix_rng.random(NUM_REQUESTS) * num_prefixes)
    lines = []
    for row, (arrival, prompt, output) in enumerate(
        zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    ):
        line: dict[str, object] = {"arrival_time": round(arrival, 3)}
        if num_prefixes:
            prefix = f"p{int(prefixes[row])}"
            line["prompt"] = [[prefix, PREFIX_TOKENS], [f"u{row}", prompt]]
        else:
            line["input_length"] = prompt
        line["output_len"] = output
        lines.append(json.dumps(line, separators=(",", ":")) + "\n")
    return "".join(lines)


def main(folder: Path) -> None:
    """Write every trace into *folder*."""
    folder.mkdir(exist_ok=True)
    for name in TRACES:
        (folder / name).write_bytes(make(name).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "traces")
