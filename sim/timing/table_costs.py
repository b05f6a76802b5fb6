"""Kernels but attention, priced by the rows of a timing table: linear between measured sizes."""

from collections.abc import Sequence

import numpy as np

from sim.timing.attention import Cost
from sim.timing.base import PS_PER_US
from sim.timing.curves import Bracket, Curve, bracket
from sim.timing.layers import ExpertShape
from sim.timing.table import OPERATIONS, TimingTable


def chosen(rows: TimingTable) -> TimingTable:
    """Answer the rows of what prices one operation, of one identity but for the kernel.

    Kernels that have no size in common are what a library chose by size: all of them. Where there
    are two for one size, the one kernel with most rows.
    """
    if len(rows):
        sizes = OPERATIONS[rows.columns["op"][0]].sizes
        if len(rows.distinct(*sizes)) < len(rows):
            kernels = rows.columns["kernel"].tolist()
            rows = rows.where(kernel=max(sorted(set(kernels)), key=kernels.count))
    return rows


def of_dtype(rows: TimingTable) -> TimingTable:
    """Answer the rows in bfloat16, else those in float16, which are equally fast.

    Weights are 16-bit: rows of narrower ones price another model.
    """
    found = rows.where(dtype="bfloat16")
    return found if len(found) else rows.where(dtype="float16")


def curve_of(rows: TimingTable, size: str) -> Curve:
    """Answer the time over *size*, by the kernels that are `chosen`."""
    rows = chosen(rows)
    order = np.argsort(rows.columns[size], kind="stable")
    times = rows.columns["latency_us"][order] * PS_PER_US
    return Curve(rows.columns[size][order].tolist(), times.tolist())


class _Scaled:
    """A curve over another size."""

    def __init__(self, curve: Curve, factor: float) -> None:
        self._curve, self._factor = curve, factor

    @property
    def last(self) -> float:
        return self._curve.last / self._factor

    def at(self, size: float) -> float | None:
        return self._curve.at(size * self._factor)


def transfer_of(rows: TimingTable, bytes_per_token: int) -> Cost:
    """Answer the time of an all-reduce by tokens, from rows by bytes."""
    return _Scaled(curve_of(rows, "message_bytes"), bytes_per_token)


class _Product:
    """A product whose n or k was not measured: between those that were, linear in n and in k."""

    def __init__(self, parts: Sequence[tuple[float, Curve]]) -> None:
        self._parts = parts
        self.last = min(curve.last for _, curve in parts)

    def at(self, size: float) -> float | None:
        total = 0.0
        for weight, curve in self._parts:
            time = curve.at(size)
            if time is None:
                return None
            total += weight * time
        return total


def product_of(rows: TimingTable, n: int, k: int) -> Cost | None:
    """Answer the time of a product by its rows; None if n or k is larger than any measured."""
    rows = of_dtype(rows)
    places = [(np.unique(rows.columns[name]).tolist(), size) for name, size in (("n", n), ("k", k))]
    n_bracket, k_bracket = (bracket(knots, size) for knots, size in places)
    if n_bracket is None or k_bracket is None:
        return None
    parts: list[tuple[float, Curve]] = []
    for n_place, n_weight in _corners(n_bracket):
        for k_place, k_weight in _corners(k_bracket):
            corner = rows.where(n=places[0][0][n_place], k=places[1][0][k_place])
            if not len(corner):
                return None
            parts.append((n_weight * k_weight, curve_of(corner, "num_tokens")))
    return parts[0][1] if len(parts) == 1 else _Product(parts)


def _corners(place: Bracket) -> list[tuple[int, float]]:
    low, high, weight = place
    return [(low, 1.0)] if low == high else [(low, 1 - weight), (high, weight)]


def expert_rows(rows: TimingTable, experts: ExpertShape, hidden_size: int) -> TimingTable:
    """Answer the rows of experts of this shape on one rank."""
    ranks = experts.num_experts // experts.num_local if experts.num_local else 1
    return rows.where(
        n=experts.width,
        k=hidden_size,
        num_experts=experts.num_local,
        top_k=experts.top_k,
        num_gpus=ranks,
    )


class BalancedExperts:
    """Routed experts by tokens, from rows whose tokens touch as many experts as they can.

    Real tokens touch fewer. Weights decide until balanced tokens touch all experts: n tokens take
    as long as the fewer balanced ones that touch as many, and, beyond those that touch all, what
    more tokens add.
    """

    def __init__(self, rows: TimingTable, experts: ExpertShape) -> None:
        self._experts = experts
        self._curve = curve_of(rows, "num_tokens")
        self._touching_all = experts.num_experts / experts.top_k
        self.last = self._curve.last

    def at(self, size: float) -> float | None:
        """Answer the time of *size* tokens; None for more than were measured."""
        share = self._experts.touched(size) / self._experts.num_local
        times = [
            self._curve.at(tokens)
            for tokens in (
                share * self._touching_all,
                max(size, self._touching_all),
                self._touching_all,
            )
        ]
        weights, more, less = times
        if weights is None or more is None or less is None:
            return None
        return weights + more - less


def experts_of(rows: TimingTable, experts: ExpertShape) -> Cost:
    """Answer the time of routed experts by tokens, from *rows* of their shape."""
    c = rows.columns
    pairs = c["num_tokens"] * experts.top_k * experts.num_local / experts.num_experts
    most = np.minimum(np.ceil(pairs), experts.num_local)
    is_balanced = bool((c["num_active_experts"] == most).all())
    return BalancedExperts(rows, experts) if is_balanced else MeasuredExperts(rows, experts)


class MeasuredExperts:
    """Routed experts by tokens, and by the experts they touch where rows say so."""

    def __init__(self, rows: TimingTable, experts: ExpertShape) -> None:
        self._experts = experts
        touched = np.unique(rows.columns["num_active_experts"])
        self._knots: list[float] = touched.tolist()
        self._curves = [
            curve_of(rows.where(num_active_experts=count), "num_tokens") for count in touched
        ]
        self.last = max(curve.last for curve in self._curves)

    def at(self, size: float) -> float | None:
        """Answer the time of *size* tokens; None for more than were measured."""
        place = bracket(self._knots, self._experts.touched(size))
        if place is None:
            place = bracket(self._knots, self._knots[-1])
        assert place is not None
        low, high = (self._curves[index].at(size) for index in place[:2])
        if low is None or high is None:
            return None
        return low + place.weight * (high - low)
