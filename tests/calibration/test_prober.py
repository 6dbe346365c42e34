"""One step at one shape, run as the loop runs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import bert, limit_bytes

from budgetdb.calibration.prober import PoisonedProcessError, Prober
from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.errors import StepFailedError
from budgetdb.models.facts import resident_bytes
from budgetdb.profiles import Outcome
from budgetdb.shapes import Shape
from budgetdb.workloads.base import parse_workload

MIB = 2**20


@contextmanager
def prober_of(model: Any, *, workload: str = "forward", room_mib: int = 64) -> Iterator[tuple[Prober, Device]]:
    device = choose_device("cpu")
    resident = resident_bytes(model) if isinstance(model, torch.nn.Module) else 0
    prober = Prober(device=device, model=model, workload=parse_workload(workload), resident_bytes=resident)
    room = prober.start(longest=256, memory_limit_bytes=limit_bytes(room_mib))
    prober.cap(room.limit_bytes)
    try:
        yield prober, device
    finally:
        prober.close()


def test_a_step_that_fits_is_measured() -> None:
    model = bert()
    with prober_of(model) as (prober, _):
        probe = prober.probe(Shape(4, 64))
    assert probe.outcome is Outcome.FITS
    assert probe.baseline_bytes == resident_bytes(model)
    assert probe.baseline_bytes < probe.peak_bytes < probe.baseline_bytes + 8 * MIB
    assert probe.elapsed_s > 0
    # last_hidden_state and pooler_output
    assert probe.held_bytes == 4 * (4 * 64 * 64 + 4 * 64)


def test_the_outputs_of_the_previous_step_are_alive_during_the_next() -> None:
    model = bert()
    with prober_of(model) as (prober, _):
        previous = prober.probe(Shape(8, 128))
    with prober_of(model, workload="forward[hold=none]") as (prober, _):
        none = prober.probe(Shape(8, 128))
    assert previous.peak_bytes - none.peak_bytes == previous.held_bytes


def test_an_out_of_memory_error_is_an_outcome_and_leaves_nothing_behind() -> None:
    with prober_of(bert()) as (prober, device):
        before = device.allocated_bytes()
        probe = prober.probe(Shape(4096, 256))
        after = device.allocated_bytes()
        again = prober.probe(Shape(4, 64))
    assert probe.outcome is Outcome.OOM
    assert "can't allocate memory" in (probe.message or "")
    assert probe.peak_allocated_bytes is None
    assert after == before
    assert prober.leak is None
    assert again.outcome is Outcome.FITS


def test_memory_that_others_hold_is_left_out() -> None:
    model = bert()
    with prober_of(model) as (prober, _):
        alone = prober.probe(Shape(4, 64))
    mine = torch.zeros(20 * MIB)
    with prober_of(model) as (prober, _):
        beside = prober.probe(Shape(4, 64))
    assert mine.numel() == 20 * MIB
    assert beside.peak_bytes == alone.peak_bytes
    assert beside.baseline_bytes == alone.baseline_bytes


class Broken(torch.nn.Module):
    """Raises what it is given once the batch has more than `rows` rows."""

    def __init__(self, error: Exception, rows: int = 8) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.error, self.rows, self.calls = error, rows, 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[0] > self.rows:
            self.calls += 1
            raise self.error
        return self.embedding(input_ids)


def test_a_shape_bug_is_no_lack_of_memory() -> None:
    model = Broken(RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x768 and 1024x2)"))
    with prober_of(model) as (prober, _), pytest.raises(StepFailedError, match="16 x length 32") as caught:
        prober.probe(Shape(16, 32))
    assert model.calls == 1
    assert caught.value.batch_size == 16
    assert caught.value.length == 32
    assert "mat1 and mat2" in caught.value.reason


def test_a_sticky_error_poisons_the_process() -> None:
    model = Broken(RuntimeError("CUDA error: device-side assert triggered"))
    with prober_of(model) as (prober, _), pytest.raises(PoisonedProcessError, match="device-side assert"):
        prober.probe(Shape(16, 32))


def test_an_ambiguous_error_counts_as_memory_only_when_memory_is_low() -> None:
    message = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    with prober_of(Broken(RuntimeError(message))) as (prober, _), pytest.raises(StepFailedError, match="CUBLAS"):
        prober.probe(Shape(16, 32))

    class Full(Broken):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            most = torch.empty(60 * MIB, dtype=torch.uint8) if input_ids.shape[0] > self.rows else None
            return super().forward(input_ids) if most is None or most.numel() else input_ids

    with prober_of(Full(RuntimeError(message))) as (prober, _):
        assert prober.probe(Shape(16, 32)).outcome is Outcome.OOM


def test_a_grid_that_is_too_large_is_a_limit_of_its_own() -> None:
    with prober_of(Broken(RuntimeError("CUDA error: invalid configuration argument"))) as (prober, _):
        assert prober.probe(Shape(16, 32)).outcome is Outcome.KERNEL_LIMIT


def test_a_leak_is_told() -> None:
    kept = []

    class Leaking(Broken):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[0] > self.rows:
                kept.append(torch.zeros(2 * MIB))
            return super().forward(input_ids)

    with prober_of(Leaking(MemoryError("out_of_memory: no more"))) as (prober, _):
        assert prober.probe(Shape(16, 32)).outcome is Outcome.OOM
        assert "were left on the device" in (prober.leak or "")
    kept.clear()
    gc.collect()
