"""The check finds each broken promise: a workload that keeps all but one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from budgetdb.plugins import WORKLOADS
from budgetdb.shapes import Shape
from budgetdb.testing.contract import ContractError
from budgetdb.testing.workloads import check_workload
from budgetdb.workloads.base import Workload, parse_workload
from budgetdb.workloads.forward import ForwardWorkload

pytestmark = pytest.mark.usefixtures("quick_collector")


class Tiny(nn.Module):
    """One embedding and one layer: a model as small as they come, and no transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 8), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        return {"last_hidden_state": hidden, "logits": self.head(hidden)}


class Counting(ForwardWorkload):
    """Keeps every promise, with an option of its own."""

    name = "counting"

    def __init__(self, *, hold: str = "previous", answers: str | int = 4) -> None:
        super().__init__(hold=hold)
        self.answers = int(answers)

    def options(self) -> dict[str, str]:
        return super().options() | {"answers": str(self.answers)}


class ForgetsItsOption(Counting):
    """An option that changes memory and is not in the key."""

    def options(self) -> dict[str, str]:
        return {"hold": self.hold, "answers": "4" if self.answers == 4 else "5"} | (
            {"answers": "6"} if self.answers == 5 else {}
        )


class HidesItsHold(Counting):
    def key(self) -> str:
        return f"{self.name}[answers={self.answers}]"


class Unreadable(Counting):
    def key(self) -> str:
        return f"{self.name}({self.hold})"


class Random(Counting):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        inputs = super().inputs(model, shape, device)
        return inputs | {"input_ids": torch.randint(100, inputs["input_ids"].shape)}


class Growing(Counting):
    calls = 0

    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        self.calls += 1
        return super().inputs(model, shape, device) | {f"input_{self.calls}": torch.zeros(shape.batch_size)}


class Elsewhere(Counting):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        return super().inputs(model, shape, device) | {"labels": torch.zeros(shape.batch_size, device="meta")}


class OneRow(Counting):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        return super().inputs(model, Shape(1, shape.length), device)


class Short(Counting):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        return super().inputs(model, Shape(shape.batch_size, max(shape.length - 1, 1)), device)


class Unpadded(Counting):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        inputs = super().inputs(model, shape, device)
        return inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}


class WithGradients(Counting):
    def step(self, model: Any, inputs: dict[str, torch.Tensor]) -> object:
        with torch.enable_grad():
            return [model(**inputs)]


class Hoarding(Counting):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hoard: list[object] = []

    def step(self, model: Any, inputs: dict[str, torch.Tensor]) -> object:
        outputs = super().step(model, inputs)
        self.hoard.append(outputs)
        return outputs


BROKEN = [
    (ForgetsItsOption, "is read as"),
    (HidesItsHold, "workloads that hold differently share a key"),
    (Unreadable, "can't be read back"),
    (Random, "differ in input_ids"),
    (Growing, "two calls of inputs at"),
    (Elsewhere, "labels is on meta, not on cpu"),
    (OneRow, "has the shape (1, 5), not 3 rows"),
    (Short, "input_ids has the shape (1, 7), asked for"),
    (Unpadded, "the last token of each row, and no other, must be padding"),
    (WithGradients, "runs with gradients"),
    (Hoarding, "bytes behind after its outputs were dropped"),
]


@pytest.fixture
def register() -> Iterator[Any]:
    yield lambda workload: WORKLOADS.register("counting")(workload)
    WORKLOADS.unregister("counting")


@pytest.mark.parametrize("name", ["forward", "embed"])
@pytest.mark.parametrize("hold", ["previous", "none", "all"])
def test_those_of_budgetdb_keep_the_contract(name: str, hold: str) -> None:
    check_workload(parse_workload(name, hold=hold), Tiny())


def test_one_with_an_option_passes(register: Any) -> None:
    register(Counting)
    check_workload(Counting(answers=7), Tiny())
    check_workload(Counting(answers=7), Tiny(), shapes=[Shape(5, 30)])


def test_a_workload_that_is_not_registered_is_found() -> None:
    with pytest.raises(ContractError, match="no workload 'counting' is registered: register Counting first"):
        check_workload(Counting(), Tiny())


def test_a_name_that_stands_for_another_class_is_found(register: Any) -> None:
    register(ForwardWorkload)

    class Other(Counting):
        def options(self) -> dict[str, str]:
            return {"hold": self.hold}

    with pytest.raises(ContractError, match="is read as a ForwardWorkload"):
        check_workload(Other(), Tiny())


@pytest.mark.parametrize(("workload", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_each_broken_promise_is_found(workload: type[Workload], words: str, register: Any) -> None:
    register(workload)
    with pytest.raises(ContractError) as caught:
        check_workload(workload(answers=5), Tiny())  # type: ignore[call-arg]  # each of them has it
    assert words in str(caught.value)
