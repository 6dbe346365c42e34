"""Follow every storage that operations make, from its birth to its death."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from budgetdb.models.anatomy import modules_behind
from budgetdb.tracing.lifetimes import Event, Moment
from budgetdb.tracing.values import answer, follow, give_value


class LifetimeTracker(TorchDispatchMode):
    """Records the birth and death of every storage on one kind of device, while it is entered.

    A storage is born when an operation returns a tensor on one that was not seen before, so views, aliases and
    in-place results count once; it dies when the last reference to it goes, seen by a weak reference. Operations that
    depend on the values of tensors are answered by `budgetdb.tracing.values`.

    Args:
        device_type: kind of device whose storages count, `cuda` for one.
        resident: tensors that are there before and after, and don't count.
        model: whose modules are named in moments, a module or a function that runs some.
    """

    def __init__(self, device_type: str, *, resident: Iterable[torch.Tensor] = (), model: object = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.moments: list[Moment] = []
        self._device_type = device_type
        # Storages by address, which is theirs while they live: the weak references remove them.
        self._alive: dict[int, tuple[int, int, weakref.ref[Any] | None]] = {}
        for tensor in resident:
            # Held by whoever holds the model, longer than this.
            self._alive[tensor.untyped_storage()._cdata] = (-1, 0, None)
        self._births = 0
        self._paths = {id(module): path for path, module in _named_modules(model)}
        self._running: list[str] = [""]
        self._hooks: list[Any] = []
        # Of the error seen last its id: the error itself would keep what its frames hold alive.
        self._failure: tuple[int, Moment] = (0, Moment("", ""))

    @property
    def module(self) -> str:
        """Path of the innermost module that is running."""
        return self._running[-1]

    def where_raised(self, error: BaseException) -> Moment:
        """Where `error`, which ended the step, came from; no operation where none raised it."""
        return self._failure[1] if self._failure[0] == id(error) else Moment(self.module, "")

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._running = [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and look at what it returns."""
        kwargs = kwargs or {}
        try:
            outputs = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            answered = answer(func, args, kwargs)
            if answered is None:
                self._note(error, str(func))
                raise
            outputs = tree_map(self._faked, answered[0])
        except Exception as error:
            self._note(error, str(func))
            raise
        else:
            follow(func, args, kwargs, outputs)
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, func)
        return outputs

    def see(self, tensor: torch.Tensor, operation: object) -> None:
        """Count the storage of `tensor` as born in `operation`, unless it is known."""
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        known = self._alive.get(address)
        if known is not None:
            if known[1] == nbytes or known[0] < 0:
                return
            self._died(address, None)  # it was resized
        if nbytes == 0:
            return
        number = self._births
        self._births += 1
        self._alive[address] = (number, nbytes, weakref.ref(storage, partial(self._died, address)))
        self._record(number, nbytes, Moment(self.module, str(operation)))

    def _died(self, address: int, reference: object) -> None:
        del reference
        known = self._alive.pop(address, None)
        if known is not None:
            self._record(known[0], -known[1], Moment(self.module, "free"))

    def _record(self, number: int, nbytes: int, moment: Moment) -> None:
        self.events.append(Event(number, nbytes))
        self.moments.append(moment)

    def _note(self, error: BaseException, operation: str) -> None:
        """Remember where `error` was first seen: the innermost place."""
        if self._failure[0] != id(error):
            self._failure = id(error), Moment(self.module, operation)

    def _faked(self, leaf: Any) -> Any:
        """A fake tensor on the traced device for a real one that a value-dependent operation returned."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = torch.device("cpu") if self._device_type == "cpu" else torch.device(self._device_type, 0)
        return give_value(torch.empty_like(leaf, device=device), leaf)

    def _enter_module(self, module: nn.Module, arguments: Any) -> None:
        del arguments
        self._running.append(self._paths.get(id(module), self._running[-1]))

    def _leave_module(self, module: nn.Module, arguments: Any, outputs: Any) -> None:
        del module, arguments, outputs
        error = sys.exc_info()[1]  # hooks that are always called run while it is handled
        if error is not None:
            self._note(error, "")
        if len(self._running) > 1:
            self._running.pop()


def _named_modules(model: object) -> Iterable[tuple[str, nn.Module]]:
    """The modules of a module by their paths, those behind a function by its name for them."""
    if isinstance(model, nn.Module):
        yield from model.named_modules()
        return
    for name, behind in modules_behind(model).items():
        yield from ((f"{name}.{path}".rstrip("."), module) for path, module in behind.named_modules())
