"""A cost model out of traces alone: exact where the step's sizes are polynomials, fitted to more traces where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from budgetdb.costs.base import CostModel
from budgetdb.costs.exact import ExactCost, Form
from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Moment, Trace
from budgetdb.tracing.polynomials import NotPolynomialError, signature, solve

_log = logging.getLogger(__name__)

TraceAt = Callable[[Shape], Trace]

# What kernels align rows to: with lengths that are no multiple of it, masks are padded and the sequence is another.
_ALIGNED = 8
_ROWS = (2, 3)
# Three lengths are solved for, the last two this far above the first; one more is checked.
_SPACING = (0, 16, 48)
_CHECKED = 80
# Windows and chunks change the sequence once or twice; what changes it more often is a loop over the tokens.
_MOST_REGIMES = 4
_SHORTEST = 16
_FITTED_LENGTHS = 7


@dataclass(frozen=True)
class TracedCost:
    """What traces say of a step's peak at every shape.

    Attributes:
        cost: the peak, weights and buffers included.
        is_exact: whether it is to the byte what a trace of any shape gives.
        reason: why it is not, else None.
        error: largest relative error above the weights at shapes that were only checked; 0 where exact.
        resident_bytes: weights and buffers.
        moments: for each form of an exact model, where in the step it is the peak.
        held_per_token: bytes for each token of a batch that the outputs of one step keep.
        traces: how many were made.
    """

    cost: CostModel
    is_exact: bool
    reason: str | None
    error: float
    resident_bytes: int
    moments: tuple[tuple[Form, Moment], ...]
    held_per_token: float
    traces: int


def traced_cost(trace_at: TraceAt, *, longest: int, pad_multiple: int = 1) -> TracedCost:
    """The cost model of a step for padded lengths up to `longest`.

    Where lengths may be no multiple of 8, it is exact for those that are, and for the others the largest that padding
    within kernels can make of them.

    Raises:
        UntraceableError: the step can't be traced at all.
    """
    traces = _Traces(trace_at)
    first = traces.at(Shape(_ROWS[0], min(_SHORTEST, longest)))
    held = first.held_bytes / (_ROWS[0] * min(_SHORTEST, longest))
    try:
        solved = list(_solve_everywhere(traces, longest=longest, pad_multiple=pad_multiple))
        cost: CostModel = ExactCost(dict.fromkeys(form for form, _ in solved))
        reason, error = None, 0.0
    except (NotPolynomialError, ValueError) as failure:
        solved, reason = [], str(failure)
        _log.info("the cost model is fitted to traces: %s", reason)
        cost, error = _fit(traces, longest=longest, pad_multiple=pad_multiple)
    return TracedCost(
        cost=cost,
        is_exact=reason is None,
        reason=reason,
        error=error,
        resident_bytes=first.resident_bytes,
        moments=tuple(dict(solved).items()),
        held_per_token=held,
        traces=len(traces),
    )


class _Traces:
    """Traces by shape, each made once."""

    def __init__(self, trace_at: TraceAt) -> None:
        self._trace_at, self._made = trace_at, dict[Shape, Trace]()

    def at(self, shape: Shape) -> Trace:
        if shape not in self._made:
            self._made[shape] = self._trace_at(shape)
        return self._made[shape]

    def signature(self, length: int) -> int:
        return signature(self.at(Shape(_ROWS[0], length)))

    def __len__(self) -> int:
        return len(self._made)


def _solve_everywhere(traces: _Traces, *, longest: int, pad_multiple: int) -> Iterator[tuple[Form, Moment]]:
    """The forms for lengths that are multiples of 8, and for all others where there are such."""
    yield from _solve_class(traces, range(_SHORTEST, longest + 1, _ALIGNED), step=_ALIGNED)
    if pad_multiple % _ALIGNED:
        # Of all remainders 1 is padded the most; where the sequence changes is looked for at every odd length.
        yield from _solve_class(traces, range(_SHORTEST + 1, longest + 1, 2), step=_ALIGNED)


def _solve_class(traces: _Traces, lengths: Sequence[int], *, step: int) -> Iterator[tuple[Form, Moment]]:
    if not lengths:
        raise NotPolynomialError("no length is long enough to solve for")
    spacing = lengths[1] - lengths[0] if len(lengths) > 1 else 1
    regimes = list(_regimes(traces, lengths))
    for number, regime in enumerate(regimes):
        # Between the last length seen of one regime and the first of the next, both hold.
        first = 1 if number == 0 else regimes[number - 1][-1] + 1
        last = 0 if number == len(regimes) - 1 else regime[-1] + spacing - 1
        yield from _solve_regime(traces, regime, step=step, first=first, last=last)


def _regimes(traces: _Traces, lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    """`lengths` in runs over which the events of a trace line up, found by bisection."""
    for _ in range(_MOST_REGIMES):
        here = traces.signature(lengths[0])
        if traces.signature(lengths[-1]) == here:
            yield lengths
            return
        same, other = 0, len(lengths) - 1
        while other - same > 1:
            middle = (same + other) // 2
            if traces.signature(lengths[middle]) == here:
                same = middle
            else:
                other = middle
        yield lengths[:other]
        lengths = lengths[other:]
    raise NotPolynomialError("the order of allocations changes with the length again and again")


def _solve_regime(
    traces: _Traces, lengths: Sequence[int], *, step: int, first: int, last: int
) -> Iterator[tuple[Form, Moment]]:
    """Solve at six shapes, and check at others: one beyond them, one row of the longest, and many rows."""
    start = lengths[0] + step * 2 if lengths[0] + step * 2 + _CHECKED <= lengths[-1] else lengths[0]
    start = lengths[0] + -(-(start - lengths[0]) // step) * step
    spacing = _SPACING if start + _SPACING[-1] <= lengths[-1] else (0, step, 2 * step)
    if start + spacing[-1] > lengths[-1]:
        raise NotPolynomialError(f"only lengths {lengths[0]} to {lengths[-1]} run as they do: too few to solve for")
    shapes = [Shape(rows, start + more) for rows in _ROWS for more in spacing]
    solved = solve([(shape, traces.at(shape)) for shape in shapes], first=first, last=last)
    cost = ExactCost([form._replace(first=1.0) for form in solved.forms])
    for shape in _checks(lengths, start=start, step=step):
        difference = cost.peak_bytes(shape) - traces.at(shape).peak_bytes
        if difference:
            raise NotPolynomialError(f"the polynomials miss a trace of {shape} by {difference} bytes")
    yield from zip(solved.forms, solved.moments, strict=True)


def _checks(lengths: Sequence[int], *, start: int, step: int) -> list[Shape]:
    def nearest(length: int) -> int:
        """The length of the same remainder as `start`, at most `length`, but within the regime."""
        below = start + (min(length, lengths[-1]) - start) // step * step
        return max(below, start)

    longest = nearest(lengths[-1])
    return [Shape(5, nearest(start + _CHECKED - step)), Shape(1, longest), Shape(64, nearest((start + longest) // 2))]


def _fit(traces: _Traces, *, longest: int, pad_multiple: int) -> tuple[CostModel, float]:
    """A quadratic model above traces at several lengths, and its largest error half-way between them."""
    grid = sorted({_padded(longest * (i + 1) / _FITTED_LENGTHS, pad_multiple, longest) for i in range(_FITTED_LENGTHS)})
    grid = sorted({_padded(_SHORTEST, pad_multiple, longest), _padded(64, pad_multiple, longest), *grid})
    probes = [_as_probe(shape, traces.at(shape)) for length in grid for shape in (Shape(1, length), Shape(4, length))]
    between = [_padded((low + high) / 2, pad_multiple, longest) for low, high in pairwise(grid)]
    checks = [_as_probe(Shape(3, length), traces.at(Shape(3, length))) for length in between]
    error = max((_error(QuadraticCost.fit(probes), check) for check in checks), default=0.0)
    return QuadraticCost.fit([*probes, *checks]), error


def _padded(length: float, pad_multiple: int, longest: int) -> int:
    return max(min(round(length / pad_multiple), longest // pad_multiple), 1) * pad_multiple


def _as_probe(shape: Shape, trace: Trace) -> Probe:
    return Probe(
        batch_size=shape.batch_size,
        length=shape.length,
        outcome=Outcome.FITS,
        peak_allocated_bytes=trace.peak_bytes,
        baseline_bytes=trace.resident_bytes,
    )


def _error(cost: CostModel, check: Probe) -> float:
    above = max(check.peak_bytes - check.baseline_bytes, 1)
    return abs(cost.peak_bytes(check.shape) - check.peak_bytes) / above
