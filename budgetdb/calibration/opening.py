"""Open a session for whatever the caller calls a model: a live one, a name, a directory, a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from budgetdb.calibration.process import WorkerSession
from budgetdb.calibration.session import LocalSession, Session
from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.errors import UsageError
from budgetdb.models.attention import check_attention_name
from budgetdb.models.facts import display_name
from budgetdb.models.spec import ModelSpec
from budgetdb.settings import read_settings
from budgetdb.workloads.base import parse_workload


def open_session(model: Any, *, device: str | None, workload: str, build: Mapping[str, Any] | None = None) -> Session:
    """A session in this process for a live model, in a worker process for one given by name; nothing is loaded yet.

    `build` says how a model given by name is built: the fields of `ModelSpec` but its source.

    Raises:
        UsageError: `model` is neither, or `build` does not apply to it; `UnknownNameError` for a misspelt name.
        DeviceError: the device is not on this machine.
    """
    build = build or {}
    if isinstance(model, str | Path):
        return _worker_session(str(model), device=device, workload=workload, build=build)
    if not callable(model):
        raise UsageError(
            f"a model is callable, and a {type(model).__name__} is not",
            next_step="Give a model, or its name to `budgetdb.calibrate`",
        )
    for name, value in build.items():
        if value not in (None, "auto", False):
            raise UsageError(
                f"{name}={value!r} can't be applied to a live model", next_step="Build the model so, or give its name"
            )
    return LocalSession(model, device=device_of(model, device), workload=parse_workload(workload))


def device_of(model: Any, device: str | None) -> Device:
    """The device asked for, else the one that the live model's first parameter is on."""
    if device is None and hasattr(model, "parameters"):
        parameter = next(iter(model.parameters()), None)
        if parameter is not None:
            return choose_device(parameter.device)
    return choose_device(device)


def _worker_session(model: str, *, device: str | None, workload: str, build: Mapping[str, Any]) -> Session:
    check_attention_name(build["attention"])
    chosen = choose_device(device)
    try:
        spec = ModelSpec.model_validate({"source": model, **build})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg']}", next_step="See `budgetdb calibrate --help`") from None
    return WorkerSession(
        spec,
        device=str(chosen.torch_device),
        workload=parse_workload(workload).key(),
        name=display_name(model),
        environment=chosen.worker_environment,
        probe_timeout_s=read_settings().probe_timeout_s,
    )
