"""Steps whose activation does not fit beside the KV cache: the risk of a high utilization.

vLLM leaves room for the activation of its profiling run. Room is short where the pool was given,
not sized, and where something that it does not subtract takes it: CUDA graphs before 0.21 live in
what ``--gpu-memory-utilization`` leaves out.
"""

from typing import NamedTuple

import numpy as np

from sim.columns import Columns
from sim.config import RunConfig
from sim.errors import ConfigError
from sim.hardware import get_gpu
from sim.kv_pool import KVPool
from sim.kv_spec import bytes_per_block, weight_bytes
from sim.memory import activation_bytes, graph_bytes, non_torch_bytes
from sim.models import model_of
from sim.pool_sizing import engine_of


class Overrun(NamedTuple):
    """Memory of the steps of a run, on one GPU.

    Attributes:
        room_bytes: what weights, memory outside torch, CUDA graphs and KV cache leave of the
            visible memory; negative if they do not fit themselves.
        max_activation_bytes: the most that a step needed; 0 without steps.
        num_steps: steps that needed more than there was room for.
        share: of all steps.
    """

    room_bytes: int
    max_activation_bytes: int
    num_steps: int
    share: float


class StepSizes:
    """Counts steps by the tokens and requests that were in them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, rows: Columns) -> None:
        """Note *rows* of steps (`sim.metrics.Recorder.step_chunks`)."""
        steps = rows["num_steps"].astype(np.int64)
        seqs = (rows["num_decodes"] + rows["num_prefills"]).astype(np.int64)
        tokens = rows["num_decodes"] + rows["num_late_decodes"] + rows["num_prefill_tokens"]
        busy = (steps > 0) & (seqs > 0)
        sizes = tokens.astype(np.int64)[busy] << 32 | seqs[busy]  # both at once
        found, places = np.unique(sizes, return_inverse=True)
        counts = np.bincount(places, steps[busy], len(found)).astype(np.int64)
        for size, count in zip(found.tolist(), counts.tolist(), strict=True):
            key = (size >> 32, size & 0xFFFFFFFF)
            self._counts[key] = self._counts.get(key, 0) + count

    def overrun(self, config: RunConfig, pool: KVPool) -> Overrun | None:
        """Answer what the steps needed; None for a model whose memory is not known.

        By the rule of the profiling run (`sim.memory.activation_bytes`), for each step's own tokens
        and requests.
        """
        model = model_of(config.model)
        gpu = get_gpu(config.model.gpu, config.model.gpu_memory_gib)
        engine, tp = engine_of(config), config.model.tensor_parallel_size
        try:
            kv_bytes = pool.num_gpu_blocks * bytes_per_block(
                model,
                pool.block_size,
                tensor_parallel_size=tp,
                kv_cache_dtype=config.cache.kv_cache_dtype,
            )
            taken = weight_bytes(model, tp) + non_torch_bytes(gpu, engine) + kv_bytes
            room = gpu.memory_visible_bytes - taken - graph_bytes(model, engine)
            needed = {
                (tokens, seqs): activation_bytes(
                    model, gpu, engine._replace(max_num_batched_tokens=tokens, max_num_seqs=seqs)
                )
                for tokens, seqs in self._counts
            }
        except ConfigError:
            return None
        num_steps = sum(self._counts[size] for size, num in needed.items() if num > room)
        total = sum(self._counts.values())
        return Overrun(room, max(needed.values(), default=0), num_steps, num_steps / (total or 1))
