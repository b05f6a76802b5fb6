"""Samples as the families of the Prometheus client library."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from sim.simulation import RunResult
from sim.watch.names import HISTOGRAMS, SCALARS, Scalar, bounds
from sim.watch.observer import Sample

Timed = Sequence[tuple[float | None, Sample]]
"""Samples and their Unix times, None for now; one at least, in order."""

ENGINE = "0"
"""Its label: vLLM counts engines from 0, and a run has one."""


class Families(NamedTuple):
    """What is shown of one run.

    Attributes:
        model_name: label of every metric.
        cache_config, run_info: labels of the two metrics that are always 1.
        max_model_len: the last bound of some histograms.
    """

    model_name: str
    cache_config: dict[str, str]
    run_info: dict[str, str]
    max_model_len: int

    @classmethod
    def of(cls, result: RunResult) -> "Families":
        """Answer them for the run that *result* will be of."""
        config, pool = result.config, result.pool
        cache = {
            "block_size": config.cache.block_size,
            "num_gpu_blocks": pool.num_gpu_blocks,
            "cache_dtype": config.cache.kv_cache_dtype,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "gpu_memory_utilization": config.cache.gpu_memory_utilization,
        }
        times = dict.fromkeys(source.provenance for source in result.step_time.sources)
        return cls(
            config.model.model,
            {name: str(value) for name, value in cache.items()},
            {"allocator": config.label, "gpu": config.model.gpu, "timing": ", ".join(times)},
            config.model.max_model_len or 0,
        )

    def show(self, samples: Timed) -> Iterator[Metric]:
        """Answer *samples*, family by family."""
        for scalar in SCALARS:
            yield self._scalar(scalar, samples)
        for name, upper in bounds(self.max_model_len).items():
            yield self._histogram(name, upper, samples)
        yield self._info(
            "vllm:cache_config_info", "Configuration of the KV cache.", self.cache_config, samples
        )
        yield self._info("kvsim:run_info", "What is simulated.", self.run_info, samples)

    def _scalar(self, scalar: Scalar, samples: Timed) -> Metric:
        kind = CounterMetricFamily if scalar.kind == "counter" else GaugeMetricFamily
        labels = ["model_name", "engine", *([scalar.label] if scalar.label else [])]
        family = kind(scalar.name, scalar.doc, labels=labels)
        values = [scalar.values(sample) for _, sample in samples]
        for which in values[0]:
            own = [self.model_name, ENGINE, *([which] if scalar.label else [])]
            for (time, _), value in zip(samples, values, strict=True):
                family.add_metric(own, value[which], timestamp=time)
        return family

    def _histogram(self, name: str, upper: Sequence[float], samples: Timed) -> Metric:
        doc = HISTOGRAMS[name][0]
        family = HistogramMetricFamily(name, doc, labels=["model_name", "engine"])
        shown = [*map(floatToGoString, upper), "+Inf"]
        for time, sample in samples:
            counts, total = sample.histograms[name]
            buckets = list(zip(shown, counts.cumsum().tolist(), strict=True))
            family.add_metric([self.model_name, ENGINE], buckets, total, timestamp=time)
        return family

    def _info(self, name: str, doc: str, labels: dict[str, str], samples: Timed) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=["engine", *labels])
        for time, _ in samples:
            family.add_metric([ENGINE, *labels.values()], 1, timestamp=time)
        return family
