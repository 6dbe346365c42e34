"""A deep model's step from traces of a shallow one.

Layers that are built alike allocate alike: beyond the second of each kind, one more layer adds the same events again
(seen to the byte for 2 to 32 layers, TRACING 4). So a copy with a few layers is traced, the events of one period of the
layer pattern are found by comparing two depths, and put in as often as the model has further periods. The result is
compared with a trace of the whole model, event by event, before it is believed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import nn

from budgetdb.errors import UntraceableError
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Event, Trace
from budgetdb.tracing.polynomials import signature
from budgetdb.tracing.steps import Steps
from budgetdb.tracing.targets import Target
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import Workload

_log = logging.getLogger(__name__)

# Periods in the two shallow copies: the first layers and the last may differ, those between are the pattern.
_SHALLOW, _DEEPER = 2, 3
# Attributes of a layer that number it, and so differ between layers that are alike.
_NUMBERING = ("idx", "index", "layer_id", "layer_number", "layer_num")


@dataclass(frozen=True)
class Stack:
    """A list of layers that repeat.

    Attributes:
        path: of the list within the model.
        count: layers in it.
        prefix: layers at the front that are outside the pattern.
        period: layers in one turn of the pattern.
    """

    path: str
    count: int
    prefix: int
    period: int

    @property
    def periods(self) -> int:
        """Whole turns of the pattern."""
        return (self.count - self.prefix) // self.period

    def layers_for(self, periods: int) -> int:
        """Layers of a copy with so many turns, ending where the whole list does."""
        return self.count - (self.periods - periods) * self.period


class DeepTracer:
    """Traces a deep model by way of shallow copies of it, where its layers repeat; else as `Tracer` does.

    Args:
        model, workload, target: as of `Tracer`.
        depth_is_known: shallow copies stood for this model on another target, and are not compared with it again.

    Attributes:
        whole: the tracer of the model at its whole depth.
    """

    def __init__(self, model: Any, workload: Workload, target: Target, *, depth_is_known: bool = False) -> None:
        self._is_known = depth_is_known
        self.whole = Tracer(model, workload, target)
        self._hold = workload.hold
        self._stacks = layer_stacks(model)
        # One copy with every stack at the same number of periods, and for each stack one where it has a period less.
        every = {stack.path: stack.layers_for(_DEEPER) for stack in self._stacks}
        self._deeper = Tracer(model, workload, target, layers=every) if every else None
        self._shallow = [
            Tracer(model, workload, target, layers={**every, stack.path: stack.layers_for(_SHALLOW)})
            for stack in self._stacks
        ]
        self._blocks: dict[int, list[_Block]] = {}

    @property
    def resident_bytes(self) -> int:
        """Weights and buffers of the whole model."""
        return self.whole.resident_bytes

    @property
    def is_shallow(self) -> bool:
        """Whether shallow copies stand for the model, as far as it has been traced."""
        return self._deeper is not None

    def __enter__(self) -> Self:
        self._entered(self.whole)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracer in (self._deeper, *self._shallow, self.whole):
            if tracer is not None:
                tracer.__exit__(kind, error, trace)

    def trace(self, shape: Shape) -> Trace:
        """What a step at `shape` allocates; see `Tracer.trace`.

        Raises:
            UntraceableError: the model can't run on fake tensors.
            UsageError: the workload does not suit the model.
        """
        if self._deeper is None:
            return self.whole.trace(shape)
        try:
            deeper = self._entered(self._deeper).trace(shape)
            return self._extended(deeper, self._blocks_of(deeper, shape))
        except (_UnlikeError, UntraceableError) as error:
            _log.info("traced at its whole depth: %s", error)
            self._deeper, self._shallow = None, []
            return self.whole.trace(shape)

    def _blocks_of(self, deeper: Trace, shape: Shape) -> list[_Block]:
        """What one more period of each stack adds to traces like this one; compared once with the whole model."""
        kind = signature(deeper)
        if kind not in self._blocks:
            blocks = [_Block.between(self._entered(shallow).trace(shape), deeper) for shallow in self._shallow]
            self.whole.repeats = all(shallow.repeats for shallow in self._shallow)
            if not self._is_known and not _same(self._extended(deeper, blocks), self.whole.trace(shape)):
                raise _UnlikeError("its whole depth allocates otherwise")
            self._blocks[kind] = blocks
        return self._blocks[kind]

    def _entered(self, tracer: Tracer) -> Tracer:
        return tracer if tracer.is_open else tracer.__enter__()

    def _extended(self, deeper: Trace, blocks: Sequence[_Block]) -> Trace:
        steps, batch = Steps(list(deeper.step_events), list(deeper.moments[: deeper.step_length])), deeper.batch_length
        # The last one in the step first: where the others begin then stays the same.
        for block, stack in sorted(zip(blocks, self._stacks, strict=True), key=lambda pair: -pair[0].start):
            steps = block.inserted(steps, times=stack.periods - _DEEPER)
        twice = steps.repeated(batch, hold=self._hold)
        return Trace(
            resident_bytes=self.resident_bytes,
            events=tuple(twice.events),
            moments=tuple(twice.moments),
            held_bytes=sum(steps.left(batch).values()),
            batch_length=batch,
            step_length=len(steps.events),
        )


def layer_stacks(model: Any) -> list[Stack]:
    """The lists of layers of a model that repeat often enough to be cut, outermost only."""
    if not isinstance(model, nn.Module):
        return []
    stacks: list[Stack] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{stack.path}.") for stack in stacks)
        if isinstance(module, nn.ModuleList) and not inside:
            pattern = _pattern([_structure(layer) for layer in module])
            if pattern is not None:
                stacks.append(Stack(path, len(module), *pattern))
    return stacks


def _pattern(structures: Sequence[object]) -> tuple[int, int] | None:
    """Prefix and period of the shortest pattern that holds to the end and turns often enough to be cut."""
    count = len(structures)
    for period in range(1, count // (_DEEPER + 2) + 1):
        for prefix in range(count - (_DEEPER + 2) * period + 1):
            if all(structures[i] == structures[i + period] for i in range(prefix, count - period)):
                return prefix, period
    return None


def _structure(layer: nn.Module) -> object:
    """What makes two layers alike: classes, shapes of parameters, and settings, but for their numbers."""
    return tuple(
        (
            path,
            type(module),
            tuple((name, tuple(p.shape), p.dtype) for name, p in module._parameters.items() if p is not None),
            tuple((name, tuple(b.shape), b.dtype) for name, b in module._buffers.items() if b is not None),
            tuple(_settings(module)),
        )
        for path, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str | None) and not any(part in name for part in _NUMBERING):
            yield name, value


class _UnlikeError(Exception):
    """Depth does not add the same events again."""


@dataclass(frozen=True)
class _Block:
    """The events that one more period adds: `length` of them from event `start` on, with so many births."""

    start: int
    length: int
    births: int

    @classmethod
    def between(cls, shallow: Trace, deeper: Trace) -> _Block:
        """What a trace has that one of a period less has not."""
        short, long = _outline(shallow), _outline(deeper)
        length = len(long) - len(short)
        if length <= 0:
            raise _UnlikeError("a further layer adds no allocations")
        # As far from the end as both agree: there the last period of the deeper one begins.
        same = 0
        while same < len(short) and _alike(short[-1 - same], long[-1 - same]):
            same += 1
        start = len(short) - same
        if not all(map(_alike, short[:start], long[:start])):
            raise _UnlikeError("layers in the middle allocate otherwise than the last ones")
        return cls(start, length, sum(event.nbytes > 0 for event in deeper.step_events[start : start + length]))

    def inserted(self, steps: Steps, *, times: int) -> Steps:
        """A step with the block repeated `times` more."""
        events, moments = steps.events, steps.moments
        end = self.start + self.length
        # What a block frees is its own or of the block before; what comes after may also free what came first of all.
        born_before = sum(event.nbytes > 0 for event in events[: self.start])
        blocks = [
            Event(event.storage + turn * self.births, event.nbytes)
            for turn in range(1, times + 1)
            for event in events[self.start : end]
        ]
        shift = times * self.births
        after = [
            Event(event.storage + (shift if event.storage >= born_before else 0), event.nbytes)
            for event in events[end:]
        ]
        places = [*moments[:end], *moments[self.start : end] * times, *moments[end:]]
        return Steps([*events[:end], *blocks, *after], places)


class _Outlined(NamedTuple):
    """An event without the number of its storage, but for deaths both ways to tell whose it is."""

    nbytes: int
    operation: str
    storage: int
    births_ago: int


def _outline(trace: Trace) -> list[_Outlined]:
    births, outline = 0, []
    for event, moment in zip(trace.step_events, trace.moments, strict=False):
        if event.nbytes > 0:
            births += 1
        outline.append(_Outlined(event.nbytes, moment.operation, event.storage, births - event.storage))
    return outline


def _alike(one: _Outlined, other: _Outlined) -> bool:
    """Whether they do the same to the same storage, counted from the start or from here."""
    return one[:2] == other[:2] and (one.births_ago == other.births_ago or one.storage == other.storage)


def _same(extended: Trace, whole: Trace) -> bool:
    """Whether two traces allocate and free the same bytes in the same order."""
    return Steps(list(extended.events), list(extended.moments)).is_like(Steps(list(whole.events), list(whole.moments)))
