"""Where probes run: in this process on a live model, or in a worker process that builds the model itself."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from budgetdb.calibration.prober import PoisonedProcessError, Prober
from budgetdb.calibration.subject import Place, Subject, describe_subject
from budgetdb.devices.base import Device, Room
from budgetdb.errors import DoesNotFitError, WorkerError
from budgetdb.models.facts import resident_bytes
from budgetdb.profiles import Probe
from budgetdb.settings import format_bytes
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload

_log = logging.getLogger(__name__)


class Ready(BaseModel):
    """What a session may use, once the model is there and warm.

    Attributes:
        limit_bytes: what the allocator may hold, before the headroom is taken off.
        headroom_bytes: what is kept free of it.
        overhead_bytes: what the process holds on the device outside the allocator.
        resident_bytes: weights and buffers.
        warm_up_bytes: how much of the overhead came with the first steps.
        step_s: seconds of a warm step of one short row; 0 where it was not run.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    limit_bytes: int
    headroom_bytes: int
    overhead_bytes: int
    resident_bytes: int
    warm_up_bytes: int = 0
    step_s: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """The limit less the headroom."""
        return max(self.limit_bytes - self.headroom_bytes, 0)


class Session(ABC):
    """One model on one device, to be probed: `describe`, then `prepare`, then `probe` as often as needed.

    A session is a context manager; leaving it lifts the cap and frees what the session allocated.
    """

    @abstractmethod
    def describe(self) -> Subject:
        """What is to be calibrated; no step is run, and no weights are loaded for it."""

    @abstractmethod
    def outline(self) -> tuple[Any, Place] | None:
        """The model, live or without memory, and the device: what a trace needs; None where none should be made.

        Raises:
            ModelError: the model can't be outlined.
        """

    @abstractmethod
    def prepare(self, *, longest: int, memory_limit_bytes: int | None, headroom_bytes: int | None) -> Ready:
        """Load and warm up the model, read what is free, and hold the process to it.

        `longest` is the longest length that will be probed.

        Raises:
            StepFailedError: a tiny step failed, and not for lack of memory.
        """

    @abstractmethod
    def probe(self, shape: Shape, *, purpose: str) -> Probe:
        """Run one step, twice in a row.

        Raises:
            StepFailedError: it failed for a reason that is not memory.
            CalibrationTimeoutError: it did not end in time.
            WorkerError: the process it ran in is gone for good.
        """

    @abstractmethod
    def close(self) -> None:
        """Lift the cap and free what the session allocated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalSession(Session):
    """Probes a live model in this process."""

    def __init__(self, model: Any, *, device: Device, workload: Workload, name: str | None = None) -> None:
        self._device, self._workload, self._model, self._name = device, workload, model, name
        self._resident_bytes = resident_bytes(model)
        self._prober = Prober(device=device, model=model, workload=workload, resident_bytes=self._resident_bytes)

    def describe(self) -> Subject:
        """What the live model is."""
        return describe_subject(self._model, device=self._device, workload=self._workload, name=self._name)

    def outline(self) -> tuple[Any, Device] | None:
        """The live model; not on a CPU, where what a trace leaves in this process would be missing from the limit."""
        return None if self._device.torch_device.type == "cpu" else (self._model, self._device)

    def prepare(self, *, longest: int, memory_limit_bytes: int | None, headroom_bytes: int | None) -> Ready:
        """Warm up and cap this process."""
        return prepare_prober(
            self._prober,
            self._device,
            longest=longest,
            memory_limit_bytes=memory_limit_bytes,
            headroom_bytes=headroom_bytes,
            resident_bytes=self._resident_bytes,
        )

    def probe(self, shape: Shape, *, purpose: str) -> Probe:
        """Run one step here."""
        try:
            probe = self._prober.probe(shape, purpose=purpose)
        except PoisonedProcessError as error:
            raise WorkerError(
                f"the step at {shape} left this process unable to use the device: {error}",
                next_step="Start Python anew, and calibrate by the model's name: that probes in a process of its own",
            ) from None
        if self._prober.leak is not None:
            _log.warning("%s", self._prober.leak)
        return probe

    def close(self) -> None:
        """Lift the cap; the model stays as it was."""
        self._prober.close()


def prepare_prober(
    prober: Prober,
    device: Device,
    *,
    longest: int,
    memory_limit_bytes: int | None,
    headroom_bytes: int | None,
    resident_bytes: int,
) -> Ready:
    """Warm a prober up, read the room there is, and cap the process to it.

    Raises:
        DoesNotFitError: the model alone takes all there is.
    """
    room = prober.start(longest=longest, memory_limit_bytes=memory_limit_bytes)
    headroom = device.default_headroom_bytes(room.limit_bytes) if headroom_bytes is None else headroom_bytes
    ready = ready_within(room, headroom_bytes=headroom, resident_bytes=resident_bytes)
    ready = ready.model_copy(update={"warm_up_bytes": prober.warm_up_bytes, "step_s": prober.step_s})
    prober.cap(ready.usable_bytes)
    return ready


def ready_within(room: Room, *, headroom_bytes: int, resident_bytes: int) -> Ready:
    """What a session may use of `room`.

    Raises:
        DoesNotFitError: the model alone takes all there is.
    """
    ready = Ready(
        limit_bytes=room.limit_bytes,
        headroom_bytes=headroom_bytes,
        overhead_bytes=room.overhead_bytes,
        resident_bytes=resident_bytes,
    )
    if ready.usable_bytes <= resident_bytes:
        raise DoesNotFitError(
            f"the model's weights take {format_bytes(resident_bytes)}, and {format_bytes(ready.usable_bytes)} may be "
            f"used: a limit of {format_bytes(ready.limit_bytes)} less {format_bytes(headroom_bytes)} of headroom, "
            f"beside {format_bytes(room.overhead_bytes)} that the process takes for itself",
            needed_bytes=resident_bytes,
            limit_bytes=room.limit_bytes,
            next_step="Raise --memory-limit, free memory on the device, or use a smaller dtype",
        )
    return ready
