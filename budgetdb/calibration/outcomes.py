"""What an error of a step means: too big, a limit of a kernel, a poisoned process, or a fault that is none of these.

The table lists what each backend really says (FIELD 3). Anything that is not in it is no out-of-memory error: a
shape bug taken for one loops down to batch size 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import torch


class ErrorKind(StrEnum):
    """What to do about an error: shrink, shrink if memory is short, clamp, start a fresh process, or give up."""

    OOM = "oom"
    OOM_IF_MEMORY_LOW = "oom_if_memory_low"
    KERNEL_LIMIT = "kernel_limit"
    STICKY = "sticky"
    OTHER = "other"


@dataclass(frozen=True)
class StepError:
    """What is kept of an exception: strings only, so that no traceback keeps a tensor alive."""

    kind: ErrorKind
    type_name: str
    message: str

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


# In the order they are looked for. After a sticky error every later call of the process fails, so these come first.
_PATTERNS: tuple[tuple[ErrorKind, str], ...] = (
    (ErrorKind.STICKY, r"device-side assert"),
    (ErrorKind.STICKY, r"illegal memory access"),
    (ErrorKind.STICKY, r"uncorrectable ECC error"),
    (ErrorKind.STICKY, r"unspecified launch failure"),
    (ErrorKind.STICKY, r"misaligned address"),
    (ErrorKind.OOM, r"CUDA out of memory"),
    (ErrorKind.OOM, r"CUDA (driver )?error: out of memory"),
    (ErrorKind.OOM, r"HIP (error: )?out of memory"),
    (ErrorKind.OOM, r"XPU out of memory"),
    (ErrorKind.OOM, r"MPS backend out of memory"),
    (ErrorKind.OOM, r"Invalid buffer size: [\d.]+ [KMGT]i?B"),  # MPS, a buffer above the largest one
    (ErrorKind.OOM, r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)"),  # XPU
    (ErrorKind.OOM, r"Triton Error \[(CUDA|HIP)\]: out of memory"),
    (ErrorKind.OOM, r"DefaultCPUAllocator: (can't|not enough memory)"),
    (ErrorKind.OOM, r"NVML_SUCCESS == r INTERNAL ASSERT FAILED"),  # the allocator's report of an OOM failed itself
    (ErrorKind.OOM, r"!handles_\.at\(i\) INTERNAL ASSERT FAILED"),  # expandable segments
    (ErrorKind.OOM, r"CUDA driver error: device not ready"),  # expandable segments
    (ErrorKind.OOM, r"out_of_memory: "),  # RMM
    (ErrorKind.OOM, r"^std::bad_alloc$"),  # C++ in the libraries under torch, seen under a CPU cap
    (ErrorKind.KERNEL_LIMIT, r"invalid configuration argument"),  # a grid of more than 65 535 blocks
    (ErrorKind.KERNEL_LIMIT, r"canUse32BitIndexMath|too large for 32-bit index"),
    # The libraries say these of a failed allocation of their own, and of real faults too.
    (ErrorKind.OOM_IF_MEMORY_LOW, r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"),
    (ErrorKind.OOM_IF_MEMORY_LOW, r"CUDNN_STATUS_(NOT_SUPPORTED|NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED)"),
    (ErrorKind.OOM_IF_MEMORY_LOW, r"NCCL .*unhandled cuda error"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
_OOM_TYPES = (torch.OutOfMemoryError, MemoryError)
# Only these can carry a backend's message; a ValueError that quotes one is somebody's own error.
_BACKEND_TYPES = (RuntimeError, MemoryError, SystemError)
_MESSAGE_CHARACTERS = 400


def classify(error: BaseException) -> ErrorKind:
    """What `error`, raised by a step, means; a cause or context of it is looked at where the error says nothing."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = _classify_one(current)
        if kind is not ErrorKind.OTHER:
            return kind
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return ErrorKind.OTHER


def take(error: BaseException) -> StepError:
    """What is to be kept of `error`, whose tracebacks are dropped, those of its causes too.

    A traceback holds the frames it passed, and these hold the tensors of the failed step (pytorch#27600).
    """
    message = str(error).strip().partition("\n")[0][:_MESSAGE_CHARACTERS]
    taken = StepError(kind=classify(error), type_name=type(error).__name__, message=message)
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = None
        waiting.extend(other for other in (current.__cause__, current.__context__) if other is not None)
    return taken


def _classify_one(error: BaseException) -> ErrorKind:
    if not isinstance(error, _BACKEND_TYPES):
        return ErrorKind.OTHER
    text = str(error)
    for kind, pattern in _COMPILED:
        if pattern.search(text):
            return kind
    return ErrorKind.OOM if isinstance(error, _OOM_TYPES) else ErrorKind.OTHER
