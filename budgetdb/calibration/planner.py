"""Which shape to probe next: a pure function of the probes so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from budgetdb.calibration.evidence import Evidence, fit_cost
from budgetdb.costs.base import CostModel, Fitter
from budgetdb.costs.forms import UNLIMITED
from budgetdb.profiles import Caps, Outcome, Probe
from budgetdb.shapes import Shape

# A length is settled when the room left above the best probe, as a share of the room above the fixed part, is at most
# this. The frontier is where the fitted line meets the limit, so this is how far the line is trusted beyond the last
# probe, not what is given away. The fixed part is left out: 3 % of a card full of weights can be a third of the room.
TOLERANCE = 0.05
# After so many probes of one length, or a failure at it, noise is what keeps it open: then this much is enough.
_MANY_ATTEMPTS = 3
_TIRED_TOLERANCE = 0.10
# After so many it is left in any case, at the largest batch that fitted.
_MOST_ATTEMPTS = 12
# The gap between the largest batch that fits and the smallest that fails, as a share of the latter (DESIGN 6.5).
_GAP = 0.03
# Share of the predicted frontier at which to probe (DESIGN 6.4): close enough to settle the length, under it by more
# than a clean measurement errs.
_AIM = 0.985
# Share of the smallest failure that is tried next when nothing better is known; squared with each further failure.
_BACK_OFF = 0.93
# A line through two peaks is extended only as far as an error of this share in one of them could not carry it over
# the limit by a tenth.
_TRUSTED_ERROR = 0.003


@dataclass(frozen=True)
class Planner:
    """Chooses shapes until the frontier is known at each of `lengths`; knows nothing of devices or models.

    Longest length first: its bytes per token are the highest, so what it shows is safe to start from at the shorter
    ones. It starts at one row, whose peak above the baseline bounds the slope from above, and each further guess is
    where the line through what was measured meets the limit, less a little.

    Attributes:
        lengths: padded lengths to settle.
        usable_bytes: the limit less the headroom.
        cost: fits a cost model along the way: a fitted kind, or a trace to scale.
        caps: limits that are not memory.
        pad_multiple: what lengths are multiples of, needed when the longest does not fit and is bisected.
        first_guess: a cost model from elsewhere (a trace, another profile) that takes the place of the first probes.
        max_step_s: no batch whose step would take longer is tried, or None.
    """

    lengths: Sequence[int]
    usable_bytes: int
    cost: Fitter
    caps: Caps = field(default_factory=Caps)
    pad_multiple: int = 1
    first_guess: CostModel | None = None
    max_step_s: float | None = None

    def next_shape(self, probes: Sequence[Probe]) -> Shape | None:
        """The shape to probe next, or None when every length is settled or nothing fits at all."""
        evidence = Evidence(tuple(probes), self.usable_bytes)
        shorter = self._shorten(evidence)
        if shorter is not None:
            return shorter
        for length in self.settled_lengths(evidence):
            shape = self._next_at(length, evidence)
            if shape is not None:
                return shape
        return None

    def settled_lengths(self, evidence: Evidence) -> list[int]:
        """The lengths that can be settled, in the order they are: the longest that fits, the shortest, the others."""
        failed = evidence.smallest_failure_length()
        reachable = sorted((n for n in self.lengths if failed is None or n < failed), reverse=True)
        if failed is not None and evidence.longest_fit() not in reachable:
            reachable = [evidence.longest_fit(), *(n for n in reachable if n < evidence.longest_fit())]
        reachable = [n for n in reachable if n > 0]
        return [*reachable[:1], *reachable[:0:-1][:1], *reachable[1:-1]]

    def _shorten(self, evidence: Evidence) -> Shape | None:
        """One row of a shorter length, while one row of the longest is known not to fit."""
        failed = evidence.smallest_failure_length()
        if failed is None:
            return None
        fitting = evidence.longest_fit()
        shortest = min(self.lengths)
        if fitting == 0:
            return Shape(1, shortest) if shortest < failed else None
        gap = max(self.pad_multiple, int(_GAP * failed))
        if failed - fitting <= gap:
            return None
        guess = self._longer(fitting, evidence) // self.pad_multiple * self.pad_multiple
        return Shape(1, min(max(guess, fitting + self.pad_multiple), failed - self.pad_multiple))

    def _longer(self, fitting: int, evidence: Evidence) -> int:
        """Where one row would fill the memory if its cost grew with the square of the length, or half-way there."""
        failed = evidence.smallest_failure_length() or fitting
        middle = math.sqrt(fitting * failed)
        rows = {probe.length: probe.peak_bytes for probe in evidence.probes if probe.batch_size == 1 and probe.fits}
        before = max((length for length in rows if length < fitting), default=None)
        if before is None or fitting not in rows or rows[fitting] <= rows[before]:
            return int(middle)
        square = (rows[fitting] - rows[before]) / (fitting**2 - before**2)
        return int(min(middle, math.sqrt(fitting**2 + (self.usable_bytes - rows[fitting]) / square)))

    def _next_at(self, length: int, evidence: Evidence) -> Shape | None:
        """The next shape at `length`, or None when it is settled."""
        lower, failure = evidence.largest_fit(length), evidence.smallest_failure(length)
        upper = min(self._cap(length, evidence), failure - 1 if failure is not None else UNLIMITED)
        if lower >= upper or self._is_settled(length, evidence):
            return None
        guess = self._guess(length, evidence)
        if failure is not None:
            if failure - lower <= _GAP * failure:
                return None
            back_off = _BACK_OFF ** (2 ** (evidence.failures(length) - 1))
            guess = min(guess, int(max(math.sqrt(lower * failure), back_off * failure)))
        return Shape(min(max(guess, lower + 1), upper), length)

    def _is_settled(self, length: int, evidence: Evidence) -> bool:
        fits = evidence.fits_at(length)
        if not fits:
            return False
        if evidence.attempts(length) >= _MOST_ATTEMPTS:
            return True
        best = fits[-1]
        rest = self._model(evidence, length).peak_bytes(Shape(0, length))
        left, room = self.usable_bytes - best.peak_bytes, max(self.usable_bytes - rest, 1)
        tired = evidence.attempts(length) >= _MANY_ATTEMPTS or evidence.smallest_failure(length) is not None
        if left <= (_TIRED_TOLERANCE if tired else TOLERANCE) * room:
            return True
        one_line = len(fits) > 1 or best.baseline_bytes > 0
        return one_line and left <= self._slope(fits, rest)

    def _slope(self, fits: Sequence[Probe], rest: int) -> float:
        """Bytes for each further row: on the line from the fixed part, or the smallest batch if that is flatter."""
        best, smallest = fits[-1], fits[0]
        slope = (best.peak_bytes - rest) / best.batch_size
        if smallest.batch_size < best.batch_size:
            secant = (best.peak_bytes - smallest.peak_bytes) / (best.batch_size - smallest.batch_size)
            slope = min(slope, secant)
        return max(slope, 0.0)

    def _guess(self, length: int, evidence: Evidence) -> int:
        """The batch size expected to come just under the limit."""
        fits = evidence.fits_at(length)
        model = self._model(evidence, length)
        if not fits:
            nothing_known = self.first_guess is None and not any(map(evidence.fitted, evidence.probes))
            # Rounded up: of few rows, one less is more than the share that is left.
            return 1 if nothing_known else math.ceil(_AIM * model.max_batch_size(length, self.usable_bytes))
        best, smallest = fits[-1], fits[0]
        slope = self._slope(fits, model.peak_bytes(Shape(0, length)))
        further = (self.usable_bytes - best.peak_bytes) / slope if slope > 0 else math.inf
        span = best.batch_size - (smallest.batch_size if len(fits) > 1 else 0)
        further = min(further, span * 0.1 * self.usable_bytes / (_TRUSTED_ERROR * best.peak_bytes))
        aimed = int(_AIM * (best.batch_size + further))
        return aimed if aimed > best.batch_size else int(best.batch_size + further)

    def _cap(self, length: int, evidence: Evidence) -> int:
        """The largest batch size worth trying: by the caps, and by the time a step may take."""
        cap = self.caps.clip(UNLIMITED, length)
        tokens = tokens_in_time(evidence, length, self.max_step_s)
        return cap if tokens is None else max(min(cap, tokens // length), 1)

    def _model(self, evidence: Evidence, length: int) -> CostModel:
        """The best model at hand: fitted, or the first guess while nothing ran at `length` or near it."""
        if not any(map(evidence.fitted, evidence.probes)):
            return self.first_guess if self.first_guess is not None else self.cost.fit([_nothing(length)])
        return fit_cost(self.cost, evidence)


def tokens_in_time(evidence: Evidence, length: int, max_step_s: float | None) -> int | None:
    """How many tokens a step of `max_step_s` takes, judged by the largest step that ran; None when unknown.

    Steps of under a tenth of a second are mostly overhead and say nothing.
    """
    if max_step_s is None:
        return None
    timed = [probe for probe in evidence.probes if probe.fits and probe.elapsed_s >= 0.1]
    same = [probe for probe in timed if probe.length == length] or timed
    if not same:
        return None
    largest = max(same, key=lambda probe: probe.shape.tokens)
    return max(int(largest.shape.tokens * max_step_s / largest.elapsed_s), length)


def _nothing(length: int) -> Probe:
    return Probe(batch_size=1, length=length, outcome=Outcome.FITS)
