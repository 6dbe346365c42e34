"""Does a workload keep its contract?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.errors import BudgetDBError
from budgetdb.plugins import WORKLOADS
from budgetdb.shapes import Shape
from budgetdb.testing.contract import ContractError, require
from budgetdb.workloads.base import HOLDS, Workload, parse_workload

_SHAPES = (Shape(1, 1), Shape(1, 8), Shape(3, 5), Shape(2, 16))


def check_workload(
    workload: Workload, model: Any, *, device: str = "cpu", shapes: Sequence[Shape] | None = None
) -> None:
    """Hold a workload to every promise of `Workload`, by running it on a small model.

    The workload's class must be registered under its name, as its package's entry point does.

    Args:
        workload: the workload, with the options to check.
        model: a model that it can run, on `device`.
        device: name of the device, as `--device` takes it.
        shapes: batches to run; a few small ones by default.

    Raises:
        ContractError: a promise is broken; the message says which one, and at what values.
    """
    _check_key(workload)
    where = choose_device(device)
    for shape in shapes or _SHAPES:
        _check_inputs(workload, model, shape, where.torch_device)
        _check_step(workload, model, shape, where)


def _check_key(workload: Workload) -> None:
    key, name = workload.key(), workload.name
    require(name in WORKLOADS, f"no workload {name!r} is registered: register {type(workload).__name__} first")
    try:
        again = parse_workload(key)
    except BudgetDBError as error:
        raise ContractError(f"the key {key!r} can't be read back: {error}") from error
    require(type(again) is type(workload), f"the key {key!r} is read as a {type(again).__name__}")
    require(again.key() == key, f"the key {key!r} is read as {again.key()!r}")
    require(again.options() == workload.options(), f"read back from {key!r}, the options are {again.options()}")
    keys = {parse_workload(key, hold=hold).key() for hold in HOLDS}
    require(len(keys) == len(HOLDS), f"workloads that hold differently share a key: {sorted(keys)}")


def _check_inputs(workload: Workload, model: Any, shape: Shape, torch_device: torch.device) -> None:
    # The global random state must not matter: in another process it is another.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        first = workload.inputs(model, shape, torch_device)
        torch.default_generator.manual_seed(2)
        second = workload.inputs(model, shape, torch_device)
    require(first.keys() == second.keys(), f"two calls of inputs at {shape} give {list(first)} and {list(second)}")
    for name, tensor in first.items():
        require(tensor.device.type == torch_device.type, f"{name} is on {tensor.device}, not on {torch_device}")
        same = tensor.shape == second[name].shape and torch.equal(tensor, second[name])
        require(same, f"two calls of inputs at {shape} differ in {name}")
        require(
            tensor.dim() > 0 and tensor.shape[0] == shape.batch_size,
            f"{name} has the shape {tuple(tensor.shape)}, not {shape.batch_size} rows",
        )
    if "input_ids" in first:
        size = tuple(first["input_ids"].shape)
        require(size == (shape.batch_size, shape.length), f"input_ids has the shape {size}, asked for {shape}")
    if "attention_mask" in first and shape.length > 1:
        _check_padding(first["attention_mask"], shape)


def _check_padding(mask: torch.Tensor, shape: Shape) -> None:
    expected = torch.ones(shape.batch_size, shape.length, dtype=mask.dtype, device=mask.device)
    expected[:, -1] = 0
    require(
        mask.shape == expected.shape and torch.equal(mask, expected),
        f"at {shape} the last token of each row, and no other, must be padding; attention_mask is {mask.tolist()}",
    )


def _check_step(workload: Workload, model: Any, shape: Shape, device: Device) -> None:
    inputs = workload.inputs(model, shape, device.torch_device)
    workload.step(model, inputs)  # what is made at first use stays for good
    device.clean()
    before = device.allocated_bytes()
    outputs = workload.step(model, inputs)
    gradients = any(tensor.requires_grad for tensor in _tensors(outputs))
    require(not gradients, f"the step at {shape} runs with gradients")
    del outputs
    device.clean()
    left = device.allocated_bytes() - before
    require(left <= 0, f"the step at {shape} left {left} bytes behind after its outputs were dropped")


def _tensors(outputs: object) -> Iterable[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
