from pathlib import Path

import numpy as np
import pytest

from workloads.readers import read_trace
from workloads.samples import make_samples


def test_the_script_reproduces_the_committed_samples(samples: Path, tmp_path: Path) -> None:
    make_samples.main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in samples.iterdir() if path.name in made}
    assert made == committed
    assert set(made) == {
        p.name for p in samples.iterdir() if p.suffix in {".csv", ".json", ".jsonl"}
    }


def test_conversation_has_the_published_statistics(samples: Path) -> None:
    trace = read_trace(samples / "conversation.jsonl")
    private = trace.num_prompt_tokens - make_samples.SYSTEM_PROMPT_TOKENS
    output = trace.num_output_tokens
    assert len(trace) == 1000
    assert np.percentile(private, [50, 90, 95, 99]) == pytest.approx(
        [1020, 2735, 4083, 4142], rel=0.02
    )
    assert np.percentile(output, [50, 90, 99]) == pytest.approx([129, 424, 601], rel=0.02)
    assert private.mean() == pytest.approx(1154.70, rel=0.002)
    assert output.mean() == pytest.approx(211.13, rel=0.002)
    assert (private.min(), output.min()) == (2, 7)
    assert 6500 < private.max() <= 7000
    assert 900 < output.max() <= 1000


@pytest.mark.parametrize("pieces", [make_samples.PROMPT, make_samples.OUTPUT])
def test_pieces_join_and_cover_everything(pieces: tuple[make_samples.Piece, ...]) -> None:
    assert sum(piece.share for piece in pieces) == pytest.approx(1)
    assert [p.high for p in pieces[:-1]] == [p.low for p in pieces[1:]]


def test_conversation_arrivals_and_content(samples: Path) -> None:
    trace = read_trace(samples / "conversation.jsonl")
    seconds = trace.arrival_ps / 1e12
    assert len(trace) / seconds[-1] == pytest.approx(make_samples.ARRIVALS_PER_S, rel=0.1)
    gaps = np.diff(seconds, prepend=0)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)
    assert set(trace.segment_nodes[::2].tolist()) == {int(trace.segment_nodes[0])}
    assert len(set(trace.segment_nodes[1::2].tolist())) == 1000


@pytest.mark.parametrize(
    ("name", "trace_format", "requests"),
    [
        ("azure2023.csv", "azure", 20),
        ("conversation.jsonl", "native", 1000),
        ("mooncake.jsonl", "mooncake", 20),
        ("tokens.jsonl", "native", 5),
    ],
)
def test_samples_read_without_notes(
    samples: Path, name: str, trace_format: str, requests: int
) -> None:
    trace = read_trace(samples / name)
    assert (trace.trace_format, len(trace), trace.notes) == (trace_format, requests, ())


@pytest.mark.parametrize("name", ["mooncake.jsonl", "tokens.jsonl"])
def test_samples_share_prefixes(samples: Path, name: str) -> None:
    nodes = read_trace(samples / name).segment_nodes
    assert len(np.unique(nodes)) < 0.75 * len(nodes)
