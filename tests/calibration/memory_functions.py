"""Random memory functions: what a search has to cope with, without a device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape

MIB, GIB = 2**20, 2**30
SHORTEST = 8
HEADROOM_SHARE = 0.04


@dataclass(frozen=True)
class Case:
    """A function of (rows, length) in bytes, a limit, and how far a measurement may be off."""

    kind: str
    limit_bytes: int
    fixed_bytes: float
    baseline_bytes: int
    longest: int
    noise: float
    peak: Callable[[int, int], float]

    @property
    def headroom_bytes(self) -> int:
        return int(HEADROOM_SHARE * self.limit_bytes)

    @property
    def usable_bytes(self) -> int:
        return self.limit_bytes - self.headroom_bytes

    def frontier(self, length: int, limit_bytes: int) -> int:
        """The largest batch size whose true peak is at most `limit_bytes`."""
        low, high = 0, 1
        while self.peak(high, length) <= limit_bytes:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle, length) <= limit_bytes else (low, middle)
        return low


def random_case(seed: int) -> Case:
    """Linear, quadratic or stepped; a fixed part of 0-90 % of the limit; half of them measured with 0-3 % of noise."""
    rng = random.Random(seed)
    kind = rng.choice(["linear", "quadratic", "stepped"])
    limit = rng.choice([1, 2, 4, 8, 24, 80]) * GIB
    fixed = rng.uniform(0, 0.9) * limit
    longest = rng.choice([128, 256, 512, 2048, 4096, 8192])
    room = (limit * (1 - HEADROOM_SHARE) - fixed) / 1.5
    token = min(10 ** rng.uniform(2.5, 6), room / longest)
    if kind == "linear":
        second = 0.0, 0.0
    else:
        intercept = token * rng.uniform(0.2, 0.9)
        slope = min((token - intercept) / (rng.uniform(0.05, 1.5) * longest), (room / longest - intercept) / longest)
        second = intercept, max(slope, 0.0)
    step = rng.choice([2, 20]) * MIB if kind == "stepped" else 0

    def peak(rows: int, length: int) -> float:
        tokens = rows * length
        grown = max(token * tokens, second[0] * tokens + second[1] * tokens * length)
        return fixed + (-(-grown // step) * step if step else grown)

    # Devices know what the weights take; what else is always there (workspaces) they don't.
    baseline = int(fixed * rng.choice([1.0, 1.0, rng.uniform(0.9, 1.0)]))
    noise = rng.choice([0.0, rng.uniform(0, 0.03)])
    return Case(kind, limit, fixed, baseline, longest, noise, peak)


class Oracle:
    """Answers probes from a case, with its noise, and counts them."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._rng = case, random.Random(~seed)
        self.shapes: list[Shape] = []
        self.ooms = 0

    def __call__(self, shape: Shape) -> Probe:
        self.shapes.append(shape)
        off = 1 + self._rng.uniform(-self._case.noise, self._case.noise)
        peak = int(self._case.peak(shape.batch_size, shape.length) * off)
        fits = peak <= self._case.usable_bytes
        self.ooms += not fits
        return Probe(
            batch_size=shape.batch_size,
            length=shape.length,
            outcome=Outcome.FITS if fits else Outcome.OOM,
            peak_allocated_bytes=peak if fits else None,
            baseline_bytes=self._case.baseline_bytes,
            cap_bytes=self._case.usable_bytes,
        )
