"""Calibrations in a worker process, under a real limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from tiny import POSITIONS, WORKER_LIMIT_BYTES, write_config

import budgetdb
from budgetdb.calibration.calibrator import CalibrationEvent
from budgetdb.calibration.process import WorkerSession
from budgetdb.errors import (
    CalibrationTimeoutError,
    DoesNotFitError,
    ModelNotFoundError,
    StepFailedError,
    UnknownNameError,
    WorkerError,
)
from budgetdb.models.spec import ModelSpec
from budgetdb.profiles import Bound, Outcome, Profile, Provenance
from budgetdb.shapes import Shape


def calibrate(config: Path, store: budgetdb.ProfileStore, **options: object) -> tuple[Profile, list[CalibrationEvent]]:
    events: list[CalibrationEvent] = []
    arguments = {"memory_limit_bytes": WORKER_LIMIT_BYTES, "pad_multiple": 8, "device": "cpu", **options}
    return budgetdb.calibrate(str(config), store=store, on_event=events.append, **arguments), events


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "calibration.worker" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):  # it has just ended
        return ""


def test_the_profile_is_stored_and_the_second_run_is_a_hit(tmp_path: Path) -> None:
    config, store = write_config(tmp_path / "some-bert"), budgetdb.ProfileStore(tmp_path / "profiles.db")
    profile, events = calibrate(config, store, max_length=4096)

    assert profile.provenance is Provenance.MEASURED
    assert profile.model_name == "some-bert"
    assert (profile.max_length, profile.bound) == (POSITIONS, Bound.MAX_LENGTH)
    assert any("256 positions" in event.message for event in events if event.stage == "note")
    assert store.list() == [profile]
    assert workers() == []

    # whatever is stored as measured has a probe that ran, at the frontier or beside it
    for point in profile.frontier:
        if point.probed:
            ran = [probe.batch_size for probe in profile.probes if probe.fits and probe.length == point.length]
            assert max(ran) >= 0.98 * point.batch_size
    assert all(
        profile.peak_bytes(probe.shape) >= probe.peak_bytes for probe in profile.probes if probe.outcome is Outcome.FITS
    )
    assert sum(not probe.fits for probe in profile.probes) <= 1

    again, events = calibrate(config, store, max_length=4096)
    assert again == profile
    assert [event.stage for event in events] == ["known"]

    smaller, events = calibrate(config, store, memory_limit_bytes=WORKER_LIMIT_BYTES - 20 * 2**20)
    assert [event.stage for event in events] == ["known"]
    assert smaller.token_budget < profile.token_budget
    assert smaller.probes == profile.probes


def test_a_killed_calibration_goes_on_where_it_was(tmp_path: Path) -> None:
    config, store = write_config(tmp_path / "bert"), budgetdb.ProfileStore(tmp_path / "profiles.db")
    script = textwrap.dedent(
        """
        import sys, budgetdb
        def pause(event):
            print(event.stage, flush=True)
        budgetdb.calibrate(sys.argv[1], memory_limit_bytes=int(sys.argv[2]), pad_multiple=8, device="cpu",
                           store=budgetdb.ProfileStore(sys.argv[3]), on_event=pause)
        """
    )
    command = [sys.executable, "-c", script, str(config), str(WORKER_LIMIT_BYTES), str(tmp_path / "profiles.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line.strip() == "probe"
            if seen == 2:
                break
        left = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        os.kill(process.pid, signal.SIGKILL)

    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in left)

    kept = store.status().unfinished_probes
    assert kept is not None
    assert kept >= 2
    profile, events = calibrate(config, store)
    assert "resumed" in [event.stage for event in events]
    ran_now = [event.probe for event in events if event.probe is not None]
    assert len(profile.probes) == kept + len(ran_now)
    assert store.status().unfinished_probes == 0


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    store = budgetdb.ProfileStore(tmp_path / "profiles.db")
    with pytest.raises(DoesNotFitError, match="weights take") as caught:
        calibrate(write_config(tmp_path / "bert"), store, memory_limit_bytes=2**20)
    assert caught.value.limit_bytes == 0
    assert store.list() == []
    assert workers() == []


def test_the_error_of_a_worker_is_the_error_of_the_call(tmp_path: Path) -> None:
    store = budgetdb.ProfileStore(tmp_path / "profiles.db")
    with pytest.raises(ModelNotFoundError, match="no-such-dir"):
        calibrate(tmp_path / "no-such-dir", store)
    with pytest.raises(UnknownNameError, match="Did you mean 'forward'") as caught:
        calibrate(write_config(tmp_path / "bert"), store, workload="forwrad")
    assert caught.value.name == "forwrad"


def session(tmp_path: Path, *, environment: dict[str, str] | None = None, timeout_s: float = 60.0) -> WorkerSession:
    return WorkerSession(
        ModelSpec(source=str(write_config(tmp_path / "bert"))),
        device="cpu",
        workload="forward",
        name="bert",
        environment=environment or {},
        probe_timeout_s=timeout_s,
    )


def test_a_worker_that_is_killed_during_a_probe_counts_as_out_of_memory_and_is_replaced(tmp_path: Path) -> None:
    with session(tmp_path) as probing:
        probing.prepare(longest=POSITIONS, memory_limit_bytes=None, headroom_bytes=0)
        [worker] = workers()
        worker.kill()
        killed = probing.probe(Shape(2, 16), purpose="search")
        fresh = probing.probe(Shape(2, 16), purpose="search")
    assert killed.outcome is Outcome.OOM
    assert "killed" in (killed.message or "")
    assert fresh.outcome is Outcome.FITS
    assert workers() == []


def test_a_worker_that_crashes_once_is_forgiven(tmp_path: Path) -> None:
    with session(tmp_path) as probing:
        probing.prepare(longest=POSITIONS, memory_limit_bytes=None, headroom_bytes=0)
        [worker] = workers()
        worker.send_signal(signal.SIGSEGV)
        assert probing.probe(Shape(2, 16), purpose="search").outcome is Outcome.FITS


def test_a_worker_that_crashes_again_and_again_is_given_up(tmp_path: Path) -> None:
    over = threading.Event()

    def crash_workers() -> None:
        while not over.wait(0.05):
            for worker in workers():
                worker.send_signal(signal.SIGSEGV)

    with session(tmp_path) as probing:
        probing.prepare(longest=POSITIONS, memory_limit_bytes=None, headroom_bytes=0)
        killer = threading.Thread(target=crash_workers)
        killer.start()
        try:
            with pytest.raises((WorkerError, StepFailedError), match=r"the worker .*died"):
                probing.probe(Shape(2, 16), purpose="search")
        finally:
            over.set()
            killer.join()


def test_a_probe_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with session(tmp_path, timeout_s=0.01) as probing:
        probing.prepare(longest=POSITIONS, memory_limit_bytes=None, headroom_bytes=0)
        with pytest.raises(CalibrationTimeoutError, match="BUDGETDB_PROBE_TIMEOUT_S"):
            probing.probe(Shape(64, 256), purpose="search")
    assert workers() == []


def test_a_worker_that_can_not_start_says_why(tmp_path: Path) -> None:
    with (
        session(tmp_path, environment={"PYTHONPATH": "", "PYTHONHOME": str(tmp_path)}) as probing,
        pytest.raises(WorkerError, match="exit status"),
    ):
        probing.describe()
