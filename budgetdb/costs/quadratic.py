"""The larger of two moments, each with a share that grows with the square of the length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from typing_extensions import override

from budgetdb.costs.base import FittedCost, read_coefficients
from budgetdb.costs.envelope import fit_envelope
from budgetdb.costs.forms import (
    Moment,
    largest_peak_bytes,
    smallest_max_batch_size,
    smallest_max_batch_sizes,
)
from budgetdb.profiles import CostParameter, Probe
from budgetdb.shapes import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# With more lengths than this only neighbours give a direction: pairs of lines grow with the fourth power of them.
_ALL_PAIRS = 8
_COEFFICIENTS = ("c", "a", "p", "b", "q")


class QuadraticCost(FittedCost):
    """The larger of `c + a·kL + p·kL²` (the MLP, the head) and `c + b·kL + q·kL²` (attention).

    A single polynomial through both under-predicts eager attention by up to 48 % (TRACING 6). The first moment has a
    square of its own, since a padded mask is alive in it too (`p` is 1 for sdpa), and with eager attention so are the
    scores of the layer before. In bytes per token the two are lines in the length, `a + p·L` and `b + q·L`: below the
    length at which they cross the first decides, above it the second. They are fitted as chords: a true rate is convex
    in the length, so what lies between two measured lengths lies below the line through them.
    """

    kind: ClassVar[str] = "quadratic"

    def __init__(self, *, c: float, a: float, p: float, b: float, q: float) -> None:
        self._moments = (Moment(constant=c, token=a, square=p), Moment(constant=c, token=b, square=q))

    @classmethod
    @override
    def fit(cls, probes: Sequence[Probe]) -> Self:
        constant, rates = fit_envelope(probes)
        first, second = _two_lines(sorted(rates.items()))
        return cls(c=constant, a=first.intercept, p=first.slope, b=second.intercept, q=second.slope)

    @override
    def peak_bytes(self, shape: Shape) -> int:
        return largest_peak_bytes(self._moments, shape)

    @override
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return smallest_max_batch_size(self._moments, length, limit_bytes)

    @override
    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> NDArray[np.int64]:
        return smallest_max_batch_sizes(self._moments, list(lengths), limit_bytes)

    @override
    def parameters(self) -> dict[str, CostParameter]:
        first, second = self._moments
        return dict(
            zip(_COEFFICIENTS, (first.constant, first.token, first.square, second.token, second.square), strict=True)
        )

    @classmethod
    @override
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        return cls(**read_coefficients(parameters, _COEFFICIENTS, kind=cls.kind))


class _Line(NamedTuple):
    """Bytes per token as a function of the length."""

    intercept: float
    slope: float

    def at(self, length: float) -> float:
        return self.intercept + self.slope * length


_Point = tuple[int, float]


def _two_lines(points: Sequence[_Point]) -> tuple[_Line, _Line]:
    """Two lines whose larger lies on or above every point `(length, bytes per token)`, as close as can be.

    Each way to split the lengths is tried: the short ones under one line, the long ones under the other. A line takes
    its direction from a pair of points, or runs through the origin, and is lifted above its side. The pair with the
    smallest relative overshoot wins; among equals the one that is higher between the points.
    """
    chosen: tuple[_Line, _Line] | None = None
    best: tuple[float, float] | None = None
    for split in range(1, len(points) + 1):
        for first in _lines_above(points[:split], points):
            for second in _lines_above(points[split:], points):
                score = _score(first, second, points)
                if best is None or score < best:
                    best, chosen = score, (first, second)
    if chosen is None:
        raise ValueError("there are no points to fit lines to")
    return chosen


def _lines_above(side: Sequence[_Point], points: Sequence[_Point]) -> Iterator[_Line]:
    """Rising lines from a non-negative intercept, on or above all of `side`."""
    if not side:
        yield _Line(0.0, 0.0)
        return
    directions = {0.0} | {
        max((rate2 - rate1) / (length2 - length1), 0.0)
        for (length1, rate1), (length2, rate2) in combinations(points, 2)
    }
    for slope in sorted(directions):
        intercept = max(rate - slope * length for length, rate in side)
        if intercept >= 0:
            yield _Line(intercept, slope)
    yield _Line(0.0, max(rate / length for length, rate in side))


def _score(first: _Line, second: _Line, points: Sequence[_Point]) -> tuple[float, float]:
    """Relative overshoot at the points, rounded; then how low the larger line runs half-way between them."""
    overshoot = sum((max(first.at(n), second.at(n)) - rate) / max(rate, 1e-9) for n, rate in points)
    middles = [(left + right) / 2 for (left, _), (right, _) in pairwise(points)]
    return round(overshoot, 4), -sum(max(first.at(n), second.at(n)) for n in middles)
