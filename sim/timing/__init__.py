"""Step times by name: what ``--step-time`` accepts."""

from collections.abc import Callable

from sim.config import TimingConfig
from sim.errors import ConfigError
from sim.timing.base import StepTimeModel
from sim.timing.basis import CONTIGUOUS, Deployment
from sim.timing.build import kernel_step_time
from sim.timing.kernels import KernelStepTime
from sim.timing.simple import ConstantStepTime, LinearStepTime
from workloads.errors import did_you_mean, plain

__all__ = [
    "CONTIGUOUS",
    "STEP_TIMES",
    "ConstantStepTime",
    "Deployment",
    "KernelStepTime",
    "LinearStepTime",
    "kernel_step_time",
    "make_step_time",
]


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


def _constant(timing: TimingConfig, _deployment: Deployment) -> StepTimeModel:
    """Answer the step time of ``constant:SECONDS``."""
    return ConstantStepTime(*_numbers(timing.step_time, "constant:SECONDS"))


def _linear(timing: TimingConfig, _deployment: Deployment) -> StepTimeModel:
    """Answer the step time of ``linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN``, all in seconds."""
    return LinearStepTime(*_numbers(timing.step_time, "linear:BASE,PER_TOKEN,PER_CONTEXT_TOKEN"))


def _roofline(timing: TimingConfig, deployment: Deployment) -> StepTimeModel:
    """Answer the step time of ``roofline``: kernel by kernel, from fits or a timing table."""
    spec = timing.step_time
    if spec != "roofline":
        raise ConfigError(f"--step-time {spec!r}: roofline takes no numbers, expected roofline")
    return kernel_step_time(timing, deployment)


STEP_TIMES: dict[str, Callable[[TimingConfig, Deployment], StepTimeModel]] = {
    "constant": _constant,
    "linear": _linear,
    "roofline": _roofline,
}
"""Every kind of step time, by what stands before the colon."""


def make_step_time(timing: TimingConfig, deployment: Deployment) -> StepTimeModel:
    """Answer the step time that *timing* asks for.

    Raises:
        ConfigError: an unknown kind, the wrong count of numbers, a number that is none, negative or
            not finite, a time that is always zero, or what `kernel_step_time` refuses.
    """
    spec = timing.step_time
    kind = spec.partition(":")[0]
    if kind not in STEP_TIMES:
        raise ConfigError(f"--step-time {spec!r} is unknown; {did_you_mean(kind, STEP_TIMES)}")
    if kind != "roofline" and timing.timing_table is not None:
        raise ConfigError(
            f"--timing-table {plain(timing.timing_table)} has no effect on --step-time {spec}: "
            "leave one of them out"
        )
    return STEP_TIMES[kind](timing, deployment)
