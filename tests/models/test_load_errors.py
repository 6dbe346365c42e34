import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_models import tiny_config, tiny_spec

from budgetdb.errors import BudgetDBError, ModelError, ModelNotFoundError, UnknownNameError
from budgetdb.models.load import load_model, outline_model
from budgetdb.models.spec import ModelSpec

CPU = torch.device("cpu")


def refusal(kind: type[BudgetDBError], spec: ModelSpec) -> str:
    with pytest.raises(kind) as caught:
        load_model(spec, CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.next_step
    assert message.endswith(caught.value.next_step)
    assert len(message) < 600
    return message


@pytest.mark.parametrize(
    ("options", "kind", "fragment"),
    [
        ({"head": "masked-ml"}, UnknownNameError, "unknown head 'masked-ml'. Did you mean 'masked-lm'?"),
        ({"dtype": "bfloat61"}, UnknownNameError, "unknown dtype 'bfloat61'. Did you mean 'bfloat16'?"),
        ({"attention": "spda"}, UnknownNameError, "unknown attention implementation 'spda'. Did you mean 'sdpa'?"),
        ({"attention": "flash_attention_2"}, ModelError, "Use one of: eager, sdpa, flex_attention"),
        ({"head": "seq2seq-lm"}, ModelError, "bert has no head 'seq2seq-lm'"),
        ({"weights": "pretrained"}, ModelError, "no weight files beside the configuration of"),
    ],
)
def test_what_can_not_be_built(
    options: dict[str, Any], kind: type[BudgetDBError], fragment: str, tmp_path: Path
) -> None:
    assert fragment in refusal(kind, tiny_spec("bert", tmp_path, **options))


def test_a_model_that_refuses_sdpa_says_what_it_takes(tmp_path: Path) -> None:
    from transformers import LongformerConfig

    config = LongformerConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    message = refusal(ModelError, ModelSpec(source=str(tmp_path), attention="sdpa"))
    assert "LongformerModel can't run with attention 'sdpa'" in message
    assert message.endswith("Use one of: eager")


def test_a_directory_with_a_close_spelling_is_offered(tmp_path: Path) -> None:
    tiny_config("bert").save_pretrained(tmp_path / "my-model")
    message = refusal(ModelNotFoundError, ModelSpec(source=str(tmp_path / "my-modle")))
    assert message.endswith(f"Did you mean {str(tmp_path / 'my-model')!r}?")


def test_a_directory_without_configuration(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(ModelNotFoundError, ModelSpec(source=str(tmp_path)))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model_type": "no-such-type"}', '{"model_type": "bert", "hidden_size": "x"}']
)
def test_a_configuration_that_can_not_be_used(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    refusal(ModelError, ModelSpec(source=str(tmp_path)))


def test_a_quantised_model_needs_its_weights(tmp_path: Path) -> None:
    fields = tiny_config("llama").to_dict() | {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert "Use pretrained weights" in refusal(ModelError, ModelSpec(source=str(tmp_path)))


def test_damaged_weights(tmp_path: Path) -> None:
    tiny_config("bert").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    assert "BertModel can't be built from" in refusal(ModelError, ModelSpec(source=str(tmp_path)))


def test_a_damaged_list_of_weights(tmp_path: Path) -> None:
    tiny_config("bert").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "Download the model again" in refusal(ModelError, ModelSpec(source=str(tmp_path)))


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-of-that-name"])
def test_a_name_that_no_hub_can_be_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real connection, refused at once: port 9 of this machine is where nothing listens.
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    message = refusal(ModelNotFoundError, ModelSpec(source=name))
    assert repr(name) in message
    assert "no model hub could be reached" in message


def test_a_name_that_no_hub_has() -> None:
    assert "no hub has such a name" in refusal(ModelNotFoundError, ModelSpec(source="two words"))


def test_the_outline_refuses_alike(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError):
        outline_model(tiny_spec("bert", tmp_path, head="nothing"))


def test_errors_of_memory_stay_what_they_are(tmp_path: Path) -> None:
    tiny_config("bert", vocab_size=2**40).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="memory") as caught:
        load_model(ModelSpec(source=str(tmp_path)), CPU)
    assert not isinstance(caught.value, BudgetDBError)


def test_a_specification_survives_json_and_takes_no_unknown_field() -> None:
    spec = ModelSpec(source="x", attention="sdpa", weights="random")
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValidationError):
        ModelSpec.model_validate_json('{"source": "x", "weigths": "random"}')


@pytest.mark.parametrize(("module", "imports_torch"), [("spec", "False"), ("load", "True")])
def test_the_specification_alone_does_not_import_torch(module: str, imports_torch: str) -> None:
    code = f"import sys, budgetdb.models.{module}; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == imports_torch
