"""Bytes of tensors, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`; views and tied weights share one.

    A tensor that wraps others (torchao's quantised weights) counts as what it wraps.
    """
    # Storages stay referenced until the sum is made: an id could else be used again.
    storages = {}
    for tensor in tensors:
        for plain in _plain_tensors(tensor):
            storage = plain.untyped_storage()
            storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())


def _plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        if tensor.layout is torch.strided:
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_tensors(getattr(tensor, name))
