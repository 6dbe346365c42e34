"""The step of an evaluation that computes the loss: labels as the head wants them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig

from budgetdb.errors import UsageError
from budgetdb.models.anatomy import config_of, logits_width, unwrapped, vocabulary_size
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload
from budgetdb.workloads.tokens import DEFAULT_VOCABULARY, call, parameter_names, random_integers, token_inputs

IGNORED_LABEL = -100


class LossWorkload(Workload):
    """A forward pass with labels; the loss and the whole output are kept, as the Trainer's evaluation does.

    Labels are one per row for sequence classification, the two ends of the answer for question answering, and one per
    token for the rest; the decoder of a sequence-to-sequence model gets as many as the encoder has tokens.
    """

    name: ClassVar[str] = "loss"

    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """Token ids, their mask, and labels."""
        inputs = token_inputs(model, shape, device)
        labels = _labels(model, shape, padded=inputs.get("attention_mask"))
        return inputs | {name: tensor.to(device) for name, tensor in labels.items()}

    @torch.no_grad()
    def step(self, model: Any, inputs: dict[str, torch.Tensor]) -> object:
        """All that the model returns, the loss included.

        Raises:
            UsageError: it returns no loss.
        """
        outputs = call(model, inputs)
        if getattr(outputs, "loss", None) is None and config_of(model) is not None:
            raise _without_loss(model)
        return outputs


def _labels(model: Any, shape: Shape, *, padded: torch.Tensor | None) -> dict[str, torch.Tensor]:
    names = parameter_names(model)
    if {"start_positions", "end_positions"} <= set(names):
        ends = random_integers(shape.length, shape, salt=1, per_row=True)
        return {"start_positions": ends, "end_positions": ends.clone()}
    if "labels" not in names or "MultipleChoice" in _class_name(model):
        raise _without_loss(model)
    config = config_of(model)
    if config is not None and "SequenceClassification" in _class_name(model):
        return {"labels": _row_labels(config, shape)}
    labels = random_integers(_token_classes(model, config), shape, salt=1)
    if padded is not None:
        labels.masked_fill_(padded.cpu() == 0, IGNORED_LABEL)
    return {"labels": labels}


def _row_labels(config: PretrainedConfig, shape: Shape) -> torch.Tensor:
    """One class per row, one number for a regression, or a row of zeros and ones where several classes can be true."""
    classes, problem = config.num_labels, config.problem_type
    if classes == 1 and problem != "single_label_classification":
        return torch.linspace(0, 1, shape.batch_size)
    labels = random_integers(classes, shape, salt=1, per_row=True)
    if problem in ("multi_label_classification", "regression"):
        return torch.nn.functional.one_hot(labels, classes).to(torch.float32)
    return labels


def _token_classes(model: Any, config: PretrainedConfig | None) -> int:
    if config is not None and "TokenClassification" in _class_name(model):
        return int(config.num_labels)
    return logits_width(model) or vocabulary_size(model) or DEFAULT_VOCABULARY


def _class_name(model: Any) -> str:
    inner = unwrapped(model)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _without_loss(model: Any) -> UsageError:
    return UsageError(
        f"{_class_name(model)} computes no loss from labels per row or token",
        next_step="Use the workload `forward`, or load the model with a head",
    )
