"""The contract of a cost model, and the largest-of-forms kind that all of ours are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from budgetdb.profiles import CostParameter, CostRecord, Probe
from budgetdb.shapes import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class CostModel(ABC):
    """A formula for the peak of a step, in bytes, as a function of its shape.

    What every implementation promises:

    - it is immutable, and the same parameters give the same answers in any process;
    - it never falls when rows or length grow;
    - `max_batch_size` is the exact inverse: the largest k with `peak_bytes(Shape(k, length)) <= limit_bytes`, 0 if
      there is none;
    - `from_parameters(model.parameters())` is an equal model, and the parameters are finite.

    Where its coefficients come from is its kind's own affair: `FittedCost` for one that is fitted to probes alone.
    """

    kind: ClassVar[str]

    @abstractmethod
    def peak_bytes(self, shape: Shape) -> int:
        """Expected peak of a step at `shape`, in bytes, weights included."""

    @abstractmethod
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        """The largest batch size at a padded `length` whose peak is at most `limit_bytes`, or 0."""

    @abstractmethod
    def parameters(self) -> dict[str, CostParameter]:
        """The coefficients, in a form that JSON holds."""

    @classmethod
    @abstractmethod
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        """The model that `parameters` described.

        Raises:
            ValueError: one is missing, unknown, negative or not a number.
        """

    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> NDArray[np.int64]:
        """`max_batch_size` for each of `lengths`, shape `(len(lengths),)`; a kind may have a faster way."""
        import numpy as np

        return np.array([self.max_batch_size(int(length), limit_bytes) for length in lengths], dtype=np.int64)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostModel) and type(self) is type(other) and self.parameters() == other.parameters()

    def __hash__(self) -> int:
        return hash((type(self), *self.parameters()))

    def record(self) -> CostRecord:
        """The model as a profile stores it."""
        return CostRecord(kind=self.kind, parameters=self.parameters())


class FittedCost(CostModel):
    """A cost model whose coefficients come from probes, and from nothing else.

    Beside what every cost model promises, `fit` errs on the safe side: for each probe that fitted,
    `peak_bytes(probe.shape) >= probe.peak_bytes`. Authors run `budgetdb.testing.costs.check_cost_model` against their
    class to see that it all holds.
    """

    @classmethod
    @abstractmethod
    def fit(cls, probes: Sequence[Probe]) -> Self:
        """The model of this kind that lies on the safe side of every probe that fitted, as close as it can.

        Raises:
            ValueError: no probe fitted.
        """


class Fitter(Protocol):
    """Whatever makes a cost model of probes: the class of a fitted kind, or a trace to be scaled by them.

    Equal ones fit alike.
    """

    def __hash__(self) -> int: ...

    def fit(self, probes: Sequence[Probe]) -> CostModel:
        """The model on the safe side of every probe that fitted.

        Raises:
            ValueError: no probe fitted.
        """


def read_coefficients(parameters: Mapping[str, CostParameter], names: Sequence[str], *, kind: str) -> dict[str, float]:
    """Exactly the named scalar coefficients, as floats.

    Raises:
        ValueError: one is missing, unknown, or not a number.
    """
    if set(parameters) != set(names):
        raise ValueError(
            f"a {kind} cost model has coefficients {', '.join(names)}; got {', '.join(sorted(parameters))}"
        )
    coefficients = {}
    for name in names:
        value = parameters[name]
        if not isinstance(value, int | float):
            raise ValueError(f"coefficient {name} of a {kind} cost model must be a number, got {value!r}")  # noqa: TRY004
        coefficients[name] = float(value)
    return coefficients
