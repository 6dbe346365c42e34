from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_spec
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from budgetdb.models.load import load_model
from budgetdb.shapes import Shape
from budgetdb.workloads.base import parse_workload
from budgetdb.workloads.held import held_bytes

CPU = torch.device("cpu")


@dataclass
class Output:
    loss: torch.Tensor
    states: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Slotted:
    loss: torch.Tensor


def test_tensors_are_found_in_any_nesting() -> None:
    ten = torch.zeros(10)
    for outputs in (ten, [ten], (ten, None, "text"), {"a": ten}, Slotted(ten), SimpleNamespace(x={"y": [ten]})):
        assert held_bytes(outputs) == 40
    assert held_bytes(Output(ten, (torch.zeros(5), torch.zeros(1, dtype=torch.int8)))) == 40 + 20 + 1


def test_a_storage_counts_once_and_whole() -> None:
    whole = torch.zeros(10, 10)
    assert held_bytes([whole, whole, whole[0], whole.T]) == 400
    assert held_bytes(whole[0]) == 400


def test_nothing_modules_functions_and_cycles() -> None:
    knot: list[object] = [torch.zeros(3)]
    knot.append(knot)
    assert held_bytes(knot) == 12
    assert held_bytes(None) == held_bytes([1, "x", nn.Linear(3, 3), print]) == 0


def test_caches_of_transformers_count() -> None:
    def cache() -> DynamicCache:
        made = DynamicCache()
        made.update(torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 8, 16), 0)
        return made

    assert held_bytes(cache()) == 2 * (2 * 4 * 8 * 16 * 4)
    assert held_bytes(EncoderDecoderCache(cache(), cache())) == 4 * (2 * 4 * 8 * 16 * 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # rows 3, tokens 8, float32: last hidden state and pooled first token
        ("bert", 4 * 3 * (8 * 32 + 32)),
        # logits, and keys and values of two layers with two heads of eight numbers
        ("llama", 4 * 3 * 8 * (120 + 2 * 2 * 2 * 8)),
        ("gpt2", 4 * 3 * 8 * (120 + 2 * 2 * 4 * 8)),
        # logits, the encoder's states, and a cache each for self- and cross-attention
        ("t5", 4 * 3 * 8 * (120 + 32 + 2 * 2 * 2 * 4 * 8)),
    ],
)
def test_a_forward_pass_holds_what_its_outputs_hold(name: str, expected: int, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path), CPU)
    workload = parse_workload("forward")
    assert held_bytes(workload.step(model, workload.inputs(model, Shape(3, 8), CPU))) == expected


def test_embeddings_hold_one_row_each(tmp_path: Path) -> None:
    model = load_model(tiny_spec("llama", tmp_path), CPU)
    workload = parse_workload("embed")
    assert held_bytes(workload.step(model, workload.inputs(model, Shape(3, 8), CPU))) == 4 * 3 * 32
