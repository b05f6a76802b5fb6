"""Random numbers of a workload: lengths, counts and times, each by its quantile function.

A value is the quantile function of its distribution at a uniform draw. Every kind takes one draw a
value, so that another kind, or other parameters, move no other value of the same stream.
"""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from workloads.errors import TraceError, did_you_mean, plain, quote
from workloads.record import IntArray

Floats = npt.NDArray[np.float64]

MAX_VALUE = 1e9
"""Largest parameter: beyond it a length is no length."""

NonNegative = Annotated[float, Meta(ge=0, le=MAX_VALUE)]
Positive = Annotated[float, Meta(gt=0, le=MAX_VALUE)]

_Z99 = NormalDist().inv_cdf(0.99)


class Distribution(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=str.lower,
):
    """A distribution; *min* and *max* move what lies beyond them to the bound."""

    min: NonNegative | None = None
    max: NonNegative | None = None

    def __post_init__(self) -> None:
        """Refuse bounds in the wrong order."""
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:
        """Answer the values below which *shares*, in [0, 1), of all lie, before the bounds.

        *whole*: of a whole number, which the caller rounds. *folder*: where a file is looked for.
        """
        raise NotImplementedError


class Fixed(Distribution, frozen=True):
    """Always *value*."""

    value: NonNegative

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer *value* everywhere."""
        return np.full(len(shares), self.value)


class Uniform(Distribution, frozen=True):
    """From *low* to *high*; of whole numbers each is equally likely, both ends included."""

    low: NonNegative
    high: NonNegative

    def __post_init__(self) -> None:
        """Refuse ends in the wrong order."""
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer a line; of whole numbers one with a step each."""
        if whole:
            low, high = math.ceil(self.low), math.floor(self.high)
            return np.floor(low + shares * (high - low + 1))
        return self.low + shares * (self.high - self.low)


class Normal(Distribution, frozen=True):
    """The normal distribution; what is below 0 becomes the least that can be."""

    mean: NonNegative
    std: NonNegative

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer mean and standard deviations away from it."""
        return self.mean + self.std * _normal(shares)


class Lognormal(Distribution, frozen=True):
    """The exponential of a normal: half is below *median*, 99 % below *p99*."""

    median: Positive
    p99: Positive

    def __post_init__(self) -> None:
        """Refuse percentiles in the wrong order."""
        super().__post_init__()
        if self.median > self.p99:
            raise ValueError(f"median {self.median:g} is above p99 {self.p99:g}")

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer powers of p99 / median."""
        return self.median * np.exp(math.log(self.p99 / self.median) / _Z99 * _normal(shares))


class Exponential(Distribution, frozen=True):
    """Times between events that know nothing of each other."""

    mean: Positive

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer minus the logarithm."""
        return -self.mean * np.log1p(-shares)


class Geometric(Distribution, frozen=True):
    """Whole numbers from 1: as often as not, with the same chance each time, there is one more."""

    mean: Annotated[float, Meta(ge=1, le=MAX_VALUE)]

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer how many."""
        if self.mean == 1:
            return np.ones(len(shares))
        return 1 + np.floor(np.log1p(-shares) / math.log1p(-1 / self.mean))


class Zipf(Distribution, frozen=True):
    """Whole numbers *k* from 1, or *min*, to *max*, as likely as ``k ** -exponent``."""

    exponent: NonNegative
    max: Annotated[float, Meta(ge=1, le=10_000_000)]

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer whole numbers."""
        first = max(1, math.ceil(self.min or 1))
        if math.floor(self.max) < first:
            raise TraceError(f"no whole number lies between min {self.min} and max {self.max}")
        values = np.arange(first, math.floor(self.max) + 1, dtype=np.float64)
        return values[ranks(shares, values**-self.exponent)]


class Quantiles(Distribution, frozen=True):
    """Straight lines between *values*, below which lie *levels* of all.

    Without *levels* they are as far apart as each other, from 0 to 1.
    """

    values: Annotated[list[NonNegative], Meta(min_length=1, max_length=100_000)]
    levels: list[Annotated[float, Meta(ge=0, le=1)]] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no quantile function."""
        super().__post_init__()
        if sorted(self.values) != self.values:
            raise ValueError("values go down; expected each at least the one before")
        if self.levels is not None and (
            sorted(set(self.levels)) != self.levels or len(self.levels) != len(self.values)
        ):
            raise ValueError("levels: expected one for each of values, each above the one before")

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer the lines."""
        levels = self.levels or np.linspace(0, 1, len(self.values))
        return np.interp(shares, levels, self.values)


class Empirical(Distribution, frozen=True):
    """The values in *column* of *file*, each as likely as it is frequent.

    A CSV file with a header, or a JSON object a line; it lies in the folder of the specification,
    or in one below it.
    """

    file: str
    column: str

    def quantile(self, shares: Floats, *, whole: bool, folder: Path) -> Floats:  # noqa: ARG002
        """Answer values that occur.

        Raises:
            TraceError: the file cannot be used.
        """
        values = np.sort(_column(inside(folder, self.file), self.column))
        return values[(shares * len(values)).astype(np.int64)]


AnyDistribution = (
    Fixed
    | Uniform
    | Normal
    | Lognormal
    | Exponential
    | Geometric
    | Zipf
    | Quantiles
    | Empirical
    | NonNegative
)
"""A table with ``kind``, or a number for a fixed value."""


class ByInput(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="by_input",
):
    """Outputs that go with their inputs: of those up to each of *bounds* one of *of*, and a last.

    Attributes:
        bounds: largest input_len (or turn_len) of all but the last.
        of: one distribution more than bounds.
    """

    bounds: Annotated[list[NonNegative], Meta(min_length=1, max_length=1000)]
    of: list[AnyDistribution]

    def __post_init__(self) -> None:
        """Refuse bounds in the wrong order, or another number of distributions."""
        if sorted(set(self.bounds)) != self.bounds:
            raise ValueError("bounds: expected each above the one before")
        if len(self.of) != len(self.bounds) + 1:
            raise ValueError(f"of: expected {len(self.bounds) + 1}, one more than bounds")


def draw(
    distribution: AnyDistribution, shares: Floats, *, least: float, whole: bool, folder: Path
) -> tuple[Floats, int]:
    """Answer the value of *distribution* at each of *shares*, and how many its bounds moved.

    Nothing is below *least*. *whole*: rounded to whole numbers.

    Raises:
        TraceError: a file that cannot be used.
    """
    if not isinstance(distribution, Distribution):
        distribution = Fixed(value=distribution)
    values = distribution.quantile(shares, whole=whole, folder=folder)
    high = MAX_VALUE if distribution.max is None else distribution.max
    found = np.maximum(np.clip(values, distribution.min or 0.0, high), least)
    moved = int(np.count_nonzero(found != values))
    return (np.rint(found) if whole else found), moved


def ranks(shares: Floats, weights: Floats) -> IntArray:
    """Answer the place in *weights*, drawn in proportion to them, that each of *shares* means."""
    cumulative = np.cumsum(weights)
    places = np.searchsorted(cumulative, shares * cumulative[-1], side="right")
    found: IntArray = np.minimum(places, len(weights) - 1).astype(np.int64)
    return found


def correlated(shares: Floats, others: Floats, correlation: float) -> Floats:
    """Answer *others*, uniform, so bent that their ranks and those of *shares* correlate.

    A normal copula, whose rank correlation is 6 / pi * asin(rho / 2).
    """
    if not correlation:
        return others
    rho = 2 * math.sin(math.pi * correlation / 6)
    bent = rho * _normal(shares) + math.sqrt(1 - rho**2) * _normal(others)
    share_of = NormalDist().cdf
    # A share is below 1.
    return np.array([min(share_of(value), 1 - 2**-53) for value in bent.tolist()])


def inside(folder: Path, name: str) -> Path:
    """Answer the file *name* of *folder*.

    Raises:
        TraceError: it lies elsewhere, or is no file.
    """
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise TraceError(
                f"file {quote(name)} is outside the folder of the specification: expected a file "
                "in it"
            )
        if not path.is_file():
            raise TraceError(f"file {quote(name)}: no such file: expected one beside this file")
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"file {quote(name)} cannot be read: expected a readable file") from error
    return path


def _normal(shares: Floats) -> Floats:
    """Answer the standard normal quantiles of *shares*; of 0 that of the least positive float."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(share or 5e-324) for share in shares.tolist()], dtype=np.float64)


def _column(path: Path, column: str) -> Floats:
    """Answer the numbers in *column* of the file *path*."""
    shown = plain(path.name)
    values: list[float] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, row in _rows(path, file):
                if column not in row:
                    keys = [str(key) for key in row]
                    raise TraceError(
                        f"{shown}, line {line}: column {quote(column)} is missing; "
                        f"{did_you_mean(column, keys)}"
                    )
                values.append(_number(row[column], f"{shown}, line {line}: {column}"))
    except (OSError, UnicodeError, csv.Error, msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{shown}: {error}: expected CSV or JSON lines") from error
    if not values:
        raise TraceError(f"{shown}: empty: expected at least one row")
    return np.array(values)


def _rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, dict[str, object]]]:
    if path.suffix == ".jsonl":
        decoder = msgspec.json.Decoder(dict[str, object])
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, decoder.decode(text)
        return
    reader = csv.DictReader(file)
    for row in reader:
        yield reader.line_num, {key: value for key, value in row.items() if key is not None}


def _number(value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        number = math.nan
    if not 0 <= number <= MAX_VALUE:
        raise TraceError(f"{where} {quote(value)}: expected a number, 0 to {MAX_VALUE:g}")
    return number
