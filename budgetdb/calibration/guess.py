"""What a trace of the step tells a calibration before its first probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from budgetdb.costs.base import CostModel
from budgetdb.costs.calibrated import TRUSTED_ERROR, ScaledTrace
from budgetdb.costs.frontier import max_batch_sizes
from budgetdb.profiles import Caps, Outcome, Probe
from budgetdb.shapes import padded_length


@dataclass(frozen=True)
class Guess:
    """A cost model from a trace.

    A trace counts bytes that are alive, and so do probes: what a caching allocator reserves beyond them is partly cache
    that it gives back when it has to, and partly lost between blocks, more or less by chance. So a trace is compared
    with what was allocated, and what may be lost in a run of mixed shapes is a constant beside it.

    Attributes:
        cost: what a step is expected to need on the device, the allocator's share included: where to probe first.
        trace: the exact trace to be scaled by probes; None where there are only traces that a model was fitted to.
        note: one line for people.
        margin_bytes: what the allocator may lose between blocks; part of the constant of `cost` and `trace`.
    """

    cost: CostModel
    trace: ScaledTrace | None
    note: str
    margin_bytes: int = 0

    @classmethod
    def of(cls, trace: ScaledTrace, *, margin_bytes: int, note: str) -> Self:
        """A guess by an exact trace, on an allocator that may lose so much."""
        beside = replace(trace, resident_bytes=trace.resident_bytes + margin_bytes)
        return cls(beside.unscaled(), beside, note, margin_bytes)

    def needed(self, probe: Probe) -> Probe:
        """A probe as the trace is compared with it: what it allocated, and the margin.

        A step that ended after the allocator gave its cache back did end: that much is what the margin is for.
        """
        if self.trace is None or probe.peak_allocated_bytes is None:
            return probe
        return probe.model_copy(
            update={
                "outcome": Outcome.FITS,
                "peak_allocated_bytes": probe.peak_allocated_bytes + self.margin_bytes,
                "peak_reserved_bytes": None,
                "baseline_bytes": probe.baseline_bytes + self.margin_bytes,
            }
        )

    def lengths(self, longest: int, *, pad_multiple: int, usable_bytes: int) -> list[int]:
        """The lengths to probe: the shortest and the longest, and between them one where another moment decides."""
        shortest = min(padded_length(8, pad_multiple), longest)
        ends = {shortest, longest}
        middle = self._other_moment(shortest, longest, pad_multiple=pad_multiple, usable_bytes=usable_bytes)
        return sorted(ends | ({middle} if middle is not None else set()))

    def is_trusted(self, probes: Sequence[Probe]) -> bool:
        """Whether the trace has the right form: as it is, or leaving one probe out and scaled by the others.

        Few probes of an allocator that rounds can't tell a factor from bytes per token; where the trace needs neither,
        it does not have to.
        """
        if self.trace is None or self.trace.unscaled_error(probes) <= TRUSTED_ERROR:
            return True
        error = self.trace.leave_one_out(probes)
        return error is None or error <= TRUSTED_ERROR

    def _other_moment(self, shortest: int, longest: int, *, pad_multiple: int, usable_bytes: int) -> int | None:
        """The first length at which another moment than the shortest's decides; None where one decides everywhere.

        What a device adds need not be the same for each moment, so each is probed.
        """
        import numpy as np

        if self.trace is None:
            return None
        lengths = np.arange(shortest, longest + 1, pad_multiple, dtype=np.int64)
        sizes = max_batch_sizes(self.cost, lengths, usable_bytes=usable_bytes, caps=Caps())
        decides = [self.trace.deciding(int(k), int(n)) for k, n in zip(sizes, lengths, strict=True) if k]
        if len(set(decides)) < 2:
            return None
        change = next(i for i in range(1, len(decides)) if decides[i] != decides[0])
        found = int(lengths[change])
        return found if shortest < found < longest else None
