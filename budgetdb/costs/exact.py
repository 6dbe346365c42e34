"""The peak of a step as its trace gives it: the largest of a few moments, each an exact polynomial in the shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from typing_extensions import override

from budgetdb.costs.base import CostModel
from budgetdb.costs.forms import UNLIMITED, Moment, rows_below
from budgetdb.profiles import CostParameter
from budgetdb.shapes import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Lines = tuple[NDArray[np.float64], NDArray[np.float64]]  # constants and slopes


class Form(NamedTuple):
    """Bytes alive at one moment of a step: `c + k·rows + l·L + kl·kL + ll·L² + kll·kL²`, k rows of L tokens.

    Valid for lengths from `first` to `last`; beyond `last` it stays at what it was there, so that a peak made of
    several forms never falls as rows grow longer.

    Attributes:
        first: shortest padded length it is valid for.
        last: longest one; 0 for no end.
        c: bytes whatever the shape, weights included.
        k: bytes for each row.
        l: bytes for each token of a row, whatever the number of rows (tables of positions).
        kl: bytes for each token.
        ll: bytes for each pair of tokens of a row, whatever the number of rows (a causal mask, relative positions).
        kll: bytes for each pair of tokens of a row in each row (attention scores, a padded mask).
    """

    first: float
    last: float
    c: float
    k: float
    l: float  # noqa: E741 (the formula's own letter)
    kl: float
    ll: float
    kll: float

    def line(self, length: int) -> tuple[float, float] | None:
        """At a fixed length the bytes are a line in the rows: its constant and its slope, None before `first`."""
        if length < self.first:
            return None
        tokens = min(length, self.last) if self.last else length
        constant = self.c + tokens * (self.l + self.ll * tokens)
        return constant, self.k + tokens * (self.kl + self.kll * tokens)

    def lines(self, lengths: NDArray[np.float64]) -> Lines:
        """`line` at each of `lengths`; before `first` it is no bytes at all."""
        import numpy as np

        tokens = np.minimum(lengths, self.last) if self.last else lengths
        valid = lengths >= self.first
        constants = self.c + tokens * (self.l + self.ll * tokens)
        slopes = self.k + tokens * (self.kl + self.kll * tokens)
        return np.where(valid, constants, 0.0), np.where(valid, slopes, 0.0)

    def check(self) -> Self:
        """Itself, if the bytes are finite, not negative, and never fall as rows or length grow.

        A negative coefficient is allowed where others outweigh it: labels shifted by one leave `kL - k` of them.

        Raises:
            ValueError: they are not.
        """
        if not all(map(math.isfinite, self)) or self.first < 0 or self.last < 0:
            raise ValueError(f"a form's numbers must be finite and its lengths not negative, got {tuple(self)}")
        shortest = max(self.first, 1)
        rising_in_rows = self.k + shortest * (self.kl + self.kll * shortest) >= 0 and self.kll >= 0
        rising_in_rows = rising_in_rows and self.kl + 2 * self.kll * shortest >= 0
        rising_in_length = self.l >= 0 and self.ll >= 0 and self.kl >= 0
        if not (rising_in_rows and rising_in_length and self.c + self.l * shortest + self.ll * shortest**2 >= 0):
            raise ValueError(f"the bytes of a form must not be negative nor fall, got {tuple(self)}")
        return self


class FormsCost(CostModel):
    """A cost model that at each length is the largest of a few straight lines in the rows."""

    def lines(self, length: int) -> list[Moment]:
        """The lines at `length`, each as a moment of one token per row.

        A form that is not valid yet gives none.
        """
        raise NotImplementedError

    def all_lines(self, lengths: NDArray[np.float64]) -> Iterator[Lines]:
        """The lines of each form at all of `lengths`; one that is not valid yet is no bytes at all."""
        raise NotImplementedError

    @override
    def peak_bytes(self, shape: Shape) -> int:
        at = Shape(shape.batch_size, 1)
        return max(line.peak_bytes(at) for line in self.lines(shape.length))

    @override
    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        return min(line.max_batch_size(1, limit_bytes) for line in self.lines(length))

    @override
    def max_batch_sizes(self, lengths: Iterable[int], limit_bytes: int) -> NDArray[np.int64]:
        import numpy as np

        lengths_array = np.fromiter(lengths, dtype=np.float64)
        sizes = np.full(len(lengths_array), UNLIMITED if limit_bytes >= 0 else 0, dtype=np.int64)
        for constants, slopes in self.all_lines(lengths_array):
            sizes = np.minimum(sizes, rows_below(constants, slopes, limit_bytes))
        return sizes


class ExactCost(FormsCost):
    """The largest of a trace's moments: to the byte what the step allocates, before the allocator rounds.

    >>> cost = ExactCost([Form(1, 0, c=1000, k=0, l=0, kl=10, ll=0, kll=2)])
    >>> cost.peak_bytes(Shape(2, 5)), cost.max_batch_size(length=5, limit_bytes=1400)
    (1200, 4)

    Args:
        forms: the moments that are the peak at some shape; one at least is valid from length 1 on.

    Raises:
        ValueError: none is, or one of them falls or is negative somewhere.
    """

    kind: ClassVar[str] = "exact"

    def __init__(self, forms: Iterable[Form]) -> None:
        self.forms = tuple(form.check() for form in forms)
        if not any(form.first <= 1 for form in self.forms):
            raise ValueError("an exact cost model needs a form that is valid from length 1 on")

    @override
    def lines(self, length: int) -> list[Moment]:
        lines = (form.line(length) for form in self.forms)
        return [Moment(constant=line[0], token=line[1]) for line in lines if line is not None]

    @override
    def all_lines(self, lengths: NDArray[np.float64]) -> Iterator[Lines]:
        return (form.lines(lengths) for form in self.forms)

    @override
    def parameters(self) -> dict[str, CostParameter]:
        return {"forms": [list(form) for form in self.forms]}

    @classmethod
    @override
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        return cls(read_forms(parameters, kind=cls.kind))


def read_forms(parameters: Mapping[str, CostParameter], *, kind: str, others: Sequence[str] = ()) -> list[Form]:
    """The forms in a cost model's parameters, which hold nothing else but `others`.

    Raises:
        ValueError: a parameter is missing or unknown, or a form is no list of eight numbers.
    """
    if set(parameters) != {"forms", *others}:
        wanted = ", ".join(["forms", *others])
        raise ValueError(f"a cost model of kind {kind} has {wanted}; got {', '.join(sorted(parameters))}")
    written = parameters["forms"]
    if not isinstance(written, list) or not all(isinstance(row, list) for row in written):
        raise ValueError(f"the forms of a cost model of kind {kind} must be a list of lists, got {written!r}")
    if any(len(row) != len(Form._fields) for row in written):
        raise ValueError(f"each form must have {len(Form._fields)} numbers: {', '.join(Form._fields)}")
    return [Form(*map(float, row)) for row in written]
