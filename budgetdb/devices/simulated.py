"""A card that is not there: what is known of it, and an allocator that runs out of memory where its own would."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from budgetdb.devices.base import Device, Room
from budgetdb.devices.catalogue import CatalogueCard, custom_card, find_card
from budgetdb.devices.info import DeviceInfo
from budgetdb.devices.kernel_limits import card_headroom_bytes, cuda_caps
from budgetdb.errors import SimulatedOutOfMemoryError
from budgetdb.profiles import Caps
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.tracing.attention_call import CardRules
from budgetdb.tracing.replay import Event, Hold, peak_live_bytes, run, smallest_limit_bytes
from budgetdb.tracing.targets import Target, card_target
from budgetdb.tracing.workspaces import workspace_allocations

# What a CUDA build of torch 2.13 brings along, as `torch.backends.cudnn.version()` counts: assumed where none is here.
ASSUMED_CUDNN = 92_000


class SimulatedCard:
    """A card known from the catalogue, from its description, or from the device at hand.

    Args:
        card: its memory, compute capability and context.
        settings: of torch's allocator; as the environment sets them by default.
    """

    def __init__(self, card: CatalogueCard, settings: AllocatorSettings | None = None) -> None:
        self.card = card
        self.settings = settings if settings is not None else AllocatorSettings.from_environment()

    @classmethod
    def named(cls, name: str) -> SimulatedCard:
        """The card of the catalogue called `name`.

        Raises:
            UnknownCardError: there is none; the message offers the nearest.
            UsageError: several are called so.
        """
        return cls(find_card(name))

    @classmethod
    def like(cls, device: Device) -> SimulatedCard:
        """The card that `device` is, where it has a compute capability."""
        info = device.info()
        return cls(custom_card(info.total_bytes, info.compute_capability or "8.0", name=info.name))

    def info(self) -> DeviceInfo:
        """The card as it would describe itself."""
        return self.card.info()

    def caps(self, *, heads: int | None, widest: int | None) -> Caps:
        """Limits of its kernels."""
        return cuda_caps(heads=heads, widest=widest)

    def room(self, memory_limit_bytes: int | None = None) -> Room:
        """What one process may use when it has the card to itself."""
        limit = min(self.card.total_bytes, memory_limit_bytes or self.card.total_bytes) - self.card.context_bytes
        return Room(limit_bytes=max(limit, 0), overhead_bytes=self.card.context_bytes)

    def default_headroom_bytes(self, limit_bytes: int) -> int:
        """What to keep free of `limit_bytes` when the user does not say."""
        return card_headroom_bytes(limit_bytes)

    def target(self) -> Target:
        """The card to trace for."""
        return card_target(self.rules())

    def rules(self) -> CardRules:
        """What decides which kernels it runs."""
        capability = self.card.compute_capability
        if capability.startswith("gfx"):
            return CardRules(gfx=capability)
        major, minor = map(int, re.findall(r"\d+", capability)[:2])
        backend: Any = torch.backends.cudnn
        cudnn = backend.version() if torch.version.cuda else None
        return CardRules(capability=(major, minor), cudnn=cudnn or ASSUMED_CUDNN)

    @property
    def workspaces(self) -> list[int]:
        """Bytes that matrix products take from the allocator once and keep."""
        capability = self.card.compute_capability
        return workspace_allocations(None if capability.startswith("gfx") else capability)

    def fragmentation_bytes(
        self, steps: Sequence[Sequence[Event]], *, resident_bytes: int, hold: str, expandable: bool | None = None
    ) -> int:
        """What the allocator needs beyond the bytes alive when `steps` run one after another in one process.

        Each twice in a row, since a warm allocator can fail where a cold one did not, and then all of them backwards:
        an evaluation may be in any order. `expandable` overrides the setting of that name.
        """
        settings = self.settings
        if expandable is not None:
            settings = replace(settings, expandable_segments=expandable)
        stream, resident = _stream(steps), [resident_bytes, *self.workspaces]
        needed = smallest_limit_bytes(stream, settings, resident=resident, hold=cast("Hold", hold))
        return needed - peak_live_bytes(stream, resident=resident, hold=cast("Hold", hold))

    def is_enough(self, margin_bytes: int, steps: Sequence[Sequence[Event]], *, resident_bytes: int, hold: str) -> bool:
        """Whether `margin_bytes` beyond the bytes alive are enough for the run that `fragmentation_bytes` looks at."""
        stream, resident = _stream(steps), [resident_bytes, *self.workspaces]
        limit = peak_live_bytes(stream, resident=resident, hold=cast("Hold", hold)) + margin_bytes
        return self.fits(stream, resident_bytes=resident_bytes, hold=hold, limit_bytes=limit)[0]

    def fits(
        self, steps: Sequence[Sequence[Event]], *, resident_bytes: int, hold: str, limit_bytes: int
    ) -> tuple[bool, CachingAllocator]:
        """Whether `steps` run one after another within `limit_bytes`, and the allocator as they left it."""
        allocator = CachingAllocator(self.settings, limit_bytes)
        try:
            run(steps, allocator, resident=[resident_bytes, *self.workspaces], hold=cast("Hold", hold))
        except SimulatedOutOfMemoryError:
            return False, allocator
        return True, allocator


def _stream(steps: Sequence[Sequence[Event]]) -> list[Sequence[Event]]:
    """Each step twice in a row, and then all of them backwards."""
    return [*(step for step in steps for _ in range(2)), *reversed(steps)]
