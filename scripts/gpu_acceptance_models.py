"""The models that a device is accepted by, of every kind of architecture, and how large they are made for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from budgetdb.models.load import load_model
from budgetdb.models.spec import ModelSpec
from budgetdb.settings import parse_bytes
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload
from budgetdb.workloads.forward import ForwardWorkload

PAD_MULTIPLE = 8


@dataclass(frozen=True)
class Size:
    """How large models and batches are.

    Attributes:
        hidden: width of a layer; heads are a sixteenth of it wide at least.
        layers: how many.
        heads: of attention.
        key_value_heads: where they are grouped.
        vocabulary: of all models but Llama.
        large_vocabulary: of Llama, whose logits are then the peak.
        lengths: where steps are looked at; the last is the longest that the models take.
        room: what the allocator may hold in the steps of this process.
        memory_limit: what a calibration may use on the device, with all that the process takes beside the allocator.
    """

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    large_vocabulary: int
    lengths: tuple[int, ...]
    room: str
    memory_limit: str

    @property
    def room_bytes(self) -> int:
        """`room` in bytes."""
        return parse_bytes(self.room)


SIZES: Mapping[str, Size] = {
    "tiny": Size(64, 2, 4, 2, 500, 2000, (32, 128, 256), "48MiB", "700MiB"),
    "small": Size(128, 6, 4, 2, 2000, 8000, (128, 512, 2048), "192MiB", "700MiB"),
    "large": Size(1024, 12, 16, 4, 32_000, 128_256, (512, 2048, 8192), "6GiB", "8GiB"),
}
# What is looked at first where time is short: logits, grouped heads, scores in memory, an encoder.
CLASSES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "sdpa"),
    "bert": ("BertForMaskedLM", "sdpa"),
    "gpt2": ("GPT2LMHeadModel", "eager"),
    "t5": ("T5ForConditionalGeneration", "sdpa"),
    "modernbert": ("ModernBertForMaskedLM", "sdpa"),
    "albert": ("AlbertForMaskedLM", "eager"),
    "qwen2": ("Qwen2ForCausalLM", "sdpa"),
    "mixtral": ("MixtralForCausalLM", "sdpa"),
    "gemma2": ("Gemma2ForCausalLM", "eager"),
}


@dataclass(frozen=True)
class Case:
    """One model with one attention implementation: random weights, by the path of its `config.json`."""

    name: str
    attention: str
    dtype: str
    config: str

    def __str__(self) -> str:
        return f"{self.name} {self.attention}"

    @property
    def spec(self) -> ModelSpec:
        """What to build."""
        return ModelSpec(source=self.config, attention=self.attention, dtype=self.dtype, weights="random")

    def load(self, device: torch.device) -> nn.Module:
        """The live model."""
        return load_model(self.spec, device)


def names_for(dtype: str) -> list[str]:
    """Eight models: experts in bfloat16, which is all that torch's fake kernel for them takes, else Gemma 2."""
    return [name for name in CLASSES if name != ("gemma2" if dtype == "bfloat16" else "mixtral")]


def write_case(name: str, size: Size, *, dtype: str, directory: Path) -> Case:
    """The model's `config.json` in a directory of its own, and what to call it by."""
    path = directory / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(configuration(name, size)), encoding="utf-8")
    return Case(name, CLASSES[name][1], dtype, str(path))


def configuration(name: str, size: Size) -> dict[str, Any]:
    """What the `config.json` says."""
    own = {"model_type": name, "architectures": [CLASSES[name][0]], "pad_token_id": 0}
    return {**own, **dict(_parameters(name, size))}


def _parameters(name: str, size: Size) -> Iterator[tuple[str, Any]]:
    positions, width = size.lengths[-1], size.hidden // size.heads
    yield "vocab_size", size.large_vocabulary if name == "llama" else size.vocabulary
    if name == "gpt2":
        yield from {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads}.items()
        yield from {"n_positions": positions, "bos_token_id": 1, "eos_token_id": 2}.items()
        return
    if name == "t5":
        yield from {"d_model": size.hidden, "d_kv": width, "d_ff": 4 * size.hidden}.items()
        yield from {"num_layers": size.layers, "num_heads": size.heads, "decoder_start_token_id": 0}.items()
        return
    yield from {"hidden_size": size.hidden, "intermediate_size": 4 * size.hidden}.items()
    yield from {"num_hidden_layers": size.layers, "num_attention_heads": size.heads}.items()
    yield "max_position_embeddings", positions
    if name in ("llama", "qwen2", "mixtral", "gemma2"):
        yield "num_key_value_heads", size.key_value_heads
    yield from _OWN.get(name, {}).items()
    if name == "gemma2":
        yield from {"head_dim": width, "sliding_window": positions // 2}.items()


_OWN: Mapping[str, Mapping[str, Any]] = {
    "albert": {"embedding_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "modernbert": {
        "local_attention": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}


class UnpaddedForward(ForwardWorkload):
    """The plain step on rows that are all of one length: a mask without a zero is dropped on the way."""

    @override
    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        inputs = super().inputs(model, shape, device)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        return inputs


# By what is in the mask.
WORKLOADS: Mapping[str, type[Workload]] = {"padded": ForwardWorkload, "ones": UnpaddedForward}
