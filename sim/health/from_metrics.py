"""Facts of a vLLM server's ``/metrics``: one scrape, or a series with timestamps (OpenMetrics).

Names and units are vLLM 0.33.0's (``v1/metrics/loggers.py``): usage is a share of 1, look-ups are
tokens, counters count since the server started.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sim.errors import FileError
from sim.files import read_small, reason
from sim.health.facts import Facts, Point
from workloads.errors import plain, quote

MAX_BYTES = 1 << 26
"""Of a file: a scrape has 100 KB, an hour of OpenMetrics a few MB."""

MAX_COUNT = 2**31
"""Tokens of a block, and blocks: as a setting may be."""

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
REQUIRED = (RUNNING, WAITING, USAGE)
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
SUCCESS = "vllm:request_success_total"
LENGTHS = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
CONFIG = "vllm:cache_config_info"
_USED = (*REQUIRED, QUERIES, HITS, PREEMPTIONS, SUCCESS, *LENGTHS)
OLD = {
    "vllm:gpu_cache_usage_perc": USAGE,
    "vllm:gpu_prefix_cache_queries_total": QUERIES,
    "vllm:gpu_prefix_cache_hits_total": HITS,
}
"""Names that vLLM had until 0.9, of the same meaning."""

ENGINES = ("sglang", "trtllm", "nv_trt_llm", "lmdeploy", "tgi")
"""What the metrics of other engines start with."""

Labels = frozenset[tuple[str, str]]
"""Names and values: of a sample, or those by which an engine is told from others."""


class _Scrape:
    """The samples of one engine."""

    def __init__(self) -> None:
        self.values: dict[str, dict[float, float]] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.buckets: dict[str, dict[float, dict[float, float]]] = {}

    def add(self, name: str, labels: dict[str, str], time: float, value: float) -> None:
        """Take in a sample; of those that differ in other labels than the engine's, the sum."""
        times = self.values.setdefault(name, {})
        times[time] = times.get(time, 0.0) + value
        self.labels[name] = labels
        bound = _number(labels.get("le"))
        if bound is not None:
            held = self.buckets.setdefault(name, {}).setdefault(time, {})
            held[bound] = held.get(bound, 0.0) + value

    def last_buckets(self, name: str) -> dict[float, float]:
        """Answer the latest counts of the histogram *name* by the upper bound."""
        times = self.buckets.get(f"{name}_bucket")
        return times[max(times)] if times else {}

    def last(self, name: str) -> float | None:
        """Answer the latest value of *name*."""
        times = self.values.get(name)
        return times[max(times)] if times else None

    def label(self, name: str, key: str) -> str | None:
        """Answer the label *key* of *name*, as the last sample has it."""
        found = self.labels.get(name, {}).get(key)
        return None if found in {"", "None"} else found


def _number(text: str | None) -> float | None:
    """Answer the number that a label is, None if it is none or NaN."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return None if math.isnan(number) else number


def facts_of_metrics(path: Path) -> list[Facts]:
    """Answer the facts of every engine in the metrics text at *path*.

    Raises:
        FileError: it cannot be read, is no metrics text, of another engine, or lacks what every
            vLLM server exposes.
    """
    shown = f"--metrics {plain(str(path))}"
    try:
        data = read_small(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise FileError(f"{shown} cannot be read: {reason(error)}; {_EXPECTED}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{shown}: byte {error.start} is no text; {_EXPECTED}") from None
    if not text.strip():
        raise FileError(f"{shown} is empty; {_EXPECTED}")
    # Times are in milliseconds in Prometheus' text, which the parser divides, in seconds here.
    unit = 1000.0 if text.rstrip().endswith("# EOF") else 1.0
    scrapes = _scrapes(_families(text, shown), unit, shown)
    common = frozenset.intersection(*scrapes)
    file = plain(str(path))
    reports = []
    for whose, scrape in scrapes.items():
        own = [f"{name} {plain(value)}" for name, value in sorted(whose - common)]
        reports.append(_facts(scrape, ", ".join([file, *own])))
    return reports


_EXPECTED = "expected the text of a vLLM server's /metrics"


def _families(text: str, shown: str) -> Iterator[Metric]:
    """Yield what the text has."""
    try:
        # Of OpenMetrics too: the library's parser of that (0.23 to 0.26) takes a histogram with
        # several times for one that lacks buckets.
        yield from text_string_to_metric_families(text)
    # The parser raises whatever its string handling does on lines that are none.
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError) as error:
        why = quote(" ".join(str(error).split()))
        raise FileError(f"{shown}: no metrics text: {why}; {_EXPECTED}") from None


def _scrapes(families: Iterable[Metric], unit: float, shown: str) -> dict[Labels, _Scrape]:
    """Answer the samples of each engine; *unit* is seconds in what the parser calls one."""
    samples: dict[tuple[str, float, Labels], float] = {}
    old_names: dict[tuple[str, float, Labels], float] = {}  # 0.9 and 0.10 have both
    others: set[str] = set()
    for family in families:
        for sample in family.samples:
            if not sample.name.startswith("vllm:"):
                others.add(sample.name.partition(":")[0].partition("_")[0])
                continue
            time = 0.0 if sample.timestamp is None else unit * float(sample.timestamp)
            name = OLD.get(sample.name, sample.name)
            if name.startswith(_USED) and not 0 <= sample.value < math.inf:
                raise FileError(
                    f"{shown}: {plain(name)} {sample.value:g}: expected a finite number from 0"
                )
            key = (name, time, frozenset(sample.labels.items()))
            kept = samples if name == sample.name else old_names
            if name.startswith(_USED) and key in kept:
                raise FileError(
                    f"{shown}: {plain(name)} stands there twice with the same labels and time: "
                    "expected one scrape, or times beside the samples of several"
                )
            kept[key] = float(sample.value)
    return _by_engine(old_names | samples, others, shown)


def _by_engine(
    samples: dict[tuple[str, float, Labels], float], others: set[str], shown: str
) -> dict[Labels, _Scrape]:
    """Answer *samples* by engine: whatever labels the gauges have tell one from another.

    Of a server these are model and engine; of a federation instance or pod, too. A family may lack
    some (cache_config_info has no model): what it says is of every engine that it does not
    contradict. Labels that only it has (a reason, a bound) are its own.
    """
    if not samples:
        engine = next((name for name in ENGINES if name.partition("_")[0] in others), None)
        what = f"of {engine}" if engine else "without a family that starts with vllm:"
        raise FileError(f"{shown}: metrics {what}; {_EXPECTED}")
    gauges = dict.fromkeys(labels for name, _, labels in samples if name in REQUIRED)
    most = max(map(len, gauges), default=0)
    engines = {labels: _Scrape() for labels in gauges if len(labels) == most} or {
        frozenset(): _Scrape()
    }
    told = {name for labels in engines for name, _ in labels}
    owners: dict[Labels, list[_Scrape]] = {}
    for (name, time, labels), value in samples.items():
        own = frozenset(label for label in labels if label[0] in told)
        if own not in owners:
            owners[own] = [engines[own]] if own in engines else _not_contradicted(own, engines)
        for scrape in owners[own]:
            scrape.add(name, dict(labels), time, value)
    _check(engines.values(), shown)
    return engines


def _not_contradicted(labels: Labels, engines: dict[Labels, _Scrape]) -> list[_Scrape]:
    said = dict(labels)
    return [
        scrape
        for whose, scrape in engines.items()
        if all(said.get(name, value) == value for name, value in whose)
    ]


def _check(scrapes: Iterable[_Scrape], shown: str) -> None:
    """Refuse what is not whole."""
    for scrape in scrapes:
        missing = [name for name in REQUIRED if name not in scrape.values]
        if missing:
            raise FileError(
                f"{shown}: {', '.join(missing)} missing; expected them, as vLLM 0.33 exposes them"
            )
        most = max(scrape.values[USAGE].values())
        if not most <= 1:
            raise FileError(
                f"{shown}: {USAGE} {most:g}: expected a share from 0 to 1, not per cent"
            )


def _facts(scrape: _Scrape, name: str) -> Facts:
    facts = Facts(source="metrics", name=name)
    size = _number(scrape.label(CONFIG, "block_size"))
    facts.block_size = int(size) if size is not None and 1 <= size < MAX_COUNT else None
    share = _number(scrape.label(CONFIG, "gpu_memory_utilization"))
    facts.gpu_memory_utilization = share if share is not None and 0 < share <= 1 else None
    caching = scrape.label(CONFIG, "enable_prefix_caching")
    facts.enable_prefix_caching = None if caching is None else caching == "True"
    blocks = _number(scrape.label(CONFIG, "num_gpu_blocks"))
    if blocks is not None and 0 <= blocks < MAX_COUNT and facts.block_size is not None:
        facts.kv_tokens = int(blocks) * facts.block_size
    for setting in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        fixed = _number(scrape.label(CONFIG, setting))
        if fixed is not None and 0 < fixed < math.inf:
            setattr(facts, setting, int(fixed))
            facts.is_sized = False
    facts.queries, facts.hits = scrape.last(QUERIES), scrape.last(HITS)
    if facts.queries and facts.hits is not None:
        facts.hit_rate = facts.hits / facts.queries
        facts.places["hit_rate"] = f"{facts.hits:,.0f} of {facts.queries:,.0f} tokens since start"
    preempted, done = scrape.last(PREEMPTIONS), scrape.last(SUCCESS)
    facts.num_preemptions = None if preempted is None else int(preempted)
    facts.num_requests = None if done is None else int(done)
    facts.places["num_preemptions"] = "since start"
    _lengths(facts, scrape)
    facts.series = list(_series(scrape))
    return facts


def _lengths(facts: Facts, scrape: _Scrape) -> None:
    """Fill in lengths from histograms: means, and the bound of the highest bucket that is used."""
    means, longest = 0.0, 0.0
    for name in LENGTHS:
        count, total = scrape.last(f"{name}_count"), scrape.last(f"{name}_sum")
        if not count or total is None:
            return
        means += total / count
        used = [bound for bound, held in scrape.last_buckets(name).items() if held >= count]
        longest += min(used, default=math.inf)
    facts.mean_len = means
    if math.isfinite(longest):
        facts.longest = int(longest)
        facts.places["longest"] = "upper bounds of the buckets"


def _series(scrape: _Scrape) -> Iterator[Point]:
    """Answer a point a time; counters become what was added since the time before."""
    before: dict[str, float] = {}
    times = sorted(scrape.values[USAGE])

    def at(name: str, time: float) -> float | None:
        return scrape.values.get(name, {}).get(time)

    for time in times:
        now = {name: at(name, time) for name in (QUERIES, HITS, PREEMPTIONS)}
        added = {
            name: max(0.0, value - before[name])  # a server that starts anew counts from 0
            for name, value in now.items()
            if value is not None and name in before
        }
        before |= {name: value for name, value in now.items() if value is not None}
        queries = added.get(QUERIES, 0.0)
        yield Point(
            f"{time - times[0]:,.1f} s" if len(times) > 1 else "in this scrape",
            at(RUNNING, time),
            at(WAITING, time),
            at(USAGE, time),
            added.get(HITS, 0.0) / queries if queries > 0 else None,
            queries,
            added.get(PREEMPTIONS),
        )
