"""The contract of a device."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from budgetdb.devices.info import BUCKET_BYTES, DeviceInfo
from budgetdb.profiles import Caps

__all__ = ["BUCKET_BYTES", "Device", "DeviceInfo", "Measurement", "Room"]


@dataclass(frozen=True)
class Room:
    """What this process may use on the device at this moment.

    Attributes:
        limit_bytes: what the allocator may hold: the total less other processes and less the overhead.
        overhead_bytes: what the process holds on the device outside the allocator (context, workspaces, libraries).
    """

    limit_bytes: int
    overhead_bytes: int


@dataclass
class Measurement:
    """Filled in when a measured block ends, or is left by an exception.

    Attributes:
        peak_allocated_bytes: most bytes in live tensors at once, those from before the block included.
        peak_reserved_bytes: most bytes the allocator held at once; equal to allocated where nothing is cached.
        alloc_retries: times the allocator had to flush its cache and try again.
    """

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    alloc_retries: int = 0


class Device(ABC):
    """One device of the machine, as a calibration sees it.

    What every implementation promises:

    - it imports nothing and touches no memory of the device until it is asked;
    - inside `capped(limit)`, an allocation that would take the process above the limit fails as it does on a full
      device, and the process can go on; where the backend has no such cap, the doc string says so;
    - `measuring()` counts everything allocated in the block, kernels' workspaces included as far as they come from
      the allocator, and never less than what was live when it began;
    - `clean()` gives back every byte that nothing refers to;
    - it is used by one thread.

    Args:
        torch_device: the device as torch names it.
    """

    name: ClassVar[str]
    # Variables to start a worker process with, so that measurements in it repeat.
    worker_environment: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @abstractmethod
    def info(self) -> DeviceInfo:
        """What the device is."""

    @abstractmethod
    def room(self, memory_limit_bytes: int | None = None) -> Room:
        """What the process may use now, under `memory_limit_bytes` for all it holds on the device if given."""

    @abstractmethod
    def capped(self, limit_bytes: int) -> AbstractContextManager[None]:
        """A block in which the allocator can't hold more than `limit_bytes`."""

    @abstractmethod
    def measuring(self) -> AbstractContextManager[Measurement]:
        """A block whose peak is measured."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes in live tensors of this process on the device."""

    @abstractmethod
    def default_headroom_bytes(self, limit_bytes: int) -> int:
        """What to keep free of `limit_bytes` when the user does not say."""

    def synchronize(self) -> None:
        """Wait for what was queued on the device; nothing to do where steps run at once."""
        return

    def clean(self) -> None:
        """Free what nothing refers to, and give cached memory back."""
        gc.collect()

    def caps(self, *, heads: int | None, widest: int | None) -> Caps:  # noqa: ARG002 (for devices that have limits)
        """Limits of the device's kernels for a model with so many heads and so wide a tensor per token."""
        return Caps()
