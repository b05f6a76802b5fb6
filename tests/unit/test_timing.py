"""Step times by name: constant and linear, and refusals."""

import re

import pytest

from sim.config import TimingConfig
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.models import get_model
from sim.timing import STEP_TIMES, Deployment, make_step_time
from sim.timing.base import TICKS_PER_PS, StepBatch, StepTimeModel

DEPLOYMENT = Deployment(get_model("Llama-3.1-8B"), get_gpu("H100"))


def step_time(spec: str) -> StepTimeModel:
    return make_step_time(TimingConfig(step_time=spec), DEPLOYMENT)


def prefill(chunk: int, context: int) -> StepBatch:
    return StepBatch(0, 0, ((chunk, context),))


def _ps(model: StepTimeModel, batch: StepBatch) -> float:
    return model.step_time(batch) / TICKS_PER_PS


def test_num_tokens_of_a_batch() -> None:
    assert StepBatch(3, 100, ((24, 24), (10, 50))).num_tokens == 37


def test_constant_is_constant() -> None:
    model = step_time("constant:0.025")
    assert _ps(model, prefill(1, 1)) == _ps(model, prefill(8192, 8192))
    assert _ps(model, prefill(1, 1)) == 25_000_000_000
    assert model.sources == (("step", "assumed", "constant, 0.025 s a step"),)


@pytest.mark.parametrize(
    ("batch", "expected_ps"),
    [
        # Steps 0, 1, 8 and 10 of a run of vLLM 0.33.0's scheduler under this step time.
        (prefill(24, 24), 12_424_000_000),
        (StepBatch(1, 25, ()), 10_125_000_000),
        (StepBatch(1, 30, ((27, 27),)), 12_857_000_000),
        (StepBatch(2, 61, ()), 10_261_000_000),
    ],
)
def test_linear_is_exact(batch: StepBatch, expected_ps: int) -> None:
    model = step_time("linear:0.01,0.0001,1e-06")
    assert _ps(model, batch) == expected_ps
    assert model.sources[0].provenance == "assumed"


def test_linear_counts_context_behind_a_prefix() -> None:
    model = step_time("linear:0,0,1e-12")
    assert _ps(model, prefill(10, 500)) == 500


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "linaer:1,2,3",
            "--step-time 'linaer:1,2,3' is unknown; did you mean 'linear'? "
            "choices: constant, linear, roofline",
        ),
        ("", "--step-time '' is unknown; choices: constant, linear, roofline"),
        ("constant", "--step-time 'constant' has 0 numbers, expected constant:SECONDS"),
        ("constant:1,2", "has 2 numbers, expected constant:SECONDS"),
        ("linear:1,2", "has 2 numbers, expected linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN"),
        ("linear:1,,3", "'' is not a number, expected linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN"),
        ("constant:fast", "'fast' is not a number, expected constant:SECONDS"),
        ("constant:-1", "constant:SECONDS is -1.0, expected seconds, 0 to 1000000"),
        ("constant:nan", "constant:SECONDS is nan, expected seconds, 0 to 1000000"),
        ("linear:inf,0,0", "linear's BASE is inf, expected seconds, 0 to 1000000"),
        ("linear:0,0,-1e-6", "linear's PER_CONTEXT_TOKEN is -1e-06, expected seconds"),
        ("constant:0", "--step-time constant:0 would freeze the clock"),
        ("linear:0,0,0", "--step-time linear:0,0,0 would freeze the clock"),
        ("linear:0,1e-17,0", "linear's PER_TOKEN is 1e-17 s, below the resolution of 1e-16 s"),
        ("roofline:0.8", "--step-time 'roofline:0.8': roofline takes no numbers"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        step_time(spec)
    assert "\n" not in str(refusal.value)


def test_every_step_time_is_in_the_registry() -> None:
    assert list(STEP_TIMES) == ["constant", "linear", "roofline"]
