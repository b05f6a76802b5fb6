"""The remedy ladder: what to change, in which order, when a deployment does not carry its load.

Each remedy is run on top of those that were kept before it, cheap ones first: prefix sharing,
utilization, the type of the KV cache, max_model_len, max_num_seqs, the type of the weights, more
cards. What a remedy is worth depends on what came before it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.config import RunConfig
from sim.errors import CapacityError, ConfigError
from sim.hardware import get_gpu
from sim.memory import activation_bytes
from sim.models import model_of
from sim.overrun import StepSizes
from sim.pool_sizing import engine_of, pool_of
from sim.report import Summary
from sim.settings import KERNEL_BLOCK_SIZE
from sim.what_if import Outcome, Ran, Simulate, changed, ran
from workloads.record import Trace

MOST_UTILIZATION = 0.95
"""Beyond it nothing is left for what no accounting knows: a neighbour, fragmentation of torch's
allocator, graphs larger than their estimate."""

MOST_CARDS = 8
"""Of one machine."""

LEAST_GAIN = 0.01
"""Of throughput, as a factor, or of SLO attainment, in points: less is not told from noise."""

GOAL = 0.99
"""Share of requests that meet the SLOs beyond which no more cards are tried (as in ``[find]``)."""

OVERLOADED = 0.5
"""Share below which who meets the SLOs is a matter of luck in the queue, and throughput tells."""

RULE = (
    f"a step is kept if {100 * LEAST_GAIN:.0f} % more of all requests meet the SLOs (--goodput) or,"
    " where as many do or fewer than half either way, if output throughput at the offered load is "
    f"{100 * LEAST_GAIN:.0f} % higher; more cards until {100 * GOAL:.0f} % meet the SLOs or, "
    "without SLOs, while tokens get no dearer"
)
"""When a step is kept, in words."""

GOES_ON = ("kept", "not enough")
"""Verdicts of steps that those after it build on."""

FREE = "prefix caching"
"""The remedy that costs nothing, and is vLLM's default: it is not taken back."""

LOSSY = ("quantized weights", "fp8 KV cache")
"""Remedies that cost quality: at the end it is tried whether the others do without them."""


class Setup(NamedTuple):
    """A deployment that was tried.

    Attributes:
        config: of each of *replicas* engines.
        run: what came of it; None if it cannot be done.
        refusal: why not; empty if it can.
        does_not_fit: whether it is for want of memory.
    """

    config: RunConfig
    replicas: int
    run: Ran | None
    refusal: str
    does_not_fit: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """The figures, if it can be done."""
        return None if self.run is None else self.run.outcome

    @property
    def cards(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.config.model.tensor_parallel_size


class Step(NamedTuple):
    """A step of the ladder.

    Attributes:
        name: the remedy.
        changes: settings that it changes, by name, those of the best of what was tried.
        replicas: engines with it.
        verdict: ``start``, ``kept``, ``not enough`` (kept, and does not start yet), ``no gain``,
            ``worse``, ``cannot`` or ``not tried``.
        why: why it cannot be or was not done, or what else was tried for it.
        outcome: with all steps kept before; None if there was no run.
        before: of those alone; None of the first, and where that cannot be done.
    """

    name: str
    changes: dict[str, Any]
    replicas: int
    verdict: str
    why: str
    outcome: Outcome | None
    before: Outcome | None


class Advice(NamedTuple):
    """What came of the whole ladder.

    Attributes:
        steps: in the order in which they were tried, the start first.
        final: with all that was kept.
        changes: settings that differ from the start, by name.
        summary: of the final run, one replica's; None if nothing that was tried can be done.
    """

    steps: tuple[Step, ...]
    final: Setup
    changes: dict[str, Any]
    summary: Summary | None


class _Try(NamedTuple):
    """A change that may help."""

    changes: dict[str, Any]
    replicas: int = 1


class Nothing(NamedTuple):
    """There is nothing to try, and why."""

    why: str
    verdict: str = "not tried"


Candidates = Callable[[Setup, Trace], "list[_Try] | Nothing"]


def advise(config: RunConfig, trace: Trace, simulate: Simulate) -> Advice:
    """Climb the ladder from *config* on *trace*, as recorded; *simulate* runs.

    Raises:
        ConfigError, TraceError: *config* cannot be used, other than for want of memory.
    """
    ladder = _Ladder(config, trace, simulate)
    for name, candidates in REMEDIES.items():
        ladder.climb(name, candidates)
    while ladder.climb("more cards", _more_cards):
        pass
    ladder.do_without()
    return ladder.advice()


class _Ladder:
    """What was kept so far, and every step."""

    def __init__(self, config: RunConfig, trace: Trace, simulate: Simulate) -> None:
        self._start, self._trace, self._simulate = config, trace, simulate
        self._kept: dict[str, dict[str, Any]] = {}
        self._in_vain: list[str] = []
        self._steps: list[Step] = []
        self._now = Setup(config, 1, None, "")
        self._now = self._tried({}, 1)
        self._note("as given", _Try({}), "start" if self._now.run else "cannot", self._now)

    @property
    def _changes(self) -> dict[str, Any]:
        return {key: value for kept in self._kept.values() for key, value in kept.items()}

    def climb(self, name: str, candidates: Candidates) -> bool:
        """Try a remedy; keep the best of its candidates if it helps, and answer whether it did.

        While nothing starts every remedy is kept: several together may do.
        """
        found = candidates(self._now, self._trace)
        if isinstance(found, Nothing):
            nothing = Setup(self._now.config, self._now.replicas, None, found.why)
            self._note(name, _Try({}), found.verdict, nothing)
            return False
        tried = [(each, self._tried(self._changes | each.changes, each.replicas)) for each in found]
        running = [(each, setup) for each, setup in tried if setup.run is not None]
        # Of those that do not start the last is the smallest.
        each, setup = running[0] if running else tried[0 if self._now.run else -1]
        for other in running[1:]:
            if _helps(setup, other[1]):
                each, setup = other
        verdict = _verdict(self._now, setup)
        others = ", ".join(_shown(other) for other, _ in tried if other is not each)
        self._note(name, each, verdict, setup, f"also tried: {others}" if others else "")
        if verdict not in GOES_ON:
            return False
        self._kept[name] = self._kept.get(name, {}) | each.changes
        self._now = setup
        if verdict == "not enough" and name != FREE:
            self._in_vain.append(name)
        return True

    def do_without(self) -> None:
        """Take back remedies that cost quality, or did not suffice, if they are no help now."""
        for name in dict.fromkeys((*LOSSY, *reversed(self._in_vain))):
            if self._now.run is None or name in {"more cards", *list(self._kept)[-1:]}:
                continue
            if name in self._kept:
                self._take_back(name)

    def _take_back(self, name: str) -> None:
        others = {
            k: v for step, kept in self._kept.items() if step != name for k, v in kept.items()
        }
        setup = self._tried(others, self._now.replicas)
        start = self._start.flat()
        each = _Try({key: start[key] for key in self._kept[name]}, self._now.replicas)
        if setup.run is None or _helps(setup, self._now):
            self._note(f"no {name}", each, "worse", setup, "it helps")
            return
        self._note(f"no {name}", each, "kept", setup, "it is no help any more")
        del self._kept[name]
        self._now = setup

    def _note(self, name: str, each: _Try, verdict: str, setup: Setup, why: str = "") -> None:
        why = setup.refusal or why
        before = self._now.outcome if self._steps else None
        self._steps.append(
            Step(name, each.changes, each.replicas, verdict, why, setup.outcome, before)
        )

    def _tried(self, changes: Mapping[str, Any], replicas: int) -> Setup:
        config = self._now.config
        try:
            config = changed(self._start, changes)
            run = ran(config, self._trace, replicas=replicas, simulate=self._simulate)
        except CapacityError as error:
            return Setup(config, replicas, None, str(error), does_not_fit=True)
        except ConfigError as error:
            if not self._steps:
                raise
            return Setup(config, replicas, None, str(error))
        return Setup(config, replicas, run, "")

    def advice(self) -> Advice:
        """Answer all that was tried."""
        summary = None if self._now.run is None else self._now.run.summary
        return Advice(tuple(self._steps), self._now, self._changes, summary)


def _shown(each: _Try) -> str:
    words = [f"{name} {value}" for name, value in each.changes.items()]
    return ", ".join([*words, *([f"{each.replicas} replicas"] if each.replicas > 1 else [])])


def _verdict(before: Setup, after: Setup) -> str:
    """Answer what comes of *after*: one of `Step.verdict`."""
    if after.run is None:
        return "not enough" if after.does_not_fit and before.run is None else "cannot"
    if _helps(before, after):
        return "kept"
    return "worse" if _helps(after, before) else "no gain"


def _helps(before: Setup, after: Setup) -> bool:
    """Whether *after* carries the load better than *before*, by `RULE`."""
    old, new = before.outcome, after.outcome
    if new is None or old is None:
        return new is not None
    met, meets = old.slo_attainment or 0, new.slo_attainment or 0
    if max(met, meets) >= OVERLOADED and abs(meets - met) >= LEAST_GAIN - 1e-12:
        return meets > met
    old_rate, new_rate = old.output_throughput or 0, new.output_throughput or 0
    needed = 1 + LEAST_GAIN
    if after.cards > before.cards and new.slo_attainment is None:
        # Nothing but the price says how many cards are enough.
        needed = after.cards / before.cards * (1 - LEAST_GAIN)
    return new_rate >= needed * old_rate and new_rate > old_rate


def _prefix_caching(now: Setup, _: Trace) -> list[_Try] | Nothing:
    if now.config.cache.allocator == "prefix":
        return Nothing("it is on")
    return [_Try({"enable_prefix_caching": True})]


def _utilization(now: Setup, _: Trace) -> list[_Try] | Nothing:
    """The highest within the margin that leaves room for the largest activation there can be."""
    cache = now.config.cache
    if not cache.by_utilization:
        return Nothing("the pool was given in blocks or bytes, not by utilization", "cannot")
    assert cache.gpu_memory_utilization is not None, "resolved"
    least = math.floor(100 * cache.gpu_memory_utilization + 1e-9)
    for hundredths in range(round(100 * MOST_UTILIZATION), least, -1):
        change = {"gpu_memory_utilization": hundredths / 100}
        if _has_room(changed(now.config, change)):
            return [_Try(change)]
    if least >= round(100 * MOST_UTILIZATION):
        return Nothing(f"it is {cache.gpu_memory_utilization:g}: the margin ends at 0.95")
    return Nothing(f"above {cache.gpu_memory_utilization:g} activation and graphs do not fit")


def _has_room(config: RunConfig) -> bool:
    """Whether activation of the profiling run fits beside the pool and CUDA graphs, or no pool.

    A pool that cannot be had is refused, in words, when it is tried.
    """
    model, gpu = model_of(config.model), get_gpu(config.model.gpu, config.model.gpu_memory_gib)
    try:
        overrun = StepSizes().overrun(config, pool_of(config, model, gpu))
    except CapacityError:
        return True
    return overrun is None or overrun.room_bytes >= activation_bytes(model, gpu, engine_of(config))


def _kv_dtype(now: Setup, _: Trace) -> list[_Try] | Nothing:
    if now.config.cache.kv_cache_dtype.startswith("fp8"):
        return Nothing("it is fp8")
    return [_Try({"kv_cache_dtype": "fp8"})]


def longest_request(trace: Trace) -> int:
    """Answer the tokens of the longest prompt with its output, in whole blocks of a kernel."""
    longest = int((trace.num_prompt_tokens + trace.num_output_tokens).max())
    return -(-longest // KERNEL_BLOCK_SIZE) * KERNEL_BLOCK_SIZE


def _max_model_len(now: Setup, trace: Trace) -> list[_Try] | Nothing:
    longest, asked = longest_request(trace), now.config.model.max_model_len
    assert asked is not None, "resolved"
    if longest >= asked:
        return Nothing(f"the longest request has {longest:,} tokens, it is {asked:,}")
    return [_Try({"max_model_len": longest})]


def _max_num_seqs(now: Setup, _: Trace) -> list[_Try] | Nothing:
    """What the pool holds, and less, which makes steps shorter; twice as many if all seats run."""
    scheduler = now.config.scheduler
    asked, budget = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert asked is not None, "resolved"
    assert budget is not None, "resolved"
    if now.outcome is None:
        wanted = [asked // 4, asked // 16]
    else:
        held, is_full = now.outcome.users_held or 0, now.outcome.max_num_requests_running >= asked
        wanted = [2 * asked] if is_full else []
        wanted += [int(held / part) for part in (1, 2, 4) if is_full or held / part < asked]
    wanted = [min(n, budget) for n in wanted]
    tries = [_Try({"max_num_seqs": n}) for n in dict.fromkeys(wanted) if 0 < n != asked]
    return tries or Nothing(f"it is {asked}, and what the pool holds is no less")


def _weights(now: Setup, _: Trace) -> list[_Try] | Nothing:
    if now.config.model.quantization is not None:
        return Nothing(f"it is {now.config.model.quantization}")
    tries = [_Try({"quantization": "fp8"})]
    if now.outcome is None:  # half as large does perhaps not fit either
        tries.append(_Try({"quantization": "bitsandbytes"}))
    return tries


REMEDIES: Mapping[str, Candidates] = {
    "prefix caching": _prefix_caching,
    "utilization": _utilization,
    "fp8 KV cache": _kv_dtype,
    "max_model_len": _max_model_len,
    "max_num_seqs": _max_num_seqs,
    "quantized weights": _weights,
}
"""By name, what to try of each, in their order; more cards come after."""


def _more_cards(now: Setup, _: Trace) -> list[_Try] | Nothing:
    """Twice as many: to share the model among, with more seats perhaps, or for more engines."""
    if now.outcome is not None and (now.outcome.slo_attainment or 0) >= GOAL:
        return Nothing(
            f"{100 * (now.outcome.slo_attainment or 0):.1f} % of all requests meet the SLOs"
        )
    if 2 * now.cards > MOST_CARDS:
        return Nothing(f"a machine has {MOST_CARDS}")
    scheduler = now.config.scheduler
    seats, budget = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert seats is not None, "resolved"
    assert budget is not None, "resolved"
    shared = {"tensor_parallel_size": 2 * now.config.model.tensor_parallel_size}
    tries = [_Try(shared, now.replicas)]
    if now.outcome is None:
        return tries
    tries.append(_Try({}, 2 * now.replicas))
    if 2 * (now.outcome.users_held or 0) > seats * now.replicas and 2 * seats <= budget:
        tries.append(_Try({**shared, "max_num_seqs": 2 * seats}, now.replicas))
    return tries
