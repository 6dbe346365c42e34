"""CUDA, ROCm and XPU cards, and Apple's GPUs, through `torch.accelerator`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from budgetdb.devices import nvml
from budgetdb.devices.base import Device, DeviceInfo, Measurement, Room
from budgetdb.devices.kernel_limits import card_headroom_bytes, cuda_caps
from budgetdb.errors import DeviceError
from budgetdb.profiles import Caps

# In the order in which torch 2.13 looks: c10::CachingAllocator::AcceleratorAllocatorConfig.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class AcceleratorDevice(Device):
    """A card that torch has a backend for.

    The cap is the backend's `set_per_process_memory_fraction`, held by the allocator against the bytes it reserves.
    Where a backend keeps no peak (MPS), memory is measured as what the allocator holds after the block: its cache was
    emptied before, so that is the most it held.
    """

    name: ClassVar[str] = "accelerator"

    def __init__(self, torch_device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != torch_device.type:
            have = accelerator.type if accelerator is not None else "none"
            raise DeviceError(
                f"no {torch_device.type} device on this machine (accelerator: {have})", next_step="Use --device cpu"
            )
        count = torch.accelerator.device_count()
        index = torch_device.index if torch_device.index is not None else torch.accelerator.current_device_index()
        if not 0 <= index < count:
            raise DeviceError(
                f"there is no {torch_device.type}:{index}, only {count} device(s)",
                next_step=f"Use --device {torch_device.type}:0",
            )
        super().__init__(torch.device(torch_device.type, index))
        self._backend: Any = getattr(torch, torch_device.type)

    @override
    def info(self) -> DeviceInfo:
        kind = self.torch_device.type
        if kind == "mps":
            return DeviceInfo(name="Apple GPU", total_bytes=int(self._backend.recommended_max_memory()))
        properties = self._backend.get_device_properties(self.torch_device)
        major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
        return DeviceInfo(
            name=_name(properties),
            total_bytes=int(properties.total_memory),
            runtime=torch.version.hip or torch.version.cuda if kind == "cuda" else None,
            driver=nvml.driver_version() if kind == "cuda" and torch.version.cuda else None,
            compute_capability=f"{major}.{minor}" if major is not None else None,
            allocator=next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), ""),
        )

    @override
    def room(self, memory_limit_bytes: int | None = None) -> Room:
        free, total = self._memory()
        reserved = self._reserved_bytes()
        others = nvml.other_processes_bytes(self.torch_device) if self.torch_device.type == "cuda" else None
        overhead = max(total - free - reserved - (others or 0), 0)
        limit = free + reserved
        if memory_limit_bytes is not None:
            limit = min(limit, memory_limit_bytes - (overhead if others is not None else 0))
        return Room(limit_bytes=max(limit, 0), overhead_bytes=overhead)

    @override
    @contextmanager
    def capped(self, limit_bytes: int) -> Iterator[None]:
        set_fraction = getattr(self._backend, "set_per_process_memory_fraction", None)
        if set_fraction is None:
            yield
            return
        arguments = () if self.torch_device.type == "mps" else (self.torch_device,)
        set_fraction(min(limit_bytes / self.info().total_bytes, 1.0), *arguments)
        try:
            yield
        finally:
            set_fraction(1.0, *arguments)

    @override
    @contextmanager
    def measuring(self) -> Iterator[Measurement]:
        measurement = Measurement()
        self.synchronize()
        retries = self._statistic("num_alloc_retries")
        if self.torch_device.type != "mps":
            torch.accelerator.reset_peak_memory_stats(self.torch_device)
        try:
            yield measurement
            self.synchronize()
        finally:
            if self.torch_device.type == "mps":
                measurement.peak_allocated_bytes = self._backend.current_allocated_memory()
                measurement.peak_reserved_bytes = self._backend.driver_allocated_memory()
            else:
                measurement.peak_allocated_bytes = torch.accelerator.max_memory_allocated(self.torch_device)
                measurement.peak_reserved_bytes = torch.accelerator.max_memory_reserved(self.torch_device)
                measurement.alloc_retries = self._statistic("num_alloc_retries") - retries

    @override
    def allocated_bytes(self) -> int:
        if self.torch_device.type == "mps":
            return int(self._backend.current_allocated_memory())
        return torch.accelerator.memory_allocated(self.torch_device)

    @override
    def default_headroom_bytes(self, limit_bytes: int) -> int:
        return card_headroom_bytes(limit_bytes)

    @override
    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    @override
    def clean(self) -> None:
        super().clean()
        torch.accelerator.empty_cache()

    @override
    def caps(self, *, heads: int | None, widest: int | None) -> Caps:
        if self.torch_device.type != "cuda":
            return Caps()
        return cuda_caps(heads=heads, widest=widest)

    def _memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        if self.torch_device.type == "mps":
            total = int(self._backend.recommended_max_memory())
            return max(total - int(self._backend.driver_allocated_memory()), 0), total
        # torch.accelerator has get_memory_info from 2.10 on
        read = getattr(torch.accelerator, "get_memory_info", None) or self._backend.mem_get_info
        free, total = read(self.torch_device)
        return int(free), int(total)

    def _reserved_bytes(self) -> int:
        if self.torch_device.type == "mps":
            return int(self._backend.driver_allocated_memory())
        return torch.accelerator.memory_reserved(self.torch_device)

    def _statistic(self, name: str) -> int:
        if self.torch_device.type == "mps":
            return 0
        return int(torch.accelerator.memory_stats(self.torch_device).get(name, 0))


def _name(properties: Any) -> str:
    """The card's name; ROCm calls many cards "AMD Radeon Graphics" or nothing, so its architecture joins it."""
    name = str(properties.name).strip()
    architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return f"{name} {architecture}".strip() or "unknown accelerator"
