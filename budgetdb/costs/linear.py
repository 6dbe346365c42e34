"""`c + a·kL`: memory linear in tokens, as flash attention has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from budgetdb.costs.base import FittedCost, read_coefficients
from budgetdb.costs.envelope import fit_envelope
from budgetdb.costs.forms import Moment, smallest_max_batch_sizes
from budgetdb.profiles import CostParameter, Probe
from budgetdb.shapes import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LinearCost(FittedCost):
    """One moment, `c + a·kL` bytes: nothing in the step grows with the square of the length.

    >>> LinearCost(c=1000, a=10).max_batch_size(length=50, limit_bytes=2500)
    3
    """

    kind: ClassVar[str] = "linear"

    def __init__(self, *, c: float, a: float) -> None:
        self._moment = Moment(constant=c, token=a)

    @classmethod
    @override
    def fit(cls, probes: Sequence[Probe]) -> Self:
        constant, rates = fit_envelope(probes)
        return cls(c=constant, a=max(rates.values()))

    @override
    def peak_bytes(self, shape: Shape) -> int:
        return self._moment.peak_bytes(shape)

    @override
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return self._moment.max_batch_size(length, limit_bytes)

    @override
    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> NDArray[np.int64]:
        return smallest_max_batch_sizes([self._moment], list(lengths), limit_bytes)

    @override
    def parameters(self) -> dict[str, CostParameter]:
        return {"c": self._moment.constant, "a": self._moment.token}

    @classmethod
    @override
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        return cls(**read_coefficients(parameters, ("c", "a"), kind=cls.kind))
