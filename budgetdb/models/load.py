"""Build a model from its specification: with its weights, with random ones, or without any memory."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.initialization import meta_device_safe_creation_ops, no_init_weights
from transformers.utils import is_accelerate_available

from budgetdb.errors import BudgetDBError, ModelError, UnknownNameError
from budgetdb.models.attention import check_attention_name, supported_attention
from budgetdb.models.heads import check_head, model_class
from budgetdb.models.quiet import quiet_transformers
from budgetdb.models.sources import Source, ask_hub, find_source
from budgetdb.models.spec import ModelSpec

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
RANDOM_STD = 0.02


def load_model(spec: ModelSpec, device: torch.device) -> nn.Module:
    """The model on `device`, ready to evaluate: evaluation mode, no gradients.

    Random weights are made on the device itself, in their own dtype; pretrained ones pass through the CPU unless
    accelerate is installed.

    Raises:
        ModelNotFoundError: nothing of that name, here or on a hub that can be reached.
        ModelError: it can't be built so: unreadable, without weights, or no such head or attention.
        UnknownNameError: no head, dtype or attention implementation of that name.
    """
    source, config = _read(spec)
    if _wants_pretrained(spec, source):
        model = _load_pretrained(spec, source=source, config=config, device=device)
    else:
        model = _build(spec, source=source, config=config, device=device)
        _fill(model)
    return model.requires_grad_(requires_grad=False).eval()


def outline_model(spec: ModelSpec) -> nn.Module:
    """The same model on the `meta` device: every name, shape and dtype, and no memory; its fingerprint is the same.

    Raises:
        ModelNotFoundError: nothing of that name, here or on a hub that can be reached.
        ModelError: it can't be built so.
        UnknownNameError: no head, dtype or attention implementation of that name.
    """
    source, config = _read(spec)
    model = _build(spec, source=source, config=config, device=torch.device("meta"))
    return model.requires_grad_(requires_grad=False).eval()


def outline_config(config: PretrainedConfig, spec: ModelSpec) -> nn.Module:
    """As `outline_model`, of a configuration at hand; `spec.source` only names it in messages.

    Raises:
        ModelError: it can't be built so.
        UnknownNameError: no head, dtype or attention implementation of that name.
    """
    _check_names(spec)
    source = Source(spec.source, "config", has_weights=False, is_local=True)
    model = _build(spec, source=source, config=copy.deepcopy(config), device=torch.device("meta"))
    return model.requires_grad_(requires_grad=False).eval()


def _check_names(spec: ModelSpec) -> None:
    check_head(spec.head)
    if spec.dtype != "auto" and spec.dtype not in DTYPES:
        raise UnknownNameError("dtype", spec.dtype, ["auto", *DTYPES])
    check_attention_name(spec.attention)


def _read(spec: ModelSpec) -> tuple[Source, PretrainedConfig]:
    _check_names(spec)
    source = find_source(spec.source)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                source.location, trust_remote_code=spec.trust_remote_code, local_files_only=source.is_local
            )
    except Exception as error:  # a configuration is anybody's file, and with remote code anybody's program
        raise ModelError(
            f"the configuration of {spec.source!r} can't be read ({_one_line(error)})",
            next_step="Check that its config.json is whole, and that this transformers knows its model_type",
        ) from None
    return source, config


def _wants_pretrained(spec: ModelSpec, source: Source) -> bool:
    if spec.weights != "pretrained":
        return spec.weights == "auto" and source.has_weights
    if source.kind == "config" or (source.kind == "directory" and not source.has_weights):
        raise ModelError(
            f"no weight files beside the configuration of {spec.source!r}",
            next_step="Use random weights, or give the directory that holds them",
        )
    if source.is_local and not source.has_weights:
        ask_hub(source.location, absent=f"the weights of {spec.source!r} are not in the hub's cache")
    return True


def _load_pretrained(spec: ModelSpec, *, source: Source, config: PretrainedConfig, device: torch.device) -> nn.Module:
    builder = _builder(spec, source=source, config=config)
    options: dict[str, Any] = {"local_files_only": source.has_weights, "trust_remote_code": spec.trust_remote_code}
    straight = device.type != "cpu" and is_accelerate_available()
    if straight:
        options["device_map"] = {"": device}
    try:
        with quiet_transformers():
            model: nn.Module = builder.from_pretrained(
                source.location, config=config, **_settings(spec, config), **options
            )
    except Exception as error:
        raise _refusal(error, spec=spec, builder=builder) from None
    return model if straight or _is_quantized(config) else model.to(device)


def _build(spec: ModelSpec, *, source: Source, config: PretrainedConfig, device: torch.device) -> nn.Module:
    """The model on `device` with uninitialised parameters, but with its buffers as they should be.

    Buffers hold frequencies and indices that a constructor computes, so it runs on the device and not on `meta`.
    """
    if _is_quantized(config):
        raise ModelError(
            f"{spec.source!r} is quantised, and its layers only come into being with its weights",
            next_step="Use pretrained weights",
        )
    builder = _builder(spec, source=source, config=config)
    try:
        safe_on_meta = meta_device_safe_creation_ops() if device.type == "meta" else nullcontext()
        with quiet_transformers(), no_init_weights(), safe_on_meta, device:
            model: Any = builder._from_config(config, **_settings(spec, config))
        model.tie_weights()
        _keep_in_float32(model, _dtype(spec, config))
    except Exception as error:
        raise _refusal(error, spec=spec, builder=builder) from None
    built: nn.Module = model
    return built


def _builder(spec: ModelSpec, *, source: Source, config: PretrainedConfig) -> Any:
    try:
        builder = model_class(
            config, head=spec.head, location=source.location, trust_remote_code=spec.trust_remote_code
        )
    except BudgetDBError:
        raise
    except Exception as error:  # code that comes with a model may raise anything at import
        raise ModelError(
            f"the code that comes with {spec.source!r} can't be imported ({_one_line(error)})",
            next_step="Install what it needs",
        ) from None
    _complete_token_ids(config, builder)
    return builder


def _complete_token_ids(config: PretrainedConfig, builder: Any) -> None:
    """Give a bare configuration the ids that its model asks for at run time and a tokenizer would have set."""
    if "ForSequenceClassification" in builder.__name__ and config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = (end[0] if isinstance(end, list) else end) or 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0


def _settings(spec: ModelSpec, config: PretrainedConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"dtype": _dtype(spec, config)}
    if spec.attention is not None:
        settings["attn_implementation"] = spec.attention
    return settings


def _dtype(spec: ModelSpec, config: PretrainedConfig) -> torch.dtype:
    if spec.dtype != "auto":
        return DTYPES[spec.dtype]
    own = config.dtype
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."), None)
    return own if isinstance(own, torch.dtype) and own.is_floating_point else torch.float32


def _is_quantized(config: PretrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Cast what `from_pretrained` keeps in float32 by the model's own wish: T5's `wo` in float16, for one."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    wanted = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan))
    for name, parameter in model.named_parameters():
        if wanted.search(name):
            parameter.data = parameter.data.to(torch.float32)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Small random values: finite in every dtype, and never equal, so that a router spreads its tokens."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.normal_(std=RANDOM_STD)
        else:
            parameter.zero_()


def _refusal(error: Exception, *, spec: ModelSpec, builder: Any) -> Exception:
    """What to raise for an error of transformers; one that speaks of memory is the device's and stays as it is."""
    if isinstance(error, BudgetDBError | MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return error
    asked = spec.attention is not None and re.search("attn|attention|flash|flex", str(error), re.IGNORECASE)
    if asked and isinstance(error, ValueError | ImportError):
        return ModelError(
            f"{builder.__name__} can't run with attention {spec.attention!r} here ({_one_line(error)})",
            next_step=f"Use one of: {', '.join(supported_attention(builder))}",
        )
    return ModelError(
        f"{builder.__name__} can't be built from {spec.source!r} ({type(error).__name__}: {_one_line(error)})",
        next_step="Load it with transformers to see the whole traceback",
    )


def _one_line(error: Exception) -> str:
    """The first sentence of an error's text, or its type where it has none."""
    text = " ".join(str(error).split())
    return re.split(r"(?<=[.!])\s", text, maxsplit=1)[0][:200].rstrip(".") or type(error).__name__
