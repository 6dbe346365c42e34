"""The small models that calibrations are judged by, and text of very uneven length for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAD_MULTIPLE = 8
MAX_LENGTH = 256
# Where a frontier is looked at: the two ends, and three lengths that a calibration has no reason to probe.
LENGTHS = (8, 40, 104, 168, 256)
ATTENTION = ("eager", "sdpa")

_SIZE: Mapping[str, Any] = {
    "vocab_size": 1500,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
}
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_SIZE},
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **_SIZE,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 1000,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 256,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "albert": {"model_type": "albert", "architectures": ["AlbertForMaskedLM"], **_SIZE, "embedding_size": 32},
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 1500,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_LENGTH,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **_SIZE, "num_key_value_heads": 2},
    "modernbert": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForMaskedLM"],
        **_SIZE,
        "pad_token_id": 0,
        "local_attention": 64,
    },
    "roberta": {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        **_SIZE,
        "max_position_embeddings": MAX_LENGTH + 2,
        "pad_token_id": 1,
    },
}


def write_configuration(name: str, directory: Path) -> Path:
    """Write the `config.json` of one of the models into a directory of its own, and return its path."""
    path = directory / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIGURATIONS[name]), encoding="utf-8")
    return path


def mixed_lengths(samples: int, *, seed: int = 0) -> list[int]:
    """Tokens of each sample: log-normal, half of them under 40, one in thirty at the models' limit."""
    generator = random.Random(seed)  # noqa: S311 (nothing secret)
    return [min(max(round(generator.lognormvariate(3.7, 1.0)), 1), MAX_LENGTH) for _ in range(samples)]
