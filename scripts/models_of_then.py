"""Code of the time of a measurement, where what is installed allocates otherwise: as little of it as allocates.

Read in the wheels of transformers 4.41.2 (June 2024, `models/gpt2/modeling_gpt2.py`, `generation/utils.py`) and 4.35.2
(November 2023, `models/llama/modeling_llama.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from budgetdb.shapes import Shape
from budgetdb.workloads.base import Workload

Past = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Gpt2Attention(nn.Module):
    """Whose keys and values are cached as they are: views of a tensor that holds the queries, too."""

    def __init__(self, config: Any, *, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = config.n_head, attention
        triangle = torch.ones(config.n_positions, config.n_positions, dtype=torch.bool).tril()
        self.register_buffer("bias", triangle[None, None], persistent=False)
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, hidden: torch.Tensor, past: Any, mask: torch.Tensor) -> Any:
        """The output, and what is cached."""
        query, key, value = (self._split(part) for part in self.c_attn(hidden).chunk(3, dim=2))
        if past is not None:
            key, value = torch.cat((past[0], key), dim=-2), torch.cat((past[1], value), dim=-2)
        present = (key, value)
        if self.attention == "sdpa":
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self._causal(query, key, mask))
        else:
            attended = self._eager(query, key, value, mask)
        return self.c_proj(attended.permute(0, 2, 1, 3).contiguous().flatten(2)), present

    def _split(self, part: torch.Tensor) -> torch.Tensor:
        return part.view(*part.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def _eager(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = torch.matmul(query, key.transpose(-1, -2))
        weights = weights / torch.full([], math.sqrt(value.shape[-1]), dtype=weights.dtype, device=weights.device)
        asked, known = query.shape[-2], key.shape[-2]
        hidden = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype, device=weights.device)
        weights = torch.where(self.bias[:, :, known - asked : known, :known], weights, hidden)
        weights = weights + mask
        weights = F.softmax(weights, dim=-1)
        return torch.matmul(weights, value)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A padded mask for each row, as `_prepare_4d_causal_attention_mask_for_sdpa` makes it; none to add for one."""
        asked, known = query.shape[-2], key.shape[-2]
        if asked == 1:
            return mask.expand(len(query), 1, 1, known)
        shown = self.bias[:, :, :asked, :known].to(mask.dtype)
        return shown + mask


class Gpt2Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, config: Any, *, attention: str) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = Gpt2Attention(config, attention=attention)
        self.c_fc, self.c_proj = Conv1D(4 * config.n_embd, config.n_embd), Conv1D(config.n_embd, 4 * config.n_embd)
        self.act = NewGELUActivation()

    def forward(self, hidden: torch.Tensor, past: Any, mask: torch.Tensor) -> Any:
        """Hidden states, and what is cached."""
        attended, present = self.attn(self.ln_1(hidden), past, mask)
        hidden = attended + hidden
        return hidden + self.c_proj(self.act(self.c_fc(self.ln_2(hidden)))), present


class Gpt2OfThen(nn.Module):
    """GPT-2 with its head over the vocabulary: logits for every token, in the dtype of the weights."""

    def __init__(self, config: Any, *, attention: str) -> None:
        super().__init__()
        self.config = config
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(1024, config.n_embd)
        self.h = nn.ModuleList(Gpt2Block(config, attention=attention) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: Past | None = None) -> Any:
        """Logits, and the keys and values of each layer."""
        positions = attention_mask.long().cumsum(-1)[:, -input_ids.shape[1] :] - 1
        mask = attention_mask[:, None, None, :].to(self.wte.weight.dtype)
        mask = (1.0 - mask) * torch.finfo(mask.dtype).min
        hidden = self.wte(input_ids) + self.wpe(positions)
        presents: tuple[Any, ...] = ()
        for number, block in enumerate(self.h):
            hidden, present = block(hidden, None if past is None else past[number], mask)
            presents = (*presents, present)
        return self.lm_head(self.ln_f(hidden)), presents


class Generation(Workload):
    """The steps of a greedy search of `new_tokens` that can be its peak; `last` are the last two, else the first two.

    As in `_sample` of transformers 4.41: what a step returned, logits of all its tokens included, is held under the
    name `outputs` until the next one has returned.
    """

    name: ClassVar[str] = "generation"

    def __init__(self, *, new_tokens: int, last: bool) -> None:
        super().__init__(hold="none")
        self.new_tokens, self.last = new_tokens, last

    def inputs(self, model: Any, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """Ids, and a mask of 32-bit floats with one zero: what the sources' `get_batch` makes."""
        del model
        length = shape.length + (self.new_tokens - 2 if self.last else 0)
        mask = torch.ones(shape.batch_size, length, device=device)
        mask[0, 0] = 0
        return {"input_ids": torch.ones(shape.batch_size, length, dtype=torch.int64, device=device), "mask": mask}

    @torch.no_grad()
    def step(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> object:
        """Two forward passes, the outputs of the first held during the second; only ids are left."""
        ids, mask = inputs["input_ids"], inputs["mask"]
        outputs = self._pass(model, ids, mask, past=self._cached(model, ids) if self.last else None)
        for _ in range(1):
            ids = torch.cat([ids, outputs[0][:, -1, :].argmax(dim=-1)[:, None]], dim=-1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            outputs = self._pass(model, ids, mask, past=outputs[1])
        return ids

    def _pass(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, *, past: Past | None) -> Any:
        if isinstance(model, Gpt2OfThen):
            return model(ids if past is None else ids[:, -1:], mask, past)
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits, None

    def _cached(self, model: Any, ids: torch.Tensor) -> Past | None:
        """Keys and values of all tokens but the last, as the step before left them."""
        if not isinstance(model, Gpt2OfThen):
            return None
        weight, heads = model.wte.weight, model.config.n_head
        size = (len(ids), heads, ids.shape[1] - 1, model.config.n_embd // heads)
        return tuple((weight.new_empty(size), weight.new_empty(size)) for _ in range(model.config.n_layer))


def with_upcast_logits(model: Any) -> Any:
    """A causal model that makes 32-bit logits of all tokens beside its own: `logits = logits.float()`.

    In transformers until 4.45; since #33902 and #34147 only the loss casts.
    """
    model.lm_head.register_forward_hook(_upcast)
    return model


def _upcast(module: nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
    del module, inputs
    return logits.float()
