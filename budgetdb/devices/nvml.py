"""The few things that only NVIDIA's management library knows; each is None when it can't be asked."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger(__name__)


@contextmanager
def _library() -> Iterator[Any]:
    """The library, initialised; None where it is missing or no driver answers."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # an absent library or driver, or a foreign version: then there is nobody to ask
        _log.debug("NVML is not available: %s", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """Version of the NVIDIA driver."""
    with _library() as library:
        return str(library.nvmlSystemGetDriverVersion()) if library else None


def other_processes_bytes(device: torch.device) -> int | None:
    """Bytes that other processes hold on a CUDA device.

    None when NVML can't say: no NVIDIA card, no permission, a MIG slice (NVML answers for the parent card), or a
    container in which process ids differ from the host's.
    """
    with _library() as library:
        if not library:
            return None
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            running = library.nvmlDeviceGetComputeRunningProcesses(handle)
        except Exception as error:  # NVMLError of any kind, or a build of torch without `uuid`
            _log.debug("NVML does not say who uses %s: %s", device, error)
            return None
        used = {process.pid: process.usedGpuMemory for process in running}
        if os.getpid() not in used or None in used.values():
            return None
        return sum(int(count) for pid, count in used.items() if pid != os.getpid())
