"""Does a device keep its contract?"""

from __future__ import annotations

from contextlib import suppress

import torch

from budgetdb.calibration.outcomes import ErrorKind, classify
from budgetdb.devices.base import Device, Measurement
from budgetdb.profiles import Caps
from budgetdb.testing.contract import ContractError, require


def check_device(device: Device, *, block_bytes: int = 64 * 2**20, holds_cap: bool = True) -> None:
    """Hold a device to every promise of `Device`, by allocating a few blocks on it.

    It runs in this process; where a device names a `worker_environment`, start Python with it.

    Args:
        device: the device; some six times `block_bytes` must be free on it.
        block_bytes: size of the blocks: well above what the allocator rounds to.
        holds_cap: whether its doc string promises that `capped` holds; if not, only that the block can be entered.

    Raises:
        ContractError: a promise is broken; the message says which one, and at what values.
    """
    _check_description(device)
    _check_room(device)
    _check_allocated(device, block_bytes)
    _check_clean(device, block_bytes)
    _check_measuring(device, block_bytes)
    _check_measuring_an_error(device, block_bytes)
    _check_capped(device, block_bytes, holds_cap=holds_cap)


def _block(device: Device, block_bytes: int) -> torch.Tensor:
    return torch.zeros(block_bytes, dtype=torch.uint8, device=device.torch_device)


def _check_description(device: Device) -> None:
    info, again = device.info(), device.info()
    require(info == again, f"two calls of info() differ: {info}, {again}")
    require(info.name.strip() != "" and info.total_bytes > 0, f"info() must name the device and its memory, got {info}")
    headroom = device.default_headroom_bytes(info.total_bytes)
    require(0 <= headroom < info.total_bytes, f"a headroom of {headroom} leaves nothing of {info.total_bytes} bytes")
    environment = dict(device.worker_environment)
    require(
        all(isinstance(part, str) for pair in environment.items() for part in pair),
        f"worker_environment must map texts to texts, got {environment}",
    )
    caps = device.caps(heads=8, widest=30_000)
    require(isinstance(caps, Caps), f"caps() must be Caps, got {caps!r}")
    device.synchronize()


def _check_room(device: Device) -> None:
    for memory_limit_bytes in (None, 1, 2**30, device.info().total_bytes):
        room = device.room(memory_limit_bytes)
        require(
            room.limit_bytes >= 0 and room.overhead_bytes >= 0,
            f"room({memory_limit_bytes}) must not be negative: {room}",
        )
        ceiling = device.info().total_bytes if memory_limit_bytes is None else memory_limit_bytes
        require(room.limit_bytes <= ceiling, f"room({memory_limit_bytes}) gives {room.limit_bytes}, more than there is")
    require(device.room().limit_bytes > 0, "room() leaves nothing at all")


def _check_allocated(device: Device, block_bytes: int) -> None:
    device.clean()
    before = device.allocated_bytes()
    block = _block(device, block_bytes)
    view = block[1:]
    grown = device.allocated_bytes() - before
    require(grown >= block_bytes, f"a tensor of {block_bytes} bytes made allocated_bytes() grow by {grown}")
    require(grown < 2 * block_bytes, f"a tensor and a view of it count twice: {grown} for {block_bytes} bytes")
    del block, view
    device.clean()
    left = device.allocated_bytes() - before
    require(left <= 0, f"{left} bytes still count after their tensor is gone")


def _check_clean(device: Device, block_bytes: int) -> None:
    device.clean()
    before = device.allocated_bytes()
    knot: list[object] = [_block(device, block_bytes)]
    knot.append(knot)
    del knot
    device.clean()
    left = device.allocated_bytes() - before
    require(left <= 0, f"clean() left {left} bytes of a tensor that only a cycle refers to")


def _check_measuring(device: Device, block_bytes: int) -> None:
    kept = _block(device, block_bytes)
    live = device.allocated_bytes()
    with device.measuring() as nothing:
        pass
    _check_measurement(nothing, at_least=live, what="an empty block")
    with device.measuring() as passing:
        temporary = _block(device, 2 * block_bytes)
        del temporary
        temporary = _block(device, block_bytes)
    _check_measurement(passing, at_least=live + 2 * block_bytes, what="an allocation freed again")
    with device.measuring() as after:
        del temporary
    _check_measurement(after, at_least=live + block_bytes, what="a block that only frees")
    del kept
    device.clean()


def _check_measuring_an_error(device: Device, block_bytes: int) -> None:
    live = device.allocated_bytes()
    with suppress(LookupError), device.measuring() as measurement:
        temporary = _block(device, block_bytes)
        raise LookupError("raised by check_device")
    del temporary
    _check_measurement(measurement, at_least=live + block_bytes, what="a block left by an exception")
    with device.measuring() as again:
        temporary = _block(device, block_bytes)
    _check_measurement(again, at_least=live + block_bytes, what="a block measured after one that failed")
    del temporary


def _check_measurement(measurement: Measurement, *, at_least: int, what: str) -> None:
    peak, reserved = measurement.peak_allocated_bytes, measurement.peak_reserved_bytes
    require(peak >= at_least, f"{what} had a peak of {at_least} bytes, measured as {peak}")
    require(reserved >= peak, f"{what}: the allocator held {reserved} bytes, less than the {peak} allocated")
    require(measurement.alloc_retries >= 0, f"{what}: {measurement.alloc_retries} allocation retries")


def _check_capped(device: Device, block_bytes: int, *, holds_cap: bool) -> None:
    device.clean()
    with device.capped(device.allocated_bytes() + 2 * block_bytes):
        inside = _block(device, block_bytes)
        if holds_cap:
            _must_not_fit(device, 4 * block_bytes)
        device.clean()
        del inside
        # The process goes on: what fitted before the failure fits after it.
        inside = _block(device, block_bytes)
        del inside
    device.clean()
    try:
        outside = _block(device, 4 * block_bytes)
    except Exception as error:
        raise ContractError(f"capped() did not let go: {4 * block_bytes} bytes fail after it: {error}") from error
    del outside
    device.clean()


def _must_not_fit(device: Device, block_bytes: int) -> None:
    try:
        _block(device, block_bytes)
    except Exception as error:
        kind = classify(error)
        told = f"{type(error).__name__}: {str(error)[:200]}"
        require(kind is ErrorKind.OOM, f"the failure beyond the cap is not told as out of memory, but as {told}")
        return
    raise ContractError(f"capped() does not hold: {block_bytes} bytes were allocated beyond it")
