"""Calibrations that begin with a trace."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import WORKER_LIMIT_BYTES, write_config

import budgetdb
from budgetdb.calibration.calibrator import CalibrationEvent, Goal, run_calibration
from budgetdb.calibration.guess import Guess
from budgetdb.calibration.session import Ready, Session
from budgetdb.calibration.subject import Subject
from budgetdb.costs.calibrated import ScaledTrace
from budgetdb.costs.exact import Form
from budgetdb.models.spec import ModelFacts
from budgetdb.profiles import Caps, Environment, Outcome, Probe
from budgetdb.shapes import Shape

MIB = 2**20
WEIGHTS, LIMIT = 100 * MIB, 2000 * MIB
FORMS = (
    Form(1, 0, c=0, k=0, l=520, kl=16_912, ll=0, kll=1),
    Form(1, 0, c=0, k=0, l=0, kl=9_232, ll=0, kll=30),
)
TRACE = ScaledTrace(FORMS, WEIGHTS)
SUBJECT = Subject(
    facts=ModelFacts(model_hash="m", name="made", dtype="float32", attention="sdpa", resident_bytes=WEIGHTS),
    device_name="made",
    device_bytes=LIMIT,
    environment=Environment(torch="2"),
    workload="forward[hold=previous]",
    caps=Caps(),
)


class MadeSession(Session):
    """Peaks by a formula of the traced ones."""

    def __init__(self, factor: float, constant: int, per_token: float = 0.0, square: float = 0.0) -> None:
        self.factor, self.constant, self.per_token, self.square = factor, constant, per_token, square

    def describe(self) -> Subject:
        return SUBJECT

    def outline(self) -> None:
        return None

    def prepare(self, *, longest: int, memory_limit_bytes: int | None, headroom_bytes: int | None) -> Ready:
        return Ready(limit_bytes=LIMIT, headroom_bytes=0, overhead_bytes=0, resident_bytes=WEIGHTS)

    def peak(self, shape: Shape) -> int:
        traced = TRACE.unscaled().peak_bytes(shape) - WEIGHTS
        more = shape.tokens * (self.per_token + self.square * shape.length)
        return WEIGHTS + self.constant + math.ceil(self.factor * traced + more)

    def probe(self, shape: Shape, *, purpose: str) -> Probe:
        peak = self.peak(shape)
        fits = peak <= LIMIT
        return Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=Outcome.FITS if fits else Outcome.OOM,
            peak_allocated_bytes=peak if fits else None,
            baseline_bytes=WEIGHTS,
            purpose=purpose,
        )

    def close(self) -> None:
        return


def calibrated(session: MadeSession) -> tuple[Any, list[CalibrationEvent]]:
    events: list[CalibrationEvent] = []
    profile = run_calibration(
        session,
        SUBJECT,
        Goal(max_length=1024, pad_multiple=8),
        record=lambda probe: None,
        listen=events.append,
        guess=Guess(TRACE.unscaled(), TRACE, "made"),
    )
    return profile, events


@pytest.mark.parametrize(
    ("session", "probes", "failures"),
    [
        (MadeSession(1.0, 0), 4, 0),
        (MadeSession(1.01, 32 * MIB, 700), 6, 1),
        (MadeSession(1.15, 8 * MIB), 9, 2),
        (MadeSession(0.97, 0), 5, 0),
    ],
    ids=["as traced", "a little more", "a seventh more", "a little less"],
)
def test_a_right_trace_takes_few_probes_and_is_safe_everywhere(
    session: MadeSession, probes: int, failures: int
) -> None:
    profile, _ = calibrated(session)
    assert profile.cost.kind == "calibrated"
    assert len(profile.probes) <= probes
    assert sum(not probe.fits for probe in profile.probes) <= failures
    for length in range(8, 1025, 8):
        size = profile.max_batch_size(length)
        assert session.peak(Shape(size, length)) <= LIMIT
        assert session.peak(Shape(size + 1 + size // 20, length)) > LIMIT  # within 5 % of the truth


def test_a_wrong_trace_is_told_and_probes_decide_alone() -> None:
    # twice the scores that the trace knows of, and only at long lengths
    session = MadeSession(1.0, 0, square=60.0)
    profile, events = calibrated(session)
    assert any("disagree" in event.message for event in events)
    assert profile.cost.kind == "quadratic"
    for point in profile.frontier:
        assert session.peak(Shape(point.batch_size, point.length)) <= LIMIT


def test_lengths_in_each_regime_are_probed() -> None:
    guess = Guess(TRACE.unscaled(), TRACE, "made")
    assert guess.lengths(1024, pad_multiple=8, usable_bytes=LIMIT) == [8, 272, 1024]
    one = ScaledTrace(FORMS[:1], WEIGHTS)
    assert Guess(one.unscaled(), one, "made").lengths(1024, pad_multiple=8, usable_bytes=LIMIT) == [8, 1024]


def test_a_real_calibration_by_name_starts_from_its_trace(tmp_path: Path) -> None:
    config, store = write_config(tmp_path / "bert"), budgetdb.ProfileStore(tmp_path / "profiles.db")
    events: list[CalibrationEvent] = []
    profile = budgetdb.calibrate(
        str(config),
        attention="eager",
        memory_limit_bytes=WORKER_LIMIT_BYTES,
        pad_multiple=8,
        device="cpu",
        store=store,
        on_event=events.append,
    )
    assert profile.cost.kind == "calibrated"
    assert len(profile.probes) <= 5
    assert all(probe.fits for probe in profile.probes)
    assert any("traced exactly" in event.message for event in events)
    # on a CPU the trace is what torch's allocator counts
    assert profile.cost.parameters["s"] == pytest.approx(1.0, abs=0.01)
    assert profile.created_at <= datetime.now(UTC)
