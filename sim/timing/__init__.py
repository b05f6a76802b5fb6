"""Step times by name: what ``--step-time`` accepts."""

from collections.abc import Callable

from sim.errors import ConfigError
from sim.hardware import GpuSpec
from sim.models import ModelSpec
from sim.timing.base import StepTimeModel
from sim.timing.roofline import RooflineStepTime
from sim.timing.simple import ConstantStepTime, LinearStepTime
from workloads.errors import did_you_mean

__all__ = ["STEP_TIMES", "ConstantStepTime", "LinearStepTime", "RooflineStepTime", "make_step_time"]


def _numbers(spec: str, usage: str) -> list[float]:
    """Answer the comma-separated numbers after the colon of *spec*, as many as *usage* names."""
    text = spec.partition(":")[2]
    parts = text.split(",") if text else []
    expected = usage.count(",") + 1
    if len(parts) != expected:
        raise ConfigError(f"--step-time {spec!r} has {len(parts)} numbers, expected {usage}")
    numbers = []
    for part in parts:
        try:
            numbers.append(float(part))
        except ValueError:
            raise ConfigError(
                f"--step-time {spec!r}: {part!r} is not a number, expected {usage}"
            ) from None
    return numbers


def _constant(spec: str, _model: ModelSpec | None, _gpu: GpuSpec | None) -> StepTimeModel:
    """Answer the step time of ``constant:SECONDS``."""
    return ConstantStepTime(*_numbers(spec, "constant:SECONDS"))


def _linear(spec: str, _model: ModelSpec | None, _gpu: GpuSpec | None) -> StepTimeModel:
    """Answer the step time of ``linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN``, all in seconds."""
    return LinearStepTime(*_numbers(spec, "linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN"))


def _roofline(spec: str, model: ModelSpec | None, gpu: GpuSpec | None) -> StepTimeModel:
    """Answer the step time of ``roofline``, which needs a model and a GPU."""
    if spec != "roofline":
        raise ConfigError(f"--step-time {spec!r}: roofline takes no numbers, expected roofline")
    if model is None:
        raise ConfigError("--step-time roofline needs --model")
    if gpu is None:
        raise ConfigError("--step-time roofline needs --gpu")
    return RooflineStepTime(model, gpu)


STEP_TIMES: dict[str, Callable[[str, ModelSpec | None, GpuSpec | None], StepTimeModel]] = {
    "constant": _constant,
    "linear": _linear,
    "roofline": _roofline,
}
"""Every kind of step time: what makes it from the whole text of ``--step-time``, model and GPU."""


def make_step_time(spec: str, model: ModelSpec | None, gpu: GpuSpec | None) -> StepTimeModel:
    """Answer the step time that *spec* asks for.

    Args:
        spec: ``constant:SECONDS``, ``linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN`` or ``roofline``.
        model: needed by ``roofline`` only.
        gpu: needed by ``roofline`` only.

    Raises:
        ConfigError: an unknown kind, the wrong count of numbers, a number that is none, negative or
            not finite, a time that is always zero, or what ``roofline`` needs and lacks.
    """
    kind = spec.partition(":")[0]
    if kind not in STEP_TIMES:
        raise ConfigError(f"--step-time {spec!r} is unknown; {did_you_mean(kind, STEP_TIMES)}")
    return STEP_TIMES[kind](spec, model, gpu)
