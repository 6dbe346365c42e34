"""How long a step takes, as a profile's probes tell it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import numpy as np
from numpy.typing import NDArray

from budgetdb.profiles import Probe, Profile

# Probes that took less say more of the clock than of the device.
_LEAST_S = 1e-4
# A share of a step's seconds that is rounding in the fit, and not growth.
_ROUNDING = 1e-9

# Pivot of normal equations, whose diagonal is 1, below which two columns are one.
_SINGULAR = 1e-12


@dataclass(frozen=True)
class TimeModel:
    """`step_s + token_s * k L + square_s * k L²` seconds for a step of k rows of L tokens.

    Attributes:
        step_s: to start a step, whatever is in it: launches, the loop around it.
        token_s: for each token.
        square_s: for each pair of tokens of a row.
    """

    step_s: float
    token_s: float
    square_s: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.step_s, self.token_s, self.square_s):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"seconds must be finite and not negative, got {self}")

    @classmethod
    def fit(cls, probes: Iterable[Probe], *, step_s: float | None = None) -> Self | None:
        """The model closest to the seconds of the probes that fitted, by least squares of relative errors.

        No coefficient is negative. Probes are large batches, and seldom say what a step takes that has hardly anything
        in it: `step_s` does, where the smallest step was timed.

        Returns:
            None where there are no seconds to go by, or they do not grow with the tokens.
        """
        timed = [probe for probe in probes if probe.fits and probe.elapsed_s >= _LEAST_S]
        if len({probe.shape for probe in timed}) < (1 if step_s else 2):
            return None
        rows = np.array([probe.batch_size for probe in timed], dtype=np.float64)
        lengths = np.array([probe.length for probe in timed], dtype=np.float64)
        seconds = np.array([probe.elapsed_s for probe in timed])
        terms = np.stack([np.ones_like(rows), rows * lengths, rows * lengths**2], axis=1)
        least = min(step_s, float(seconds.min())) if step_s else 0.0
        free = (1, 2) if step_s else (0, 1, 2)
        found = _not_negative(terms / seconds[:, None], 1 - least / seconds, free)
        if ((terms[:, 1:] * found[1:]).sum(axis=1) <= _ROUNDING * seconds).all():
            return None
        return cls(least + float(found[0]), float(found[1]), float(found[2]))

    @classmethod
    def of(cls, profile: Profile) -> Self | None:
        """What the profile's probes tell; None for one that was not measured."""
        return cls.fit(profile.probes, step_s=profile.step_s or None)

    def row_seconds(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that a row adds to a batch of each of `lengths`; same shape."""
        return lengths * (self.token_s + self.square_s * lengths)

    def batch_seconds(self, sizes: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of batches of `sizes` rows, padded to `lengths`; same shape."""
        return self.step_s + sizes * self.row_seconds(lengths)


def _not_negative(
    terms: NDArray[np.float64], wanted: NDArray[np.float64], free: tuple[int, ...]
) -> NDArray[np.float64]:
    """Least squares in the `free` columns of `terms` with no coefficient negative: the best choice of positive ones.

    By normal equations of columns scaled to one size, and without numpy's linear algebra: that takes 32 MiB when it is
    first used, which an evaluation on a CPU has not been asked for.
    """
    scales = np.sqrt((terms**2).sum(axis=0))
    columns = [(terms[:, i] / scales[i]) if scales[i] else terms[:, i] for i in range(terms.shape[1])]
    best, solution = float((wanted**2).sum()), np.zeros(terms.shape[1])
    for size in range(1, len(free) + 1):
        for chosen in combinations(free, size):
            products = [[float((columns[i] * columns[j]).sum()) for j in chosen] for i in chosen]
            found = _solved(products, [float((columns[i] * wanted).sum()) for i in chosen])
            if found is None or min(found) < 0:
                continue
            fitted = sum(value * columns[i] for value, i in zip(found, chosen, strict=True))
            error = float(((fitted - wanted) ** 2).sum())
            if error < best * (1 - 1e-9):
                best, solution = error, np.zeros(terms.shape[1])
                solution[list(chosen)] = [value / scales[i] for value, i in zip(found, chosen, strict=True)]
    return solution


def _solved(matrix: list[list[float]], wanted: list[float]) -> list[float] | None:
    """Gauss's elimination with pivots; None where the matrix is singular."""
    rows = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < _SINGULAR:
            return None
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
