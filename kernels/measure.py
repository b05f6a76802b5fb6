"""Measure the cases of a grid, one after the other, whatever becomes of one of them."""

import gc
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kernels.attention_calls import AttentionCalls, is_latent, tile_key
from kernels.calls import Calls, Skip
from kernels.clock import Timing, copy_bandwidth, time_calls
from kernels.grid import MAX_TOKENS, TRITON, Case
from kernels.journal import Journal, Record
from kernels.layer_calls import LayerCalls
from kernels.reference import LATENT_DIM
from kernels.session import first_use, said, smi, takes_fp8
from kernels.tiles import tiles
from sim.errors import ConfigError
from workloads.errors import plain

RESERVE_S = 5.0
"""Kept of a budget for the last case and for writing the table."""

MAX_ALIKE = 8
"""Calls that fail for one reason, before any succeeds, from which the machine is to blame."""

TUNED_CONTEXT, TUNED_BATCH = 8191, 64
"""The decode step for which tiles are timed."""


class _Maker(Protocol):
    def make(self, case: Case) -> Calls: ...

    def release(self) -> None: ...


class Progress(Protocol):
    """Told of every case."""

    def update(self, n: int) -> object:
        """Count *n* more."""


class Clock(NamedTuple):
    """Seconds since *started* (`time.monotonic`) that may be spent; None: as many as it takes."""

    started: float
    budget_s: float | None

    @property
    def is_over(self) -> bool:
        """Whether no case should begin."""
        if self.budget_s is None:
            return False
        return time.monotonic() - self.started > self.budget_s - min(RESERVE_S, self.budget_s / 4)


class Bench:
    """Measures cases and writes each to the journal."""

    def __init__(self, device: torch.device, journal: Journal, seed: int, clock: Clock) -> None:
        self._device, self._journal, self._clock = device, journal, clock
        self._is_gpu: bool = device.type == "cuda"
        self._attention = AttentionCalls(
            device, seed, MAX_TOKENS if device.type == "cuda" else 8192
        )
        self._layers = LayerCalls(device, seed)
        self._tuned: set[str] = set()
        self._deadly: set[tuple[str, tuple[int, int, int, int]]] = set()
        self._transfers: dict[int, dict[int, Timing] | Skip] = {}
        self.wrong: list[str] = []

    def run(self, cases: Sequence[Case], progress: Progress) -> None:
        """Measure what of *cases* the journal has not, until the budget is spent.

        Raises:
            FileError: the journal cannot be written.
            ConfigError: nothing was ever measured here, and the first calls fail for one reason.
        """
        gc.collect()
        gc.freeze()  # each capture collects garbage: what is there now need not be looked at
        done = self._known()
        if not any("copy_bytes_per_s" in record for record in self._journal.records):
            with first_use():
                bandwidth = copy_bandwidth(self._device, 2**30 if self._is_gpu else 2**24)
            clocks = smi(self._device, ("clocks.sm", "clocks.mem")) if self._is_gpu else {}
            self._journal.append({"copy_bytes_per_s": bandwidth, **clocks})
        alike = Counter[str]()
        has_measured = any("us" in record for record in self._journal.records)
        for case in cases:
            if case.key not in done:
                if self._clock.is_over:
                    return
                record = {"key": case.key, **self._measured(case)}
                if record not in self._journal.records:  # skipped before, for the same reason
                    self._journal.append(record)
                has_measured |= "us" in record
                alike[record.get("skip", "")] += record.get("failed", False)
                if not has_measured and max(alike.values()) >= MAX_ALIKE:
                    raise ConfigError(
                        f"the first {MAX_ALIKE} calls fail alike, {plain(record['skip'])}: "
                        "expected a machine on which kernels run; the same command again tries them"
                    )
            progress.update(1)

    def _known(self) -> set[str]:
        """Answer the keys of cases that need no measuring, and take over the tiles found."""
        done = set()
        for record in self._journal.records:
            if "tile" in record:
                m, n, warps, stages = record["tile"]
                if record.get("stopped_gpu"):
                    self._deadly.add((record["for"], (m, n, warps, stages)))
                    continue
                self._attention.tiles[record["for"]] = (m, n, warps, stages)
                self._tuned.add(record["for"])
            elif "key" in record and not record.get("again"):
                done.add(record["key"])
        return done

    def _measured(self, case: Case) -> dict[str, Any]:
        """Answer what is written of *case*: its time, or why it has none.

        ``again``: another time there may be room, a package or a compiler; the next run looks.
        Final are times, wrong results and what stopped the GPU. ``failed``: by an exception.
        """
        for attempt in range(2):
            try:
                return self._attempt(case)
            except Skip as skip:
                return {"row": case.row(), "skip": str(skip), "again": True}
            except (torch.OutOfMemoryError, MemoryError):
                problem = "out of memory"
                self._release()
                if attempt:
                    return {"row": case.row(), "skip": problem, "again": True}
            except DeadGpuError:  # by a tile, which is written: *case* is innocent
                raise
            except Exception as error:  # one kernel's failure is not the end
                record = {"key": case.key, "row": case.row(), "skip": said(error)}
                self._refuse_dead_gpu(record, case.key, error)
                return {"row": case.row(), "skip": said(error), "again": True, "failed": True}
        raise AssertionError("two attempts answer")

    def _attempt(self, case: Case) -> dict[str, Any]:
        """Answer the time of *case*; raise whatever happens."""
        if case.kv_dtype == "fp8" and not takes_fp8(self._device):
            raise Skip("no fp8 kernels for this GPU")
        if case.op == "all_reduce":
            return self._all_reduce(case)
        self._tune(case)
        maker: _Maker = self._attention if case.op.endswith("_attention") else self._layers
        calls = maker.make(case)
        error = calls.error()
        if not error <= calls.tolerance:
            self.wrong.append(case.key)
            return {"row": case.row(), "skip": f"wrong: relative error {error:.2g}"}
        timing = time_calls(calls.calls, self._device, 0.1 if self._is_gpu else 0.005)
        return {"row": case.row(), **timing._asdict(), "error": error, "cold": calls.cold}

    def _all_reduce(self, case: Case) -> dict[str, Any]:
        """Answer a time of all that are measured at once, by processes of their own."""
        if case.num_gpus not in self._transfers:
            from kernels.collectives import all_reduce_times  # noqa: PLC0415  # with several GPUs

            self._release()  # each rank needs memory
            found: dict[int, Timing] | Skip
            try:
                found = all_reduce_times(case.num_gpus, self._device.type)
            except RuntimeError as error:
                found = Skip(str(error))
            self._transfers[case.num_gpus] = found
        found = self._transfers[case.num_gpus]
        if isinstance(found, Skip):
            raise found
        timing = found[case.message_bytes]
        return {"row": case.row(), **timing._asdict(), "cold": False}

    def _release(self) -> None:
        self._attention.release()
        self._layers.release()
        gc.collect()
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _refuse_dead_gpu(self, record: Record, what: str, error: Exception) -> None:
        """Raise if the GPU answers no more, which an illegal access does to a whole process.

        Before, *record* is written, so that the next run leaves out *what* did it.
        """
        if not self._is_gpu:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            self._journal.append(record)
            raise DeadGpuError(
                f"the GPU stopped working in {what}: {said(error)}; the same command again "
                "goes on without it"
            ) from None

    def _tune(self, case: Case) -> None:
        """Time tiles for the decodes of heads like those of *case*, once; keep the best."""
        if case.op != "decode_attention" or not case.kernel.startswith(TRITON):
            return
        name = tile_key(case)
        if name in self._tuned or not self._is_gpu:
            return
        self._tuned.add(name)
        model = case._replace(block_size=16, batch=TUNED_BATCH, context=TUNED_CONTEXT)
        width = LATENT_DIM if is_latent(case) else case.head_dim
        kv_bytes = self._attention.pool(case).key.element_size()
        times: dict[tuple[int, int, int, int], float] = {}
        for tile in tiles(case.num_heads // case.num_kv_heads, width, kv_bytes):
            cut = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages)
            if (name, cut) in self._deadly:
                continue
            self._attention.tiles[name] = cut
            try:
                calls = self._attention.make(model)
                if calls.error() <= calls.tolerance:
                    times[cut] = time_calls(calls.calls, self._device, 0.02).us
            except (torch.OutOfMemoryError, Skip):
                break
            except Exception as error:  # a tile too large for the GPU
                record = {"tile": list(cut), "for": name, "stopped_gpu": True}
                self._refuse_dead_gpu(record, f"tile {cut} for {name}", error)
            finally:
                self._attention.tiles.pop(name)
        if times:
            best = min(times, key=lambda tile: times[tile])
            self._attention.tiles[name] = best
            tried = {str(list(tile)): us for tile, us in times.items()}
            self._journal.append({"tile": list(best), "for": name, "tried_us": tried})


class DeadGpuError(RuntimeError):
    """The GPU has to be opened anew."""
