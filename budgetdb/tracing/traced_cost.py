"""A cost model out of traces alone: exact where the step's sizes are polynomials, fitted to more traces where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from budgetdb.costs.base import CostModel
from budgetdb.costs.exact import ExactCost, Form
from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Event, Moment, Trace
from budgetdb.tracing.polynomials import NotPolynomialError, Script, Solved, signature, solve

_log = logging.getLogger(__name__)

TraceAt = Callable[[Shape], Trace]

# What kernels align rows to: with lengths that are no multiple of it, masks are padded and the sequence is another.
_ALIGNED = 8
_ROWS = (2, 3)
# Three lengths are solved for, the last two this far above the first; one more tells what grows with the rows, and
# longer ones and more rows are checked.
_SPACING = (0, 16, 48)
_CHECKED, _CHECKED_ROWS = 72, 5
_MANY_ROWS = 64
# Lengths that run alike over less than this are solved for one by one.
_LEAST_SPAN = 2 * _ALIGNED
# Windows and chunks change the sequence once or twice; what changes it more often is a loop over the tokens.
_MOST_REGIMES = 4
_SHORTEST = 16
_FITTED_LENGTHS = 7


@dataclass(frozen=True)
class TracedCost:
    """What traces say of a step's peak at every shape.

    Attributes:
        cost: the peak, weights and buffers included.
        is_exact: whether it is to the byte what a trace of any shape gives; for models that copy less for a single row
            than for several, one row may take less.
        reason: why it is not, else None.
        error: largest relative error above the weights at shapes that were only checked; 0 where exact.
        resident_bytes: weights and buffers.
        moments: for each form of an exact model, where in the step it is the peak.
        held_per_token: bytes for each token of a batch that the outputs of one step keep.
        traces: how many were made.
        scripts: for an exact model one step's events, and the lengths `range(first, last + 1)` they hold for.
    """

    cost: CostModel
    is_exact: bool
    reason: str | None
    error: float
    resident_bytes: int
    moments: tuple[tuple[Form, Moment], ...]
    held_per_token: float
    traces: int
    scripts: tuple[tuple[range, Script], ...]
    _trace_at: TraceAt

    def scripted_length(self, length: int) -> int:
        """The longest length up to `length` whose events follow a rule; `length` itself where there is none."""
        below = [
            max(range(lengths[0], min(length, lengths[-1]) + 1, lengths.step), default=0) for lengths, _ in self.scripts
        ]
        return max(below, default=0) or length

    def step(self, shape: Shape) -> list[Event]:
        """The events of one step at `shape` and its batch, for an allocator; traced anew where they follow no rule."""
        for lengths, script in self.scripts:
            if shape.length in lengths:
                return script.at(shape)
        return list(self._trace_at(shape).step_events)


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
        moments = {form: moment for _, one in solved for form, moment in zip(one.forms, one.moments, strict=True)}
        cost: CostModel = ExactCost(moments)
        reason, error = None, 0.0
    except (NotPolynomialError, ValueError) as failure:
        solved, moments, reason = [], {}, str(failure)
        _log.info("the cost model is fitted to traces: %s", reason)
        cost, error = _fit(traces, longest=longest, pad_multiple=pad_multiple)
    return TracedCost(
        cost=cost,
        is_exact=reason is None,
        reason=reason,
        error=error,
        resident_bytes=first.resident_bytes,
        moments=tuple(moments.items()),
        held_per_token=held,
        traces=len(traces),
        scripts=tuple((lengths, one.script) for lengths, one in solved),
        _trace_at=trace_at,
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


def _solve_everywhere(traces: _Traces, *, longest: int, pad_multiple: int) -> Iterator[tuple[range, Solved]]:
    """What holds for lengths that are multiples of 8, and for all others where there are such."""
    yield from _solve_class(traces, range(_SHORTEST, longest + 1, _ALIGNED))
    if pad_multiple % _ALIGNED:
        # Of all remainders 1 is padded the most; where the sequence changes is looked for at every odd length.
        for lengths, solved in _solve_class(traces, range(_SHORTEST + 1, longest + 1, 2)):
            yield range(lengths[0], lengths[-1] + 1, _ALIGNED), solved


def _solve_class(traces: _Traces, lengths: range) -> Iterator[tuple[range, Solved]]:
    if not lengths:
        raise NotPolynomialError("no length is long enough to solve for")
    regimes = [
        part
        for in_order in _regimes(traces, lengths)
        for regime in _same_polynomials(traces, in_order)
        for part in _solvable(regime)
    ]
    for number, regime in enumerate(regimes):
        # Between the last length seen of one regime and the first of the next, both hold.
        first = 1 if number == 0 else regimes[number - 1][-1] + 1
        last = 0 if number == len(regimes) - 1 else regime[-1] + lengths.step - 1
        yield regime, _solve_regime(traces, regime, first=first, last=last)


def _regimes(traces: _Traces, lengths: range) -> Iterator[range]:
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


def _same_polynomials(traces: _Traces, lengths: range) -> Iterator[range]:
    """`lengths` in runs over which one solution holds: a choice of the best 2048 tokens is as long as fewer are."""
    for _ in range(_MOST_REGIMES):
        if lengths[-1] - lengths[0] < _LEAST_SPAN:
            yield lengths
            return
        start, spacing = _basis(lengths)
        # Only these have the remainder that was solved for.
        alike = range(start + spacing[-1], lengths[-1] + 1, _ALIGNED)
        cost = _solution(traces, lengths)
        if _holds(cost, traces, alike[-1]):
            yield lengths
            return
        held, missed = 0, len(alike) - 1
        while missed - held > 1:
            middle = (held + missed) // 2
            if _holds(cost, traces, alike[middle]):
                held = middle
            else:
                missed = middle
        end = lengths.index(alike[missed])
        yield lengths[:end]
        lengths = lengths[end:]
    raise NotPolynomialError("the sizes of allocations change with the length again and again")


def _solution(traces: _Traces, lengths: range) -> ExactCost:
    return ExactCost(form._replace(first=1.0, last=0.0) for form in _solved(traces, lengths, first=1, last=0).forms)


def _holds(cost: ExactCost, traces: _Traces, length: int) -> bool:
    shape = Shape(_ROWS[0], length)
    return cost.peak_bytes(shape) == traces.at(shape).peak_bytes


def _solvable(regime: range) -> Iterator[range]:
    """`regime` itself, or each of its lengths where they are too few: a window as long as the longest row, for one."""
    if len(regime) > 1 and regime[-1] - regime[0] < _LEAST_SPAN:
        yield from (regime[i : i + 1] for i in range(len(regime)))
    else:
        yield regime


def _solve_regime(traces: _Traces, lengths: range, *, first: int, last: int) -> Solved:
    """Solve at a few shapes, and check at others: one beyond them, one row of the longest, and many rows."""
    solved = _solved(traces, lengths, first=first, last=last)
    cost = ExactCost([form._replace(first=1.0) for form in solved.forms])
    for shape in _checks(lengths):
        difference = cost.peak_bytes(shape) - traces.at(shape).peak_bytes
        if difference and not (difference > 0 and _is_alone(traces, shape)):
            raise NotPolynomialError(f"the polynomials miss a trace of {shape} by {difference} bytes")
    return solved


def _solved(traces: _Traces, lengths: range, *, first: int, last: int) -> Solved:
    start, spacing = _basis(lengths)

    def solved(shapes: Sequence[Shape]) -> Solved:
        return solve([(shape, traces.at(shape)) for shape in shapes], first=first, last=last)

    few, more = ([Shape(rows, start + beyond) for beyond in spacing] for rows in _ROWS)
    if len(spacing) > 1:
        with suppress(NotPolynomialError):
            return solved([*few, _beyond(lengths)])
    return solved([*few, *more])


def _is_alone(traces: _Traces, shape: Shape) -> bool:
    """Whether `shape` is one row that runs as several would not: what is expanded to one row needs no copy."""
    return shape.batch_size == 1 and signature(traces.at(shape)) != traces.signature(shape.length)


def _basis(lengths: range) -> tuple[int, Sequence[int]]:
    """The shortest of three lengths to solve for, and how far each is above it: all of one remainder. Or the only."""
    for start, spacing in ((lengths[0] + 2 * _ALIGNED, _SPACING), (lengths[0], _SPACING)):
        if start + spacing[-1] <= lengths[-1]:
            return start, spacing
    return lengths[0], (0, _ALIGNED, _LEAST_SPAN) if len(lengths) > 1 else (0,)


def _beyond(lengths: range) -> Shape:
    """More rows than are solved for, and a length above them where the regime has one."""
    start, _ = _basis(lengths)
    return Shape(_CHECKED_ROWS, _nearest(lengths, start + _CHECKED))


def _checks(lengths: range) -> list[Shape]:
    start, _ = _basis(lengths)
    middle = _nearest(lengths, (start + lengths[-1]) // 2)
    return [_beyond(lengths), Shape(1, _nearest(lengths, lengths[-1])), Shape(_MANY_ROWS, middle)]


def _nearest(lengths: range, length: int) -> int:
    """The longest length up to `length` that is in the regime and of the remainder that is solved for."""
    start, _ = _basis(lengths)
    return start + max(min(length, lengths[-1]) - start, 0) // _ALIGNED * _ALIGNED


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
