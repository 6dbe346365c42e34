"""A trace brought into line with a device: its form from the trace, its scale from a few probes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from budgetdb.costs.exact import ExactCost, Form, FormsCost, read_forms
from budgetdb.costs.forms import Moment
from budgetdb.profiles import CostParameter, Probe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from budgetdb.costs.exact import Lines

_SCALARS = ("c", "s", "d")
# Weight of staying with the trace as it is, relative to a probe's: it decides only what the probes leave open.
_PULL = 1e-2
# Leaving one probe out, the others must predict its peak this well for the trace to be believed (DESIGN 6).
TRUSTED_ERROR = 0.02


class CalibratedCost(FormsCost):
    """`c + s·trace + d·kL`: what a device adds to a trace of the step is a constant, a factor, and bytes per token.

    The constant holds the weights and what libraries keep, the factor the allocator's rounding, and the bytes per token
    what kernels need beside their results. None is negative.

    Args:
        forms: the trace's moments without weights and buffers.
        c: bytes whatever the batch, weights included.
        s: factor of the trace.
        d: further bytes for each token.

    Raises:
        ValueError: a scalar is negative or not finite, or the forms make no cost model.
    """

    kind: ClassVar[str] = "calibrated"

    def __init__(self, forms: Sequence[Form], *, c: float, s: float = 1.0, d: float = 0.0) -> None:
        Moment(constant=c, token=s, square=d)  # refuses what is negative or no number
        self._trace = ExactCost(forms)
        self._c, self._s, self._d = c, s, d

    @override
    def lines(self, length: int) -> list[Moment]:
        return [
            Moment(
                constant=self._c + self._s * line.constant,
                token=self._s * line.token + self._d * length,
            )
            for line in self._trace.lines(length)
        ]

    @override
    def all_lines(self, lengths: NDArray[np.float64]) -> Iterator[Lines]:
        for constants, slopes in self._trace.all_lines(lengths):
            yield self._c + self._s * constants, self._s * slopes + self._d * lengths

    @override
    def parameters(self) -> dict[str, CostParameter]:
        return {**self._trace.parameters(), "c": self._c, "s": self._s, "d": self._d}

    @classmethod
    @override
    def from_parameters(cls, parameters: Mapping[str, CostParameter]) -> Self:
        forms = read_forms(parameters, kind=cls.kind, others=_SCALARS)
        scalars = {}
        for name in _SCALARS:
            value = parameters[name]
            if not isinstance(value, int | float):
                raise ValueError(f"{name} of a {cls.kind} cost model must be a number, got {value!r}")  # noqa: TRY004
            scalars[name] = float(value)
        return cls(forms, **scalars)


@dataclass(frozen=True)
class ScaledTrace:
    """Makes calibrated cost models of one trace: a `Fitter`.

    Attributes:
        forms: the trace's moments, without weights and buffers.
        resident_bytes: weights and buffers.
    """

    forms: tuple[Form, ...]
    resident_bytes: int

    @classmethod
    def of(cls, exact: ExactCost, resident_bytes: int) -> Self:
        """A trace whose forms hold the weights."""
        return cls(tuple(form._replace(c=form.c - resident_bytes) for form in exact.forms), resident_bytes)

    def unscaled(self, *, beside_bytes: int = 0) -> CalibratedCost:
        """The trace as it is, where nothing was probed, with `beside_bytes` for what libraries keep."""
        return CalibratedCost(self.forms, c=float(self.resident_bytes + beside_bytes))

    def deciding(self, batch_size: int, length: int) -> int:
        """Number of the form that is the largest at a shape."""
        lines = [form.line(length) for form in self.forms]
        peaks = [-1.0 if line is None else line[0] + batch_size * line[1] for line in lines]
        return peaks.index(max(peaks))

    def fit(self, probes: Sequence[Probe]) -> CalibratedCost:
        """The closest calibrated model that lies on the safe side of every probe that fitted.

        Least squares of relative errors over the three scalars, none of them negative, with a slight pull to the
        trace as it is; then lifted above the probe that it misses most.

        Raises:
            ValueError: no probe fitted.
        """
        fitted = [probe for probe in probes if probe.fits]
        if not fitted:
            raise ValueError("no probe fitted: there is nothing to fit a cost model to")
        base = min(max(min(probe.baseline_bytes for probe in fitted), 0), self.resident_bytes) or self.resident_bytes
        fixed, factor, token = self._least_squares(fitted, base)
        return self._lifted(fitted, base=base, fixed=fixed, factor=factor, token=token)

    def leave_one_out(self, probes: Sequence[Probe]) -> float | None:
        """The largest relative error of a probe's peak as the other probes predict it; None for fewer than three.

        Of peaks above the baseline, which is known.
        """
        fitted = [probe for probe in probes if probe.fits]
        if len({probe.shape for probe in fitted}) < 3:
            return None
        return max(
            _error(self.fit([probe for probe in fitted if probe.shape != left_out.shape]), left_out)
            for left_out in fitted
        )

    def unscaled_error(self, probes: Sequence[Probe]) -> float:
        """The largest relative error of the trace as it is, of peaks above the baseline; 0 where no probe fitted."""
        return max((_error(self.unscaled(), probe) for probe in probes if probe.fits), default=0.0)

    def _least_squares(self, probes: Sequence[Probe], base: float) -> tuple[float, float, float]:
        import numpy as np

        trace = ExactCost(self.forms)
        peaks = np.array([max(probe.peak_bytes - base, 1.0) for probe in probes])
        unit = float(peaks.max())
        tokens = max(probe.shape.tokens for probe in probes)
        # Unknowns: constant / unit, factor, bytes per token * tokens / unit, so that all are of about one size.
        columns = np.array(
            [[unit, trace.peak_bytes(probe.shape), unit * probe.shape.tokens / tokens] for probe in probes]
        )
        rows = np.vstack([columns / peaks[:, None], _PULL * np.eye(3)])
        wanted = np.concatenate([np.ones(len(probes)), _PULL * np.array([0.0, 1.0, 0.0])])
        best, solution = np.inf, np.array([0.0, 1.0, 0.0])
        for size in (3, 2, 1):  # every choice of unknowns that are not zero: the best with none negative is the optimum
            for free in map(list, combinations(range(3), size)):
                found = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
                error = float(((rows[:, free] @ found - wanted) ** 2).sum())
                if (found >= 0).all() and error < best:
                    best, solution = error, np.zeros(3)
                    solution[free] = found
        return float(solution[0] * unit), float(solution[1]), float(solution[2] * unit / tokens)

    def _lifted(
        self, probes: Sequence[Probe], *, base: float, fixed: float, factor: float, token: float
    ) -> CalibratedCost:
        """The model raised by the factor that brings it above every probe, and by a byte where there is no factor."""
        model = CalibratedCost(self.forms, c=base + fixed, s=factor, d=token)
        lift = 1.0
        for probe in probes:
            above = model.peak_bytes(probe.shape) - base
            if above > 0:
                lift = max(lift, (probe.peak_bytes - base) / above)
        lifted = CalibratedCost(self.forms, c=base + lift * fixed, s=lift * factor, d=lift * token)
        missing = max(0, *(probe.peak_bytes - lifted.peak_bytes(probe.shape) for probe in probes))
        return CalibratedCost(self.forms, c=base + lift * fixed + missing, s=lift * factor, d=lift * token)


def _error(cost: CalibratedCost, probe: Probe) -> float:
    above = max(probe.peak_bytes - probe.baseline_bytes, 1)
    return abs(cost.peak_bytes(probe.shape) - probe.peak_bytes) / above
