"""What errors mean, by what backends really say; and that nothing of a failed step outlives it."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from budgetdb.calibration.outcomes import ErrorKind, StepError, classify, take

CASES = json.loads((Path(__file__).parents[1] / "cases" / "oom_messages.json").read_text())
TYPES: dict[str, type[Exception]] = {
    "torch.OutOfMemoryError": torch.OutOfMemoryError,
    "torch.AcceleratorError": torch.AcceleratorError,
    "RuntimeError": RuntimeError,
    "MemoryError": MemoryError,
    "IndexError": IndexError,
    "ValueError": ValueError,
}
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["message"][:40])
def test_cases(case: dict[str, str]) -> None:
    assert classify(TYPES[case["type"]](case["message"])) is ErrorKind(case["expect"])


def test_the_cases_are_there() -> None:
    assert len(CASES) >= 29
    assert {case["expect"] for case in CASES} == set(ErrorKind)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA error: misaligned address"), ErrorKind.STICKY),
        (RuntimeError("HIP error: out of memory"), ErrorKind.OOM),
        (RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB."), ErrorKind.OOM),
        (RuntimeError("Triton Error [HIP]: out of memory"), ErrorKind.OOM),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), ErrorKind.OOM),
        (RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false."), ErrorKind.KERNEL_LIMIT),
        (RuntimeError("nonzero: the input is too large for 32-bit index"), ErrorKind.KERNEL_LIMIT),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"), ErrorKind.OOM_IF_MEMORY_LOW),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), ErrorKind.OOM_IF_MEMORY_LOW),
        (SystemError(OOM), ErrorKind.OOM),
        (MemoryError(), ErrorKind.OOM),
        (torch.OutOfMemoryError("Allocation on device"), ErrorKind.OOM),
        # An assert poisons the process even where memory is mentioned as well.
        (RuntimeError("CUDA error: device-side assert triggered\nafter CUDA out of memory"), ErrorKind.STICKY),
        (ValueError(OOM), ErrorKind.OTHER),
        (KeyError(OOM), ErrorKind.OTHER),
        (AssertionError("device-side assert"), ErrorKind.OTHER),
        (KeyboardInterrupt(), ErrorKind.OTHER),
        (RuntimeError(""), ErrorKind.OTHER),
        (RuntimeError("you asked for an invalid size: memory"), ErrorKind.OTHER),
    ],
    ids=repr,
)
def test_more_that_backends_say(error: BaseException, kind: ErrorKind) -> None:
    assert classify(error) is kind


def raised(outer: Exception, inner: Exception, *, how: str) -> Exception:
    """`outer`, as it is when it was raised while `inner` was handled: from it, in its context, or hiding it."""
    outer.__context__ = inner
    if how == "from":
        outer.__cause__ = inner
    outer.__suppress_context__ = how != "context"
    return outer


@pytest.mark.parametrize(
    ("how", "kind"), [("from", ErrorKind.OOM), ("context", ErrorKind.OOM), ("hidden", ErrorKind.OTHER)]
)
@pytest.mark.parametrize("outer", [ValueError("the step failed"), RuntimeError("layer 3 failed")], ids=repr)
def test_causes_are_looked_at_where_the_error_says_nothing(outer: Exception, how: str, kind: ErrorKind) -> None:
    assert classify(raised(type(outer)(*outer.args), torch.OutOfMemoryError(OOM), how=how)) is kind


def test_what_the_error_itself_says_comes_before_its_cause() -> None:
    outer = RuntimeError("CUDA error: device-side assert triggered")
    assert classify(raised(outer, RuntimeError(OOM), how="from")) is ErrorKind.STICKY


def test_a_cause_three_steps_down() -> None:
    middle = raised(ValueError("middle"), torch.OutOfMemoryError(OOM), how="from")
    assert classify(raised(LookupError("outer"), middle, how="context")) is ErrorKind.OOM


def test_an_oom_while_another_fault_was_handled_is_one() -> None:
    assert classify(raised(torch.OutOfMemoryError(OOM), IndexError("index"), how="context")) is ErrorKind.OOM


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is ErrorKind.OTHER
    assert take(first).kind is ErrorKind.OTHER


def test_strings_are_what_is_kept() -> None:
    taken = take(RuntimeError(f"\n  {OOM}\nIf reserved memory is large try ..."))
    assert taken == StepError(ErrorKind.OOM, "RuntimeError", OOM)
    assert str(taken) == f"RuntimeError: {OOM}"
    assert len(take(ValueError("x" * 10_000)).message) == 400
    assert take(torch.OutOfMemoryError(OOM)).type_name == "OutOfMemoryError"


class Failing:
    """A step that fails with a tensor in its frame, and watches over it."""

    def __init__(self) -> None:
        self.watched: list[weakref.ref[torch.Tensor]] = []

    def fail(self, error: Exception) -> None:
        activation = torch.zeros(1000)
        self.watched.append(weakref.ref(activation))
        raise error

    def fail_in_chain(self, how: str) -> None:
        try:
            self.fail(torch.OutOfMemoryError(OOM))
        except torch.OutOfMemoryError as error:
            wrapped = RuntimeError("wrapped")
            if how == "from":
                raise wrapped from error
            if how == "hidden":
                raise wrapped from None
            self.fail(wrapped)

    def alive(self) -> list[Any]:
        return [reference() for reference in self.watched if reference() is not None]


@pytest.fixture
def no_collector() -> Any:
    """Reference counts alone have to free the tensors."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", ["from", "context", "hidden"])
def test_tensors_of_a_failed_step_are_freed(how: str, no_collector: None) -> None:
    step = Failing()
    kept: list[BaseException] = []
    try:
        step.fail_in_chain(how)
    except RuntimeError as error:
        kept.append(error)
    # Without `take` the exception, which is still referred to, keeps them alive: this test can fail.
    assert len(step.alive()) == len(step.watched) == (2 if how == "context" else 1)
    assert take(kept[0]).kind is (ErrorKind.OTHER if how == "hidden" else ErrorKind.OOM)
    assert step.alive() == []


def test_a_tensor_is_freed_while_the_error_is_handled(no_collector: None) -> None:
    step = Failing()
    try:
        step.fail(RuntimeError(OOM))
    except RuntimeError as error:
        take(error)
        assert step.alive() == []


def test_a_failed_allocation_in_c_plus_plus_is_out_of_memory() -> None:
    # Seen of BERT with eager attention under a CPU cap; torch passes it on as it is.
    assert classify(RuntimeError("std::bad_alloc")) is ErrorKind.OOM
    assert classify(ValueError("std::bad_alloc")) is ErrorKind.OTHER
