"""Fitting from above: the fixed part of a peak, and what a token costs at each length, both on the safe side.

The peak at a fixed length is a straight line in the number of rows: `peak = constant + tokens * rate(length)`. Probes
give points on these lines; what is wanted lies on or above each of them and touches the ones near the limit, where
budgets are decided. A least-squares fit does neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from budgetdb.profiles import Probe

# Probes of less than this share of the largest batch at their length only lift the constant: an allocator's 20 MiB
# blocks would dominate the bytes per token of a tiny batch, and two batches of nearly one size make no line.
_SMALL_SHARE = 0.5


def fit_envelope(probes: Sequence[Probe]) -> tuple[float, dict[int, float]]:
    """The constant in bytes, and the bytes per token at each probed length.

    `constant + rate[L] * k * L` is at least the measured peak for every probe that fitted, and close to that of the
    largest batch at each length.

    Raises:
        ValueError: no probe fitted.
    """
    by_length = _fitted_by_length(probes)
    constant = _constant(by_length)
    return constant, {
        length: max(0.0, *((probe.peak_bytes - constant) / probe.shape.tokens for probe in group))
        for length, group in by_length.items()
    }


def _fitted_by_length(probes: Sequence[Probe]) -> dict[int, list[Probe]]:
    by_length: dict[int, list[Probe]] = defaultdict(list)
    for probe in probes:
        if probe.fits:
            by_length[probe.length].append(probe)
    if not by_length:
        raise ValueError("no probe fitted: there is nothing to fit a cost model to")
    return by_length


def _constant(by_length: Mapping[int, Sequence[Probe]]) -> float:
    """The smallest constant with which the largest batch at each length sets a rate that covers the small ones too.

    Two probes of one length make a line, and its intercept is the constant; of several intercepts the largest is safe.
    The baseline (weights and buffers) is there whatever runs, so the constant is never below it.
    """
    constant = float(min(probe.baseline_bytes for group in by_length.values() for probe in group))
    for group in by_length.values():
        largest = max(group, key=lambda probe: probe.batch_size)
        for small in group:
            share = small.batch_size / largest.batch_size
            if share < _SMALL_SHARE:
                constant = max(constant, (small.peak_bytes - share * largest.peak_bytes) / (1 - share))
    return constant
