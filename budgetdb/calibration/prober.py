"""Run one step at one shape, as the evaluation loop would, and say what it took."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from budgetdb.calibration.outcomes import ErrorKind, StepError, take
from budgetdb.devices.base import Device, Measurement, Room
from budgetdb.errors import StepFailedError
from budgetdb.models.quiet import quiet_transformers
from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload
from budgetdb.workloads.held import held_bytes

_log = logging.getLogger(__name__)

# An error that may or may not mean memory counts as out of memory when this share of the cap was reserved.
_LOW_MEMORY_SHARE = 0.8
# After a failed step as much may be left over for good: workspaces and caches of kernels that ran for the first time.
_LEAK_BYTES = 1 << 20

_WARM_LENGTH, _WARM_TOKENS = 256, 2048


class PoisonedProcessError(Exception):
    """A step left the process unable to use its device: a fresh one has to go on."""


@dataclass
class _Step:
    """What one run of a step leaves behind."""

    measurement: Measurement
    held_bytes: int = 0
    elapsed_s: float = 0.0
    error: StepError | None = None


class Prober:
    """Probes a model on a device; between `start` and `close` the process is held to the limit.

    What else this process keeps on the device is left out of every figure: the limit, the baseline and the peaks are
    those of the model alone.

    Args:
        device: where the model is.
        model: anything that the workload can run.
        workload: the kind of step.
        resident_bytes: the model's weights and buffers.
    """

    def __init__(self, *, device: Device, model: Any, workload: Workload, resident_bytes: int) -> None:
        self._device, self._model, self._workload = device, model, workload
        self._resident_bytes = resident_bytes
        self._foreign_bytes = 0
        # What the first steps added outside the allocator: buffers of libraries, kernels loaded on first use.
        self.warm_up_bytes = 0
        # Seconds of the smallest step once it is warm: what any step takes.
        self.step_s = 0.0
        self._cap_bytes: int | None = None
        self._baseline_bytes = 0
        self._block = ExitStack()
        # What the last probe left behind on the device, for people; None when it left nothing.
        self.leak: str | None = None

    def start(self, *, longest: int, memory_limit_bytes: int | None = None) -> Room:
        """Warm up with throw-away steps, so that kernels and workspaces are there, and read the room.

        First a tiny step, then one of a couple of thousand tokens, for the buffers that libraries only make for larger
        matrices (5 MiB of MKL's, seen with BERT on two cores). `longest` is the longest length that the model takes.

        Raises:
            StepFailedError: a step failed, and not for lack of memory.
        """
        cold = self._device.room().overhead_bytes
        length = min(_WARM_LENGTH, longest)
        for shape in (Shape(1, min(8, longest)), Shape(_WARM_TOKENS // length, length)):
            step = self._run(shape)
            error = step.error
            self.step_s = self.step_s or step.elapsed_s
            if error is not None and error.kind is not ErrorKind.OOM:
                raise StepFailedError(batch_size=shape.batch_size, length=shape.length, reason=str(error))
        self._device.clean()
        allocated = self._device.allocated_bytes()
        self._foreign_bytes = max(allocated - self._resident_bytes, 0)
        self._baseline_bytes = allocated - self._foreign_bytes
        room = self._device.room(memory_limit_bytes)
        self.warm_up_bytes = max(room.overhead_bytes - cold, 0)
        return Room(max(room.limit_bytes - self._foreign_bytes, 0), overhead_bytes=room.overhead_bytes)

    def cap(self, cap_bytes: int) -> None:
        """Hold the process to `cap_bytes` in the allocator until `close`."""
        self._block.enter_context(self._device.capped(cap_bytes + self._foreign_bytes))
        self._cap_bytes = cap_bytes

    def close(self) -> None:
        """Lift the cap and clean up."""
        self._block.close()
        self._device.clean()

    def probe(self, shape: Shape, *, purpose: str = "search") -> Probe:
        """Run the step at `shape`, twice in a row, and measure it.

        A `check` is run as in the middle of an evaluation, with no cleaning before it.

        Raises:
            StepFailedError: the step failed for a reason that is not memory.
            PoisonedProcessError: the process can't go on.
        """
        if purpose != "check":
            self._device.clean()
        step = self._run(shape)
        if step.error is not None:
            self._recover(step.error)
        return self._as_probe(shape, step, purpose=purpose)

    def _run(self, shape: Shape) -> _Step:
        step = _Step(Measurement())
        try:
            self._measure(shape, step)
        except Exception as error:  # whatever a model raises: it is sorted by what it says
            step.error = take(error)
        return step

    def _measure(self, shape: Shape, step: _Step) -> None:
        with quiet_transformers(), self._device.measuring() as step.measurement:
            inputs = self._workload.inputs(self._model, shape, self._device.torch_device)
            outputs: object = None
            everything = []
            for _ in range(2):
                self._device.synchronize()
                started = time.perf_counter()
                if self._workload.hold == "none":
                    outputs = None
                # With hold="previous" the old outputs live until the name is bound anew, as in a plain loop.
                outputs = self._workload.step(self._model, inputs)
                self._device.synchronize()
                step.elapsed_s = time.perf_counter() - started
                if self._workload.hold == "all":
                    everything.append(outputs)
            step.held_bytes = held_bytes(outputs)

    def _recover(self, error: StepError) -> None:
        """Clean up after a failed step, outside any `except`, where nothing holds its tensors any more."""
        if error.kind is ErrorKind.STICKY:
            raise PoisonedProcessError(str(error))
        self._device.clean()
        leaked = self._device.allocated_bytes() - self._foreign_bytes - self._baseline_bytes
        self.leak = f"{leaked} bytes were left on the device by a step that failed" if leaked > _LEAK_BYTES else None

    def _as_probe(self, shape: Shape, step: _Step, *, purpose: str) -> Probe:
        step.measurement.peak_allocated_bytes = max(step.measurement.peak_allocated_bytes - self._foreign_bytes, 0)
        step.measurement.peak_reserved_bytes = max(step.measurement.peak_reserved_bytes - self._foreign_bytes, 0)
        outcome = self._outcome(shape, step, purpose=purpose)
        ended = step.error is None
        return Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=outcome,
            peak_allocated_bytes=step.measurement.peak_allocated_bytes if ended else None,
            peak_reserved_bytes=step.measurement.peak_reserved_bytes if ended else None,
            baseline_bytes=self._baseline_bytes,
            held_bytes=step.held_bytes,
            alloc_retries=step.measurement.alloc_retries,
            elapsed_s=step.elapsed_s,
            cap_bytes=self._cap_bytes,
            purpose=purpose,
            message=str(step.error) if step.error is not None else None,
        )

    def _outcome(self, shape: Shape, step: _Step, *, purpose: str) -> Outcome:
        error, measured = step.error, step.measurement
        if error is None:
            # A retry means that the allocator had to flush its cache although it held nothing but this step: the next
            # batch may not be so lucky. In a check the cache is full of other shapes, and flushing it is how a limit
            # is kept. A peak above the cap means that the system lent memory from elsewhere (Windows, WSL).
            peak = max(measured.peak_allocated_bytes, measured.peak_reserved_bytes)
            over = self._cap_bytes is not None and peak > self._cap_bytes
            flushed = measured.alloc_retries > 0 and purpose != "check"
            return Outcome.OOM if flushed or over else Outcome.FITS
        if error.kind is ErrorKind.OOM:
            return Outcome.OOM
        if error.kind is ErrorKind.KERNEL_LIMIT:
            return Outcome.KERNEL_LIMIT
        if error.kind is ErrorKind.OOM_IF_MEMORY_LOW and self._memory_was_low(measured):
            return Outcome.OOM
        raise StepFailedError(batch_size=shape.batch_size, length=shape.length, reason=str(error))

    def _memory_was_low(self, measured: Measurement) -> bool:
        reserved = max(measured.peak_allocated_bytes, measured.peak_reserved_bytes)
        return self._cap_bytes is not None and reserved >= _LOW_MEMORY_SHARE * self._cap_bytes
