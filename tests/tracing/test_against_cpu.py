"""Traces against the allocator of a real CPU.

A trace sees the tensors that operators return. What an operator's CPU kernel takes beside these, and gives back before
it returns, is not in it; the exceptions from "a trace is what the allocator hands out" are these, and no others:

| kernel | what it takes beside its results |
|---|---|
| `_scaled_dot_product_flash_attention_for_cpu` | a buffer for each thread: `flash_buffers_bytes`, to the byte |
| a product with a number (`aten.mul.Tensor`) | the number as a tensor: 2 to 16 bytes |
| bf16 matrix products of oneDNN, where the processor has instructions for them | up to 0.15 MiB (TRACING 5) |
| grouped matrix products of experts in float32 | refused by torch's fake kernel, which takes bfloat16 only: no trace |
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any, NamedTuple

import pytest
import torch
from traced_models import ARCHITECTURES, HEAD_WIDTH, WORKLOADS, small_model

from budgetdb.calibration.prober import Prober
from budgetdb.devices.choose import choose_device
from budgetdb.errors import UntraceableError
from budgetdb.shapes import Shape
from budgetdb.tracing.lifetimes import Trace
from budgetdb.tracing.targets import cpu_target
from budgetdb.tracing.tracer import Tracer
from budgetdb.workloads.base import Workload

pytestmark = pytest.mark.usefixtures("quick_collector")

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
SHAPES = (Shape(3, 200), Shape(2, 500))
QUICK_SHAPES = (Shape(3, 200), Shape(2, 300))
MODES = list(product(("eager", "sdpa"), (torch.float32, torch.bfloat16)))
WORKLOADS_IN_TURN = list(WORKLOADS)
ERROR = 1e-3
ONEDNN_BYTES = 0.15 * 2**20


class Cell(NamedTuple):
    """One model doing one workload at one shape."""

    name: str
    attention: str
    dtype: torch.dtype
    workload: tuple[str, str]
    shape: Shape

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-{self.attention}-{dtype}-{'-'.join(self.workload)}-{self.shape.length}"


def traceable(name: str, attention: str, dtype: torch.dtype) -> bool:
    """Gemma2 has no sdpa, since it caps its scores; experts in float32 are in a test of their own."""
    return (name, attention) != ("gemma2", "sdpa") and (name, dtype) != ("mixtral", torch.float32)


def a_few_cells() -> Iterator[Cell]:
    """Each architecture in three of the four modes, workloads and shapes in turn."""
    turn = 0
    for number, (name, (attention, dtype)) in enumerate(product(ARCHITECTURES, MODES)):
        if number % 5 and traceable(name, attention, dtype):
            yield Cell(name, attention, dtype, WORKLOADS_IN_TURN[turn % 9], QUICK_SHAPES[turn // 2 % 2])
            turn += 1


FEW = list(a_few_cells())
ALL = [
    Cell(name, *mode, workload, shape)
    for name, mode, workload, shape in product(ARCHITECTURES, MODES, WORKLOADS, SHAPES)
    if traceable(name, *mode)
]


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_a_trace_is_what_the_allocator_hands_out(cell: Cell) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in ALL if cell not in FEW], ids=str)
def test_a_trace_is_what_the_allocator_hands_out_everywhere(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("hold", ["none", "previous", "all"])
@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("t5", "sdpa"), ("modernbert", "sdpa")])
def test_what_is_held_is_in_the_trace(name: str, attention: str, hold: str) -> None:
    model = small_model(name, attention=attention)
    compare(model, WORKLOADS["forward", "ones"](hold=hold), Shape(3, 120))


@pytest.mark.parametrize("shape", [Shape(1, 1), Shape(9, 3), Shape(1, 800)], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_shapes_of_every_kind(name: str, shape: Shape) -> None:
    # Beyond 768 tokens the CPU kernel takes larger blocks of queries.
    compare(small_model(name), WORKLOADS["forward", "padded"](), shape)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_experts_in_float32_have_no_trace(attention: str) -> None:
    model = small_model("mixtral", attention=attention)
    with (
        Tracer(model, WORKLOADS["forward", "padded"](), cpu_target()) as tracer,
        pytest.raises(
            UntraceableError, match=r"MixtralForCausalLM\.model\.layers\.0\.mlp\S* .*RuntimeError of \S+grouped_mm"
        ),
    ):
        tracer.trace(Shape(2, 16))


def check(cell: Cell) -> None:
    model = small_model(cell.name, attention=cell.attention, dtype=cell.dtype)
    compare(model, WORKLOADS[cell.workload](), cell.shape)


def compare(model: Any, workload: Workload, shape: Shape) -> None:
    """Hold the trace of two steps to what the real ones take, beyond what kernels take for themselves."""
    with Tracer(model, workload, cpu_target()) as tracer:
        trace = tracer.trace(shape)
    real, held_bytes = measured(model, workload, shape)
    expected = with_flash_buffers(trace, shape.length, model.dtype)
    allowed = ERROR * real
    if model.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        allowed += ONEDNN_BYTES
    moment = f"the trace's peak is {trace.transient_bytes}, at {trace.peak_moment}"
    assert abs(expected - real) <= allowed, f"{real} bytes were handed out at most, {expected} expected: {moment}"
    assert trace.held_bytes == held_bytes


def measured(model: Any, workload: Workload, shape: Shape) -> tuple[int, int]:
    """The most bytes handed out during a probe, beyond those alive before it, and what its outputs held."""
    device = choose_device("cpu")
    prober = Prober(device=device, model=model, workload=workload, resident_bytes=0)
    gc.collect()
    before = device.allocated_bytes()
    probe = prober.probe(shape)
    assert probe.fits, probe.message
    return probe.peak_bytes - before, probe.held_bytes


def with_flash_buffers(trace: Trace, length: int, dtype: torch.dtype) -> int:
    """The trace's peak if each call of the CPU's own attention took its buffers while its results are there."""
    live = accumulate(event.nbytes for event in trace.events)
    buffers = flash_buffers_bytes(length, HEAD_WIDTH, dtype)
    calls = (
        bytes_alive + buffers
        for bytes_alive, event, moment in zip(live, trace.events, trace.moments, strict=True)
        if moment.operation == FLASH and event.nbytes > 0
    )
    return max(trace.transient_bytes, *calls, 0)


def flash_buffers_bytes(length: int, width: int, dtype: torch.dtype) -> int:
    """What `cpu_flash_attention` takes for its blocks (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).

    Scores, their largest and their sum, and the result, for a block of queries and one of keys, in float32; below that
    the scores once more in the reduced type.
    """
    queries = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    keys = min(512, length)
    buffers = 4 * (queries * keys + 2 * queries + queries * width)
    reduced = 0 if dtype is torch.float32 else dtype.itemsize * queries * keys
    return torch.get_num_threads() * (buffers + reduced)
