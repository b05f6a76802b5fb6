"""Assemble one run from its configuration: pool, allocator, scheduler, step time, engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

import msgspec

from sim.allocators import ALLOCATORS
from sim.allocators.base import Allocator, HasBlockTables
from sim.clients import make_clients
from sim.config import RunConfig
from sim.engine import Camera, Engine
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.kv_pool import KVPool
from sim.kv_spec import check_tensor_parallel
from sim.metrics import Recorder
from sim.models import model_of
from sim.pool_sizing import pool_of
from sim.scheduler import Scheduler
from sim.scheduler_output import SchedulerOutput
from sim.static_batching import StaticScheduler
from sim.timing import CONTIGUOUS, Deployment, make_step_time
from sim.timing.base import StepTimeModel
from workloads.collector import few_collections
from workloads.errors import did_you_mean
from workloads.record import Trace


@dataclass(frozen=True, slots=True)
class RunResult:
    """One finished run: what went in, and what was recorded."""

    config: RunConfig
    trace: Trace
    pool: KVPool
    step_time: StepTimeModel
    recorder: Recorder


class Simulation:
    """One configuration on one trace, checked and ready: refusals come here, not in mid-run.

    Args:
        config: as `sim.settings.resolve` answers it.
        trace: what arrives.
        save_steps: record every step and who was scheduled.
        single_step: decide every step by itself, never a run of steps: slower, equal results.
        save_block_tables: `run` will be given a file for the block ids of every step.

    Raises:
        ConfigError: unknown allocator, model, GPU or step time; a model that the GPUs cannot share;
            a step time that does not know the setting; a pool too small for one request of
            max_model_len; *save_block_tables* for an allocator that has none.
    """

    def __init__(
        self,
        config: RunConfig,
        trace: Trace,
        *,
        save_steps: bool = False,
        single_step: bool = False,
        save_block_tables: bool = False,
    ) -> None:
        model, cache, scheduler = config.model, config.cache, config.scheduler
        if cache.allocator not in ALLOCATORS:
            raise ConfigError(
                f"--allocator {cache.allocator!r} is unknown; "
                f"{did_you_mean(str(cache.allocator), ALLOCATORS)}"
            )
        assert model.max_model_len is not None, "resolved"
        assert scheduler.max_num_seqs is not None, "resolved"
        model_spec = model_of(model)
        gpu_spec = get_gpu(model.gpu, model.gpu_memory_gib)
        check_tensor_parallel(
            model_spec,
            model.tensor_parallel_size,
            enable_expert_parallel=model.enable_expert_parallel,
        )
        pool = pool_of(config, model_spec, gpu_spec)
        self.allocator: Allocator = ALLOCATORS[cache.allocator](
            cache, scheduler, pool, model.max_model_len
        )
        if save_block_tables and not isinstance(self.allocator, HasBlockTables):
            raise ConfigError(
                f"--save-block-tables: the {config.label} allocator has no blocks; "
                "expected --allocator paged or prefix"
            )
        deployment = Deployment(
            model_spec,
            gpu_spec,
            tensor_parallel_size=model.tensor_parallel_size,
            enable_expert_parallel=model.enable_expert_parallel,
            kv_cache_dtype=cache.kv_cache_dtype,
            block_size=CONTIGUOUS if cache.allocator == "contiguous" else cache.block_size,
            max_num_seqs=scheduler.max_num_seqs,
        )
        step_time = make_step_time(config.timing, deployment)
        self.clients = make_clients(config.load, trace, model.max_model_len)
        recorder = Recorder(
            trace,
            cache.block_size,
            self.allocator.stats().capacity,
            save_steps=save_steps,
            async_scheduling=scheduler.async_scheduling,
            arrival_ps=self.clients.arrival_ps,
        )
        kind = StaticScheduler if scheduler.batching == "static" else Scheduler
        self.scheduler = kind(scheduler, model.max_model_len, self.allocator)
        self._save_steps = save_steps
        # Block tables are those of each step, which a run of steps would hide.
        self._single_step = single_step or save_block_tables
        self.result = RunResult(config, trace, pool, step_time, recorder)

    def run(
        self,
        on_step: Callable[[], None] | None = None,
        block_tables: TextIO | None = None,
        camera: Camera | None = None,
    ) -> RunResult:
        """Replay the whole trace.

        *on_step* is called after every step or run of steps. *block_tables* receives a JSON line a
        step with the block ids of every scheduled request. *camera* looks on.
        """

        def write_block_tables(output: SchedulerOutput) -> None:
            assert block_tables is not None
            assert isinstance(self.allocator, HasBlockTables)
            tables = {
                request.request_id: self.allocator.block_table(request)
                for request, _ in self.scheduler.scheduled(output)
            }
            line = {"step": self.result.recorder.num_steps, "blocks": tables}
            block_tables.write(msgspec.json.encode(line).decode() + "\n")

        engine = Engine(
            clients=self.clients,
            scheduler=self.scheduler,
            allocator=self.allocator,
            step_time=self.result.step_time,
            recorder=self.result.recorder,
            single_step=self._single_step,
            save_names=self._save_steps,
            on_scheduled=write_block_tables if block_tables else None,
            on_step=on_step,
            camera=camera,
        )
        with few_collections():
            engine.run()
        return self.result
