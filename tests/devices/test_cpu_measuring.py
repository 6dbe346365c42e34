"""Peaks of the CPU come from the events of torch's allocator, and are exact to the byte."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pytest
import torch
from device_process import run_on_cpu
from torch import nn

from budgetdb.devices.choose import choose_device
from budgetdb.devices.cpu import CpuDevice
from budgetdb.errors import DeviceError

CPU = choose_device("cpu")


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], str]:
    code = """
kept = torch.zeros(1000)
facts["baseline"] = device.allocated_bytes()

with device.measuring() as nothing:
    pass
with device.measuring() as one_after_the_other:
    for _ in range(5):
        torch.zeros(12_345)
with device.measuring() as computation:
    x = torch.ones(100, 200)
    y = torch.ones(200, 300)
    z = x @ y
    del x, y
    z = z + 1
    w = torch.zeros(50_000)
    del w, z
with device.measuring() as views:
    x = torch.zeros(1000, 10)
    y = x.T[3:]
    del x, y
try:
    with device.measuring() as failed:
        x = torch.zeros(70_001)
        raise LookupError
except LookupError:
    del x
with device.measuring() as left_over:
    rest = torch.zeros(2_000)
with device.measuring() as with_what_was_left:
    torch.zeros(500)
for name in ("nothing", "one_after_the_other", "computation", "views", "failed", "left_over", "with_what_was_left"):
    measurement = globals()[name]
    assert measurement.peak_reserved_bytes == measurement.peak_allocated_bytes
    facts[name] = measurement.peak_allocated_bytes - facts["baseline"]
facts["retries"] = computation.alloc_retries
"""
    return run_on_cpu(code)


@pytest.mark.parametrize(
    ("block", "floats"),
    [
        ("nothing", 0),
        ("one_after_the_other", 12_345),
        # The two factors, 20 000 and 60 000, and the product beside them: more than the sum and the 50 000 at the end.
        ("computation", 100 * 200 + 200 * 300 + 100 * 300),
        ("views", 10_000),
        ("failed", 70_001),
        ("left_over", 2_000),
        ("with_what_was_left", 2_000 + 500),
    ],
)
def test_peaks_are_exact(block: str, floats: int, measured: tuple[dict[str, Any], str]) -> None:
    assert measured[0][block] == 4 * floats


def test_what_was_alive_before_counts(measured: tuple[dict[str, Any], str]) -> None:
    assert measured[0]["baseline"] == 4000
    assert measured[0]["retries"] == 0


def test_nothing_is_printed(measured: tuple[dict[str, Any], str]) -> None:
    assert measured[1] == ""


def grown_by(make: Any) -> int:
    """Bytes that the device counts for what `make` returned, while it lives."""
    before = CPU.allocated_bytes()
    made = make()
    grown = CPU.allocated_bytes() - before
    del made
    assert CPU.allocated_bytes() == before
    return grown


class Wrapping(torch.Tensor):
    """A tensor without memory of its own, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a tensor that only holds another")


def same_memory_twice() -> list[torch.Tensor]:
    array = np.zeros(1000, dtype=np.uint8)
    return [torch.from_numpy(array), torch.from_numpy(array[:10])]


def views() -> list[torch.Tensor]:
    whole = torch.zeros(10, 10)
    return [whole, whole[0], whole.T, whole.detach(), whole.view(-1)]


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(100), 400),
        (lambda: torch.zeros(100, dtype=torch.int8), 100),
        (lambda: torch.zeros(100)[:1], 400),
        (views, 400),
        (tied, 400),
        (same_memory_twice, 1000),
        (lambda: nn.Linear(10, 10), 440),
        (lambda: nn.Linear(10, 10, device="meta"), 0),
        (lambda: torch.zeros(0), 0),
        (lambda: nn.LazyLinear(10), 0),
        (lambda: Wrapping(torch.zeros(100, dtype=torch.int8)), 100),
    ],
    ids=[
        "tensor", "bytes", "slice", "views", "tied", "numpy", "module", "meta", "empty", "lazy", "wrapping",
    ],
)  # fmt: skip
def test_each_storage_counts_once(make: Any, expected: int, quick_collector: None) -> None:
    assert grown_by(make) == expected


def test_a_clean_frees_what_only_a_cycle_refers_to(quick_collector: None) -> None:
    CPU.clean()
    before = CPU.allocated_bytes()
    knot: list[object] = [torch.zeros(1000)]
    knot.append(knot)
    del knot
    assert CPU.allocated_bytes() == before + 4000
    CPU.clean()
    assert CPU.allocated_bytes() == before


def test_the_cpu_is_no_other_device() -> None:
    with pytest.raises(DeviceError, match=r"meta is not the CPU\. Use --device cpu"):
        CpuDevice(torch.device("meta"))
