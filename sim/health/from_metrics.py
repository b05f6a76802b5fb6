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

Whose = tuple[str, str]
"""Model and engine, as labels name them."""


class _Scrape:
    """The samples of one engine."""

    def __init__(self) -> None:
        self.values: dict[str, dict[float, float]] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.buckets: dict[str, dict[float, float]] = {}

    def add(self, name: str, labels: dict[str, str], time: float, value: float) -> None:
        """Take in a sample; of those that differ in other labels than the engine's, the sum."""
        times = self.values.setdefault(name, {})
        times[time] = times.get(time, 0.0) + value
        self.labels[name] = labels
        bound = _number(labels.get("le"))
        if bound is not None:
            self.buckets.setdefault(name, {})[bound] = value

    def last(self, name: str) -> float | None:
        """Answer the latest value of *name*."""
        times = self.values.get(name)
        return times[max(times)] if times else None

    def label(self, name: str, key: str) -> str | None:
        """Answer the label *key* of *name*, as the last sample has it."""
        found = self.labels.get(name, {}).get(key)
        return None if found in {"", "None"} else found

    def take_over(self, other: "_Scrape") -> None:
        """Take what *other* has and this one has not."""
        self.values = other.values | self.values
        self.labels = other.labels | self.labels
        self.buckets = other.buckets | self.buckets


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
    name = plain(str(path))
    return [_facts(scrape, _named(name, whose, len(scrapes))) for whose, scrape in scrapes.items()]


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


def _scrapes(families: Iterable[Metric], unit: float, shown: str) -> dict[Whose, _Scrape]:
    """Answer the samples of each engine; *unit* is seconds in what the parser calls one."""
    scrapes: dict[Whose, _Scrape] = {}
    others: set[str] = set()
    for family in families:
        for sample in family.samples:
            if not sample.name.startswith("vllm:"):
                others.add(sample.name.partition(":")[0].partition("_")[0])
                continue
            whose = (sample.labels.get("model_name", ""), sample.labels.get("engine", ""))
            scrape = scrapes.setdefault(whose, _Scrape())
            time = 0.0 if sample.timestamp is None else unit * float(sample.timestamp)
            name = OLD.get(sample.name, sample.name)
            if name.startswith(_USED) and not 0 <= sample.value < math.inf:
                raise FileError(
                    f"{shown}: {plain(name)} {sample.value:g}: expected a finite number from 0"
                )
            scrape.add(name, sample.labels, time, float(sample.value))
    # cache_config_info has no model: what it says is of the engine of that number, or of all.
    for whose in [each for each in scrapes if not each[0]]:
        owners = [each for each in scrapes if each[0] and whose[1] in {"", each[1]}]
        for owner in owners:
            scrapes[owner].take_over(scrapes[whose])
        if owners:
            del scrapes[whose]
    _check(scrapes, others, shown)
    return scrapes


def _check(scrapes: dict[Whose, _Scrape], others: set[str], shown: str) -> None:
    """Refuse what is not of vLLM, or not whole."""
    if not scrapes:
        engine = next((name for name in ENGINES if name.partition("_")[0] in others), None)
        what = f"of {engine}" if engine else "without a family that starts with vllm:"
        raise FileError(f"{shown}: metrics {what}; {_EXPECTED}")
    for scrape in scrapes.values():
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


def _named(shown: str, whose: Whose, count: int) -> str:
    if count == 1:
        return shown
    return f"{shown}, {whose[0] or 'no model'} engine {whose[1] or '-'}"


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
        buckets = scrape.buckets.get(f"{name}_bucket", {})
        used = [bound for bound, held in buckets.items() if held >= count]
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
            f"{time - times[0]:,.1f} s",
            at(RUNNING, time),
            at(WAITING, time),
            at(USAGE, time),
            added.get(HITS, 0.0) / queries if queries > 0 else None,
            queries,
            added.get(PREEMPTIONS),
        )
