"""The device that a trace is made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from budgetdb.errors import DeviceError
from budgetdb.tracing.attention import CudaAttention, with_process_settings
from budgetdb.tracing.attention_call import AttentionCall, CardRules, Kernel
from budgetdb.tracing.attention_kernels import choose_kernel
from budgetdb.tracing.fake_cuda import can_fake_cuda


@dataclass
class Choices:
    """What a trace asked of its card: all that makes it another card's trace or not.

    Attributes:
        kernels: which kernel each call of attention was left to.
        capabilities: compute capability, where the model asked for it.
    """

    kernels: dict[AttentionCall, Kernel] = field(default_factory=dict)
    capabilities: set[tuple[int, int]] = field(default_factory=set)

    def hold_for(self, card: CardRules) -> bool:
        """Whether `card` would have answered all of it alike, so that the trace is its own as well."""
        if self.capabilities - {card.capability}:
            return False
        try:
            return all(choose_kernel(call, card) == kernel for call, kernel in self.kernels.items())
        except DeviceError:  # no kernel of it takes one of the calls
            return False


@dataclass(frozen=True)
class Target:
    """A device to trace for, there or not.

    Attributes:
        torch_device: what the fake tensors are on.
        card: what decides which kernels run, None for the CPU of this machine.
        choices: what traces asked of the card so far.
    """

    torch_device: torch.device
    card: CardRules | None = None
    choices: Choices = field(default_factory=Choices, compare=False)

    @property
    def stands_in(self) -> bool:
        """Whether fake CPU tensors stand for a card's, since this torch can't make those."""
        return self.card is not None and self.torch_device.type == "cpu"

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """A block in which operations allocate what the device's kernels do."""
        if self.card is None:
            yield
            return
        attention = CudaAttention(self.card, device_type=self.torch_device.type, chosen=self.choices.kernels)
        with _capability(self.card.capability, asked=self.choices.capabilities), attention:
            yield


@contextmanager
def _capability(capability: tuple[int, int], *, asked: set[tuple[int, int]]) -> Iterator[None]:
    """What torch is told that the card can do: grouped matrix products ask the one that is there, and none may be."""
    ask = torch.cuda.get_device_capability

    def answer(device: object = None) -> tuple[int, int]:
        del device
        asked.add(capability)
        return capability

    torch.cuda.get_device_capability = answer
    try:
        yield
    finally:
        torch.cuda.get_device_capability = ask


def cpu_target() -> Target:
    """The CPU of this machine."""
    return Target(torch.device("cpu"))


def card_target(card: CardRules) -> Target:
    """A card that follows `card`; its tensors are fake CUDA ones where this torch can make them, else fake CPU ones."""
    device = torch.device("cuda", 0) if can_fake_cuda() else torch.device("cpu")
    return Target(device, with_process_settings(card))
