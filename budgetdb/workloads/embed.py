"""Sentence embeddings: hidden states pooled by their mean, and nothing else kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from budgetdb.errors import UsageError
from budgetdb.models.anatomy import config_of, unwrapped
from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload
from budgetdb.workloads.tokens import call, token_inputs


class EmbedWorkload(Workload):
    """The mean of a model's last hidden states over the tokens that are no padding: `(batch_size, hidden_size)`.

    The encoder of a sequence-to-sequence model, and a model with a head without it, so that no logits are made.
    """

    name: ClassVar[str] = "embed"

    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """Token ids and their mask; no decoder's, since only the encoder runs."""
        return token_inputs(model, shape, device)

    @torch.no_grad()
    def step(self, model: Any, inputs: dict[str, torch.Tensor]) -> object:
        """The embeddings, `(batch_size, hidden_size)`."""
        return mean_pooled(_hidden_states(call(_encoder(model), inputs), model), inputs.get("attention_mask"))


def mean_pooled(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mean of `hidden_states`, `(k, L, hidden)`, over the tokens whose mask is 1: `(k, hidden)`."""
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    weights = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def _encoder(model: Any) -> Any:
    config = config_of(model)
    if config is None:
        return model
    inner = unwrapped(model)
    return inner.get_encoder() if config.is_encoder_decoder else inner.base_model


def _hidden_states(outputs: Any, model: Any) -> torch.Tensor:
    found = outputs.get("last_hidden_state") if isinstance(outputs, Mapping) else outputs
    found = getattr(found, "last_hidden_state", found)
    if isinstance(found, list | tuple) and found:
        found = found[0]
    if not isinstance(found, torch.Tensor) or found.dim() != 3:
        raise UsageError(
            f"{type(unwrapped(model)).__name__} returns no hidden states to pool, of shape (rows, tokens, hidden)",
            next_step="Use the workload `forward`",
        )
    return found
