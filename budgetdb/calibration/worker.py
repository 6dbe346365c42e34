"""The worker process: builds a model, probes it, and answers in lines of JSON.

    python -m budgetdb.calibration.worker REPLY_FD

Requests come on standard input, one JSON object a line; replies go to the file descriptor `REPLY_FD`, one for each
request, since libraries write to the standard streams as they like. It ends when its input ends, and is killed by the
kernel when its parent dies. `budgetdb.calibration.process` is the other side.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from budgetdb.calibration.outcomes import ErrorKind, classify
from budgetdb.calibration.prober import PoisonedProcessError, Prober
from budgetdb.calibration.session import prepare_prober
from budgetdb.calibration.subject import describe_subject
from budgetdb.devices.choose import choose_device
from budgetdb.errors import BudgetDBError, DoesNotFitError
from budgetdb.models.facts import resident_bytes
from budgetdb.models.load import load_model, outline_model
from budgetdb.models.spec import ModelSpec
from budgetdb.settings import format_bytes
from budgetdb.shapes import Shape
from budgetdb.workloads.base import parse_workload

_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers one request at a time."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._spec = ModelSpec.model_validate(request["spec"])
        self._name = str(request["name"])
        self._device = choose_device(request["device"])
        self._workload = parse_workload(request["workload"])
        self._prober: Prober | None = None

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be calibrated, from the model without memory."""
        del request
        outline = outline_model(self._spec)
        subject = describe_subject(outline, device=self._device, workload=self._workload, name=self._name)
        return {"subject": subject.model_dump(mode="json")}

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model, warm it up, and cap the process."""
        model = self._load()
        resident = resident_bytes(model)
        self._prober = Prober(device=self._device, model=model, workload=self._workload, resident_bytes=resident)
        ready = prepare_prober(
            self._prober,
            self._device,
            longest=request["longest"],
            memory_limit_bytes=request["memory_limit_bytes"],
            headroom_bytes=request["headroom_bytes"],
            resident_bytes=resident,
        )
        return {"ready": ready.model_dump(mode="json")}

    def _load(self) -> nn.Module:
        """The model on the device; that there is no room for it is an error of its own."""
        try:
            return load_model(self._spec, self._device.torch_device)
        except Exception as error:
            if classify(error) is not ErrorKind.OOM:
                raise
        needed, room = resident_bytes(outline_model(self._spec)), self._device.room()
        raise DoesNotFitError(
            f"the model's weights take {format_bytes(needed)}, and {format_bytes(room.limit_bytes)} are free on "
            f"{self._device.torch_device}",
            needed_bytes=needed,
            limit_bytes=room.limit_bytes,
            next_step="Free memory on the device, or use a smaller dtype",
        )

    def probe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step."""
        if self._prober is None:
            raise RuntimeError("probe was asked for before prepare")
        shape = Shape(request["batch_size"], request["length"])
        probe = self._prober.probe(shape, purpose=request["purpose"])
        return {"probe": probe.model_dump(mode="json"), "poisoned": self._prober.leak}


def main() -> None:
    """Serve requests until standard input ends."""
    _die_with_parent()
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        worker: Worker | None = None
        for line in sys.stdin:
            request = json.loads(line)
            try:
                worker = worker or Worker(request)
                reply = getattr(worker, request["op"])(request)
            except PoisonedProcessError as error:
                reply = {"poisoned": str(error), "probe": None}
            except BudgetDBError as error:
                reply = {"error": {"type": type(error).__name__, "message": str(error), "attributes": _plain(error)}}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def _plain(error: BudgetDBError) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(error).items()
        if isinstance(value, str | int | float | list | None) and not name.startswith("_")
    }


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, in the middle of a probe too."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides


if __name__ == "__main__":
    main()
