"""A session whose probes run in a worker process, which is started anew whenever a step leaves it unfit to go on."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any

from budgetdb import errors
from budgetdb.calibration.session import Ready, Session
from budgetdb.calibration.subject import Subject
from budgetdb.devices.base import Device
from budgetdb.devices.choose import choose_device
from budgetdb.errors import BudgetDBError, CalibrationTimeoutError, StepFailedError, WorkerError
from budgetdb.models.load import outline_model
from budgetdb.models.spec import ModelSpec
from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0
_GRACE_S = 5.0


class WorkerDiedError(Exception):
    """The worker ended without an answer."""

    def __init__(self, return_code: int | None, last_words: str) -> None:
        super().__init__(f"exit status {return_code}: {last_words}" if last_words else f"exit status {return_code}")
        self.return_code = return_code


class WorkerSession(Session):
    """Builds and probes a model in a process of its own, so that no fault of a step reaches this one.

    Args:
        spec: the model to build.
        device: name of the device, as `choose_device` takes it.
        workload: name or key of the workload.
        name: what to call the model.
        environment: variables to start the worker with, the device's own.
        probe_timeout_s: how long one probe may take before the worker is killed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: str,
        workload: str,
        name: str,
        environment: Mapping[str, str],
        probe_timeout_s: float,
    ) -> None:
        self._spec, self._device = spec, device
        self._identity = {
            "spec": spec.model_dump(mode="json"),
            "device": device,
            "workload": workload,
            "name": name,
        }
        self._environment = dict(environment)
        self._probe_timeout_s = probe_timeout_s
        self._process: _Process | None = None
        self._prepared: dict[str, Any] | None = None
        self._ready: Ready | None = None

    def describe(self) -> Subject:
        """What the worker would calibrate; it builds the model without memory."""
        reply = self._ask_surely({"op": "describe"})
        return Subject.model_validate_json(json.dumps(reply["subject"]))

    def outline(self) -> tuple[Any, Device] | None:
        """The model without memory, built in this process, so that the worker's memory is the step's alone."""
        return outline_model(self._spec), choose_device(self._device)

    def prepare(self, *, longest: int, memory_limit_bytes: int | None, headroom_bytes: int | None) -> Ready:
        """Have the worker load the model and cap itself."""
        self._prepared = {
            "op": "prepare",
            "longest": longest,
            "memory_limit_bytes": memory_limit_bytes,
            "headroom_bytes": headroom_bytes,
        }
        reply = self._ask_surely(self._prepared)
        self._ready = Ready.model_validate_json(json.dumps(reply["ready"]))
        return self._ready

    def probe(self, shape: Shape, *, purpose: str) -> Probe:
        """Have the worker run one step; once more in a fresh one when it dies of something that is not memory."""
        request = {"op": "probe", "batch_size": shape.batch_size, "length": shape.length, "purpose": purpose}
        reason = ""
        for _ in range(2):
            self._revive()
            try:
                reply = self._ask(request, timeout_s=self._probe_timeout_s)
            except WorkerDiedError as death:
                self._end()
                if death.return_code == -signal.SIGKILL:
                    return self._killed(shape, purpose=purpose)
                reason = f"the worker died ({death})"
                continue
            if reply.get("poisoned"):
                reason = str(reply["poisoned"])
                _log.info("starting a fresh worker: %s", reason)
                self._end()
            if reply.get("probe") is not None:
                return Probe.model_validate_json(json.dumps(reply["probe"]))
        raise StepFailedError(batch_size=shape.batch_size, length=shape.length, reason=f"{reason}, twice")

    def close(self) -> None:
        """End the worker."""
        self._end()

    def _killed(self, shape: Shape, *, purpose: str) -> Probe:
        """The machine's own memory ran out, and the kernel ended the largest process: the batch was too big."""
        return Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=Outcome.OOM,
            baseline_bytes=self._ready.resident_bytes if self._ready else 0,
            cap_bytes=self._ready.usable_bytes if self._ready else None,
            purpose=purpose,
            message="the worker was killed (SIGKILL), most likely because the machine's memory ran out",
        )

    def _revive(self) -> None:
        """A fresh worker, prepared as the last one was, if there is none."""
        if self._process is None and self._prepared is not None:
            self._ask_surely(self._prepared)

    def _ask_surely(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._ask(request, timeout_s=_START_TIMEOUT_S)
        except WorkerDiedError as death:
            self._end()
            raise WorkerError(
                f"the worker process died while it was asked to {request['op']} ({death})",
                next_step="Run again with BUDGETDB_MEMORY_LIMIT unset, or calibrate a live model in Python to see why",
            ) from None

    def _ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        if self._process is None:
            self._process = _Process(self._environment)
        try:
            reply = self._process.ask({**self._identity, **request}, timeout_s=timeout_s)
        except CalibrationTimeoutError:
            self._end()
            raise
        if "error" in reply:
            error = reply["error"]
            kind = getattr(errors, error["type"], BudgetDBError)
            raise errors.rebuilt_error(kind, error["message"], error["attributes"])
        return reply

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One worker and the pipes to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        read_end, write_end = os.pipe()
        self._noise: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        try:
            self._process = subprocess.Popen(  # noqa: S603 (our own module under our own interpreter)
                [sys.executable, "-m", "budgetdb.calibration.worker", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=self._noise,
                stderr=self._noise,
                env={**os.environ, **environment},
                pass_fds=(write_end,),
                start_new_session=True,
                text=True,
            )
        finally:
            os.close(write_end)
        self._replies = os.fdopen(read_end, "rb", buffering=0)
        self._unread = b""

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The reply to one request.

        Raises:
            WorkerDiedError: it ended instead of answering.
            CalibrationTimeoutError: it did not answer in time.
        """
        if self._process.stdin is None:
            raise RuntimeError("the worker was started without a pipe to it")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        reply: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s, timeout_s=timeout_s))
        return reply

    def _line(self, deadline: float, *, timeout_s: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise CalibrationTimeoutError(
                        f"no answer within {timeout_s:.0f} s", next_step="Raise BUDGETDB_PROBE_TIMEOUT_S"
                    )
                chunk = self._replies.read(1 << 16)
                if not chunk:
                    raise self._death()
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> WorkerDiedError:
        try:
            return_code = self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            return_code = None
        self._noise.seek(0)
        words = self._noise.read().decode(errors="replace").strip().splitlines()
        return WorkerDiedError(return_code, words[-1][:300] if words else "")

    def end(self) -> None:
        """Close its input; kill it if it does not end by itself."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                _log.debug("the worker had closed its input already")
        try:
            # An idle worker ends at once; one in the middle of a probe does not listen.
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._reap()
        self._replies.close()
        self._noise.close()

    def _reap(self) -> None:
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:  # a driver call that can't be interrupted
            _log.warning("worker %d does not end; its device may be stuck", self._process.pid)
