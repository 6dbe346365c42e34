"""What a trace of the step tells a calibration before its first probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from budgetdb.costs.base import CostModel
from budgetdb.costs.calibrated import TRUSTED_ERROR, ScaledTrace
from budgetdb.costs.frontier import max_batch_sizes
from budgetdb.profiles import Caps, Probe
from budgetdb.shapes import padded_length


@dataclass(frozen=True)
class Guess:
    """A cost model from a trace.

    Attributes:
        cost: what a step is expected to take on the device, the allocator's share included: where to probe first.
        trace: the exact trace to be scaled by probes; None where there are only traces that a model was fitted to.
        note: one line for people.
    """

    cost: CostModel
    trace: ScaledTrace | None
    note: str

    def lengths(self, longest: int, *, pad_multiple: int, usable_bytes: int) -> list[int]:
        """The lengths to probe: the shortest and the longest, and between them one where another moment decides."""
        shortest = min(padded_length(8, pad_multiple), longest)
        ends = {shortest, longest}
        middle = self._other_moment(shortest, longest, pad_multiple=pad_multiple, usable_bytes=usable_bytes)
        return sorted(ends | ({middle} if middle is not None else set()))

    def is_trusted(self, probes: Sequence[Probe]) -> bool:
        """Whether leaving one probe out, the others predict its peak: then the trace has the right form."""
        error = self.trace.leave_one_out(probes) if self.trace is not None else None
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
