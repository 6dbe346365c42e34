"""How many bytes the outputs of a step keep alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from budgetdb.models.storages import storage_bytes


def held_bytes(outputs: object) -> int:
    """Bytes of the storages that `outputs` keeps alive, each counted once.

    Tensors are found in mappings, sequences, dataclasses, the outputs of transformers and its key-value caches, and in
    the attributes of any other object that is no module.
    """
    return storage_bytes(_tensors(outputs))


def _tensors(outputs: object) -> Iterator[torch.Tensor]:
    waiting, seen = [outputs], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            waiting.extend(_parts(value))


def _parts(value: Any) -> Iterable[object]:
    # Parts are attributes and elements that live on in `value`, so that no id in `seen` is used twice.
    if isinstance(value, str | bytes | type | nn.Module) or callable(value):
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())
