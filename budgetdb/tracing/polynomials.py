"""From a few small traces to the peak at every shape.

The size of every storage of a step is a polynomial in the number of rows k and their length L, with the terms 1, k, L,
kL, L² and kL². Three lengths give it at one k; and since nearly every storage has either a part for each row or nothing
that grows with the rows, one more trace tells which. Where a storage is a mixture of both, six traces give six
equations. The bytes alive after each event are sums of these, and the peak is the largest of the sums. What holds is
checked on traces that were not used, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from budgetdb.costs.exact import Form
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Event, Moment, Trace

Array = NDArray[np.float64]

# Coefficients are whole bytes, or halves where something is as long as half a row.
_PARTS = 2
_TERMS = 6
_FEW = 4
# Largest residual of a solved event, in bytes: rounding of the solution and nothing else.
_RESIDUAL = 0.25
# Where it is looked for which moments are ever the peak: up to a million rows, and lengths up to 2**17.
_ROWS_SEEN = (1, 2, 3, *(2**i for i in range(2, 21)))
_LENGTHS_SEEN = 160
_LONGEST_SEEN = 2**17


class NotPolynomialError(Exception):
    """Traces don't line up, or their sizes are no polynomials; the message says which."""


@dataclass(frozen=True)
class Script:
    """The events of one step at any shape.

    Attributes:
        storages: number of the storage that each event is about.
        coefficients: of the bytes of each event, shape `(events, 6)`: 1, k, L, kL, L², kL².
    """

    storages: tuple[int, ...]
    coefficients: Array

    def at(self, shape: Shape) -> list[Event]:
        """What happens in a step at `shape`; where the bytes come out as no whole number, they are rounded up."""
        sizes = self.coefficients @ np.array(_terms(shape.batch_size, shape.length))
        away = np.where(sizes < 0, np.floor(sizes), np.ceil(sizes)).astype(np.int64).tolist()
        return [Event(storage, nbytes) for storage, nbytes in zip(self.storages, away, strict=True)]


@dataclass(frozen=True)
class Solved:
    """What holds at every shape of a regime.

    Attributes:
        forms: the bytes at the moments that are the peak at some shape, weights included.
        moments: where each is.
        script: one step, to be replayed.
    """

    forms: tuple[Form, ...]
    moments: tuple[Moment, ...]
    script: Script


def solve(traces: Sequence[tuple[Shape, Trace]], *, first: int, last: int) -> Solved:
    """The forms valid for lengths `first` to `last` (0 for no end), from a few traces.

    Args:
        traces: of three lengths at one number of rows, and of any other shape after them; or of three lengths at two
            numbers of rows; or of one length at two, which is enough for the forms of that length alone.
        first: shortest length of the forms.
        last: longest.

    Raises:
        NotPolynomialError: the traces' events don't line up, or a size fits no polynomial; of four traces, one that is
            neither in proportion to the rows nor independent of them.
    """
    _check_aligned([trace for _, trace in traces])
    sizes = np.array([[event.nbytes for event in trace.events] for _, trace in traces], dtype=np.float64)
    solver = _coefficients_of_four if len(traces) == _FEW else _coefficients_of_grid
    coefficients = np.round(solver([shape for shape, _ in traces], sizes) * _PARTS) / _PARTS
    terms = np.array([_terms(shape.batch_size, shape.length) for shape, _ in traces])
    residual = np.abs(terms @ coefficients - sizes)
    if residual.max(initial=0.0) > _RESIDUAL:
        worst = int(residual.max(axis=0).argmax())
        raise NotPolynomialError(f"the bytes of {traces[0][1].moments[worst]} are no polynomial in rows and length")
    alive = np.cumsum(coefficients.T, axis=0)
    trace = traces[0][1]
    births = [i for i, event in enumerate(trace.events) if event.nbytes > 0]
    alive[:, 0] += trace.resident_bytes
    winners = _winners(alive[births], first=max(first, 1), last=last)
    forms = tuple(Form(float(first), float(last), *map(float, alive[births[i]])) for i in winners)
    step = slice(trace.step_length)
    return Solved(
        forms=forms,
        moments=tuple(trace.moments[births[i]] for i in winners),
        script=Script(tuple(event.storage for event in trace.events[step]), coefficients.T[step]),
    )


def _coefficients_of_grid(shapes: Sequence[Shape], sizes: Array) -> Array:
    """As many terms as there are shapes, of one length 1 and k; shape `(6, events)`."""
    terms = np.array([_terms(shape.batch_size, shape.length) for shape in shapes])[:, : len(shapes)]
    coefficients = np.zeros((_TERMS, sizes.shape[1]))
    coefficients[: len(shapes)] = np.linalg.solve(terms, sizes)
    return coefficients


def _coefficients_of_four(shapes: Sequence[Shape], sizes: Array) -> Array:
    """A polynomial in the length at the first three, in proportion to the rows or not as the fourth says."""
    *same, other = shapes
    rows = same[0].batch_size
    powers = np.array([[1.0, shape.length, shape.length**2] for shape in shapes])
    in_length = np.linalg.solve(powers[:-1], sizes[:-1])
    foretold = powers[-1] @ in_length
    is_shared = np.abs(sizes[-1] - foretold) <= _RESIDUAL
    if not (is_shared | (np.abs(sizes[-1] - foretold * other.batch_size / rows) <= _RESIDUAL)).all():
        raise NotPolynomialError("a size has a part for each row and one for all rows")
    coefficients = np.zeros((_TERMS, sizes.shape[1]))
    coefficients[0::2] = np.where(is_shared, in_length, 0.0)
    coefficients[1::2] = np.where(is_shared, 0.0, in_length / rows)
    return coefficients


def signature(trace: Trace) -> int:
    """Equal for traces whose events line up: the same operations make and free the same storages in the same order."""
    return hash(tuple(_outline(trace)))


def _outline(trace: Trace) -> Iterable[tuple[int, bool, str]]:
    return (
        (event.storage, event.nbytes > 0, moment.operation)
        for event, moment in zip(trace.events, trace.moments, strict=True)
    )


def _check_aligned(traces: Sequence[Trace]) -> None:
    if len({len(trace.events) for trace in traces}) > 1:
        counts = sorted({len(trace.events) for trace in traces})
        raise NotPolynomialError(f"the number of allocations changes with the shape ({counts[0]} to {counts[-1]})")
    if len(set(map(signature, traces))) > 1:
        raise NotPolynomialError("the order of allocations changes with the shape")


def _terms(rows: float, length: float) -> list[float]:
    return [1.0, rows, length, rows * length, length**2, rows * length**2]


def _winners(alive: Array, *, first: int, last: int) -> list[int]:
    """Rows of `alive`, coefficients of bytes after each event, that are the largest at some shape."""
    candidates = _not_dominated(alive)
    longest = min(last or _LONGEST_SEEN, _LONGEST_SEEN)
    lengths = np.unique(np.geomspace(first, max(longest, first), _LENGTHS_SEEN).round())
    shapes = np.array([_terms(rows, float(length)) for rows in _ROWS_SEEN for length in lengths])
    largest = (shapes @ alive[candidates].T).argmax(axis=1)
    return [candidates[i] for i in sorted(set(largest.tolist()))]


def _not_dominated(alive: Array) -> list[int]:
    """Rows that no other row matches or exceeds in every coefficient; of equal ones the first."""
    _, firsts = np.unique(alive, axis=0, return_index=True)
    kept: list[int] = []
    # The largest sums first: what dominates a row comes before it.
    for i in sorted(firsts.tolist(), key=lambda i: (-alive[i].sum(), i)):
        if not (alive[kept] >= alive[i]).all(axis=1).any():
            kept.append(i)
    return sorted(kept)
