"""What traces and the simulated allocator say of one model on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
from gpu_acceptance_models import PAD_MULTIPLE, Case
from gpu_acceptance_record import Bench

from budgetdb.devices.base import Device
from budgetdb.devices.simulated import SimulatedCard
from budgetdb.errors import SimulatedOutOfMemoryError
from budgetdb.models.facts import describe
from budgetdb.models.load import outline_model
from budgetdb.prediction import target_of
from budgetdb.profiles import Caps
from budgetdb.shapes import Shape
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.depth import DeepTracer
from budgetdb.tracing.lifetimes import Event, Moment
from budgetdb.tracing.replay import Hold, peak_live_bytes, run
from budgetdb.tracing.steps import Steps
from budgetdb.tracing.traced_cost import TracedCost, traced_cost
from budgetdb.workloads.base import Workload


@dataclass(frozen=True)
class Expected:
    """What a sequence of steps should take, weights included.

    Attributes:
        fits: whether it ends within the limit.
        live_bytes: most bytes alive at once, as asked for.
        allocated_bytes: most bytes in blocks given out; the live ones on a CPU, which has no blocks.
        reserved_bytes: most bytes taken from the device, likewise.
    """

    fits: bool
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Foretold:
    """Steps of one model doing one workload, traced for a device and run through its allocator.

    Args:
        model: live, or outlined on `meta`.
        workload: the kind of step.
        device: the device at hand, whose allocator is simulated where it has one.
        traced: the traces.

    Attributes:
        batch_length: how many of a step's events, the first ones, are the births of its batch.
    """

    def __init__(self, model: Any, workload: Workload, device: Device, traced: TracedCost) -> None:
        self.traced, self.workload = traced, workload
        self._card = SimulatedCard.like(device) if device.torch_device.type == "cuda" else None
        self._residents = storage_sizes(model)
        facts = describe(model)
        self._caps: Caps = device.caps(heads=facts.heads, widest=facts.output_width)
        inputs = workload.inputs(model, Shape(2, 16), torch.device("cpu"))
        self.batch_length = sum(tensor.numel() > 0 for tensor in inputs.values())
        self.step = lru_cache(maxsize=64)(traced.step)

    def rows(self, length: int, limit_bytes: float) -> int:
        """The largest batch whose live bytes are within the limit, and that kernels take."""
        return self._caps.clip(self.traced.cost.max_batch_size(length, int(limit_bytes)), length)

    def probe(self, shape: Shape, *, hold: str) -> Expected:
        """A probe: one batch, run twice in a row, outputs held as `hold` says."""
        events = self.step(shape)
        steps = Steps(events, [Moment("", "")] * len(events))
        return self.sequence([steps.repeated(self.batch_length, hold=hold).events], hold="none")

    def sequence(
        self, streams: Sequence[Sequence[Event]], *, hold: str = "previous", limit_bytes: int | None = None
    ) -> Expected:
        """Steps one after another on one allocator, each with a batch of its own."""
        resident, held = self.traced.resident_bytes, cast("Hold", hold)
        live = peak_live_bytes(streams, resident=[resident], hold=held)
        if self._card is None:
            return Expected(limit_bytes is None or live <= limit_bytes, live, live, live)
        limit = None if limit_bytes is None else limit_bytes + self.base_reserved_bytes
        allocator, fits = self._loaded(limit), True
        try:
            run(streams, allocator, hold=held)
        except SimulatedOutOfMemoryError:
            fits = False
        beside = self._loaded(None).allocated_bytes - resident
        return Expected(fits, live, allocator.peak_allocated_bytes - beside, allocator.peak_reserved_bytes - beside)

    @property
    def workspaces(self) -> list[int]:
        """What matrix products take once and keep."""
        return self._card.workspaces if self._card is not None else []

    @cached_property
    def base_reserved_bytes(self) -> int:
        """What is reserved beyond the weights once the model is loaded and warm; 0 on a CPU."""
        return self._loaded(None).reserved_bytes - self.traced.resident_bytes if self._card is not None else 0

    def _loaded(self, limit_bytes: int | None) -> CachingAllocator:
        """The allocator with the weights in it, each storage on its own, and the workspaces of matrix products."""
        if self._card is None:
            raise TypeError("a CPU has no caching allocator")
        allocator = CachingAllocator(self._card.settings, limit_bytes, capped=True)
        run([], allocator, resident=[*self._residents, *self.workspaces])
        return allocator


@contextmanager
def foretold(case: Case, workload: Workload, bench: Bench, *, longest: int) -> Iterator[Foretold]:
    """The traces of a model of that case, which needs no memory; open in the block, for shapes that follow no rule."""
    outline = outline_model(case.spec)
    with DeepTracer(outline, workload, target_of(bench.device)) as tracer:
        traced = traced_cost(tracer.trace, longest=longest, pad_multiple=PAD_MULTIPLE)
        yield Foretold(outline, workload, bench.device, traced)


def storage_sizes(model: Any) -> list[int]:
    """Bytes of each storage of parameters and buffers, tied ones once, in the order of the modules."""
    sizes: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes())
    return [nbytes for nbytes in sizes.values() if nbytes]


def live_peak(events: Sequence[tuple[int, int]]) -> int:
    """The most bytes alive at once in a list of births and deaths."""
    return max(accumulate(nbytes for _, nbytes in events), default=0)
