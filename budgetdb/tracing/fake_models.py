"""A model whose weights are fake: every module and attribute as it is, and no memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from budgetdb.models.anatomy import modules_behind

_log = logging.getLogger(__name__)


@contextmanager
def fake_model(model: Any, mode: FakeTensorMode, device: torch.device) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """The model with its parameters and buffers as fake tensors on `device`, and the list of these.

    A module is copied, so that nothing a trace leaves in it reaches the caller's; its weights are not. A function, and
    a module that can't be copied, is given as it is, and the modules behind it hold fakes while the block runs.
    """
    is_module = isinstance(model, nn.Module)
    modules = [model] if is_module else list(modules_behind(model).values())
    memo = _fakes_of(modules, mode, device)
    copied = _copied(model, memo) if is_module else None
    if copied is not None:
        yield copied, list(memo.values())
        return
    with _replaced(modules, memo):
        yield model, list(memo.values())


def _copied(model: nn.Module, memo: dict[int, torch.Tensor]) -> nn.Module | None:
    """A copy with the fakes of `memo`; None where an attribute (a lock, a weight that is computed) can't be copied."""
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:  # whatever an attribute raises
        _log.debug("%s can't be copied: %s", type(model).__name__, error)
        return None


def _fakes_of(modules: list[nn.Module], mode: FakeTensorMode, device: torch.device) -> dict[int, torch.Tensor]:
    """A fake for each parameter and buffer, by the id of the real one: tied weights stay tied."""
    fakes: dict[int, torch.Tensor] = {}
    for root in modules:
        for module in root.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in fakes:
                    fakes[id(tensor)] = _fake(tensor, mode, device)
    return fakes


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, plain, device)
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake


@contextmanager
def _replaced(modules: list[nn.Module], memo: dict[int, torch.Tensor]) -> Iterator[None]:
    """The modules' tensors replaced by their fakes."""
    with state_kept(modules):
        for root in modules:
            for module in root.modules():
                for held in _contents(module)[:2]:
                    # A module that two others share is met twice, the second time with its fakes.
                    held.update({name: memo.get(id(tensor), tensor) for name, tensor in held.items()})
        yield


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A block at whose end the modules are as they were: attributes, parameters, buffers, and modules within."""
    before = [
        (module, dict(vars(module)), [dict(held) for held in _contents(module)])
        for root in modules
        for module in root.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for held, content in zip(_contents(module), contents, strict=True):
                held.clear()
                held.update(content)


def _contents(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules
