"""Small models and small limits, so that a real calibration takes a second or two."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from budgetdb.devices.choose import choose_device

MIB = 2**20
POSITIONS = 256
CONFIG: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
# What torch and transformers take of a worker process before any model: about 450 MiB, and room to differ.
WORKER_LIMIT_BYTES = 560 * MIB


def bert(attention: str = "sdpa") -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**CONFIG, attn_implementation=attention)).eval()


def classifier(labels: int = 3) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**CONFIG, num_labels=labels)).eval()


def write_config(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"], **CONFIG}))
    return path


@cache
def warm_up() -> None:
    """Have this process make the buffers that it makes once, so that what is free afterwards stays free."""
    model, device = bert(), choose_device("cpu")
    for rows in (1, 32):
        with device.measuring(), torch.no_grad():
            model(torch.ones(rows, POSITIONS, dtype=torch.long))


def limit_bytes(room_mib: int) -> int:
    """A limit that leaves this process `room_mib` for tensors beyond those it holds."""
    warm_up()
    device = choose_device("cpu")
    return device.room().overhead_bytes + device.allocated_bytes() + room_mib * MIB
