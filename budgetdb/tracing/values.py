"""The small whole-number tensors of a step, kept with their real values beside their fake ones.

A model asks its mask and its positions questions that decide what it allocates: is every token real, do positions
restart in the middle of a row. A fake tensor can't answer, and a tracer that guesses gets another step than the one
that runs. But what is asked about comes from token ids and masks, which the workload makes and which are small: so each
operation on tensors whose values are known is run on those values too, and the answer is the real one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_any, tree_flatten, tree_map

_log = logging.getLogger(__name__)

# Values are followed up to this many elements: the four-dimensional mask of a large batch is not asked about.
_MOST_ELEMENTS = 2**22
_ATTRIBUTE = "_budgetdb_value"
# Set on a storage, fake or of values, that something unknown was written into: its views are unknown from then on.
_OVERWRITTEN = "_budgetdb_overwritten"
_CPU = torch.device("cpu")


def give_value(fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`fake`, known from now on to hold `value`."""
    setattr(fake, _ATTRIBUTE, value)
    return fake


def value_of(tensor: Any) -> torch.Tensor | None:
    """The real value of a fake tensor, None where it is not known."""
    value: torch.Tensor | None = getattr(tensor, _ATTRIBUTE, None)
    if value is None or any(hasattr(each.untyped_storage(), _OVERWRITTEN) for each in (tensor, value)):
        return None
    return value


def follow(func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """Give `outputs` of `func(*args, **kwargs)` their values, where those of all its tensors are known."""
    real = None if _is_random(func) or not _is_small(outputs) else _on_values(func, args, kwargs)
    if real is None:
        _forget_written(func, args, kwargs)
        return
    fakes, reals = tree_flatten(outputs)[0], tree_flatten(real[0])[0]
    for fake, value in zip(fakes, reals, strict=True):
        if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor) and _matches(fake, value):
            give_value(fake, value)


def answer(func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """What `func` returns for the real values of its arguments, boxed; None where they are not known."""
    return _on_values(func, args, kwargs)


def _on_values(func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """`func` on the values behind its arguments, boxed; None where one is unknown.

    In-place operations change the values in place, and views of values are views: aliasing carries over.
    """
    if tree_any(lambda leaf: isinstance(leaf, torch.Tensor) and value_of(leaf) is None, (args, kwargs)):
        return None
    real_args, real_kwargs = tree_map(_real, (args, kwargs))
    try:
        with no_dispatch():
            return (func(*real_args, **real_kwargs),)
    except Exception as error:  # whatever a kernel raises: its answer is unknown
        _log.debug("%s is not followed: %s", func, error)
        return None


def _real(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return value_of(leaf)
    return _CPU if isinstance(leaf, torch.device) else leaf


def _forget_written(func: Any, args: Any, kwargs: Any) -> None:
    """Nothing is known any more of what `func` writes into, by its schema."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in tree_flatten(written)[0]:
                if isinstance(leaf, torch.Tensor):
                    setattr(leaf.untyped_storage(), _OVERWRITTEN, True)
                    value = getattr(leaf, _ATTRIBUTE, None)
                    if value is not None:
                        setattr(value.untyped_storage(), _OVERWRITTEN, True)


def _matches(fake: torch.Tensor, value: torch.Tensor) -> bool:
    return fake.shape == value.shape and fake.layout is value.layout is torch.strided


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_small(outputs: Any) -> bool:
    """Whether values of this size are worth following."""
    return all(leaf.numel() <= _MOST_ELEMENTS for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor))
