"""The readers against the published statistics of the traces themselves."""

from pathlib import Path

import numpy as np
import pytest

from workloads.readers import read_trace
from workloads.readers.hashed import BLOCK_TOKENS
from workloads.record import PS_PER_S, IntArray, Trace
from workloads.reuse import (
    block_accesses,
    lru_hit_ratios,
    num_repeated_tokens,
    reuse_distances,
)


def _trace(shared: Path, name: str) -> Trace:
    path = shared / "traces" / name
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return read_trace(path)


def _percentiles(values: IntArray) -> list[int]:
    found: list[int] = np.percentile(values, [50, 90, 95, 99], method="lower").tolist()
    return [int(values.min()), *found, int(values.max())]


def test_azure_2023_conversation(shared: Path) -> None:
    trace = _trace(shared, "azure2023/AzureLLMInferenceTrace_conv.csv")
    assert trace.trace_format == "azure"
    assert len(trace) == 19_366
    assert _percentiles(trace.num_prompt_tokens)[::5] == [2, 14050]
    assert np.percentile(trace.num_prompt_tokens, [50, 95, 99]).tolist() == [1020, 4083, 4142]
    assert np.percentile(trace.num_prompt_tokens, 90) == pytest.approx(2735, abs=0.6)
    assert np.percentile(trace.num_output_tokens, [50, 90, 99]).tolist() == [129, 424, 601]
    assert _percentiles(trace.num_output_tokens)[::5] == [7, 1000]
    assert trace.num_prompt_tokens.mean() == pytest.approx(1154.70, abs=0.005)
    assert trace.num_output_tokens.mean() == pytest.approx(211.13, abs=0.005)
    assert int((trace.num_prompt_tokens + trace.num_output_tokens > 8192).sum()) == 1
    # 18:15:50.9951690 - 18:15:46.6805900, to the tick
    assert trace.arrival_ps[:2].tolist() == [0, 4_314_579_000_000]
    assert len(np.unique(trace.arrival_ps)) == 19_366
    assert trace.notes == ()


def test_mooncake_conversation(shared: Path) -> None:
    trace = _trace(shared, "mooncake/conversation_trace.jsonl")
    assert trace.trace_format == "mooncake"
    assert len(trace) == 12_031
    assert trace.arrival_ps[-1] == 3537 * PS_PER_S - PS_PER_S // 1000
    assert len(np.unique(trace.arrival_ps)) == 1180
    quantiles = np.percentile(trace.num_prompt_tokens, [50, 90, 95, 99])
    assert quantiles == pytest.approx([6909, 27367, 39551, 85400], abs=0.6)
    assert _percentiles(trace.num_prompt_tokens)[::5] == [891, 126195]
    quantiles = np.percentile(trace.num_output_tokens, [50, 90, 99])
    assert quantiles == pytest.approx([350, 597, 1119], abs=0.6)
    assert _percentiles(trace.num_output_tokens)[::5] == [1, 2000]
    assert int((trace.num_output_tokens == 1).sum()) == 72
    assert trace.num_prompt_tokens.mean() == pytest.approx(12_035.1, abs=0.05)
    assert trace.num_output_tokens.mean() == pytest.approx(342.6, abs=0.05)
    assert trace.notes == ()


def test_mooncake_hit_ratios(shared: Path) -> None:
    """Figures published for the trace, and recomputed by others to all digits given."""
    trace = _trace(shared, "mooncake/conversation_trace.jsonl")
    accesses = block_accesses(trace, BLOCK_TOKENS)
    unique = len(np.unique(accesses))
    assert (len(accesses), unique) == (288_500, 182_790)
    assert int((np.bincount(accesses) == 1).sum()) == pytest.approx(0.758 * unique, rel=1e-3)
    distances = reuse_distances(accesses)
    assert (distances >= 0).mean() == pytest.approx(0.3664, abs=5e-5)
    shares = lru_hit_ratios(distances, [round(f * unique) for f in (0.01, 0.05, 0.1, 0.25, 0.5)])
    assert shares == pytest.approx([0.0523, 0.1954, 0.2784, 0.3535, 0.3631], abs=5e-5)
    ratios = lru_hit_ratios(distances, [1000, 10_000, 30_000, 50_000, 100_000])
    assert ratios == pytest.approx([0.0445, 0.2112, 0.3257, 0.3546, 0.3637], abs=5e-5)


def test_claude_code_sessions(shared: Path) -> None:
    trace = _trace(shared, "weka_claude_code/weka_cc_sessions.compact.jsonl.gz")
    assert trace.trace_format == "claude_code"
    assert len(trace) == 46_218  # 692 sessions and 63 sub-agents
    assert len(set(trace.session_ids)) == 692 + 63
    assert "27 calls without output generate 1 token" in trace.notes
    assert "116 think times are not known: gaps between arrivals stand for them" in trace.notes
    assert _percentiles(trace.num_prompt_tokens)[::5] == [6343, 894_371]
    assert trace.num_output_tokens.max() == 18_195
    # Ids cover full blocks only, and are local to a session: the published 96.3 %.
    covered = (trace.num_prompt_tokens // 64 * 64).sum()
    assert num_repeated_tokens(trace).sum() / covered == pytest.approx(0.963, abs=5e-4)


def test_vidur_summaries(shared: Path) -> None:
    trace = _trace(shared, "arxiv_summarization/lengths.csv")
    assert trace.trace_format == "vidur"
    assert np.percentile(trace.num_prompt_tokens, 50) == 2730
    assert np.percentile(trace.num_output_tokens, [50, 99]) == pytest.approx([167, 3271], abs=0.5)
    assert (trace.num_prompt_tokens + trace.num_output_tokens).max() <= 4096


def test_llmservingsim_workload(shared: Path) -> None:
    path = shared / "published" / "e2e_rtx4090" / "workload.jsonl"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    trace = read_trace(path)
    assert trace.trace_format == "llmservingsim"
    assert len(trace) == 300
    assert _percentiles(trace.num_output_tokens)[::5] == [512, 1021]
    assert trace.num_prompt_tokens.max() == 3998
    # Full blocks of 16 tokens that an earlier prompt had
    repeated = (num_repeated_tokens(trace) // 16).sum()
    assert (repeated, (trace.num_prompt_tokens // 16).sum()) == (1220, 15_942)
