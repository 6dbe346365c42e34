"""Small models of many architectures with random weights, and workloads whose mask is another than the usual one."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from budgetdb.models.quiet import quiet_transformers
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload
from budgetdb.workloads.embed import EmbedWorkload
from budgetdb.workloads.forward import ForwardWorkload
from budgetdb.workloads.loss import LossWorkload

POSITIONS = 1024
HEAD_WIDTH = 16
_COMMON = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_T5 = {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": 500,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
}
_GPT2 = {"vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "eos_token_id": 2}
_MODERN = _COMMON | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}

# name: prefix of the classes, what the head's class is called, arguments of the configuration; windows of 64 tokens
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("Albert", "ForMaskedLM", _COMMON | {"embedding_size": 32}),
    "bart": ("Bart", "ForConditionalGeneration", _BART),
    "bert": ("Bert", "ForMaskedLM", _COMMON),
    "gemma2": ("Gemma2", "ForCausalLM", _GROUPED | {"head_dim": HEAD_WIDTH, "sliding_window": 64}),
    "gpt-neox": ("GPTNeoX", "ForCausalLM", _COMMON),
    "gpt2": ("GPT2", "LMHeadModel", _GPT2 | {"bos_token_id": 1}),
    "llama": ("Llama", "ForCausalLM", _GROUPED),
    "mistral": ("Mistral", "ForCausalLM", _GROUPED | {"sliding_window": 64}),
    "mixtral": ("Mixtral", "ForCausalLM", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "modernbert": ("ModernBert", "ForMaskedLM", _MODERN | {"local_attention": 64}),
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED),
    "roberta": ("Roberta", "ForMaskedLM", _COMMON),
    "t5": ("T5", "ForConditionalGeneration", _T5 | {"decoder_start_token_id": 0}),
}


def small_model(
    name: str,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    head: str | None = None,
    **changes: object,
) -> PreTrainedModel:
    """A model of that architecture, with the head of its language model or another."""
    prefix, usual_head, arguments = ARCHITECTURES[name]
    config = getattr(transformers, f"{prefix}Config")(**(arguments | changes))
    model_class = getattr(transformers, prefix + (usual_head if head is None else head))
    torch.manual_seed(0)
    with quiet_transformers():
        return model_class._from_config(config, attn_implementation=attention, dtype=dtype).eval()  # type: ignore[no-any-return]


class _Unpadded(Workload):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        inputs = super().inputs(model, shape, device)  # type: ignore[safe-super]  # of a real workload
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        return inputs


class _WithoutMask(Workload):
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        inputs = super().inputs(model, shape, device)  # type: ignore[safe-super]  # of a real workload
        inputs.pop("attention_mask", None)
        return inputs


class UnpaddedForward(_Unpadded, ForwardWorkload): ...


class UnpaddedLoss(_Unpadded, LossWorkload): ...


class UnpaddedEmbed(_Unpadded, EmbedWorkload): ...


class ForwardWithoutMask(_WithoutMask, ForwardWorkload): ...


class LossWithoutMask(_WithoutMask, LossWorkload): ...


class EmbedWithoutMask(_WithoutMask, EmbedWorkload): ...


# By name, and by what is in the mask: padding at the end of each row, ones only, or no mask at all.
WORKLOADS: dict[tuple[str, str], type[Workload]] = {
    ("forward", "padded"): ForwardWorkload,
    ("forward", "ones"): UnpaddedForward,
    ("forward", "none"): ForwardWithoutMask,
    ("loss", "padded"): LossWorkload,
    ("loss", "ones"): UnpaddedLoss,
    ("loss", "none"): LossWithoutMask,
    ("embed", "padded"): EmbedWorkload,
    ("embed", "ones"): UnpaddedEmbed,
    ("embed", "none"): EmbedWithoutMask,
}
