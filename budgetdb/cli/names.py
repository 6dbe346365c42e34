"""Names checked before anything heavy is imported: a misspelling costs a moment, and not the seconds of torch."""

from __future__ import annotations

from budgetdb.errors import UnknownNameError
from budgetdb.plugins import ATTENTION, DEVICES, WORKLOADS

# Kinds of device that torch has, and the word for the best there is.
_DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


def check_names(*, device: str | None, attention: str | None, workload: str) -> None:
    """Look every name up in its registry; plugins are not imported.

    Raises:
        UnknownNameError: nothing is registered under one of them; the message has the nearest spelling.
    """
    name = workload.partition("[")[0]
    if name not in WORKLOADS:
        raise UnknownNameError("workload", name, WORKLOADS.names())
    if attention is not None and "/" not in attention and attention not in ATTENTION:
        raise UnknownNameError("attention implementation", attention, ATTENTION.names())
    if device is not None:
        kind = device.partition(":")[0]
        known = sorted({*_DEVICES, *DEVICES.names()})
        if kind not in known:
            raise UnknownNameError("device", kind, known)
