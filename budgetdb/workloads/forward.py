"""The plain step: `outputs = model(**batch)`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from budgetdb.models.anatomy import config_of
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload
from budgetdb.workloads.tokens import call, parameter_names, token_inputs


class ForwardWorkload(Workload):
    """A forward pass whose whole output is kept: logits, hidden states, key-value cache.

    A sequence-to-sequence model is given as many decoder tokens as encoder tokens.
    """

    name: ClassVar[str] = "forward"

    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """Token ids and their mask, and decoder ids where the model has a decoder beside its encoder."""
        inputs = token_inputs(model, shape, device)
        if getattr(config_of(model), "is_encoder_decoder", False) and "decoder_input_ids" in parameter_names(model):
            inputs["decoder_input_ids"] = inputs["input_ids"].clone()
        return inputs

    @torch.no_grad()
    def step(self, model: Any, inputs: dict[str, torch.Tensor]) -> object:
        """All that the model returns."""
        return call(model, inputs)
