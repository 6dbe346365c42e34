"""From a task's name to the class that transformers has for it."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from budgetdb.errors import ModelError, UnknownNameError

HEADS: dict[str, Any] = {
    "base": AutoModel,
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "question-answering": AutoModelForQuestionAnswering,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}


def check_head(head: str) -> None:
    """Raise `UnknownNameError` unless `head` is `auto` or one of `HEADS`."""
    if head != "auto" and head not in HEADS:
        raise UnknownNameError("head", head, ["auto", *HEADS])


def model_class(config: PretrainedConfig, *, head: str, location: str, trust_remote_code: bool) -> Any:
    """The class to build: what `head` names, or the configuration's own where it is `auto`.

    Raises:
        UnknownNameError: no such head.
        ModelError: the architecture has no such head.
    """
    check_head(head)
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and remote:
        reference = _remote_reference(remote, head=head, architectures=config.architectures)
        if reference is not None:
            return get_class_from_dynamic_module(reference, location)
    if head == "auto":
        for name in config.architectures or ():
            if isinstance(getattr(transformers, name, None), type):
                return getattr(transformers, name)
    return _mapped_class(config, head="base" if head == "auto" else head)


def _remote_reference(remote: dict[str, str], *, head: str, architectures: list[str] | None) -> str | None:
    """`module.Class` of the code that comes with the model, None where it has nothing for this head."""
    if head != "auto":
        return remote.get(HEADS[head].__name__)
    for reference in remote.values():
        if isinstance(reference, str) and reference.rpartition(".")[2] in (architectures or ()):
            return reference
    return remote.get("AutoModel")


def _mapped_class(config: PretrainedConfig, *, head: str) -> Any:
    mapping = HEADS[head]._model_mapping
    if type(config) not in mapping:
        having = [name for name, auto in HEADS.items() if type(config) in auto._model_mapping]
        raise ModelError(
            f"{config.model_type} has no head {head!r} in transformers {transformers.__version__}",
            next_step=f"It has: {', '.join(having) or 'none'}",
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, list | tuple) else found
