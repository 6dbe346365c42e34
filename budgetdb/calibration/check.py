"""The final check: run the worst batches of a mixed-length evaluation, at the very frontier that will be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from budgetdb.calibration.planner import Planner
from budgetdb.calibration.search import SearchResult, conclude
from budgetdb.costs.frontier import max_batch_sizes
from budgetdb.errors import CalibrationTimeoutError
from budgetdb.profiles import Probe
from budgetdb.shapes import Shape, padded_length

# Shares of the longest length that are run, beside the lengths that the search settled: between those the cost model
# has only been drawn, not measured.
SHARES = (1.0, 0.75, 0.5, 0.25)
# A trace has measured what lies between: one batch beside those of the search tells whether it did.
GUIDED_SHARES = (1.0, 0.5)
# A batch counts as run when one of this share of its rows did.
_NEARLY = 0.98
# Each round shrinks what failed by a few percent or extends what turned out cheaper; more than two are rare.
_MAX_ROUNDS = 8


def check_frontier(
    planner: Planner,
    found: SearchResult,
    probe: Callable[[Shape], Probe],
    *,
    limit_bytes: int,
    shares: Sequence[float] = SHARES,
) -> SearchResult:
    """Run the frontier's batches longest first, without cleaning in between, and refit with what they took.

    A warm allocator is fragmented, so a batch can fail here that fitted alone; it then joins the evidence, and the
    smaller frontier is run again. Batches that have run already, or one within tolerance of them, are not repeated.
    """
    for _ in range(_MAX_ROUNDS):
        unverified = [shape for shape in _worst_shapes(planner, found, shares) if not _has_run(shape, found.probes)]
        if found.expired or not unverified:
            break
        probes, expired = list(found.probes), False
        for shape in unverified:
            try:
                probes.append(probe(shape))
            except CalibrationTimeoutError:
                expired = True
            if expired or not probes[-1].fits:
                break
        found = conclude(planner, probes, limit_bytes=limit_bytes, expired=expired)
    return found


def _worst_shapes(planner: Planner, found: SearchResult, shares: Sequence[float]) -> list[Shape]:
    longest = found.solved.max_length
    lengths = {min(padded_length(int(share * longest), planner.pad_multiple), longest) for share in shares}
    lengths |= {length for length in planner.lengths if length <= longest}
    ordered = sorted(lengths, reverse=True)
    sizes = max_batch_sizes(
        found.cost, np.array(ordered, dtype=np.int64), usable_bytes=planner.usable_bytes, caps=found.caps
    )
    return [Shape(int(size), length) for size, length in zip(sizes, ordered, strict=True) if size]


def _has_run(shape: Shape, probes: tuple[Probe, ...]) -> bool:
    """Whether a batch as large, or nearly so, fitted at this length."""
    return any(
        probe.fits and probe.length == shape.length and probe.batch_size >= _NEARLY * shape.batch_size
        for probe in probes
    )
