"""Which attention kernel torch runs on a card, and why not another."""

from __future__ import annotations

from budgetdb.errors import DeviceError
from budgetdb.tracing.attention_call import AttentionCall, CardRules, Kernel, MaskForm
from budgetdb.tracing.attention_rules import AMD_RULES, NVIDIA_RULES

__all__ = [
    "CUDNN_ORDER",
    "TORCH_ORDER",
    "AttentionCall",
    "CardRules",
    "Kernel",
    "MaskForm",
    "choose_kernel",
    "kernel_order",
    "refusal",
    "refusals",
]

# Context.h, sdp_priority_order.
TORCH_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
# sdp_utils.cpp, priority_order, where check_prefer_cudnn_attention holds.
CUDNN_ORDER: tuple[Kernel, ...] = ("cudnn", "flash", "efficient", "math")


def choose_kernel(call: AttentionCall, card: CardRules) -> Kernel:
    """The kernel that torch runs for `call` on `card`.

    Raises:
        DeviceError: every kernel refuses it, which is an error on the card too.
    """
    for kernel in kernel_order(card):
        if refusal(kernel, call, card) is None:
            return kernel
    reasons = "; ".join(f"{kernel} {reason}" for kernel, reason in refusals(call, card).items())
    raise DeviceError(
        f"no attention kernel takes {call.dtype} queries of shape {call.query} on {card}: {reasons}",
        next_step="Enable another kernel, torch.backends.cuda.enable_math_sdp(True) for one",
    )


def refusals(call: AttentionCall, card: CardRules) -> dict[Kernel, str]:
    """Why each kernel that refuses `call` does, in the order in which torch asks them."""
    reasons = {kernel: refusal(kernel, call, card) for kernel in kernel_order(card)}
    return {kernel: reason for kernel, reason in reasons.items() if reason is not None}


def refusal(kernel: Kernel, call: AttentionCall, card: CardRules) -> str | None:
    """Why `kernel` refuses `call` on `card`, None when it takes it."""
    if kernel in card.disabled:  # check_runtime_disabled_flash, ..._mem_efficient, ..._cudnn; select_sdp_backend
        return "is turned off"
    rules = AMD_RULES if card.gfx else NVIDIA_RULES
    return next((reason for rule in rules[kernel] if (reason := rule(call, card)) is not None), None)


def kernel_order(card: CardRules) -> tuple[Kernel, ...]:
    """The kernels in the order in which torch asks them (sdp_utils.cpp, priority_order)."""
    if card.order is not None:
        return card.order
    return CUDNN_ORDER if _prefers_cudnn(card) else TORCH_ORDER


def _prefers_cudnn(card: CardRules) -> bool:
    """check_prefer_cudnn_attention: Hopper and Blackwell for servers, from cuDNN 9.15.1.

    001f694a drops the test of the minor number when built with CUDA 13.
    """
    if card.gfx or card.cudnn is None or not card.cudnn_first:
        return False
    return card.cudnn > 91_500 and card.major in (9, 10) and card.capability[1] in (0, 3)
