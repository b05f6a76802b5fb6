"""The check list, in the order in which a server is gone through."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sim.health import load_checks, memory_checks, prefix_checks
from sim.health.facts import SEVERITIES, Facts, Finding, Severity


class Check(NamedTuple):
    """A question to a server.

    Attributes:
        question: what it asks, for the report.
        find: answers what is wrong, or None.
        needs: fields of `Facts`, of each group one of which has to be known for None to mean that
            nothing is wrong.
        sharing: it asks nothing of a server without prefix caching. blocks: nor of one that has no
            blocks.
    """

    question: str
    find: Callable[[Facts], Finding | None]
    needs: tuple[tuple[str, ...], ...] = ()
    sharing: bool = False
    blocks: bool = False


CHECKS: dict[str, Check] = {
    "starts": Check("it starts", memory_checks.starts, (("refusals", "series"),)),
    "margin": Check(
        "room for activation peaks",
        memory_checks.margin,
        (("room_gib", "steps_overrun", "started_with"),),
    ),
    "graphs": Check("CUDA graphs against the pool", memory_checks.graphs, (("graph_gib",),)),
    "profile": Check(
        "profiled step against the pool", memory_checks.profile, (("activation_gib",),)
    ),
    "few_fit": Check("several longest requests fit", load_checks.few_fit, (("concurrency",),)),
    "lengths": Check(
        "max_model_len against the lengths", load_checks.lengths, (("longest",), ("max_model_len",))
    ),
    "budget": Check("pool near its budget, not over it", load_checks.budget, (("series",),)),
    "preemptions": Check("no preemption storm", load_checks.preemptions, (("num_preemptions",),)),
    "seats": Check("max_num_seqs does not bind before memory", load_checks.seats, (("series",),)),
    "caching_on": Check(
        "prefix caching is on", prefix_checks.caching_on, (("enable_prefix_caching",),)
    ),
    "hit_rate": Check(
        "hit rate against what the load allows",
        prefix_checks.hit_rate,
        (("hit_rate",), ("possible_hit_rate",)),
        sharing=True,
    ),
    "hit_rate_kept": Check(
        "hit rate is kept",
        prefix_checks.hit_rate_kept,
        (("hit_series", "possible_series"),),
        sharing=True,
    ),
    "identical": Check("equal text begins alike", prefix_checks.identical, (("num_compared",),)),
    "block_and_prefix": Check(
        "blocks against shared prefixes",
        prefix_checks.block_and_prefix,
        (("block_size",), ("shared_prefixes",)),
        sharing=True,
        blocks=True,
    ),
    "tails": Check(
        "blocks against lengths",
        load_checks.tails,
        (("block_size",), ("mean_len",)),
        blocks=True,
    ),
    "kernel_blocks": Check(
        "blocks that kernels take",
        load_checks.kernel_blocks,
        (("kernel_block_size",),),
        blocks=True,
    ),
    "hybrid_blocks": Check(
        "blocks of hybrid layers", memory_checks.hybrid_blocks, (("num_tables", "padding"),)
    ),
    "layers_whole": Check("windows are used", memory_checks.layers_whole),
    "heavy_token": Check("bytes a token", memory_checks.heavy_token, (("bytes_per_token",),)),
    "workers": Check("the worker that binds", memory_checks.workers),
    "tokens_shown": Check("tokens as printed", memory_checks.tokens_shown),
    "suggestion": Check("the advised size of the pool", memory_checks.suggestion),
    "free_share": Check("pool by need", memory_checks.free_share),
}
"""Every check by name. A check without needs asks what only some sources tell."""


class Report(msgspec.Struct, kw_only=True):
    """What the check list says of one server.

    Attributes:
        findings: the gravest first. passed: checks that found nothing. unknown: checks that lack
            facts, each with the fields.
    """

    name: str
    source: str
    findings: list[Finding]
    passed: list[str]
    unknown: dict[str, list[str]]

    @property
    def worst(self) -> Severity | None:
        """The severity of the gravest finding."""
        return self.findings[0].severity if self.findings else None


def go_through(facts: Facts) -> Report:
    """Answer what every check says of *facts*."""
    report = Report(name=facts.name, source=facts.source, findings=[], passed=[], unknown={})
    for name, check in CHECKS.items():
        if check.sharing and facts.enable_prefix_caching is False:
            continue
        if check.blocks and not facts.is_paged:
            continue
        finding = check.find(facts)
        missing = _missing(facts, check)
        if finding is not None:
            report.findings.append(finding)
        elif missing:
            report.unknown[name] = missing
        elif check.needs:
            report.passed.append(name)
    report.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return report


def _missing(facts: Facts, check: Check) -> list[str]:
    """Answer of each group of needs the first field, where none of the group is known."""
    return [group[0] for group in check.needs if not any(_is_known(facts, name) for name in group)]


def _is_known(facts: Facts, name: str) -> bool:
    value = getattr(facts, name)
    return bool(value) if name.endswith("series") else value is not None
