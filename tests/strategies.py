"""Small random workloads and configurations, for every allocator that is registered.

An allocator added to `sim.allocators.ALLOCATORS` is tested by whatever uses `VARIANTS`, without a
change here.
"""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from hypothesis import strategies as st

from sim.allocators import ALLOCATORS
from sim.allocators.base import Allocator
from sim.config import RunConfig
from sim.errors import CapacityError
from sim.options import settings
from sim.pool_sizing import engine_of, size_kv_pool
from sim.settings import FLAG_RANK, Given, resolve
from workloads.build import build_trace
from workloads.record import PS_PER_S, RequestRecord, Segment, Trace

STEP_PS = PS_PER_S // 1000
"""The constant step of these runs: a millisecond."""


class Variant(NamedTuple):
    """One allocator with the settings that only it has."""

    allocator: str
    reservation: str | None = None
    placement: str | None = None

    @property
    def label(self) -> str:
        return "-".join(part for part in self if part)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _choices(name: str) -> tuple[str, ...]:
    return next(setting.choices for setting in settings() if setting.name == name)


VARIANTS = [
    variant
    for name in ALLOCATORS
    for variant in (
        [Variant(name, *pair) for pair in product(_choices("reservation"), _choices("placement"))]
        if name == "contiguous"
        else [Variant(name)]
    )
]
"""Every registered allocator, the contiguous one in all its forms."""

PAGED, PREFIX = Variant("paged"), Variant("prefix")


def make_config(variant: Variant, **values: Any) -> RunConfig:
    """Answer the resolved configuration of *variant* with *values*, by the names of the flags."""
    values = {"trace": "in memory", "step_time": "constant:0.001", "max_num_seqs": 8} | values
    given = {
        name: Given(value, FLAG_RANK, f"--{name}")
        for name, value in (variant.settings | values).items()
    }
    return resolve(given).run


def make_trace(*requests: tuple[float, int | Sequence[Segment], int]) -> Trace:
    """Answer a trace of (arrival in seconds, prompt length or segments, output length)."""
    return build_trace(
        [
            RequestRecord(
                line=number,
                arrival_ps=round(arrival * PS_PER_S),
                num_prompt_tokens=(
                    prompt if isinstance(prompt, int) else sum(length for _, length in prompt)
                ),
                num_output_tokens=output,
                segments=None if isinstance(prompt, int) else prompt,
            )
            for number, (arrival, prompt, output) in enumerate(requests, 1)
        ],
        name="in memory",
        trace_format="none",
    )


def make_allocator(config: RunConfig) -> Allocator:
    """Answer the allocator of *config* on its own."""
    cache, scheduler = config.cache, config.scheduler
    assert config.model.max_model_len is not None
    pool = size_kv_pool(
        None,
        None,
        engine_of(config),
        block_size=cache.block_size,
        num_gpu_blocks_override=cache.num_gpu_blocks_override,
        max_model_len=config.model.max_model_len,
    )
    return ALLOCATORS[str(cache.allocator)](cache, scheduler, pool, config.model.max_model_len)


def smallest_pool(variant: Variant, block_size: int, max_model_len: int) -> int:
    """Answer the num_gpu_blocks (null block included) that just hold one longest request."""
    needed = -(-max_model_len // block_size)
    for num_gpu_blocks in range(needed + 1, 4 * needed + 3):
        try:
            make_allocator(
                make_config(
                    variant,
                    block_size=block_size,
                    max_model_len=max_model_len,
                    num_gpu_blocks_override=num_gpu_blocks,
                )
            )
        except CapacityError:
            continue
        return num_gpu_blocks
    raise AssertionError(f"{variant.label}: no pool of reasonable size holds a longest request")


@st.composite
def traces(
    draw: st.DrawFn, *, max_tokens: int = 80, unique: bool = False, sessions: bool = False
) -> Trace:
    """Answer a workload: shared, unique and repeated prompts, later turns, ties and gaps.

    With *sessions* some requests are turns of one of two.

    Some prompts are longer than a small max_model_len: those are to be refused.
    """
    prompts: list[list[Segment]] = []
    records = []
    for row in range(draw(st.integers(1, 12))):
        output = draw(st.integers(1, 40))
        kind = "new" if unique else draw(st.sampled_from(["new", "shared", "repeated", "turn"]))
        prompt: list[Segment] = [(f"u{row}", draw(st.integers(1, max_tokens)))]
        if kind == "shared":
            stem = draw(st.sampled_from(["system", "tools"]))
            prompt = [(stem, draw(st.integers(1, 40))), (f"u{row}", draw(st.integers(1, 20)))]
        elif kind == "repeated" and prompts:
            prompt = draw(st.sampled_from(prompts))
        elif kind == "turn" and prompts:
            turn = draw(st.integers(0, row - 1))
            reused: Segment = (f"out:r{turn}", draw(st.integers(1, 30)))
            prompt = [*prompts[turn], reused, (f"u{row}", draw(st.integers(1, 20)))]
        prompts.append(prompt)
        # Ties are on whole steps, the rest anywhere.
        at = draw(st.one_of(st.just(0), st.integers(0, 60).map(lambda n: n * STEP_PS)))
        at += draw(st.sampled_from([0, 0, 0, STEP_PS // 3]))
        length = sum(n for _, n in prompt)
        session = draw(st.sampled_from([None, "a", "b"])) if sessions else None
        think = draw(st.sampled_from([0, 0, STEP_PS, 5 * STEP_PS // 2, 90 * STEP_PS]))
        records.append(
            RequestRecord(row + 1, at, length, output, f"r{row}", prompt, session, think)
        )
    return build_trace(records, name="in memory", trace_format="none")


@st.composite
def scheduler_settings(draw: st.DrawFn, max_model_len: int) -> dict[str, Any]:
    """Answer how steps are put together."""
    max_num_seqs = draw(st.integers(1, 8))
    chunked = draw(st.booleans())
    least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    batching = draw(st.sampled_from(["continuous", "continuous", "static"]))
    return {
        "max_num_seqs": max_num_seqs,
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": least + draw(st.integers(0, 100)),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 7, 20])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3])),
        "async_scheduling": batching == "continuous" and draw(st.booleans()),
        "batching": batching,
    }


@st.composite
def configs(draw: st.DrawFn, variant: Variant) -> RunConfig:
    """Answer a configuration of *variant*; one pool in three just holds one longest request."""
    block_size = draw(st.integers(1, 32))
    max_model_len = draw(st.integers(4, 96))
    num_gpu_blocks = smallest_pool(variant, block_size, max_model_len)
    num_gpu_blocks += draw(st.one_of(st.just(0), st.integers(1, 8), st.integers(1, 300)))
    return make_config(
        variant,
        block_size=block_size,
        max_model_len=max_model_len,
        num_gpu_blocks_override=num_gpu_blocks,
        **draw(scheduler_settings(max_model_len)),
    )


def random_trace(seed: int, num_requests: int) -> Trace:
    """Answer chats of a few hundred tokens behind system prompts, without hypothesis."""
    random_ = random.Random(seed)
    return make_trace(
        *(
            (
                random_.randrange(200) / 1000,
                [(random_.choice(["s0", "s1"]), 48), (f"u{row}", random_.randint(1, 200))],
                random_.randint(1, 60),
            )
            for row in range(num_requests)
        )
    )
