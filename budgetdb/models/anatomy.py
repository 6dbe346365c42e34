"""Parts of a live model: what it wraps, its configurations, its token embedding, its output layer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig


def unwrapped(model: Any) -> Any:
    """The model inside a compiled, data-parallel or adapter wrapper; the model itself where there is none."""
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()
        else:
            return model


def modules_behind(function: Any) -> dict[str, nn.Module]:
    """The modules that a callable runs, by the name it knows them under: those it is bound to, given or closes over."""
    found: dict[str, nn.Module] = {}
    is_partial = isinstance(function, functools.partial)
    for name, value in _values_around(function).items():
        if isinstance(value, nn.Module):
            found[name] = value
        elif (
            isinstance(value, functools.partial)
            or inspect.ismethod(value)
            or (is_partial and inspect.isfunction(value))
        ):
            found |= {f"{name}.{inner}": module for inner, module in modules_behind(value).items()}
    return found


def _values_around(function: Any) -> dict[str, Any]:
    if isinstance(function, functools.partial):
        given = {str(position): value for position, value in enumerate(function.args)}
        return {"func": function.func, **given, **function.keywords}
    if inspect.ismethod(function):
        return {"self": function.__self__}
    if not inspect.isfunction(function):
        return {}
    try:
        scope = inspect.getclosurevars(function)
    except ValueError:  # it closes over a variable that has no value yet
        return {}
    return {**scope.globals, **scope.nonlocals}


def config_of(model: Any) -> PretrainedConfig | None:
    """The transformers configuration of a model, or None where it has none."""
    config = getattr(unwrapped(model), "config", None)
    return config if isinstance(config, PretrainedConfig) else None


def nested_configs(config: PretrainedConfig | None) -> Iterator[PretrainedConfig]:
    """A configuration and those nested in it."""
    if config is None:
        return
    yield config
    for name in config.sub_configs:
        nested = getattr(config, name, None)
        if isinstance(nested, PretrainedConfig):
            yield from nested_configs(nested)


def token_embedding(model: Any) -> nn.Embedding | None:
    """The table of token embeddings: what transformers says it is, else the first embedding in the module."""
    inner = unwrapped(model)
    if config_of(model) is not None:
        try:
            embedding = inner.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            embedding = None
        if isinstance(embedding, nn.Embedding):
            return embedding
    if not isinstance(inner, nn.Module):
        return next(filter(None, map(token_embedding, modules_behind(inner).values())), None)
    return next((module for module in inner.modules() if isinstance(module, nn.Embedding)), None)


def output_layer(model: Any) -> nn.Module | None:
    """The layer that makes logits over the vocabulary, or None where the model has no such head."""
    inner = unwrapped(model)
    if config_of(model) is None:
        return None
    try:
        layer = inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return layer if isinstance(layer, nn.Module) else None


def vocabulary_size(model: Any) -> int | None:
    """Number of token ids a model takes, or None where it shows no embedding."""
    embedding = token_embedding(model)
    if embedding is not None:
        return int(embedding.num_embeddings)
    config = config_of(model)
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None


def logits_width(model: Any) -> int | None:
    """Numbers per token in the logits over the vocabulary, or None without such a head."""
    weight = getattr(output_layer(model), "weight", None)
    return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else None
