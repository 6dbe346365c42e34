"""Read off a model what a calibration needs to know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from budgetdb.models.anatomy import config_of, logits_width, modules_behind, nested_configs, unwrapped, vocabulary_size
from budgetdb.models.fingerprint import model_hash
from budgetdb.models.spec import ModelFacts
from budgetdb.models.storages import storage_bytes

POSITION_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
HEAD_FIELDS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
)
EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
# These add a bias for the distance of two tokens, or nothing: old configurations carry a number that ends nothing.
UNLIMITED_TYPES = frozenset(
    {"bloom", "longt5", "mpt", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5", "xlnet"}
)
# Directories whose name says nothing of the model in them.
GENERAL_DIRECTORIES = frozenset({"model", "models", "checkpoint", "final", "output", "weights"})


def describe(model: Any, *, name: str | None = None) -> ModelFacts:
    """What a calibration needs to know of `model`: live, outlined on `meta`, or any callable.

    Args:
        model: a transformers model, a module, or a callable.
        name: what to call it; its own name where None.
    """
    config = config_of(model)
    return ModelFacts(
        model_hash=model_hash(model),
        name=name or _own_name(model, config),
        dtype=_dtype(model),
        attention=str(getattr(config, "_attn_implementation", None) or "none"),
        resident_bytes=resident_bytes(model),
        max_positions=max_positions(model),
        heads=max(_numbers(config, HEAD_FIELDS), default=None),
        vocab_size=vocabulary_size(model),
        output_width=_output_width(model, config),
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        flags=tuple(_flags(model, config)),
    )


def resident_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers of `model`, tied ones once."""
    return storage_bytes(_tensors(model))


def max_positions(model: Any) -> int | None:
    """The longest row `model` takes, in tokens, or None where nothing ends it.

    RoBERTa and its kin count positions from `padding_idx + 1` in their table, so that many fewer are left
    (transformers, `create_position_ids_from_input_ids`); their table is the one that has a padding index.
    """
    config = config_of(model)
    if config is None or config.model_type in UNLIMITED_TYPES:
        return None
    limits = _numbers(config, POSITION_FIELDS)
    if not limits:
        return None
    positions = min(limits)  # an encoder and a decoder are given rows of one length
    for path, module in unwrapped(model).named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return positions - module.padding_idx - 1
    return positions


def display_name(source: str) -> str:
    """What to call a model for people: its directory's name, not the path to it, or its name on the hub."""
    path = Path(source)
    if not path.exists():
        return source
    path = path.resolve()
    directory = path if path.is_dir() else path.parent
    general = directory.name.lower() in GENERAL_DIRECTORIES
    return f"{directory.parent.name}/{directory.name}" if general else directory.name


def _own_name(model: Any, config: PretrainedConfig | None) -> str:
    loaded_from = getattr(config, "_name_or_path", "")
    if loaded_from:
        return display_name(loaded_from)
    return str(getattr(model, "__qualname__", type(unwrapped(model)).__qualname__))


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()
        return
    if callable(getattr(model, "parameters", None)):
        yield from (tensor for tensor in model.parameters() if isinstance(tensor, torch.Tensor))
    for module in modules_behind(model).values():
        yield from _tensors(module)


def _dtype(model: Any) -> str:
    sizes: Counter[str] = Counter()
    for tensor in _tensors(model):
        if isinstance(tensor, nn.Parameter) or not isinstance(model, nn.Module):
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return sizes.most_common(1)[0][0] if sizes else "none"


def _numbers(config: PretrainedConfig | None, fields: Iterable[str]) -> list[int]:
    """The whole numbers above zero, also in lists, that a configuration and those nested in it have in `fields`."""
    found: list[int] = []
    for part in nested_configs(config):
        for field in fields:
            value = getattr(part, field, None)
            values = value if isinstance(value, list | tuple) else [value]
            found += [number for number in values if type(number) is int and number > 0]
    return found


def _output_width(model: Any, config: PretrainedConfig | None) -> int | None:
    if (logits := logits_width(model)) is not None:
        return logits
    widths = _numbers(config, ("hidden_size", "d_model", "n_embd"))
    if config is not None and "TokenClassification" in type(unwrapped(model)).__name__:
        widths.append(config.num_labels)
    return max(widths, default=None)


def _flags(model: Any, config: PretrainedConfig | None) -> Iterator[str]:
    if any(experts > 1 for experts in _numbers(config, EXPERT_FIELDS)):
        yield "mixture_of_experts"
    if _is_quantized(model, config):
        yield "quantized"


def _is_quantized(model: Any, config: PretrainedConfig | None) -> bool:
    if getattr(config, "quantization_config", None) is not None:
        return True
    if not isinstance(model, nn.Module):
        return False
    whole = any(not tensor.is_floating_point() for tensor in model.parameters())
    return whole or any("quantized" in type(module).__module__ for module in model.modules())
