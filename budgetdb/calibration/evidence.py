"""What the probes so far say: which batch sizes are known to fit at a length, and which are known not to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from budgetdb.costs.base import CostModel, Fitter
from budgetdb.profiles import Outcome, Probe

# Peak that a failed batch is given, as a share of what was usable, where the peaks measured would let it through.
_FAILED_AT = 1.02


@dataclass(frozen=True)
class Evidence:
    """Probes read with the one fact that always holds: a step's peak never falls with rows or with length.

    What fits, fits with fewer or shorter rows; what fails, fails with more or longer ones.

    Attributes:
        probes: all probes, in the order they ran.
        usable_bytes: the limit less the headroom; a step whose peak is above it failed, whatever the device said.
    """

    probes: tuple[Probe, ...]
    usable_bytes: int

    def fitted(self, probe: Probe) -> bool:
        """Whether the step ended within what is usable."""
        return probe.fits and probe.peak_bytes <= self.usable_bytes

    def fits_at(self, length: int) -> list[Probe]:
        """Probes of exactly this length that fitted, smallest batch first."""
        return sorted(
            (probe for probe in self.probes if probe.length == length and self.fitted(probe)),
            key=lambda probe: probe.batch_size,
        )

    def largest_fit(self, length: int) -> int:
        """The largest batch size known to fit at `length`, 0 if none is."""
        return max((p.batch_size for p in self.probes if p.length >= length and self.fitted(p)), default=0)

    def smallest_failure(self, length: int) -> int | None:
        """The smallest batch size known to fail at `length`, or None."""
        return min((p.batch_size for p in self.probes if p.length <= length and not self.fitted(p)), default=None)

    def longest_fit(self) -> int:
        """The longest length of which some batch fitted, 0 if none did."""
        return max((probe.length for probe in self.probes if self.fitted(probe)), default=0)

    def smallest_failure_length(self) -> int | None:
        """The shortest length of which not even one row fits, or None."""
        return min(
            (probe.length for probe in self.probes if probe.batch_size == 1 and not self.fitted(probe)), default=None
        )

    def attempts(self, length: int) -> int:
        """How many probes ran at exactly this length."""
        return sum(probe.length == length for probe in self.probes)

    def failures(self, length: int) -> int:
        """How many probes that bear on this length failed, at least 1 when any did."""
        return sum(probe.length <= length and not self.fitted(probe) for probe in self.probes)


@lru_cache(maxsize=64)
def fit_cost(cost: Fitter, evidence: Evidence) -> CostModel:
    """The cost model of kind `cost` above every peak measured, and above the limit at every failure.

    A failure says that the peak is more than what was usable. Where the model fitted to the peaks alone would let the
    failed batch through, the failure joins them as a peak clearly above the limit: something was missed, and one row
    less would only fail again.

    Raises:
        ValueError: no probe ended.
    """
    peaks = [probe for probe in evidence.probes if probe.fits]
    model = cost.fit(peaks)
    missed = [
        failure for failure in _smallest_failures(evidence) if model.peak_bytes(failure.shape) <= evidence.usable_bytes
    ]
    return cost.fit([*peaks, *(_as_peak(probe, int(_FAILED_AT * evidence.usable_bytes)) for probe in missed)])


def _smallest_failures(evidence: Evidence) -> Iterable[Probe]:
    """The smallest batch that ran out of memory at each length; that larger ones did says nothing more."""
    smallest: dict[int, Probe] = {}
    for probe in evidence.probes:
        if probe.outcome is Outcome.OOM:
            known = smallest.get(probe.length)
            if known is None or probe.batch_size < known.batch_size:
                smallest[probe.length] = probe
    return smallest.values()


def _as_peak(failure: Probe, peak_bytes: int) -> Probe:
    return failure.model_copy(update={"outcome": Outcome.FITS, "peak_allocated_bytes": peak_bytes})
