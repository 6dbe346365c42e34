"""A small model of every family of transformers: its default configuration with few layers, on `meta`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.initialization import meta_device_safe_creation_ops, no_init_weights
from transformers.models.auto import modeling_auto

from budgetdb.models.anatomy import nested_configs
from budgetdb.models.heads import HEADS
from budgetdb.models.quiet import quiet_transformers

MAPPINGS: Mapping[str, Mapping[str, Any]] = {
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
# Encoders of text that only AutoModel knows; the others that only it knows take images or sound.
TEXT_ENCODERS = ("bros", "canine", "clip_text_model", "dpr", "lilt", "markuplm", "splinter", "tipsv2_text_model")
# Layers of a kind are alike from the second on (TRACING 4); with more kinds than two, one of each.
_LAYERS, _MOST_LAYERS = 2, 4
_LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers"),
    *("encoder_layers", "decoder_layers", "num_blocks"),
)
# Lists with an entry for each layer.
_LAYER_LISTS = ("layer_types", "layers_block_type", "attention_layers", "attn_layers", "mlp_layer_types")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "n_ctx")
# What a default configuration lacks, or has that contradicts itself: as in a released model of the family.
_FIRST: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"cross_attn_all_layers": False},
    "cohere_compass_text": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "funnel": {"block_sizes": [1, 1, 1]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "xmod": {"default_language": "en_XX"},
}


def families() -> Iterator[tuple[str, str]]:
    """Each family with each head over a vocabulary that it has, or with none where it is an encoder."""
    for head, mapping in MAPPINGS.items():
        for family in mapping:
            yield family, head
    for family in TEXT_ENCODERS:
        yield family, "base"


def small_family(family: str, head: str, *, attention: str, dtype: torch.dtype) -> Any:
    """The model, in evaluation mode; raises whatever transformers does where it can't be built."""
    config = small_configuration(family)
    with quiet_transformers(), no_init_weights(), meta_device_safe_creation_ops(), torch.device("meta"):
        model = HEADS[head].from_config(config, attn_implementation=attention, dtype=dtype)
    return model.eval()


def small_configuration(family: str) -> PretrainedConfig:
    """Its default configuration with two layers, or as many as it takes to have one of each kind."""
    config = AutoConfig.for_model(family, **_FIRST.get(family, {}))
    for part in nested_configs(config):
        if family != "funnel":
            _shorten(part)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    return config


def most_positions(config: PretrainedConfig) -> int | None:
    """The longest row, as far as the configuration says."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in _POSITIONS]
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _shorten(config: PretrainedConfig) -> None:
    lists = {name: kinds for name in _LAYER_LISTS if isinstance(kinds := getattr(config, name, None), list)}
    chosen = _one_of_each(list(zip(*lists.values(), strict=False))) if lists else list(range(_LAYERS))
    for name in _LAYER_COUNTS:
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > len(chosen):
            _set(config, name, len(chosen))
    for name, kinds in lists.items():
        _set(config, name, [kinds[i] for i in chosen if i < len(kinds)])


def _one_of_each(kinds: list[Any]) -> list[int]:
    """Layers to keep: the first of each kind, and the next until there are two."""
    firsts = sorted({kinds.index(kind) for kind in kinds})[:_MOST_LAYERS]
    others = [i for i in range(len(kinds)) if i not in firsts][: max(_LAYERS - len(firsts), 0)]
    return sorted([*firsts, *others])


def _set(config: PretrainedConfig, name: str, value: Any) -> None:
    # What a configuration computes of other settings can't be set, and follows them.
    if not isinstance(getattr(type(config), name, None), property):
        object.__setattr__(config, name, value)
