"""A sample as the families of the Prometheus client library."""

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

ENGINE = "0"
"""Its label: vLLM counts engines from 0, and a run has one."""


_INFOS = {
    "vllm:cache_config_info": "Configuration of the KV cache.",
    "kvsim:run_info": "What is simulated.",
}
"""Help of the metrics that are always 1."""


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

    def show(self, sample: Sample) -> Iterator[Metric]:
        """Answer *sample*, family by family."""
        for scalar in SCALARS:
            yield self._scalar(scalar, sample)
        for name, upper in bounds(self.max_model_len).items():
            yield self._histogram(name, upper, sample)
        for name, labels in zip(_INFOS, (self.cache_config, self.run_info), strict=True):
            yield self._info(name, labels)

    def _scalar(self, scalar: Scalar, sample: Sample) -> Metric:
        kind = CounterMetricFamily if scalar.kind == "counter" else GaugeMetricFamily
        labels = ["model_name", "engine", *([scalar.label] if scalar.label else [])]
        family = kind(scalar.name, scalar.doc, labels=labels)
        for which, value in scalar.values(sample).items():
            family.add_metric([self.model_name, ENGINE, *([which] if scalar.label else [])], value)
        return family

    def _histogram(self, name: str, upper: Sequence[float], sample: Sample) -> Metric:
        family = HistogramMetricFamily(name, HISTOGRAMS[name][0], labels=["model_name", "engine"])
        counts, total = sample.histograms[name]
        shown = [*map(floatToGoString, upper), "+Inf"]
        buckets = list(zip(shown, counts.cumsum().tolist(), strict=True))
        family.add_metric([self.model_name, ENGINE], buckets, total)
        return family

    def _info(self, name: str, labels: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(name, _INFOS[name], labels=["engine", *labels])
        family.add_metric([ENGINE, *labels.values()], 1)
        return family


def described() -> Iterator[Metric]:
    """Answer the families that are shown of any run, without values."""
    for scalar in SCALARS:
        yield Metric(scalar.name, scalar.doc, scalar.kind)
    for name, (doc, _) in HISTOGRAMS.items():
        yield Metric(name, doc, "histogram")
    for name, doc in _INFOS.items():
        yield Metric(name, doc, "gauge")
