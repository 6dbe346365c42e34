"""What is calibrated: a model on a device doing a workload, described without running a step."""

from __future__ import annotations

import platform
from typing import Any, Protocol

import torch
import transformers
from pydantic import BaseModel, ConfigDict

from budgetdb.devices.base import Room
from budgetdb.devices.info import DeviceInfo
from budgetdb.models.facts import describe
from budgetdb.models.spec import ModelFacts
from budgetdb.profiles import Caps, Environment, ProfileKey
from budgetdb.workloads.base import Workload

# Attention implementations that make a tensor of all scores; fused ones have none that could be too large.
_WITH_SCORES = frozenset({"eager", "none"})


class Subject(BaseModel):
    """A model on a device doing a workload.

    Attributes:
        device_bytes: the device's memory as keys hold it.
        workload: the workload's key.
        caps: what the device's kernels allow for this model.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    facts: ModelFacts
    device_name: str
    device_bytes: int
    environment: Environment
    workload: str
    caps: Caps

    def key(self, pad_multiple: int) -> ProfileKey:
        """The key under which the profile is stored."""
        return ProfileKey(
            model_hash=self.facts.model_hash,
            device_name=self.device_name,
            device_bytes=self.device_bytes,
            dtype=self.facts.dtype,
            attention=self.facts.attention,
            pad_multiple=pad_multiple,
            workload=self.workload,
        )


class Described(Protocol):
    """A device as far as a description of the subject asks: there, or only known."""

    def info(self) -> DeviceInfo:
        """What the device is."""

    def caps(self, *, heads: int | None, widest: int | None) -> Caps:
        """Limits of its kernels."""


class Place(Described, Protocol):
    """A device as far as a prediction asks: there, or only known."""

    def room(self, memory_limit_bytes: int | None = None) -> Room:
        """What one process may use."""

    def default_headroom_bytes(self, limit_bytes: int) -> int:
        """What to keep free of it."""


def describe_subject(model: Any, *, device: Described, workload: Workload, name: str | None = None) -> Subject:
    """Describe a live model, or one without memory on the `meta` device, as it would run on `device`."""
    facts, info = describe(model, name=name), device.info()
    caps = device.caps(heads=facts.heads, widest=facts.output_width)
    if facts.attention not in _WITH_SCORES:
        caps = caps.model_copy(update={"squares": None})
    return Subject(
        facts=facts,
        device_name=info.name,
        device_bytes=info.key_bytes,
        environment=Environment(
            torch=torch.__version__,
            transformers=transformers.__version__,
            runtime=info.runtime,
            driver=info.driver,
            compute_capability=info.compute_capability,
            allocator=info.allocator,
            platform=f"{platform.system()} {platform.machine()}",
            device_total_bytes=info.total_bytes,
        ),
        workload=workload.key(),
        caps=caps,
    )
