"""Calibration on a card that is not there: each probe is traced, and replayed through the card's allocator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from typing_extensions import override

from budgetdb.calibration.session import Ready, Session, ready_within
from budgetdb.calibration.subject import Place, Subject, describe_subject
from budgetdb.devices.simulated import SimulatedCard
from budgetdb.errors import SimulatedOutOfMemoryError
from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.depth import DeepTracer
from budgetdb.tracing.lifetimes import Event, Trace
from budgetdb.tracing.replay import replay
from budgetdb.workloads.base import Workload

_WARM_UP = (Shape(1, 8), Shape(8, 256))
_KEPT_STEPS = {"none": 0, "previous": 1, "all": 2}


class SimulatedSession(Session):
    """Answers probes as a card would that follows its trace: for tests of searches and cost models without a card.

    The allocator is one for the whole session, as in a process: what earlier probes left cached and cut up counts in a
    `check`, and is given back before any other probe. What it finds is a simulation's; nothing stores it as measured.

    Args:
        model: live, or outlined on `meta`.
        card: the card, its settings of the allocator included.
        workload: the kind of step.
        unseen_bytes: for a shape, bytes that the card takes in a step beside what is traced (workspaces of kernels).
    """

    def __init__(
        self,
        model: Any,
        card: SimulatedCard,
        workload: Workload,
        *,
        unseen_bytes: Callable[[Shape], int] = lambda shape: 0,  # noqa: ARG005 (named for readers)
    ) -> None:
        self._model, self._card, self._workload, self._unseen_bytes = model, card, workload, unseen_bytes
        self._tracer = DeepTracer(model, workload, card.target())
        self._traces: dict[Shape, Trace] = {}
        self._allocator = CachingAllocator(card.settings)
        self._resident_bytes = self._cap_bytes = 0

    @override
    def describe(self) -> Subject:
        """What the model would be on the card."""
        return describe_subject(self._model, device=self._card, workload=self._workload)

    @override
    def outline(self) -> tuple[Any, Place]:
        """The model and the card."""
        return self._model, self._card

    @override
    def prepare(self, *, longest: int, memory_limit_bytes: int | None, headroom_bytes: int | None) -> Ready:
        """Load the weights and workspaces, and run two small steps."""
        self._resident_bytes = self._tracer.resident_bytes
        room, workspace = self._card.room(memory_limit_bytes), sum(self._card.workspaces)
        room = replace(room, limit_bytes=max(room.limit_bytes - workspace, 0))
        headroom = self._card.default_headroom_bytes(room.limit_bytes) if headroom_bytes is None else headroom_bytes
        ready = ready_within(room, headroom_bytes=headroom, resident_bytes=self._resident_bytes)
        self._cap_bytes = ready.usable_bytes
        self._allocator = CachingAllocator(self._card.settings, self._cap_bytes + workspace)
        for nbytes in (self._resident_bytes, *self._card.workspaces):
            self._allocator.allocate(nbytes)
        for shape in _WARM_UP:
            self._run(Shape(shape.batch_size, min(shape.length, longest)))
        return ready

    @override
    def probe(self, shape: Shape, *, purpose: str) -> Probe:
        """Trace the step and replay it twice in a row."""
        allocator = self._allocator
        if purpose != "check":
            allocator.empty_cache()
        allocator.reset_peaks()
        before, retries = allocator.allocated_bytes, allocator.alloc_retries
        workspace = before - self._resident_bytes  # as a prober counts: what is not the model's is left out
        ended = self._run(shape)
        flushed = allocator.alloc_retries > retries and purpose != "check"
        return Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=Outcome.FITS if ended and not flushed else Outcome.OOM,
            peak_allocated_bytes=allocator.peak_allocated_bytes - workspace if ended else None,
            peak_reserved_bytes=allocator.peak_reserved_bytes - workspace if ended else None,
            baseline_bytes=self._resident_bytes,
            held_bytes=self._trace(shape).held_bytes,
            alloc_retries=allocator.alloc_retries - retries,
            cap_bytes=self._cap_bytes,
            purpose=purpose,
        )

    @override
    def close(self) -> None:
        """Forget the traces."""
        self._traces.clear()

    def _trace(self, shape: Shape) -> Trace:
        if shape not in self._traces:
            with self._tracer:
                self._traces[shape] = self._tracer.trace(shape)
        return self._traces[shape]

    def _run(self, shape: Shape) -> bool:
        """Two steps, outputs held as the loop holds them; whether there was room. Nothing of them is left."""
        allocator = self._allocator
        alive: deque[dict[int, int]] = deque()
        before = allocator.live_handles()
        try:
            for _ in range(2):
                alive.append(replay(self._events(shape), allocator))
                while len(alive) > _KEPT_STEPS[self._workload.hold]:
                    for handle in alive.popleft().values():
                        allocator.free(handle)
        except SimulatedOutOfMemoryError:
            return False
        finally:
            for handle in allocator.live_handles() - before:
                allocator.free(handle)
        return True

    def _events(self, shape: Shape) -> list[Event]:
        events, unseen = list(self._trace(shape).step_events), self._unseen_bytes(shape)
        number = len(events)  # no storage has it: there are no more births than events
        return [Event(number, unseen), *events, Event(number, -unseen)] if unseen else events
