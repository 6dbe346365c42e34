import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from tiny_models import TINY, tiny_config
from torch import nn
from transformers import BertModel

from budgetdb.models.fingerprint import model_hash


def build(name: str, **changes: Any) -> nn.Module:
    model: nn.Module = getattr(transformers, TINY[name][2])(tiny_config(name, **changes))
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"name_or_path": "someone/fine-tuned"},
        {"id2label": {0: "bad", 1: "so-so", 2: "good"}, "label2id": {"bad": 0, "so-so": 1, "good": 2}},
        {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.2},
        {"layer_norm_eps": 1e-5, "initializer_range": 0.1},
        {"problem_type": "single_label_classification"},
        {"finetuning_task": "sst2", "task_specific_params": {"a": 1}, "transformers_version": "4.8.2"},
        {"pad_token_id": 3, "sep_token_id": 7},
        {"num_beams": 4, "max_length": 60},
    ],
)
def test_fine_tunes_of_one_architecture_are_equal(changes: dict[str, Any]) -> None:
    assert model_hash(build("bert-classes", **changes)) == model_hash(build("bert-classes"))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 4},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 2},
        {"hidden_act": "relu"},
        {"max_position_embeddings": 41},
        {"vocab_size": 121},
        {"intermediate_size": 64},
        {"output_hidden_states": True},
        {"problem_type": "multi_label_classification"},
    ],
)
def test_what_changes_memory_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert model_hash(build("bert-classes", **changes)) != model_hash(build("bert-classes"))


def test_all_architectures_and_heads_differ() -> None:
    assert len({model_hash(build(name)) for name in TINY}) == len(TINY)


def test_values_do_not_matter() -> None:
    model = build("bert")
    before = model_hash(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert model_hash(model) == before


def test_saving_and_loading_from_elsewhere_changes_nothing(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    assert model_hash(type(model).from_pretrained(tmp_path)) == model_hash(model)


def test_attention_stands_in_the_key_and_not_in_the_hash() -> None:
    eager = BertModel._from_config(tiny_config("bert"), attn_implementation="eager")
    sdpa = BertModel._from_config(tiny_config("bert"), attn_implementation="sdpa")
    assert model_hash(eager) == model_hash(sdpa)


def test_a_loss_step_changes_nothing() -> None:
    model = build("bert-classes").eval()
    before = model_hash(model)
    model(input_ids=torch.ones(2, 4, dtype=torch.int64), labels=torch.tensor([0, 1]))
    assert model.config.problem_type is not None
    assert model_hash(model) == before


def test_adapters_differ_by_presence_rank_and_place() -> None:
    def adapted(rank: int, modules: list[str]) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft reads a property that transformers renamed
            return model_hash(get_peft_model(build("bert"), LoraConfig(r=rank, target_modules=modules)))

    hashes = {model_hash(build("bert")), adapted(4, ["query"]), adapted(8, ["query"]), adapted(4, ["query", "value"])}
    assert len(hashes) == 4
    assert adapted(4, ["query"]) == adapted(4, ["query"])


def test_an_adapter_added_in_place_differs() -> None:
    model = build("bert")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["query"]), model)
    assert model_hash(model) != model_hash(build("bert"))


def test_dynamic_quantisation_differs() -> None:
    model = build("bert").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this interface moves to torchao
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert model_hash(quantised) != model_hash(model)


def test_an_integer_weight_an_integer_buffer_and_another_layer_class_differ() -> None:
    class OtherLinear(nn.Linear):
        pass

    plain, integers, buffered, other = (build("bert") for _ in range(4))
    integers.pooler.dense.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    buffered.pooler.register_buffer("scales", torch.zeros(32, dtype=torch.int8))
    other.pooler.dense = OtherLinear(32, 32)
    assert len({model_hash(model) for model in (plain, integers, buffered, other)}) == 4


@pytest.mark.parametrize("name", TINY)
def test_no_memory_is_needed(name: str) -> None:
    with torch.device("meta"):
        outline = build(name)
    assert model_hash(outline) == model_hash(build(name))


def test_plain_modules_differ_by_settings_that_no_parameter_shows() -> None:
    def network(stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 3, 3, stride=stride), nn.ReLU())

    assert model_hash(network(1)) == model_hash(network(1))
    assert model_hash(network(1)) != model_hash(network(2))
    assert model_hash(network(1)) != model_hash(nn.Sequential(nn.Conv1d(3, 3, 3), nn.GELU()))


def test_functions_are_told_by_name_and_by_the_modules_they_close_over() -> None:
    def step_with(model: nn.Module) -> Any:
        return lambda input_ids: model(input_ids)

    def other(input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids

    small, large = nn.Embedding(10, 4), nn.Embedding(10, 8)
    assert model_hash(step_with(small)) == model_hash(step_with(nn.Embedding(10, 4)))
    assert len({model_hash(value) for value in (step_with(small), step_with(large), other, small)}) == 4


def test_methods_and_partials_are_told_by_what_they_belong_to() -> None:
    small, large = nn.Embedding(10, 4), nn.Embedding(10, 8)
    assert model_hash(small.forward) != model_hash(large.forward)
    assert model_hash(small.forward) == model_hash(nn.Embedding(10, 4).forward)
    assert model_hash(functools.partial(small)) != model_hash(functools.partial(large))

    def run(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids)  # type: ignore[no-any-return]

    hashes = {model_hash(functools.partial(run, model)) for model in (small, large, nn.Embedding(10, 8))}
    assert len(hashes) == 2
    assert model_hash(functools.partial(run, model=small)) != model_hash(functools.partial(run, model=large))
    assert model_hash(functools.partial(lambda _: small)) != model_hash(functools.partial(lambda _: large))


def test_other_callables_are_told_by_class_and_parameters() -> None:
    class Step:
        def __init__(self, width: int) -> None:
            self.weight = torch.zeros(width)

        def parameters(self) -> list[torch.Tensor]:
            return [self.weight]

        def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    assert model_hash(Step(3)) == model_hash(Step(3))
    assert model_hash(Step(3)) != model_hash(Step(4))


def test_two_processes_agree() -> None:
    code = (
        "from transformers import BertConfig, BertModel\n"
        "from budgetdb.models.fingerprint import model_hash\n"
        "config = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)\n"
        "print(model_hash(BertModel(config)))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
