"""Random batches of tokens that cost what real ones do."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Collection
from typing import Any

import torch
from transformers import PretrainedConfig

from budgetdb.errors import UsageError
from budgetdb.models.anatomy import config_of, unwrapped, vocabulary_size
from budgetdb.shapes import Shape

DEFAULT_VOCABULARY = 100


def token_inputs(model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and, where the model takes one, `attention_mask`: both int64 of shape `(batch_size, length)`.

    The last token of each row is padding (a row of one has none): a mask without a zero is dropped, and attention then
    takes another path. The ids are random, since equal tokens are routed alike in a mixture of experts; special ones
    stay out, but for an end-of-sequence before the padding, which sequence-to-sequence classifiers look for.

    Raises:
        UsageError: the model takes images or sound.
    """
    config = config_of(model)
    _check_takes_tokens(model, config)
    ids = random_ids(model, shape)
    _mark_ends(ids, config)
    inputs = {"input_ids": ids.to(device)}
    if takes(model, "attention_mask"):
        mask = torch.ones(shape.batch_size, shape.length, dtype=torch.int64)
        if shape.length > 1:
            mask[:, -1] = 0
        inputs["attention_mask"] = mask.to(device)
    return inputs


def random_ids(model: Any, shape: Shape) -> torch.Tensor:
    """Token ids that the model takes and that are not special, equal for equal shapes: int64, on the CPU."""
    vocabulary = vocabulary_size(model) or DEFAULT_VOCABULARY
    special = [token for token in _special_ids(config_of(model)) if token < vocabulary]
    if len(special) >= vocabulary:
        special = []
    ids = random_integers(vocabulary - len(special), shape, salt=0)
    for token in special:  # ascending: each step opens one gap
        ids += ids >= token
    return ids


def random_integers(below: int, shape: Shape, *, salt: int, per_row: bool = False) -> torch.Tensor:
    """Integers in `[0, below)`, reproducible: int64 on the CPU, `(batch_size, length)`, or `(batch_size,)` per row."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{salt} {shape}".encode()))  # it takes 32 bits of a seed
    size = (shape.batch_size,) if per_row else (shape.batch_size, shape.length)
    return torch.randint(below, size, generator=generator, dtype=torch.int64)


def parameter_names(model: Any) -> Collection[str]:
    """Names of the arguments that the step of `model` takes."""
    return _signature(model).parameters


def takes(model: Any, name: str) -> bool:
    """Whether `model` can be given an argument of that name, by `**kwargs` if need be for the two main ones."""
    parameters = _signature(model).parameters
    catches_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (catches_all and name in ("input_ids", "attention_mask"))


def call(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """`model(**inputs)`, or `model(input_ids)` for a callable that calls its first argument something else."""
    if takes(model, "input_ids"):
        return model(**inputs)
    return model(inputs["input_ids"])


def _signature(model: Any) -> inspect.Signature:
    inner = unwrapped(model)
    function = inner.forward if isinstance(inner, torch.nn.Module) else inner
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return inspect.Signature()


def _check_takes_tokens(model: Any, config: PretrainedConfig | None) -> None:
    main = getattr(unwrapped(model), "main_input_name", "input_ids")
    if config is not None and main != "input_ids":
        raise UsageError(
            f"{type(unwrapped(model)).__name__} takes {main}, not tokens",
            next_step="Give a text model, or write a workload of your own (budgetdb.workloads.base)",
        )


def _special_ids(config: PretrainedConfig | None) -> list[int]:
    if config is None:
        return []
    found: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_ids", "_token_index")):
            values = value if isinstance(value, list | tuple) else [value]
            found |= {token for token in values if type(token) is int and token >= 0}
    return sorted(found)


def _mark_ends(ids: torch.Tensor, config: PretrainedConfig | None) -> None:
    """Padding at the end of each row, and before it the end of the sequence, where the model has ids for them."""
    if config is None:
        return
    length = ids.shape[1]
    pad, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    if type(pad) is int and pad >= 0 and length > 1:
        ids[:, -1] = pad
    if getattr(config, "is_encoder_decoder", False) and type(end) is int:
        ids[:, max(length - 2, 0)] = end
