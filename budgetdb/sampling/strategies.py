"""Strategies of packing: how many rows go into each batch, by name.

Others register theirs as every plugin does, under `budgetdb.strategies`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from budgetdb.errors import UsageError
from budgetdb.plugins import STRATEGIES
from budgetdb.sampling.packing import Histogram, pack_by_waste, pack_exactly, pack_fewest
from budgetdb.sampling.times import TimeModel

# Up to so many samples the exact optimum is worth its time: about 5 microseconds for each.
EXACT_SAMPLES = 50_000
# Waste that a batch may have, in steps: none of these is best everywhere, and each costs next to nothing to try.
_ALLOWED_STEPS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


class Strategy(ABC):
    """How to cut samples in sorted order into batches.

    What every implementation promises:

    - no batch has more rows than `histogram.rows` allows of its longest row, and none is empty;
    - the rows of all batches together are all samples;
    - equal arguments give equal batches, on every rank of a job.
    """

    name: ClassVar[str]

    @abstractmethod
    def batch_sizes(self, histogram: Histogram, times: TimeModel | None) -> NDArray[np.int64]:
        """Rows of each batch, longest sample first; shape `(batches,)`.

        Args:
            histogram: how many samples there are of each padded length, and how many rows of it fit.
            times: how long steps take, where that is known.
        """


class Fewest(Strategy):
    """As few batches as any partition has: every batch is full."""

    name = "fewest"

    @override
    def batch_sizes(self, histogram: Histogram, times: TimeModel | None) -> NDArray[np.int64]:
        """See `pack_fewest`."""
        return pack_fewest(histogram.counts, histogram.rows)


class Fastest(Strategy):
    """The least seconds in all: a batch is closed early where its padding would cost more than another step.

    The exact optimum for up to `EXACT_SAMPLES`, else the best of several thresholds of waste (scripts/bench_packing.py
    prints how far that is from the optimum).
    """

    name = "fastest"

    @override
    def batch_sizes(self, histogram: Histogram, times: TimeModel | None) -> NDArray[np.int64]:
        """See `pack_exactly` and `pack_by_waste`.

        Raises:
            UsageError: it is not known how long steps take.
        """
        if times is None:
            raise UsageError(
                "the fastest batches follow from the seconds of steps, and none are known",
                next_step="Calibrate on the device itself, or use strategy='fewest'",
            )
        counts, rows, costs = histogram.counts, histogram.rows, times.row_seconds(histogram.lengths)
        if histogram.samples <= EXACT_SAMPLES:
            return pack_exactly(counts, rows, costs, step_cost=times.step_s)
        candidates = [pack_by_waste(counts, rows, costs, allowed=steps * times.step_s) for steps in _ALLOWED_STEPS]
        return min((*candidates, pack_fewest(counts, rows)), key=lambda sizes: total_seconds(sizes, histogram, times))


def choose_strategy(name: str | None, times: TimeModel | None) -> Strategy:
    """The strategy called `name`; without one the fastest where the seconds of steps are known, else the fewest.

    Raises:
        UnknownNameError: there is none of that name.
    """
    strategy: type[Strategy] = STRATEGIES.get(name or ("fastest" if times is not None else "fewest"))
    return strategy()


def total_seconds(sizes: NDArray[np.int64], histogram: Histogram, times: TimeModel) -> float:
    """Seconds of all batches of `sizes`, longest sample first."""
    return float(times.batch_seconds(sizes, histogram.lengths[histogram.longest_of(sizes)]).sum())
