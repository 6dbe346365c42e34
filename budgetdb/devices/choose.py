"""The device that a name stands for."""

from __future__ import annotations

import torch

from budgetdb.devices.base import Device
from budgetdb.errors import DeviceError, UnknownNameError
from budgetdb.plugins import DEVICES

_TORCH_KINDS = ("cpu", "cuda", "mps", "xpu")


def choose_device(name: str | torch.device | None = None) -> Device:
    """The device called `name`: `auto`, a torch device like `cuda:1`, or the name of a device plugin.

    `auto` and None mean the accelerator of this machine, or the CPU if it has none.

    Raises:
        UnknownNameError: no such kind of device.
        DeviceError: this machine has none of it.
    """
    if name is None or name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = accelerator if accelerator is not None else "cpu"
    text = str(name)
    kind = text.partition(":")[0]
    if kind in DEVICES and kind not in ("cpu", "accelerator"):
        plugin: Device = DEVICES.get(kind)(torch.device("cpu"))
        return plugin
    if kind == "accelerator":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise DeviceError("this machine has no accelerator that torch can use", next_step="Use --device cpu")
        text = text.replace("accelerator", accelerator.type, 1)
    elif kind not in _TORCH_KINDS:
        raise UnknownNameError("device", text, {"auto", *_TORCH_KINDS, *DEVICES.names()})
    try:
        torch_device = torch.device(text)
    except RuntimeError:
        raise DeviceError(f"{text!r} names no device", next_step=f"Write it like {kind} or {kind}:0") from None
    device: Device = DEVICES.get("cpu" if torch_device.type == "cpu" else "accelerator")(torch_device)
    return device
