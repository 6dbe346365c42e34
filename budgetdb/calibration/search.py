"""The search: ask the planner, run the probe, until the frontier is known at every length asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from budgetdb.calibration.evidence import Evidence, fit_cost
from budgetdb.calibration.planner import Planner, tokens_in_time
from budgetdb.costs.base import CostModel, Fitter
from budgetdb.costs.frontier import Solved, solve
from budgetdb.errors import CalibrationTimeoutError, DoesNotFitError, UsageError
from budgetdb.plugins import COSTS
from budgetdb.profiles import Bound, Caps, Outcome, Probe
from budgetdb.settings import format_bytes
from budgetdb.shapes import Shape

ProbeFunction = Callable[[Shape], Probe]


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        cost: fitted to the probes, on the safe side of each.
        solved: the frontier under the limit, the token budget, the longest length that fits and what bounds it.
        caps: limits that are not memory, with those the search met (the time a step may take, a kernel's grid).
        probes: all of them, in the order they ran.
        expired: whether time ran out first; nothing larger than what ran is then allowed.
    """

    cost: CostModel
    solved: Solved
    caps: Caps
    probes: tuple[Probe, ...]
    expired: bool = False


def search(
    probe: ProbeFunction,
    *,
    lengths: Sequence[int],
    cost: Fitter | str,
    limit_bytes: int,
    headroom_bytes: int = 0,
    first_guess: CostModel | None = None,
    caps: Caps | None = None,
    pad_multiple: int = 1,
    known: Sequence[Probe] = (),
    max_step_s: float | None = None,
    timeout_s: float | None = None,
) -> SearchResult:
    """Find the largest batch size at every length, in few probes.

    Args:
        probe: runs one step at a shape and says what it took, or that it ran out of memory.
        lengths: padded lengths to settle; the frontier in between comes from the cost model.
        cost: kind of cost model to fit, by class or by name, or a trace to scale.
        limit_bytes: what the process may use.
        headroom_bytes: taken off the limit.
        first_guess: a cost model from elsewhere to start from.
        caps: limits that are not memory.
        pad_multiple: what padded lengths are multiples of.
        known: probes of an earlier, interrupted search; they are not run again.
        max_step_s: no batch whose step would take longer is tried.
        timeout_s: stop after this long with the best so far.

    Raises:
        UsageError: no lengths, or lengths that are not positive multiples of `pad_multiple`.
        DoesNotFitError: not even one row of the shortest length fits.
        CalibrationTimeoutError: the time ran out before anything ended.
    """
    _check_lengths(lengths, pad_multiple)
    usable = max(limit_bytes - headroom_bytes, 0)
    planner = Planner(
        lengths=lengths,
        usable_bytes=usable,
        cost=COSTS.get(cost) if isinstance(cost, str) else cost,
        caps=caps or Caps(),
        pad_multiple=pad_multiple,
        first_guess=first_guess,
        max_step_s=max_step_s,
    )
    return run_search(planner, probe, limit_bytes=limit_bytes, known=known, timeout_s=timeout_s)


def run_search(
    planner: Planner,
    probe: ProbeFunction,
    *,
    limit_bytes: int,
    known: Sequence[Probe] = (),
    timeout_s: float | None = None,
) -> SearchResult:
    """Probe what `planner` asks for until it asks for nothing more; see `search`."""
    probes, expired = list(known), False
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    while (shape := planner.next_shape(probes)) is not None:
        if deadline is not None and time.monotonic() > deadline:
            expired = True
            break
        try:
            probes.append(probe(shape))
        except CalibrationTimeoutError:
            expired = True
            break
    return conclude(planner, probes, limit_bytes=limit_bytes, expired=expired)


def conclude(planner: Planner, probes: Sequence[Probe], *, limit_bytes: int, expired: bool = False) -> SearchResult:
    """The result that `probes` support.

    `expired` says that time ran out: no batch larger than the largest that ran is then allowed at any length.

    Raises:
        DoesNotFitError: no probe fitted.
        CalibrationTimeoutError: no probe fitted because time ran out.
    """
    evidence = Evidence(tuple(probes), planner.usable_bytes)
    if not any(map(evidence.fitted, probes)):
        if expired:
            raise CalibrationTimeoutError("time ran out before any probe ended", next_step="Allow more time")
        raise _does_not_fit(probes, limit_bytes=limit_bytes, usable_bytes=planner.usable_bytes)
    model = fit_cost(planner.cost, evidence)
    caps = _caps(planner, evidence, expired=expired)
    longest = planner.settled_lengths(evidence)[0]
    solved = solve(
        model,
        usable_bytes=planner.usable_bytes,
        max_length=longest,
        caps=caps,
        pad_multiple=planner.pad_multiple,
        probes=probes,
        length_bound=None if longest >= max(planner.lengths) else Bound.MEMORY,
    )
    if solved is None:
        raise _does_not_fit(probes, limit_bytes=limit_bytes, usable_bytes=planner.usable_bytes)
    return SearchResult(cost=model, solved=solved, caps=caps, probes=tuple(probes), expired=expired)


def _check_lengths(lengths: Sequence[int], pad_multiple: int) -> None:
    if not lengths:
        raise UsageError("no lengths to settle", next_step="Give at least one padded length")
    for length in lengths:
        if length < 1 or length % pad_multiple:
            raise UsageError(
                f"length {length} is no positive multiple of {pad_multiple}", next_step="Give padded lengths"
            )


def _caps(planner: Planner, evidence: Evidence, *, expired: bool) -> Caps:
    """The planner's caps, tightened by what the search met."""
    caps = planner.caps
    grid = [probe.batch_size for probe in evidence.probes if probe.outcome is Outcome.KERNEL_LIMIT]
    if grid:
        rows = min(grid) - 1
        caps = caps.model_copy(update={"rows": max(min(rows, caps.rows or rows), 1)})
    tokens = _time_cap(planner, evidence)
    if expired:
        ran = max(probe.shape.tokens for probe in evidence.probes if evidence.fitted(probe))
        tokens = min(ran, tokens or ran)
    if tokens is None or (caps.tokens is not None and caps.tokens <= tokens):
        return caps
    return caps.model_copy(update={"tokens": tokens, "reason": Bound.TIME})


def _time_cap(planner: Planner, evidence: Evidence) -> int | None:
    """Tokens that a step may have so as to end in time, where time was what ended the search at some length."""
    limits = []
    for length in planner.settled_lengths(evidence):
        tokens = tokens_in_time(evidence, length, planner.max_step_s)
        fits = evidence.fits_at(length)
        if tokens is not None and fits and fits[-1].batch_size >= tokens // length:
            limits.append(max(fits[-1].shape.tokens, length))
    return min(limits, default=None)


def _does_not_fit(probes: Sequence[Probe], *, limit_bytes: int, usable_bytes: int) -> DoesNotFitError:
    ended = [probe for probe in probes if probe.fits]
    needed = min((probe.peak_bytes for probe in ended), default=None)
    resident = max((probe.baseline_bytes for probe in probes), default=0)
    smallest = min((probe.shape for probe in probes), key=lambda shape: shape.tokens, default=Shape(1, 1))
    takes = f"takes {format_bytes(needed)}" if needed else f"takes more than {format_bytes(usable_bytes)}"
    return DoesNotFitError(
        f"not even one row of {smallest.length} tokens fits: a step {takes} ({format_bytes(resident)} of it before the "
        f"step), and {format_bytes(usable_bytes)} of the limit of {format_bytes(limit_bytes)} may be used",
        needed_bytes=needed,
        limit_bytes=limit_bytes,
        next_step="Raise --memory-limit, free memory on the device, or use a smaller dtype",
    )
