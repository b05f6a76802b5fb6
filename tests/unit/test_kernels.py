"""A step from a table of kernels: what it lacks, what is beyond it, and the split by term."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.config import TimingConfig
from sim.errors import ConfigError, TimingRangeError
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing import Deployment, KernelStepTime, kernel_step_time
from sim.timing.base import TICKS_PER_PS, StepBatch
from sim.timing.table import TimingTable
from sim.timing.table_file import save
from tests.timing_tables import HEADS, KINDS, chunks, decodes, layers, table

Priced = Callable[..., KernelStepTime]


@pytest.fixture
def priced(tmp_path: Path) -> Priced:
    """Lend what answers the step time of Llama-3.1-8B on an A100-40 from a table."""

    def step_time(rows: TimingTable, **timing: Any) -> KernelStepTime:
        path = tmp_path / "table.parquet"
        save(rows, path)
        deployment = Deployment(get_model("Llama-3.1-8B"), get_gpu("A100-40"))
        config = TimingConfig(timing_table=str(path), enforce_eager=True, **timing)
        return kernel_step_time(config, deployment)

    return step_time


def _us(model: KernelStepTime, batch: StepBatch) -> float:
    return model.step_time(batch) / TICKS_PER_PS / 1e6


def _rows(model: KernelStepTime, *batches: StepBatch) -> dict[str, Any]:
    """Answer one row a batch, as the recorder has them."""
    columns = {
        "num_steps": [1] * len(batches),
        "duration_ps": [model.step_time(batch) / TICKS_PER_PS for batch in batches],
        "num_decodes": [batch.num_decodes for batch in batches],
        "num_late_decodes": [0] * len(batches),
        "num_prefills": [len(batch.prefills) for batch in batches],
        "num_prefill_tokens": [sum(chunk for chunk, _ in batch.prefills) for batch in batches],
        "decode_context": [batch.decode_context for batch in batches],
    }
    return {name: np.array(values) for name, values in columns.items()}


def test_layers_are_launched_as_often_as_the_model_has_them(priced: Priced) -> None:
    """Seven kernels of 2 us and a hundredth a token: four products and two norms in 32 layers."""
    model = priced(table(decodes(), chunks(), layers()))
    attention = 32 * (10 + 0.5 * 4 + 0.001 * 4 * 256)
    assumed = [32 * 2.0, 32 * 2.0, 2.0, 2.0]  # act_fn, rotary_emb, embedding, final_layernorm
    kernels = (4 + 2) * 32 * (2 + 4 / 100) + 2 * (2 + 4 / 100)
    got = _us(model, StepBatch(4, 4 * 257, ()))
    assert got == pytest.approx(attention + kernels + sum(assumed), rel=2e-2)
    split = model.split(_rows(model, StepBatch(4, 4 * 257, ())))
    assert split["linear layers"] == pytest.approx(4 * 32 * (2 + 4 / 100) / 1e6)
    assert split["lm_head and sampling"] == pytest.approx(2 * (2 + 4 / 100) / 1e6)
    assert split["decode attention"] == pytest.approx(attention / 1e6)


@pytest.mark.parametrize("missing", ["decode attention", "prefill attention"])
def test_attention_that_a_table_lacks_is_fitted_and_named(priced: Priced, missing: str) -> None:
    rows = chunks() if missing == "decode attention" else decodes()
    model = priced(table(rows, layers()))
    (fitted,) = (source for source in model.sources if source.provenance == "fitted")
    assert fitted.terms.startswith(missing)
    batch = StepBatch(4, 4 * 257, ((64, 64),))
    assert _us(model, batch) > _us(
        priced(table(decodes(), chunks(), layers())), StepBatch(1, 2, ())
    )


def test_prompts_of_several_requests_only_price_no_chunk(priced: Priced) -> None:
    two = ({**row, "batch": 2} for row in chunks())
    model = priced(table(decodes(), two, layers()))
    assert any(
        source.provenance == "fitted" and source.terms.startswith("prefill attention")
        for source in model.sources
    )


def test_beyond_the_table_is_refused_or_counted(priced: Priced) -> None:
    rows = table(decodes(), chunks(), layers())
    strict, lenient = priced(rows), priced(rows, timing_fallback="roofline")
    long = StepBatch(4, 4 * 5000, ())
    many = StepBatch(0, 0, ((2049, 2049),))
    mixed = StepBatch(4, 4 * 100, ((3000, 3000),))
    for batch in (long, many, mixed):
        with pytest.raises(TimingRangeError, match="--timing-fallback roofline") as refusal:
            strict.step_time(batch)
        assert "\n" not in str(refusal.value)
    with pytest.raises(TimingRangeError, match="of that many decodes up to 4100 tokens of context"):
        strict.step_time(long)
    within = StepBatch(4, 4 * 100, ((64, 64),))
    steps = _rows(lenient, within, long, many, mixed, StepBatch(4, 4 * 100, ()))
    assert (lenient.steps_outside(steps), lenient.num_outside) == (1, 2)
    assert lenient.steps_outside(steps) == 1, "asked twice"


def test_products_beyond_the_table_are_counted_too(priced: Priced) -> None:
    """Products up to 64 tokens only, attention of everything."""
    short = (row for row in layers() if row["num_tokens"] <= 64)
    model = priced(table(decodes(), chunks(), short), timing_fallback="roofline")
    _rows(model, StepBatch(0, 0, ((64, 64),)), StepBatch(0, 0, ((512, 512),)))
    assert model.num_outside == 1
    strict = priced(table(decodes(), chunks(), (r for r in layers() if r["num_tokens"] <= 64)))
    with pytest.raises(TimingRangeError, match="_proj for up to 64 tokens, and a step has 512"):
        strict.step_time(StepBatch(0, 0, ((512, 512),)))


def test_no_term_is_negative(priced: Priced) -> None:
    """A chunk with decodes that takes less than the decodes alone: all of it is theirs."""
    cheap = (
        KINDS | HEADS | {"op": "mixed_attention", "batch": batch, "context": history}
        | {"query_len": length, "query_context": 0, "latency_us": 6.0 + length / 100}
        for batch in (1, 16) for history in (16, 1024) for length in (16, 2048)
    )  # fmt: skip
    model = priced(table(decodes(), chunks(), layers(), cheap))
    batches = [StepBatch(n, n * 500, ((64, 64),)) for n in (1, 4, 16)]
    rows = _rows(model, *batches)
    terms = model.split(rows)
    assert min(terms.values()) >= 0
    assert sum(terms.values()) == pytest.approx(rows["duration_ps"].sum() / 1e12)


def test_decodes_without_history_and_holes_among_chunks(priced: Priced) -> None:
    nothing = table(decodes(histories=(0, 64, 1024)), chunks(), layers(), l2_policy="warm")
    assert _us(priced(nothing), StepBatch(4, 4, ())) > 0
    holes = (
        row
        for row in chunks(histories=(0, 64))
        if (row["query_len"], row["query_context"]) not in {(16, 0), (256, 64)}
    )
    model = priced(table(decodes(), holes, layers()))
    for length, history in ((16, 64), (64, 0), (256, 64), (64, 30)):
        assert _us(model, StepBatch(0, 0, ((length, length + history),))) > 0


def test_times_in_another_unit_are_refused(priced: Priced) -> None:
    with pytest.raises(ConfigError, match="latency_us looks like milliseconds"):
        priced(table(decodes(lambda b, h: 1e-5 * (b + h)), chunks(), layers()))


def test_host_overhead_is_a_term(priced: Priced) -> None:
    rows = table(decodes(), chunks(), layers())
    plain, slow = priced(rows), priced(rows, host_overhead=0.002)
    batch = StepBatch(4, 4 * 100, ())
    assert _us(slow, batch) == pytest.approx(_us(plain, batch) + 2000)
    assert slow.split(_rows(slow, batch))["host overhead"] == pytest.approx(0.002)
    assert slow.sources[-1] == ("host overhead", "assumed", "0.002 s a step")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_sizes_without_chunks_of_their_own_have_the_nearest_ones(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    """Not the fit of another kernel: else sizes would differ by what prices their prompts."""
    kind = {} if kv_cache_dtype == "auto" else {"kv_dtype": "fp8"}
    of_sizes = ({**row, **kind, "block_size": n} for row in decodes() for n in (16, 64, 1024))
    slow = ({**row, "latency_us": 5 * row["latency_us"]} for row in chunks())
    of_1024 = ({**row, "block_size": 1024, "latency_us": 1000.0} for row in chunks())
    save(table(of_sizes, slow, of_1024, layers()), tmp_path / "table.parquet")
    config = TimingConfig(timing_table=str(tmp_path / "table.parquet"))
    found = {}
    for size in (16, 32, 64, 1024):
        deployment = Deployment(
            get_model("Llama-3.1-8B"),
            get_gpu("A100-40"),
            block_size=size,
            kv_cache_dtype=kv_cache_dtype,
        )
        model = kernel_step_time(config, deployment)
        shown = "\n".join(f"{source.terms}: {source.description}" for source in model.sources)
        page = f", page {1024 if size == 1024 else 16}"
        page += "" if size in {16, 1024} else f" for block_size {size}"
        page += ", KV bfloat16 for fp8" if kind else ""
        assert re.search(rf"prefill attention[^:]*: A100-40, made up{page}", shown), shown
        assert "prefill attention (±" not in shown
        found[size] = _us(model, StepBatch(0, 0, ((256, 256),)))
    assert found[16] == found[32] == found[64]
    assert found[1024] - found[16] == pytest.approx(32 * (1000 - 5 * (5 + 256 * 0.128)))
