"""Bytes that cuBLAS and cuBLASLt take from the caching allocator at the first matrix product, and keep.

One workspace per handle and stream, so one for a process that computes on one stream in one thread. CUDA builds of
torch 2.13 (`aten/src/ATen/cuda/CublasHandlePool.cpp`); ROCm's sizes differ.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from budgetdb.errors import UsageError

logger = logging.getLogger(__name__)

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLASLT_VARIABLE = "CUBLASLT_WORKSPACE_SIZE"
UNIFIED_VARIABLE = "TORCH_CUBLASLT_UNIFIED_WORKSPACE"

# parseChosenWorkspaceSize: 32 MiB for Hopper and Blackwell, `:4096:2:16:8` for all others.
_LARGE_WORKSPACE_BYTES = 32 * 2**20
_WORKSPACE_BYTES = (4096 * 2 + 16 * 8) * 1024
_LARGE_WORKSPACE_MAJORS = (9, 10, 12)
# parseCUDABlasLtWorkspaceSize, when the two libraries do not share one workspace.
_SEPARATE_CUBLASLT_BYTES = 1024 * 1024

_PAIR = re.compile(r":([0-9]+):([0-9]+)", re.ASCII)
_LEADING_INT = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)
_SIZE_T = 2**64


def cublas_workspace_bytes(compute_capability: str | None, environment: Mapping[str, str] | None = None) -> int:
    """Bytes of cuBLAS's workspace (`getChosenWorkspaceSize`).

    >>> cublas_workspace_bytes("9.0", {}), cublas_workspace_bytes("8.0", {})
    (33554432, 8519680)
    >>> cublas_workspace_bytes("9.0", {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"})
    8519680

    Args:
        compute_capability: `9.0` and the like; None or unreadable for a device that isn't known.
        environment: variables to read, those of this process by default.

    Raises:
        UsageError: a number in CUBLAS_WORKSPACE_CONFIG is too large; torch fails at the first product.
    """
    text = _read(environment, CUBLAS_VARIABLE)
    default = _default_cublas_bytes(compute_capability)
    if text is None:
        return default
    pairs = [(int(kib), int(count)) for kib, count in _PAIR.findall(text)]
    if not pairs:
        logger.warning("%s is %r, which is no :SIZE:COUNT: torch uses %d bytes", CUBLAS_VARIABLE, text[:60], default)
        return default
    if any(number >= _SIZE_T for pair in pairs for number in pair):
        raise UsageError(
            f"{CUBLAS_VARIABLE} is {text[:60]!r}: torch can't read so large a number",
            next_step=f"Correct or unset {CUBLAS_VARIABLE}",
        )
    return sum(kib * 1024 * count for kib, count in pairs) % _SIZE_T


def cublaslt_workspace_bytes(compute_capability: str | None, environment: Mapping[str, str] | None = None) -> int:
    """Bytes cuBLASLt may use: of cuBLAS's workspace, or of its own if that is configured.

    (`getCUDABlasLtWorkspaceSize`.) Arguments and errors as for `cublas_workspace_bytes`.
    """
    unified = _is_unified(environment)
    shared = cublas_workspace_bytes(compute_capability, environment)
    default = shared // 1024 * 1024 if unified else _SEPARATE_CUBLASLT_BYTES
    nbytes = _cublaslt_bytes(_read(environment, CUBLASLT_VARIABLE), default)
    return min(nbytes, shared) if unified else nbytes


def workspace_allocations(compute_capability: str | None, environment: Mapping[str, str] | None = None) -> list[int]:
    """Requests the first matrix products make of the caching allocator, in bytes, never freed.

    One when the two libraries share a workspace, as they do unless TORCH_CUBLASLT_UNIFIED_WORKSPACE is 0; else cuBLAS's
    and cuBLASLt's. Arguments and errors as for `cublas_workspace_bytes`.
    """
    sizes = [cublas_workspace_bytes(compute_capability, environment)]
    if not _is_unified(environment):
        sizes.append(cublaslt_workspace_bytes(compute_capability, environment))
    return [size for size in sizes if size > 0]  # a workspace of 0 bytes is a null pointer


def _read(environment: Mapping[str, str] | None, name: str) -> str | None:
    return (os.environ if environment is None else environment).get(name)


def _default_cublas_bytes(compute_capability: str | None) -> int:
    major = (compute_capability or "").partition(".")[0]
    is_large = major.isdecimal() and int(major) in _LARGE_WORKSPACE_MAJORS
    return _LARGE_WORKSPACE_BYTES if is_large else _WORKSPACE_BYTES


def _is_unified(environment: Mapping[str, str] | None) -> bool:
    # check_env knows 0 and 1; anything else is as if it were not set.
    return _read(environment, UNIFIED_VARIABLE) != "0"


def _cublaslt_bytes(text: str | None, default: int) -> int:
    if text is None:
        return default
    # std::stoi: blanks and a sign may precede the digits, anything may follow, and it holds 32 bits.
    found = _LEADING_INT.match(text)
    if found is None or not -(2**31) <= int(found[1]) < 2**31:
        logger.warning("%s is %r, which is no number: torch uses %d bytes", CUBLASLT_VARIABLE, text[:60], default)
        return default
    return int(found[1]) * 1024 % _SIZE_T
