"""From traces to a cost model: exact, in regimes, or fitted and saying so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import nn

from budgetdb.costs.exact import ExactCost
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Event, Moment, Trace
from budgetdb.tracing.polynomials import NotPolynomialError, solve
from budgetdb.tracing.targets import cpu_target
from budgetdb.tracing.traced_cost import traced_cost
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import parse_workload

SHAPES = [Shape(rows, length) for rows in (2, 3) for length in (32, 48, 80)]


def made(sizes: Callable[[int, int], list[int]]) -> Callable[[Shape], Trace]:
    """Traces of a step that makes storages of the given sizes, one after another, and frees the second at the end."""

    def trace_at(shape: Shape) -> Trace:
        births = [Event(i, size) for i, size in enumerate(sizes(shape.batch_size, shape.length))]
        events = [*births, Event(1, -births[1].nbytes)]
        moments = [Moment("", f"op{i}") for i in range(len(births))] + [Moment("", "free")]
        return Trace(1000, tuple(events), tuple(moments), step_length=len(events))

    return trace_at


def test_every_coefficient_is_found_and_a_step_can_be_replayed_at_any_shape() -> None:
    sizes = lambda k, n: [8 * k * n, 7 + 3 * k + 5 * n, k * n * n, n * n, k * n // 2]  # noqa: E731
    trace_at = made(sizes)
    solved = solve([(shape, trace_at(shape)) for shape in SHAPES], first=1, last=0)
    cost = ExactCost(solved.forms)
    for shape in (Shape(1, 8), Shape(64, 4096), Shape(5, 1000)):
        assert cost.peak_bytes(shape) == trace_at(shape).peak_bytes
        assert solved.script.at(shape) == list(trace_at(shape).events)


def test_sizes_that_are_no_polynomial_and_sequences_that_differ_are_refused() -> None:
    # six shapes make six equations for six unknowns: that rounding is none of them shows at the shapes that are checked
    rounded = traced_cost(made(lambda k, n: [k * n, 512 * (k * n // 512 + 1)]), longest=512, pad_multiple=8)
    assert not rounded.is_exact
    assert "polynomial" in str(rounded.reason)
    longer = made(lambda k, n: [k * n] * (2 + n // 40))
    with pytest.raises(NotPolynomialError, match="number of allocations"):
        solve([(shape, longer(shape)) for shape in SHAPES], first=1, last=0)


@pytest.mark.parametrize("switch", [129, 256])
@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_a_window_makes_two_regimes(switch: int, pad_multiple: int) -> None:
    def sizes(k: int, n: int) -> list[int]:
        return [8 * k * n, k * n, *([k * n * n] if n >= switch else [])]

    trace_at = made(sizes)
    traced = traced_cost(trace_at, longest=2048, pad_multiple=pad_multiple)
    assert traced.is_exact, traced.reason
    for length in range(16, 2049, pad_multiple):
        difference = traced.cost.peak_bytes(Shape(3, length)) - trace_at(Shape(3, length)).peak_bytes
        # a switch between two lengths that were looked at is taken for the first of them
        assert difference == 0 or (difference > 0 and abs(length - switch) < 8)


def test_a_loop_over_the_tokens_is_fitted_and_says_so() -> None:
    trace_at = made(lambda k, n: [k * 64 * n] * (2 + n // 32))
    traced = traced_cost(trace_at, longest=1024, pad_multiple=8)
    assert not traced.is_exact
    assert traced.reason is not None
    for shape in (Shape(3, 64), Shape(7, 512), Shape(2, 1024)):
        assert traced.cost.peak_bytes(shape) >= 0.9 * trace_at(shape).peak_bytes
        assert traced.step(shape) == list(trace_at(shape).step_events)


def test_a_real_step_and_its_replay() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(input_ids)
            scores = hidden @ hidden.transpose(1, 2)
            hidden = scores.softmax(-1) @ hidden
            out: torch.Tensor = self.down(self.up(hidden).relu())
            return out

    with Tracer(Small().eval(), parse_workload("forward"), cpu_target()) as tracer:
        traced = traced_cost(tracer.trace, longest=512, pad_multiple=1)
        assert traced.is_exact, traced.reason
        for shape in (Shape(1, 16), Shape(33, 57), Shape(64, 512)):
            trace = tracer.trace(shape)
            assert traced.cost.peak_bytes(shape) == trace.peak_bytes
            live = list(accumulate(event.nbytes for event in traced.step(shape)))
            assert max(live) == max(accumulate(event.nbytes for event in trace.step_events))
    # asked again when the tracer is closed
    assert tracer.trace(Shape(3, 20)).peak_bytes == traced.cost.peak_bytes(Shape(3, 20))
