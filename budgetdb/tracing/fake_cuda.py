"""Fake CUDA tensors on a torch that was built without CUDA.

A build with CUDA makes fake `cuda` tensors on machines without a card (pytorch#160532). A CPU-only build has an empty
slot where the device's guard belongs, and refuses even to index one. Pointing that slot at the guard of the `meta`
device, which does nothing, is all it lacks; real CUDA tensors can't exist in such a build, so nothing else can meet it.
Whether it worked is tried out before it is believed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_log = logging.getLogger(__name__)

# c10/core/DeviceType.h and c10/core/impl/DeviceGuardImplInterface.h: one pointer for each kind of device.
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META, _KINDS = 1, 14, 21


@functools.cache
def can_fake_cuda() -> bool:
    """Whether fake tensors can be on `cuda` in this process; makes it so where the build alone does not."""
    if _works():
        return True
    if torch.version.cuda is None and torch.version.hip is None and _lend_guard():
        return _works()
    return False


def _works() -> bool:
    try:
        with FakeTensorMode(), torch.no_grad():
            made = torch.empty(4, 8, device="cuda")
            picked = made[1:, :2].contiguous().to(torch.float16) + 1
            linear = torch.nn.Linear(8, 3, device="cuda")(made)
            moved = torch.ones(2).to("cuda:0")
            return all(tensor.device.type == "cuda" for tensor in (picked, linear, moved))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        _log.debug("no fake cuda tensors: %s", error)
        return False


def _lend_guard() -> bool:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        registry = (ctypes.c_void_p * _KINDS).in_dll(library, _REGISTRY)
    except (OSError, ValueError):
        return False
    if registry[_CUDA] or not registry[_META]:
        return False
    registry[_CUDA] = registry[_META]
    return True
