"""A cost model for sliding-window attention: each token looks back on a window, and no further."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from budgetdb.costs.base import FittedCost, read_coefficients
from budgetdb.costs.envelope import fit_envelope
from budgetdb.costs.forms import Moment
from budgetdb.profiles import CostParameter, Probe
from budgetdb.shapes import Shape

# The attention implementation `sliding` is described by the cost model `window`.
ATTENTION = "window"


class WindowCost(FittedCost):
    """`c + kL·(a + q·min(L, 1024))`: quadratic in the length up to the window, linear beyond it."""

    kind: ClassVar[str] = "window"
    WINDOW: ClassVar[int] = 1024

    def __init__(self, *, c: float, a: float, q: float) -> None:
        self._c, self._a, self._q = c, a, q
        self._at(1)  # refuses coefficients that are no numbers

    @classmethod
    def fit(cls, probes: Sequence[Probe]) -> Self:
        constant, rates = fit_envelope(probes)
        seen = {length: min(length, cls.WINDOW) for length in rates}
        shortest, longest = min(rates), max(rates)
        span = seen[longest] - seen[shortest]
        slope = max((rates[longest] - rates[shortest]) / span, 0.0) if span else 0.0
        return cls(c=constant, a=max(0.0, *(rates[n] - slope * seen[n] for n in rates)), q=slope)

    def peak_bytes(self, shape: Shape) -> int:
        return self._at(shape.length).peak_bytes(shape)

    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return self._at(length).max_batch_size(length, limit_bytes)

    def parameters(self) -> dict[str, CostParameter]:
        return {"c": self._c, "a": self._a, "q": self._q}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        return cls(**read_coefficients(parameters, ("c", "a", "q"), kind=cls.kind))

    def _at(self, length: int) -> Moment:
        # Checked one by one: a sum of a negative and a positive coefficient may pass.
        Moment(constant=self._c, token=self._a, square=self._q)
        return Moment(constant=self._c, token=self._a + self._q * min(length, self.WINDOW))
