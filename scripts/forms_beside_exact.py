"""What the exact cost of a trace buys: the fitted forms on a handful of probes, beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from bench_families import CARD, remembering
from small_families import most_positions, small_family

from budgetdb.costs.base import CostModel
from budgetdb.costs.linear import LinearCost
from budgetdb.costs.quadratic import QuadraticCost
from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Trace
from budgetdb.tracing.targets import card_target
from budgetdb.tracing.traced_cost import traced_cost
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import parse_workload

# Without a head where the logits would hide all else: what is a line there is none without them.
MODELS = (
    *(("bert", "base", "eager"), ("modernbert", "base", "sdpa"), ("gpt2", "base", "eager")),
    *(("llama", "base", "eager"), ("llama", "causal-lm", "sdpa"), ("mixtral", "causal-lm", "eager")),
    *(("qwen2", "base", "sdpa"), ("t5", "seq2seq-lm", "sdpa")),
)
_LONGEST = 2048
_PROBES = ((2, 64), (8, 128), (4, 256), (2, 512), (8, 512), (1, 1024), (1, 2048), (4, 1024))
_HELD_OUT = (
    *((1, 16), (64, 16), (1, 40), (32, 72), (5, 200), (64, 200), (3, 384), (16, 384)),
    *((7, 648), (48, 648), (2, 904), (1, 1320), (24, 1320), (3, 1864), (64, 2048)),
)


@dataclass(frozen=True)
class Line:
    """One kind of cost for one model: how many probes or traces it took, and how far off it is above the weights."""

    model: str
    kind: str
    probes: int
    least: float
    most: float


def table(*, only: str | None = None) -> str:
    """Each model with each kind, worst errors on held-out shapes; under is what runs out of memory."""
    lines = [f"{'model':30}{'kind':12}{'probes':>8}{'under':>10}{'over':>10}"]
    for family, head, attention in MODELS:
        if only in (None, family):
            print(f"{family} {attention}", file=sys.stderr, flush=True)
            lines += [
                f"{line.model:30}{line.kind:12}{line.probes:>8}{min(line.least, 0):>10.1%}{max(line.most, 0):>10.1%}"
                for line in _lines(family, head, attention)
            ]
    return "\n".join(lines)


def _lines(family: str, head: str, attention: str) -> Iterator[Line]:
    model = small_family(family, head, attention=attention, dtype=torch.bfloat16)
    longest = min(most_positions(model.config) or _LONGEST, _LONGEST)
    with Tracer(model, parse_workload("forward"), card_target(CARD)) as tracer:
        trace_at = remembering(tracer.trace)
        probes = [_probe(shape, trace_at(shape)) for shape in _within(_PROBES, longest)]
        held_out = _within(_HELD_OUT, longest)
        traced = traced_cost(trace_at, longest=longest, pad_multiple=8)
        costs: list[tuple[CostModel, int]] = [
            (LinearCost.fit(probes), len(probes)),
            (QuadraticCost.fit(probes), len(probes)),
            (traced.cost, 0),
        ]
        for cost, count in costs:
            errors = [_error(cost, shape, trace_at) for shape in held_out]
            yield Line(f"{family} {head} {attention}", cost.kind, count, min(errors), max(errors))


def _within(shapes: Sequence[tuple[int, int]], longest: int) -> list[Shape]:
    return [Shape(rows, length) for rows, length in shapes if length <= longest]


def _probe(shape: Shape, trace: Trace) -> Probe:
    return Probe(
        batch_size=shape.batch_size,
        length=shape.length,
        outcome=Outcome.FITS,
        peak_allocated_bytes=trace.peak_bytes,
        baseline_bytes=trace.resident_bytes,
    )


def _error(cost: CostModel, shape: Shape, trace_at: Callable[[Shape], Trace]) -> float:
    """Relative to what is above the weights."""
    trace = trace_at(shape)
    return (cost.peak_bytes(shape) - trace.peak_bytes) / trace.transient_bytes
