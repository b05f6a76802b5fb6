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

from workloads.readers.hashed import BLOCK_TOKENS

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
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
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


def _csv(header: str, rows: Iterable[tuple[object, ...]]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in [tuple(header.split(",")), *rows])


def azure2024() -> str:
    """Answer `azure2024.csv`: ten rows, times with six digits and a zone."""
    times = (f"2024-05-10 00:00:{row * 3:02d}.{row * 9931:06d}+00:00" for row in range(10))
    rows = ((at, 50 + row * 211 % 900, 1 + row * 37 % 150) for row, at in enumerate(times))
    return _csv("TIMESTAMP,ContextTokens,GeneratedTokens", rows)


def azure2025() -> str:
    """Answer `azure2025.csv`: ten rows, times in milliseconds, and a column of images."""
    times = (f"2024-10-01T00:00:{row * 2:02d}.{row * 101:03d}Z" for row in range(10))
    rows = (
        (at, row % 3, 300 + row * 977 % 2000, 2 + row * 53 % 90) for row, at in enumerate(times)
    )
    return _csv("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", rows)


def burstgpt() -> str:
    """Answer `burstgpt.csv`: twelve rows of three sessions and an API, two of them failures."""
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"
    rows = []
    for row in range(12):
        session = f"s{row % 4}" if row % 4 else ""
        prompt, output = 20 + row * 97 % 400, 0 if row % 5 == 4 else 10 + row * 41 % 200
        kind = "Conversation log" if session else "API log"
        elapsed = 1 + row % 3
        total = prompt + output
        rows.append((43200.0 + row * 4, session, elapsed, "GPT-4", prompt, output, total, kind))
    return _csv(f"{header},Log Type", rows)


def vidur() -> str:
    """Answer `vidur.csv`: eight rows in the form of Vidur's traces, one length as a float."""
    rows = [(row * 0.5, f"{30 + row * 83}.0", 5 + row * 7) for row in range(8)]
    return _csv("arrived_at,num_prefill_tokens,num_decode_tokens", rows)


def bailian() -> str:
    """Answer `bailian.jsonl`: two chats of three turns, whose blocks of 16 repeat."""
    rows = []
    for row in range(6):
        chat, turn = row % 2, row // 2
        length = 37 + 48 * turn
        rows.append(
            {
                "chat_id": 100 + row,
                "parent_chat_id": 98 + row if turn else -1,
                "timestamp": 61.114 + row * 2,
                "input_length": length,
                "output_length": 12 + row,
                "type": "text",
                "turn": turn + 1,
                # The last block of the first turn is partial, so the next turn has another there.
                "hash_ids": [
                    1000 * chat + 40 * b + (turn if b == (length - 1) // 16 else 0)
                    for b in range(-(-length // 16))
                ],
            }
        )
    return _json_lines(rows)


def aiperf() -> str:
    """Answer `aiperf.jsonl`: sessions of turns that add to the one before, with delays."""
    return _json_lines(
        [
            {"session_id": "a", "timestamp": 0, "input_length": 300, "output_length": 40},
            {
                "session_id": "b",
                "timestamp": 500,
                "text_input": "Tell me more. " * 9,
                "output_length": 7,
            },
            {"session_id": "a", "delay": 2000, "input_length": 150, "output_length": 20},
            {"session_id": "a", "delay": 1000.5, "input_length": 15, "output_length": 2},
            {
                "session_id": "c",
                "timestamp": 900,
                "text_input": "Tell me more. " * 5,
                "output_length": 3,
            },
        ]
    )


def timed_trace() -> str:
    """Answer `timed_trace.jsonl`: for vLLM's reader, with labels and a unit of its own."""
    return _json_lines(
        {"ts": row * 250, "prompt_len": 20 + row, "gen_len": 5 + row, "blocks": [7, 8 + row % 2, 3]}
        for row in range(5)
    )


def bench_serve() -> str:
    """Answer `bench_serve.json`: what ``--save-detailed`` leaves of four requests, one failed."""
    return json.dumps(
        {
            "date": "20260131-120000",
            "backend": "vllm",
            "num_prompts": 4,
            "request_rate": "inf",
            "duration": 3.5,
            "completed": 3,
            "failed": 1,
            "total_input_tokens": 330,
            "total_output_tokens": 60,
            "input_lens": [100, 110, 90, 120],
            "output_lens": [10, 20, 0, 30],
            "ttfts": [0.05, 0.06, 0.0, 0.07],
            "itls": [[0.01], [0.01, 0.02], [], [0.02]],
            "start_times": [8001.5, 8001.0, 8001.75, 8002.25],
            "generated_texts": ["a", "b", "", "d"],
            "errors": ["", "", "Bad Gateway", ""],
        }
    )


def claude_code() -> str:
    """Answer `claude_code.jsonl`: two sessions with runs of ids, one a line."""
    return _json_lines(
        {
            "id": f"trace_{number}",
            "block_size": 64,
            "tool_tokens": 128,
            "system_tokens": 70,
            "requests": [
                {
                    "t": turn * 9.5,
                    "type": "n",
                    "model": "claude",
                    "in": 64 * (5 + 2 * turn) + 7 * turn,
                    "out": 30 * turn,
                    "api_time": 3.25,
                    "think_time": 2.0 * turn,
                    "stop": "tool_use",
                    "runs": [[1, 5], [9, 2 * turn]] if turn else [[1, 5]],
                }
                for turn in range(3)
            ],
        }
        for number in range(2)
    )


def claude_code_session() -> str:
    """Answer `claude_code_session.json`: a session with a sub-agent, over many lines."""

    def call(t: float, blocks: int, **more: object) -> dict[str, object]:
        ids = list(range(1, blocks + 1))
        return {"t": t, "type": "s", "in": 64 * blocks + 3, "out": 20, "hash_ids": ids, **more}

    agent = {
        "t": 12.5,
        "type": "subagent",
        "agent_id": "agent_001",
        "status": "completed",
        "requests": [call(0.0, 3), call(4.0, 4, think_time=1.5)],
    }
    session = {
        "id": "f64a8d4c-12d",
        "models": ["claude"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 100,
        "system_tokens": 40,
        "requests": [call(0.0, 6), agent, call(30.0, 8, think_time=10.0)],
        "totals": {},
    }
    return json.dumps(session, indent=1) + "\n"


def llmservingsim() -> str:
    """Answer `llmservingsim.jsonl`: two single requests and a session whose turns go on."""
    first, answer = [11, 12, 13, 14, 15, 16], [21, 22, 23]
    turns = [(first, answer), ([*first, *answer, 17, 18], [24])]
    return _json_lines(
        [
            {
                "input_toks": 5,
                "output_toks": 2,
                "arrival_time_ns": 4_059_740,
                "input_tok_ids": [*first[:4], 99],
                "output_tok_ids": [1, 2],
            },
            {"input_toks": 70, "output_toks": 9, "arrival_time_ns": 5_000_000},
            {
                "session_id": "session_0",
                "arrival_time_ns": 6_000_000,
                "sub_requests": [
                    {
                        "input_toks": len(prompt),
                        "output_toks": len(output),
                        "tool_duration_ns": 127_348_767,
                        "input_tok_ids": prompt,
                        "output_tok_ids": output,
                    }
                    for prompt, output in turns
                ],
            },
        ]
    )


def sharegpt() -> str:
    """Answer `sharegpt.json`: three conversations, one of two turns, one without an answer."""
    said = [
        [("human", "What is a page?"), ("gpt", "A block of memory of fixed size.")],
        [
            ("human", "What is a page?"),
            ("gpt", "It depends, naturellement: \u00e9t\u00e9."),
            ("human", "In an operating system?"),
            ("gpt", "Often four kilobytes."),
        ],
        [("human", "Hello?")],
    ]
    return json.dumps(
        [
            {"id": f"c{i}", "conversations": [{"from": who, "value": text} for who, text in turns]}
            for i, turns in enumerate(said)
        ],
        indent=2,
    )


def chat() -> str:
    """Answer `chat.jsonl`: completions with one system prompt; the last repeats the first."""
    system = {"role": "system", "content": "You are a helpful assistant of few words."}
    first = {"role": "user", "content": "Name a prime number."}
    answer = {"role": "assistant", "content": "Seven, for instance."}
    more = {"role": "user", "content": [{"type": "text", "text": "And a larger one?"}]}
    return _json_lines(
        [
            {
                "timestamp": "2026-01-31T12:00:00Z",
                "messages": [system, first],
                "response": "Seven, for instance.",
            },
            {"timestamp": 1769860802.5, "messages": [system, more], "max_tokens": 50},
            {
                "created": 1769860805,
                "session_id": "u1",
                "messages": [system, first, answer, more],
                "choices": [{"message": {"role": "assistant", "content": "Ninety-seven."}}],
            },
        ]
    )


def _json_lines(rows: Iterable[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SAMPLES = {
    "aiperf.jsonl": aiperf,
    "azure2023.csv": azure,
    "azure2024.csv": azure2024,
    "azure2025.csv": azure2025,
    "bailian.jsonl": bailian,
    "bench_serve.json": bench_serve,
    "burstgpt.csv": burstgpt,
    "chat.jsonl": chat,
    "claude_code.jsonl": claude_code,
    "claude_code_session.json": claude_code_session,
    "conversation.jsonl": conversation,
    "llmservingsim.jsonl": llmservingsim,
    "mooncake.jsonl": mooncake,
    "sharegpt.json": sharegpt,
    "timed_trace.jsonl": timed_trace,
    "tokens.jsonl": tokens,
    "vidur.csv": vidur,
}
"""What makes each file."""


def main(folder: Path) -> None:
    """Write every sample into *folder*."""
    for name, make in SAMPLES.items():
        (folder / name).write_bytes(make().encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
