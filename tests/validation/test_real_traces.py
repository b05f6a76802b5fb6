"""The readers against the published statistics of the traces themselves."""

from pathlib import Path

import numpy as np
import pytest

from workloads.readers import read_trace
from workloads.readers.hashed import BLOCK_TOKENS
from workloads.record import Trace


def _trace(shared: Path, name: str) -> Trace:
    path = shared / "traces" / name
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return read_trace(path)


def test_azure_2023_conversation(shared: Path) -> None:
    trace = _trace(shared, "azure2023/AzureLLMInferenceTrace_conv.csv")
    assert trace.trace_format == "azure"
    assert len(trace) == 19_366
    assert np.percentile(trace.num_prompt_tokens, 50) == 1020
    assert np.percentile(trace.num_prompt_tokens, 99) == 4142
    assert trace.num_prompt_tokens.mean() == pytest.approx(1154.70, abs=0.005)
    assert trace.num_output_tokens.mean() == pytest.approx(211.13, abs=0.005)
    # 18:15:50.9951690 - 18:15:46.6805900, to the tick
    assert trace.arrival_ps[:2].tolist() == [0, 4_314_579_000_000]
    assert trace.notes == ()


def test_mooncake_conversation(shared: Path) -> None:
    trace = _trace(shared, "mooncake/conversation_trace.jsonl")
    assert trace.trace_format == "mooncake"
    assert len(trace) == 12_031
    nodes, lengths = trace.segment_nodes, np.diff(trace.segment_ends, prepend=0)
    assert len(nodes) == 288_500
    # Ids are prefix hashes upstream, so each id is exactly one node.
    assert len(np.unique(nodes)) == 182_790
    assert (len(nodes) - len(np.unique(nodes))) / len(nodes) == pytest.approx(0.3664, abs=5e-5)
    assert lengths[lengths > 0].max() == BLOCK_TOKENS
    assert trace.notes == ()
