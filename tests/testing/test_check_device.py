"""The check finds each broken promise: a device that keeps all but one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from budgetdb.devices.base import DeviceInfo, Measurement, Room
from budgetdb.devices.cpu import CpuDevice
from budgetdb.testing.contract import ContractError
from budgetdb.testing.devices import check_device

# Enough to tell, and quick; where the cap is tried, well above what the profiler may take beyond it.
SMALL, LARGE = 2**20, 24 * 2**20

pytestmark = pytest.mark.usefixtures("quick_collector")


class Uncapped(CpuDevice):
    """Has no cap, and says so."""

    @contextmanager
    def capped(self, limit_bytes: int) -> Iterator[None]:
        yield


class Nameless(Uncapped):
    def info(self) -> DeviceInfo:
        return dataclasses.replace(super().info(), name=" ")


class Restless(Uncapped):
    calls = 0

    def info(self) -> DeviceInfo:
        self.calls += 1
        return dataclasses.replace(super().info(), driver=str(self.calls))


class Cautious(Uncapped):
    def default_headroom_bytes(self, limit_bytes: int) -> int:
        return limit_bytes


class Numbered(Uncapped):
    worker_environment: ClassVar[Any] = MappingProxyType({"MALLOC_ARENA_MAX": 1})


class InDebt(Uncapped):
    def room(self, memory_limit_bytes: int | None = None) -> Room:
        return Room(limit_bytes=-1, overhead_bytes=0)


class Unlimited(Uncapped):
    def room(self, memory_limit_bytes: int | None = None) -> Room:
        return super().room()


class CountsNothing(Uncapped):
    def allocated_bytes(self) -> int:
        return 0


class CountsViews(Uncapped):
    def allocated_bytes(self) -> int:
        import gc

        return sum(thing.untyped_storage().nbytes() for thing in gc.get_objects() if type(thing) is torch.Tensor)


class Leaves(Uncapped):
    def clean(self) -> None:
        pass


class MeasuresFromZero(Uncapped):
    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        before = self.allocated_bytes()
        with super().measuring() as measurement:
            yield measurement
        measurement.peak_allocated_bytes -= before
        measurement.peak_reserved_bytes -= before


class MeasuresTheEnd(Uncapped):
    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        measurement = Measurement()
        try:
            yield measurement
        finally:
            measurement.peak_allocated_bytes = measurement.peak_reserved_bytes = self.allocated_bytes()


class MeasuresOnlySuccess(Uncapped):
    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        measured = Measurement()
        with super().measuring() as inner:
            yield measured
        measured.peak_allocated_bytes = inner.peak_allocated_bytes
        measured.peak_reserved_bytes = inner.peak_reserved_bytes


class ReservesNothing(Uncapped):
    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        with super().measuring() as measurement:
            yield measurement
        measurement.peak_reserved_bytes = 0


class KeepsHold(CpuDevice):
    def capped(self, limit_bytes: int) -> Any:
        self.held = super().capped(limit_bytes)
        self.held.__enter__()
        return Uncapped.capped(self, limit_bytes)  # type: ignore[arg-type]  # its method fits any device


class OddlyFailing(Uncapped):
    """Fails beyond its cap with words that nobody knows."""

    @contextmanager
    def capped(self, limit_bytes: int) -> Iterator[None]:
        real = torch.zeros

        def zeros(count: int, **arguments: Any) -> torch.Tensor:
            if count > limit_bytes:
                raise RuntimeError("the drawer is full")
            return real(count, **arguments)

        torch.zeros = zeros  # type: ignore[assignment]  # put back below
        try:
            yield
        finally:
            torch.zeros = real


BROKEN = [
    (Nameless, "info() must name the device"),
    (Restless, "two calls of info() differ"),
    (Cautious, "leaves nothing of"),
    (Numbered, "worker_environment must map texts to texts"),
    (InDebt, "must not be negative"),
    (Unlimited, "more than there is"),
    (CountsNothing, "made allocated_bytes() grow by 0"),
    (CountsViews, "a tensor and a view of it count twice"),
    (Leaves, "of a tensor that only a cycle refers to"),
    (MeasuresFromZero, "an empty block had a peak of"),
    (MeasuresTheEnd, "an allocation freed again had a peak of"),
    (MeasuresOnlySuccess, "a block left by an exception had a peak of"),
    (ReservesNothing, "the allocator held 0 bytes"),
]


def test_a_device_without_a_cap_passes_if_it_says_so() -> None:
    check_device(Uncapped(torch.device("cpu")), block_bytes=SMALL, holds_cap=False)


@pytest.mark.parametrize(("device", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_each_broken_promise_is_found(device: type[CpuDevice], words: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_device(device(torch.device("cpu")), block_bytes=SMALL, holds_cap=False)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Uncapped, "capped() does not hold"),
        (OddlyFailing, "is not told as out of memory, but as RuntimeError: the drawer is full"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cap_that_does_not_hold_is_found(device: type[CpuDevice], words: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_device(device(torch.device("cpu")), block_bytes=SMALL)
    assert words in str(caught.value)


def test_a_cap_that_does_not_let_go_is_found() -> None:
    device = KeepsHold(torch.device("cpu"))
    try:
        with pytest.raises(ContractError, match=r"capped\(\) did not let go"):
            check_device(device, block_bytes=LARGE)
    finally:
        device.held.__exit__(None, None, None)
