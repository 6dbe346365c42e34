"""Tell models apart by all that can change the memory of a step, and by nothing else."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from budgetdb.models.anatomy import config_of, modules_behind

# Names and bookkeeping, and what stands in the key beside the hash: dtype and attention.
_NAMES = {
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "architectures",  # the class itself is hashed; fresh configurations have none
    "auto_map",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "_experts_implementation",
    "tokenizer_class",
    "license",
    "language",
}
# Task settings: the number of labels shows in the shape of the head. `problem_type` is handled apart.
_TASK = {"id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "prefix", "problem_type"}
# Numbers that scale values but no tensor.
_VALUES = {
    "initializer_range",
    "initializer_factor",
    "initializer_std",
    "init_std",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rms_norm_eps",
    "norm_eps",
    "norm_epsilon",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "output_router_logits_coef",
}
# Training only; evaluation runs without.
_TRAINING = {"gradient_checkpointing", "classifier_dropout", "pretraining_tp", "summary_first_dropout"}
# How `generate` decodes: no part of one forward pass. Old configurations keep these beside the architecture.
_GENERATION = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
NO_MEMORY_FIELDS = frozenset(_NAMES | _TASK | _VALUES | _TRAINING | _GENERATION)
# Every dropout probability and every special token's id, whatever an architecture calls them.
NO_MEMORY_PATTERN = re.compile(r"dropout|_pdrop$|layerdrop|drop_path_rate|_token_ids?$")


def model_hash(model: Any) -> str:
    """SHA-256, in hexadecimal, of what decides the memory of a step of `model` (DESIGN 5).

    That is its class, its configuration without the fields that change no memory, the classes of its layers, and the
    name, shape and dtype of every parameter and buffer: never a value, and the same on every device, `meta` included.
    A callable that is no module is told by its own name, by the tensors its `parameters()` gives, and by the modules
    it closes over.
    """
    described = _module(model) if isinstance(model, nn.Module) else _callable(model)
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _module(model: nn.Module) -> dict[str, Any]:
    config = config_of(model)
    described = {
        "class": _class_name(type(model)),
        "config": None if config is None else _config(config),
        "layers": dict(Counter(_class_name(type(layer)) for layer in model.modules())),
        "parameters": _tensors(model.named_parameters()),
        "buffers": _tensors(model.named_buffers()),
    }
    if config is None:
        described["settings"] = {path: layer.extra_repr() for path, layer in model.named_modules()}
    return described


def _callable(function: Any) -> dict[str, Any]:
    parameters = getattr(function, "parameters", None)
    tensors = [tensor for tensor in parameters() if isinstance(tensor, torch.Tensor)] if callable(parameters) else []
    return {
        "class": _class_name(type(function)),
        "name": f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}",
        "parameters": [_tensor(tensor) for tensor in tensors],
        "modules": {name: _module(module) for name, module in modules_behind(function).items()},
    }


def _config(config: PretrainedConfig) -> Any:
    described = _memory_fields(config.to_diff_dict())
    # The loss of several labels at once takes labels of another shape. The other problems show in the head's width, and
    # transformers writes them into the configuration of a live model during its first loss.
    if config.problem_type == "multi_label_classification":
        described["problem_type"] = config.problem_type
    return described


def _memory_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _memory_fields(value) if isinstance(value, Mapping) else _plain(value)
        for name, value in fields.items()
        if name not in NO_MEMORY_FIELDS and not NO_MEMORY_PATTERN.search(name)
    }


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: _tensor(tensor) for name, tensor in named}


def _tensor(tensor: torch.Tensor) -> list[Any]:
    # The class counts for wrappers of quantised weights, which show the dtype of what they stand for.
    kind = "" if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) else _class_name(type(tensor))
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind]


def _class_name(cls: type) -> str:
    module = cls.__module__
    if module.startswith("transformers_modules."):  # code that came with a model: the rest of the path is where it lay
        module = module.rpartition(".")[2]
    return f"{module}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    """`value` as JSON holds it, without anything that differs between two processes."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return str(value) if isinstance(value, torch.dtype | torch.device) else _class_name(type(value))
