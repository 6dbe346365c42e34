"""The accelerator of this machine, if it has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from budgetdb.calibration.outcomes import ErrorKind, classify
from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.testing.devices import check_device

pytestmark = pytest.mark.gpu

MIB = 2**20
# The caching allocator takes blocks of this size from the driver for requests between 1 and 10 MiB.
SEGMENT_BYTES = 20 * MIB


@pytest.fixture
def device() -> Iterator[Device]:
    chosen = choose_device("accelerator")
    chosen.clean()
    yield chosen
    chosen.clean()


def block(device: Device, mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8, device=device.torch_device)


def test_it_keeps_the_contract(device: Device) -> None:
    check_device(device, holds_cap=hasattr(getattr(torch, device.torch_device.type), "set_per_process_memory_fraction"))


def test_a_cap_holds_and_lets_go(device: Device) -> None:
    with device.capped(device.allocated_bytes() + 512 * MIB):
        kept = block(device, 400)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            block(device, 200)
        assert classify(caught.value) is ErrorKind.OOM
        assert int(kept[-1]) == 0
        del kept
        device.clean()
        del caught
        kept = block(device, 500)
        del kept
    beyond = block(device, 1024)
    assert beyond.numel() == 1024 * MIB


def test_a_cap_that_an_error_leaves_is_gone(device: Device) -> None:
    with pytest.raises(torch.OutOfMemoryError), device.capped(device.allocated_bytes() + 64 * MIB):
        block(device, 512)
    device.clean()
    assert block(device, 512).numel() == 512 * MIB


def test_the_peak_of_known_allocations(device: Device) -> None:
    kept = block(device, 64)
    baseline = device.allocated_bytes()
    with device.measuring() as measurement:
        first = block(device, 128)
        second = block(device, 256)
        del first
        third = block(device, 100)
        del second, third
    assert measurement.peak_allocated_bytes == baseline + 384 * MIB
    assert measurement.peak_reserved_bytes >= measurement.peak_allocated_bytes
    assert measurement.peak_reserved_bytes <= measurement.peak_allocated_bytes + 2 * SEGMENT_BYTES + 100 * MIB
    assert measurement.alloc_retries == 0
    assert kept.numel() == 64 * MIB


def test_a_peak_is_measured_anew(device: Device) -> None:
    with device.measuring():
        block(device, 512)
    device.clean()
    baseline = device.allocated_bytes()
    with device.measuring() as measurement:
        block(device, 32)
    assert measurement.peak_allocated_bytes == baseline + 32 * MIB
    assert measurement.peak_reserved_bytes < baseline + 256 * MIB


def test_allocated_bytes(device: Device) -> None:
    before = device.allocated_bytes()
    kept = block(device, 10)
    views = [kept[1:], kept.view(-1, 2)]
    assert device.allocated_bytes() == before + 10 * MIB
    del kept, views
    device.clean()
    assert device.allocated_bytes() == before


def test_room_counts_what_this_process_holds_already(device: Device) -> None:
    empty = device.room()
    kept = block(device, 512)
    assert abs(device.room().limit_bytes - empty.limit_bytes) < 64 * MIB
    del kept
    assert 0 < empty.limit_bytes <= device.info().total_bytes
    assert empty.overhead_bytes >= 0


def test_room_under_a_limit(device: Device) -> None:
    assert device.room(256 * MIB).limit_bytes <= 256 * MIB
    assert device.room(1).limit_bytes <= 1


def test_clean_gives_cached_memory_back(device: Device) -> None:
    if device.torch_device.type == "mps":
        pytest.skip("torch.accelerator does not say what MPS reserves")
    reserved = torch.accelerator.memory_reserved(device.torch_device)
    kept = block(device, 256)
    del kept
    assert torch.accelerator.memory_reserved(device.torch_device) >= reserved + 256 * MIB
    device.clean()
    assert torch.accelerator.memory_reserved(device.torch_device) <= reserved


def test_what_it_is(device: Device) -> None:
    info = device.info()
    assert info.name
    assert info.key_bytes <= info.total_bytes
    if device.torch_device.type == "cuda":
        assert info.runtime
        assert info.compute_capability
        caps = device.caps(heads=12, widest=30_000)
        assert (caps.rows, caps.tokens, caps.squares) == (65_535 // 12, (2**31 - 1) // 30_000, (2**31 - 1) // 12)
