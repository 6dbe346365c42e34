"""The larger of `c + a·kL` and `c + b·kL + q·kL²`: attention that keeps scores, or a mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from budgetdb.costs.base import CostModel, read_coefficients
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


class QuadraticCost(CostModel):
    """Two moments over one constant: the MLP or the head, `c + a·kL`, and attention, `c + b·kL + q·kL²`.

    A single polynomial through both under-predicts eager attention by up to 48 % (TRACING 6). Below the length at
    which the two meet the first decides, above it the second. In bytes per token that is a floor `a` and a rising line
    `b + q·L`, which is how it is fitted.
    """

    kind: ClassVar[str] = "quadratic"

    def __init__(self, *, c: float, a: float, b: float, q: float) -> None:
        self._moments = (Moment(constant=c, token=a), Moment(constant=c, token=b, square=q))

    @classmethod
    @override
    def fit(cls, probes: Sequence[Probe]) -> Self:
        constant, rates = fit_envelope(probes)
        a, b, q = _floor_and_line(sorted(rates.items()))
        return cls(c=constant, a=a, b=b, q=q)

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
        return {"c": first.constant, "a": first.token, "b": second.token, "q": second.square}

    @classmethod
    @override
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        return cls(**read_coefficients(parameters, ("c", "a", "b", "q"), kind=cls.kind))


Point = tuple[int, float]


def _floor_and_line(points: Sequence[Point]) -> tuple[float, float, float]:
    """`(a, b, q)` with `max(a, b + q·L)` on or above every point `(L, bytes per token)`, as close as it can be.

    Each way to split the lengths is tried: the short ones under the floor, the long ones under the line. The line runs
    through two points, or through one from the origin, lifted above the rest. Of the candidates the one with the
    smallest relative overshoot wins; among equals the one that is higher between the points, since a true rate is
    convex in the length and its chord is the safe side.
    """
    best: tuple[float, float] | None = None
    chosen = (max(rate for _, rate in points), 0.0, 0.0)
    for split in range(len(points) + 1):
        a = max((rate for _, rate in points[:split]), default=0.0)
        for b, q in _lines_above(points[split:], points):
            overshoot = sum((max(a, b + q * length) - rate) / max(rate, 1e-9) for length, rate in points)
            score = (round(overshoot, 6), -_area(a, b, q, points))
            if best is None or score < best:
                best, chosen = score, (a, b, q)
    return chosen


def _lines_above(above: Sequence[Point], points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    """Lines `b + q·L` with b, q >= 0 on or above all of `above`, their direction taken from pairs of `points`."""
    if not above:
        yield 0.0, 0.0
        return
    directions = {0.0} | {
        max((rate2 - rate1) / (length2 - length1), 0.0)
        for (length1, rate1), (length2, rate2) in combinations(points, 2)
    }
    for q in directions:
        b = max(rate - q * length for length, rate in above)
        if b >= 0:
            yield b, q
    yield 0.0, max(rate / length for length, rate in above)


def _area(a: float, b: float, q: float, points: Sequence[Point]) -> float:
    """The sum of the rates half-way between neighbouring lengths: how high the curve runs between the points."""
    middles = [(left + right) / 2 for (left, _), (right, _) in pairwise(points)]
    return sum(max(a, b + q * middle) for middle in middles)
