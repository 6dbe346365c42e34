"""Section 1: what the device is, and what a process takes on it beside its tensors."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch
import transformers
from gpu_acceptance_record import Bench, Clock, Row

from budgetdb.devices.base import Device
from budgetdb.devices.simulated import SimulatedCard
from budgetdb.tracing.allocator_settings import ENVIRONMENT_VARIABLES, AllocatorSettings


def facts(bench: Bench, clock: Clock) -> Row:
    """Versions, settings, memory, the context and the workspaces of matrix products."""
    del clock
    device = bench.device
    return {
        "device": asdict(device.info()),
        "versions": _versions(),
        "allocator": {
            "environment": {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ},
            "settings": asdict(AllocatorSettings.from_environment()),
        },
        "memory": _memory(device),
    }


def _versions() -> Row:
    backend: Any = torch.backends.cudnn
    return {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": backend.version() if torch.cuda.is_available() else None,
    }


def _memory(device: Device) -> Row:
    """Bytes outside the allocator before and after the first matrix product, and what that leaves inside."""
    torch.ones(1, device=device.torch_device)  # the context comes with the first tensor
    device.clean()
    cold, allocated = device.room(), device.allocated_bytes()
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(512, 512, dtype=dtype, device=device.torch_device)
        torch.nn.functional.linear(square, square, square[0])
        del square
    device.synchronize()
    device.clean()
    warm = device.room()
    return {
        "context_bytes": cold.overhead_bytes,
        "context_warm_bytes": warm.overhead_bytes,
        "free_for_tensors_bytes": warm.limit_bytes,
        "workspace_bytes": device.allocated_bytes() - allocated,
        "workspace_expected_bytes": sum(SimulatedCard.like(device).workspaces) if _is_cuda(device) else 0,
        "context_catalogue_bytes": SimulatedCard.like(device).card.context_bytes if _is_cuda(device) else None,
    }


def _is_cuda(device: Device) -> bool:
    return device.torch_device.type == "cuda"
