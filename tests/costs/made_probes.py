"""Probes of a known function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from budgetdb.profiles import Outcome, Probe
from budgetdb.shapes import Shape


def probe(rows: int, length: int, peak_bytes: float | None, *, baseline_bytes: int = 0) -> Probe:
    """A probe that took `peak_bytes`, or failed if that is None."""
    return Probe(
        batch_size=rows,
        length=length,
        outcome=Outcome.OOM if peak_bytes is None else Outcome.FITS,
        peak_allocated_bytes=None if peak_bytes is None else math.ceil(peak_bytes),
        baseline_bytes=baseline_bytes,
    )


def probes_of(
    peak: Callable[[int, int], float], shapes: Iterable[tuple[int, int]], *, baseline_bytes: int = 0
) -> list[Probe]:
    """A probe of `peak(rows, length)` at each shape."""
    return [probe(rows, length, peak(rows, length), baseline_bytes=baseline_bytes) for rows, length in shapes]


def unsafe(predicted: Callable[[Shape], int], probes: Iterable[Probe]) -> list[Probe]:
    """The probes that took more than what is predicted."""
    return [each for each in probes if each.fits and predicted(each.shape) < each.peak_bytes]
