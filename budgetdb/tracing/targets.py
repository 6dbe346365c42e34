"""The device that a trace is made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from budgetdb.tracing.attention import CudaAttention, with_process_settings
from budgetdb.tracing.attention_call import CardRules
from budgetdb.tracing.fake_cuda import can_fake_cuda


@dataclass(frozen=True)
class Target:
    """A device to trace for, there or not.

    Attributes:
        torch_device: what the fake tensors are on.
        card: what decides which kernels run, None for the CPU of this machine.
    """

    torch_device: torch.device
    card: CardRules | None = None

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
        with _capability(self.card.capability), CudaAttention(self.card, device_type=self.torch_device.type):
            yield


@contextmanager
def _capability(capability: tuple[int, int]) -> Iterator[None]:
    """What torch is told that the card can do: grouped matrix products ask the one that is there, and none may be."""
    ask = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability  # noqa: ARG005 (torch's own signature)
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
