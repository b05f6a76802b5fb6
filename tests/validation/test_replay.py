"""Whole real traces through every allocator: no request is lost, and hits are what they must be."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sim.result_tables import request_table
from sim.simulation import RunResult, Simulation
from tests.strategies import PAGED, PREFIX, VARIANTS, Variant, make_config
from workloads.readers import read_trace
from workloads.record import Trace

AZURE = "azure2023/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl"
HASH_TOKENS = 512
RESERVE_MAX = Variant("contiguous", "max", "first_fit")


def _path(shared: Path, name: str) -> Path:
    path = shared / "traces" / name
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return path


def _replay(variant: Variant, trace: Trace, **values: Any) -> RunResult:
    return Simulation(make_config(variant, model="Llama-3.1-8B", **values), trace).run()


def _assert_nobody_is_lost(result: RunResult, trace: Trace) -> None:
    """I3, and that every allocator gives memory back."""
    table = request_table(result.recorder)
    finished = np.array([step is not None for step in table["finish_step"].to_pylist()])
    refused = np.array([reason is not None for reason in table["refused"].to_pylist()])
    max_model_len = result.config.model.max_model_len
    assert max_model_len is not None
    assert table["request_id"].to_pylist() == trace.request_ids
    assert (finished ^ refused).all()
    assert (refused == (trace.num_prompt_tokens >= max_model_len)).all()
    generated = table["num_output_tokens"].to_numpy()[finished]
    room = max_model_len - trace.num_prompt_tokens
    assert (generated == np.minimum(trace.num_output_tokens, room)[finished]).all()
    arrival, scheduled, first, finish = (
        table[f"{name}_time"].to_numpy()[finished]
        for name in ("arrival", "scheduled", "first_token", "finish")
    )
    assert (arrival <= scheduled).all()
    assert (scheduled < first).all()
    assert (first <= finish).all()
    assert result.recorder.num_done == len(trace)


def _params(quick: tuple[Variant, ...]) -> list[Any]:
    return [
        pytest.param(v, id=v.label, marks=() if v in quick else pytest.mark.slow) for v in VARIANTS
    ]


@pytest.mark.parametrize("variant", _params(quick=(PAGED, RESERVE_MAX)))
def test_azure_conversation(variant: Variant, shared: Path) -> None:
    """19,366 requests on an H100; contexts to 14,050 tokens, so reservations are mostly waste."""
    trace = read_trace(_path(shared, AZURE))
    assert len(trace) == 19_366
    result = _replay(
        variant,
        trace,
        gpu="H100",
        max_model_len=16_384,
        max_num_seqs=256,
        step_time="constant:0.05",
    )
    _assert_nobody_is_lost(result, trace)
    assert result.recorder.totals.num_preempted == 0
    assert result.recorder.totals.prefix_cache_hits == 0, "its prompts are not known"
    if variant.reservation == "max" and variant.placement == "first_fit":
        assert result.recorder.totals.max_running == result.pool.contiguous_slots // 16_384


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
def test_mooncake_conversation_under_pressure(variant: Variant, shared: Path) -> None:
    """12,031 requests of 12,035 tokens on average, on an H200 that they fill."""
    trace = read_trace(_path(shared, MOONCAKE))
    assert len(trace) == 12_031
    result = _replay(
        variant,
        trace,
        gpu="H200",
        max_model_len=131_072,
        max_num_seqs=256,
        step_time="constant:0.05",
    )
    _assert_nobody_is_lost(result, trace)
    totals = result.recorder.totals
    # A buddy extent is up to twice what was asked for; what rounding adds belongs to nobody.
    full = 0.5 if variant.placement == "buddy" else 0.9
    assert totals.max_held_slots > full * result.recorder.capacity
    assert totals.num_refusals > 0
    if variant is PREFIX:
        ideal = _expected_hits(_path(shared, MOONCAKE), 16)
        assert 0.05 * ideal.hits < totals.prefix_cache_hits < ideal.hits


class Hits(NamedTuple):
    """What an unlimited cache must answer for a trace, in tokens."""

    hits: int
    queries: int
    common: int
    """Tokens that some earlier prompt has in common, whether in full blocks or not."""


def _expected_hits(path: Path, block_size: int) -> Hits:
    """Count over hash ids, which name the whole prefix up to the end of their 512 tokens.

    A block is found if it is full, some earlier prompt held all of it, and it ends before the last
    token of the prompt.
    """
    longest: dict[int, int] = {}
    hits = queries = total_common = 0
    for line in path.read_text().splitlines():
        record = json.loads(line)
        length, hash_ids = record["input_length"], record["hash_ids"]
        common, mine, agrees = 0, {}, True
        for place, hash_id in enumerate(hash_ids):
            mine[hash_id] = min(HASH_TOKENS, length - place * HASH_TOKENS)
            here = min(longest.get(hash_id, 0), mine[hash_id])
            common += here if agrees else 0
            agrees = agrees and here == HASH_TOKENS
        for hash_id, tokens in mine.items():
            longest[hash_id] = max(longest.get(hash_id, 0), tokens)
        total_common += common
        hits += min(common, length - 1) // block_size * block_size
        queries += length
    return Hits(hits, queries, total_common)


@pytest.mark.parametrize(
    ("block_size", "share"),
    [(512, 0.37338), pytest.param(16, 0.37362, marks=pytest.mark.slow)],
)
def test_mooncake_hits_in_an_unlimited_pool(block_size: int, share: float, shared: Path) -> None:
    """Published: 0.3664 of the blocks, partial ones counted as hits; here full blocks, in tokens.

    Every prompt is computed whole in the step after its arrival, so all earlier ones are there.
    """
    path = _path(shared, MOONCAKE)
    expected = _expected_hits(path, block_size)
    trace = read_trace(path)
    result = _replay(
        PREFIX,
        trace,
        block_size=block_size,
        max_model_len=131_072,
        num_gpu_blocks_override=200_000_000 // block_size,
        max_num_seqs=20_000,
        max_num_batched_tokens=2**31 - 1,
        step_time="constant:0.1",
    )
    _assert_nobody_is_lost(result, trace)
    totals = result.recorder.totals
    assert totals.num_refusals == 0
    assert totals.prefix_cache_queries == expected.queries == trace.num_prompt_tokens.sum()
    assert totals.prefix_cache_hits == expected.hits
    assert expected.hits / expected.queries == pytest.approx(share, abs=5e-6)


def test_mooncake_ideal_share_by_blocks_and_by_tokens(shared: Path) -> None:
    """The published 0.3664 counts blocks, a partial one at the end of a prompt like a full one."""
    path = _path(shared, MOONCAKE)
    seen: set[int] = set()
    num_found = num_blocks = 0
    for line in path.read_text().splitlines():
        hash_ids = json.loads(line)["hash_ids"]
        num_found += sum(hash_id in seen for hash_id in hash_ids)
        num_blocks += len(hash_ids)
        seen.update(hash_ids)
    assert (num_blocks, len(seen)) == (288_500, 182_790)
    assert num_found / num_blocks == pytest.approx(0.3664, abs=5e-5)
    for block_size in (1, 16, 512):
        expected = _expected_hits(path, block_size)
        assert expected.hits <= expected.common
        # No more than a block a prompt is lost to the rule of full blocks and the last token.
        assert expected.common - expected.hits < 12_031 * block_size
