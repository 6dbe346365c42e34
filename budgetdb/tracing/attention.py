"""Attention as the target device runs it, in a trace on fake tensors.

`F.scaled_dot_product_attention` asks the device which kernel to run; a fake tensor has no device, and torch falls back
to plain matrix products with all the scores in memory, which a card would seldom run. So the call is caught here, the
kernel chosen as the card would, and run as what it allocates.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from budgetdb.tracing import attention_memory
from budgetdb.tracing.attention_call import AttentionCall, CardRules, Kernel, MaskForm
from budgetdb.tracing.attention_kernels import CUDNN_ORDER, TORCH_ORDER, choose_kernel, refusals
from budgetdb.tracing.attention_memory import Options, dtype_name

_CAUGHT = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
# cuda/sdp_utils.cpp, check_data_ptr_alignment_mem_efficient: what tensor cores load at once.
_START_BYTES = 16


class CudaAttention(TorchFunctionMode):
    """While it is entered, attention on fake tensors allocates what `card` would.

    Without gradients that is all a call leaves behind. With them, log-sum-exps are made but nothing is kept for a
    backward pass.

    Args:
        card: the device that the trace is for.
        device_type: kind of device that the fake tensors are on: `cpu` where they only stand for CUDA's.
        log: how often each kernel ran is added here.
        chosen: which kernel each call was left to is added here.

    Attributes:
        log: how often each kernel ran.
        refused: why kernels refused the latest call that was left to `math`, empty when none was.
    """

    def __init__(
        self,
        card: CardRules,
        *,
        device_type: str = "cuda",
        log: Counter[Kernel] | None = None,
        chosen: dict[AttentionCall, Kernel] | None = None,
    ) -> None:
        super().__init__()
        self.card = card
        self.device_type = device_type
        self.log: Counter[Kernel] = Counter() if log is None else log
        self.refused: dict[Kernel, str] = {}
        self._chosen = {} if chosen is None else chosen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, or attention's stand-in where it is attention on the traced device."""
        kwargs = kwargs or {}
        if any(func is caught for caught in _CAUGHT):
            query = args[0] if args else kwargs["query"]
            if isinstance(query, FakeTensor) and query.device.type == self.device_type:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        del scale  # changes no shape
        call = described(query, key, value, attn_mask, dropout=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
        kernel = self._chosen[call] = choose_kernel(call, self.card)
        self.log[kernel] += 1
        if kernel == "math":
            self.refused = refusals(call, self.card)
        options = Options(
            is_causal=is_causal,
            dropout=dropout_p,
            enable_gqa=enable_gqa,
            keeps_statistics=call.requires_grad,
            half_math=self.card.half_math,
        )
        return _run(kernel, query, key, value, attn_mask, options=options)


def described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> AttentionCall:
    """A call of attention as the choice of a kernel sees it."""
    tensors = (query, key, value)
    return AttentionCall(
        dtype=dtype_name(query.dtype) if query.dtype == key.dtype == value.dtype else "mixed",
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        mask=None
        if mask is None
        else MaskForm(dtype=dtype_name(mask.dtype), shape=tuple(mask.shape), strides=mask.stride()),
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        dropout=dropout,
        requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        unit_stride=all(tensor.stride(-1) == 1 for tensor in tensors),
        aligned_starts=all(tensor.storage_offset() * tensor.element_size() % _START_BYTES == 0 for tensor in tensors),
    )


def with_process_settings(card: CardRules) -> CardRules:
    """`card` as torch would treat it in this process: kernels turned off, their order, and the environment."""
    backends: Any = torch.backends.cuda  # its getters have no annotations
    enabled: dict[Kernel, bool] = {
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
        # A build without CUDA has it off, whatever the user wants.
        "cudnn": backends.cudnn_sdp_enabled() or torch.version.cuda is None,
    }
    return replace(
        card,
        disabled=card.disabled | {kernel for kernel, is_enabled in enabled.items() if not is_enabled},
        order=card.order or _order_of_user(),
        cudnn_first=card.cudnn_first and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
        half_math=card.half_math or backends.fp16_bf16_reduction_math_sdp_allowed(),
        deterministic=card.deterministic or torch.are_deterministic_algorithms_enabled(),
    )


def _order_of_user() -> tuple[Kernel, ...] | None:
    """The order of `sdpa_kernel(..., set_priority=True)`; None where torch or the card of this machine gave it."""
    names: dict[int, Kernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # SDPBackend.h
    order = tuple(names[value] for value in torch._C._get_sdp_priority_order() if value in names)
    return None if order in (TORCH_ORDER, CUDNN_ORDER) else order


def _run(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    options: Options,
) -> torch.Tensor:
    match kernel:
        case "flash":
            return attention_memory.flash(query, key, value)
        case "efficient":
            return attention_memory.efficient(query, key, value, mask, options=options)
        case "cudnn":
            return attention_memory.cudnn(query, value, mask, options=options)
        case "math":
            return attention_memory.plain(query, key, value, mask, options=options)
