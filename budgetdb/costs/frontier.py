"""The frontier of a cost model under a limit, and the one token budget that is safe everywhere below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from budgetdb.costs.base import CostModel
from budgetdb.costs.forms import UNLIMITED
from budgetdb.profiles import Bound, Caps, FrontierPoint, Probe, Profile
from budgetdb.shapes import Shape, padded_length

# The frontier is stored at powers of two and at probed lengths: enough to read, and the cost model holds the rest.
_SHORTEST_SHOWN = 8


@dataclass(frozen=True)
class Solved:
    """What a limit allows.

    Attributes:
        max_length: longest padded length of which at least one row fits.
        bound: what decides there; `max_length` when the caller says that a longer one was wanted and can't be.
        token_budget: the largest number B such that `k * L <= B` implies that (k, L) fits, for every L up to it and k
            up to `caps.rows`, where that is set.
        frontier: the largest batch size at selected lengths.
    """

    max_length: int
    bound: Bound
    token_budget: int
    frontier: tuple[FrontierPoint, ...]


def max_batch_sizes(cost: CostModel, lengths: NDArray[np.int64], *, usable_bytes: int, caps: Caps) -> NDArray[np.int64]:
    """The largest batch size at each padded length, shape `(len(lengths),)`; 0 where not even one row fits."""
    sizes = cost.max_batch_sizes(lengths.tolist(), usable_bytes)
    if caps.rows is not None:
        sizes = np.minimum(sizes, caps.rows)
    if caps.tokens is not None:
        sizes = np.minimum(sizes, caps.tokens // lengths)
    if caps.squares is not None:
        sizes = np.minimum(sizes, caps.squares // lengths**2)
    return sizes


def solve(
    cost: CostModel,
    *,
    usable_bytes: int,
    max_length: int,
    caps: Caps | None = None,
    pad_multiple: int = 1,
    probes: Sequence[Probe] = (),
    length_bound: Bound | None = None,
) -> Solved | None:
    """What `usable_bytes` (the limit less the headroom) allow up to `max_length`; None when no row fits at all.

    `length_bound` is the bound to name when `max_length` itself fits; by default what decides the batch size there.
    """
    caps = caps or Caps()
    lengths = np.arange(pad_multiple, max_length + 1, pad_multiple, dtype=np.int64)
    sizes = max_batch_sizes(cost, lengths, usable_bytes=usable_bytes, caps=caps)
    fitting = int(np.argmin(sizes)) if (sizes == 0).any() else len(sizes)  # sizes never rise, so the first 0 ends it
    if fitting == 0:
        return None
    lengths, sizes = lengths[:fitting], sizes[:fitting]
    longest = int(lengths[-1])
    any_rows = sizes
    if caps.rows is not None:
        caps_of_tokens = caps.model_copy(update={"rows": None})
        any_rows = max_batch_sizes(cost, lengths, usable_bytes=usable_bytes, caps=caps_of_tokens)
    # B is safe at L when floor(B / L) <= size, that is when B < (size + 1) * L.
    token_budget = int(((np.minimum(any_rows, UNLIMITED) + 1) * lengths).min()) - 1
    shown = _shown_lengths(lengths, probes, pad_multiple)
    probed = {probe.length for probe in probes if probe.fits}
    frontier = tuple(
        FrontierPoint(
            length=length,
            batch_size=(size := int(sizes[length // pad_multiple - 1])),
            peak_bytes=cost.peak_bytes(Shape(size, length)),
            bound=_bound(cost, size, length, usable_bytes=usable_bytes, caps=caps),
            probed=length in probed,
        )
        for length in shown
    )
    if longest + pad_multiple <= max_length:
        bound = _bound(cost, 0, longest + pad_multiple, usable_bytes=usable_bytes, caps=caps)
    else:
        bound = length_bound or frontier[-1].bound
    return Solved(max_length=longest, bound=bound, token_budget=token_budget, frontier=frontier)


def solve_profile(profile: Profile, limit_bytes: int, *, headroom_bytes: int | None = None) -> Profile | None:
    """`profile` solved again for another limit, or None when no row fits it; probes and cost model stay."""
    headroom = profile.headroom_bytes if headroom_bytes is None else headroom_bytes
    solved = solve(
        profile.cost_model,
        usable_bytes=max(limit_bytes - headroom, 0),
        max_length=profile.max_length,
        caps=profile.caps,
        pad_multiple=profile.key.pad_multiple,
        probes=profile.probes,
        length_bound=Bound.MAX_LENGTH if profile.bound is Bound.MAX_LENGTH else None,
    )
    if solved is None:
        return None
    return profile.model_copy(
        update={
            "limit_bytes": limit_bytes,
            "headroom_bytes": headroom,
            "max_length": solved.max_length,
            "bound": solved.bound,
            "token_budget": solved.token_budget,
            "frontier": solved.frontier,
        }
    )


def _shown_lengths(lengths: NDArray[np.int64], probes: Iterable[Probe], pad_multiple: int) -> list[int]:
    shortest, longest = int(lengths[0]), int(lengths[-1])
    wanted = {padded_length(_SHORTEST_SHOWN << i, pad_multiple) for i in range(40)}
    wanted |= {probe.length for probe in probes} | {longest}
    return sorted(n for n in wanted if shortest <= n <= longest and n % pad_multiple == 0)


def _bound(cost: CostModel, size: int, length: int, *, usable_bytes: int, caps: Caps) -> Bound:
    return Bound.MEMORY if cost.max_batch_size(length, usable_bytes) == size else caps.reason
