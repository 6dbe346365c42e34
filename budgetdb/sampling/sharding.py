"""One plan over many ranks: every sample once, no communication, and all ranks done at about the same time.

Each rank plans alike, so the rules are functions of the plan and the world alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from budgetdb.errors import UsageError
from budgetdb.sampling.packing import index_dtype, pack_by_waste, pack_fewest, padded_lengths
from budgetdb.sampling.plan import Packing, Plan
from budgetdb.sampling.rows import GivenRows
from budgetdb.sampling.times import TimeModel

# A cost cap is bisected to this share of itself.
_CAP_SHARE = 1e-4


def even_plan(plan: Plan, *, world_size: int) -> Plan:
    """`plan`'s samples in a number of batches that is a multiple of `world_size`, of costs as even as can be.

    With B batches over W ranks there are `T = W * ceil(B / W)` afterwards. One cap on the cost of a batch is bisected:
    the smallest that takes no more than T batches. Where it takes fewer, the costliest become two each, of
    `ceil(k / 2)` and `floor(k / 2)` rows: a part of a batch that fits fits. Where there are fewer samples than T, each
    is a batch by then, and duplicates of the shortest one (the cheapest to run twice) make up the number, listed in
    `duplicates`.
    """
    batches = len(plan) + -len(plan) % world_size
    if world_size > 1 and plan.packing is not None and len(plan) and plan.emitted > batches:
        plan = _capped_plan(plan.packing, plan, batches)
    plan = _split_costliest(plan, batches)
    missing = batches - len(plan)
    if not missing:
        return plan
    shortest = int(np.argmin(plan.batch_lengths))
    ends = plan.emitted + np.arange(missing)
    extended = plan.select(np.concatenate([np.arange(len(plan)), np.full(missing, shortest)]))
    return replace(extended, duplicates=ends.astype(index_dtype(plan.emitted + missing)))


def assign(plan: Plan, *, world_size: int) -> NDArray[np.int64]:
    """The rank of each batch of an even plan, as many for each: shape `(batches,)`.

    Costliest first, W at a time, the costliest of these to the rank with least so far: the longest-processing-time rule
    (Graham 1969) with equal numbers.
    """
    costs = batch_costs(plan)
    by_cost = np.argsort(-costs, kind="stable")
    ranks = np.empty(len(plan), dtype=np.int64)
    loads = np.zeros(world_size)
    for first in range(0, len(plan), world_size):
        batches = by_cost[first : first + world_size]
        least_first = np.argsort(loads, kind="stable")
        ranks[batches] = least_first
        loads[least_first] += costs[batches]
    return ranks


def assign_by_speed(plan: Plan, *, speeds: Sequence[float]) -> NDArray[np.int64]:
    """The rank of each batch where ranks run at different `speeds`: each to the one that would be done with it first.

    Faster ranks get more batches; shape `(batches,)`.

    Raises:
        UsageError: a speed is not positive.
    """
    if not all(speed > 0 for speed in speeds):
        raise UsageError(f"speeds must be positive, got {list(speeds)}", next_step="Give batches or tokens per second")
    costs = batch_costs(plan)
    ranks = np.empty(len(plan), dtype=np.int64)
    # Of ranks of one speed the one done first is best: one queue for each speed.
    queues: dict[float, list[tuple[float, int]]] = {}
    for rank, speed in enumerate(speeds):
        queues.setdefault(speed, []).append((0.0, rank))
    for batch in np.argsort(-costs, kind="stable").tolist():
        done, rank, speed = min(
            (queue[0][0] + float(costs[batch]) / speed, queue[0][1], speed) for speed, queue in queues.items()
        )
        heapq.heapreplace(queues[speed], (done, rank))
        ranks[batch] = rank
    return ranks


def rank_plan(plan: Plan, ranks: NDArray[np.int64], *, rank: int) -> Plan:
    """The batches of one rank, in the order of `plan`."""
    return plan.select(np.flatnonzero(ranks == rank))


def gathered_plan(plan: Plan, ranks: NDArray[np.int64]) -> Plan:
    """All batches in the order in which outputs arrive, rank 0's first, then rank 1's."""
    return plan.select(np.argsort(ranks, kind="stable"))


def block_plans(plan: Plan, *, rank: int, world_size: int) -> tuple[Plan, Plan]:
    """For loops that gather the outputs of each step: as many rows on every rank in every step.

    Every W-th sample, longest first, is packed as if it were alone, and stands for the W from there on: rank r takes
    the r-th of them. So each step has `world_size * n` rows, of neighbouring lengths, and no rank more than fits. The
    last of them is filled up with duplicates of the shortest sample.

    Returns:
        The plan of one rank, and that of all, of which batch b holds the rows of all ranks in step b, rank 0's first.

    Raises:
        UsageError: the plan's batches were not cut by length alone.
    """
    packing = plan.packing
    if packing is None:
        raise UsageError("these batches can't be gathered step by step", next_step="Call `shard` without gather")
    rows = replace(packing.rows, longest_first=True)
    turns = -(-len(rows) // world_size)
    missing = turns * world_size - len(rows)
    order = np.concatenate([rows.indices, np.repeat(rows.indices[-1:], missing)])
    sizes = packing.strategy.batch_sizes(packing.histogram.every(world_size), packing.times)
    if not packing.rows.longest_first:
        order, sizes = order.reshape(turns, world_size)[::-1].ravel(), sizes[::-1]
    by_turn = order.reshape(turns, world_size)
    duplicates = np.arange(world_size - missing, world_size) if missing else np.zeros(0, int)
    last = turns - 1 if packing.rows.longest_first else 0
    own = _plan_of(
        packing, by_turn[:, rank], sizes, duplicates=np.array([last] if rank in duplicates else [], dtype=int)
    )
    together = np.concatenate([block.T.ravel() for block in np.split(by_turn, np.cumsum(sizes)[:-1])] or [order])
    marked = np.flatnonzero(np.isin(_turns_of(sizes, world_size), duplicates + last * world_size))
    return own, _plan_of(packing, together, sizes * world_size, duplicates=marked)


def batch_costs(plan: Plan) -> NDArray[np.float64]:
    """What each batch costs: seconds where they are known, else tokens."""
    return _times(plan.packing).batch_seconds(plan.batch_sizes, plan.batch_lengths)


def _times(packing: Packing | None) -> TimeModel:
    return packing.times if packing is not None and packing.times is not None else TimeModel(0.0, 1.0)


def _capped_plan(packing: Packing, plan: Plan, batches: int) -> Plan:
    """`batches` batches or fewer, none of which costs more than the smallest cap that allows that."""
    histogram, times = packing.histogram, _times(packing)
    row_costs = times.row_seconds(histogram.lengths)

    def sizes_under(cap: float) -> NDArray[np.int64]:
        rows = np.maximum((cap - times.step_s) / row_costs, 1).astype(np.int64)
        rows = np.minimum(rows, histogram.rows)
        if packing.times is None:
            return pack_fewest(histogram.counts, rows)
        return pack_by_waste(histogram.counts, rows, row_costs, allowed=times.step_s)

    costs = batch_costs(plan)
    low, high = times.step_s + float(row_costs[0]), float(costs.max())
    best = sizes_under(high)
    if len(best) > batches:  # the plan's own strategy wastes more, and makes fewer
        return plan
    while high - low > _CAP_SHARE * high:
        middle = (low + high) / 2
        sizes = sizes_under(middle)
        if len(sizes) <= batches:
            best, high = sizes, middle
        else:
            low = middle
    return packing.plan(best if packing.rows.longest_first else best[::-1])


def _split_costliest(plan: Plan, batches: int) -> Plan:
    """`plan` with its costliest batches halved until there are `batches`, or every one is a single row."""
    if len(plan) >= batches or not len(plan):
        return plan
    costs, sizes = batch_costs(plan), plan.batch_sizes.tolist()
    times = _times(plan.packing)
    lengths = plan.batch_lengths
    # No more than the costliest can be touched: each split takes one batch, and there are so many splits.
    costliest = [batch for batch in np.argsort(-costs, kind="stable").tolist() if sizes[batch] > 1]
    heap = [(-float(costs[batch]), batch, 0, sizes[batch]) for batch in costliest[: batches - len(plan)]]
    heapq.heapify(heap)
    parts: dict[int, list[int]] = {}
    count = len(plan)
    while count < batches and heap:
        _, batch, offset, rows = heapq.heappop(heap)
        first = (rows + 1) // 2
        parts.setdefault(batch, [0]).append(offset + first)
        count += 1
        for start, part in ((offset, first), (offset + first, rows - first)):
            if part > 1:
                seconds = times.batch_seconds(np.array([part]), lengths[batch : batch + 1])[0]
                heapq.heappush(heap, (-float(seconds), batch, start, part))
    cuts = [int(plan.starts[batch]) + start for batch, starts in parts.items() for start in starts if start]
    starts = np.sort(np.concatenate([plan.starts, np.array(cuts, dtype=np.int64)]))
    new_sizes = np.diff(starts, append=plan.emitted)
    return plan.packing.plan(new_sizes) if plan.packing is not None else _recut(plan, new_sizes)


def _recut(plan: Plan, sizes: NDArray[np.int64]) -> Plan:
    """`plan`'s rows in batches of `sizes`, each no part of two: lengths stay those of the batch it was in."""
    ends = np.cumsum(sizes)
    holders = np.searchsorted(np.cumsum(plan.batch_sizes), ends - sizes, side="right")
    return replace(
        plan,
        starts=ends - sizes,
        batch_sizes=sizes,
        batch_lengths=plan.batch_lengths[holders],
        batch_tokens=plan.batch_tokens[holders] * sizes // np.maximum(plan.batch_sizes[holders], 1),
    )


def _plan_of(
    packing: Packing, order: NDArray[np.int64], sizes: NDArray[np.int64], *, duplicates: NDArray[np.int64]
) -> Plan:
    """A plan of rows in a given order."""
    lengths = packing.rows.lengths[order].astype(np.int64)
    ends = np.cumsum(sizes)
    longest = np.maximum.reduceat(lengths, ends - sizes) if len(sizes) else ends
    padded = padded_lengths(longest, pad_multiple=packing.pad_multiple, extra_tokens=packing.extra_tokens)
    dtype, oversize = index_dtype(len(order)), packing.oversize()
    return Plan(
        rows=GivenRows(order.astype(dtype)),
        starts=ends - sizes,
        batch_sizes=sizes,
        batch_lengths=padded,
        batch_tokens=np.add.reduceat(lengths, ends - sizes) if len(sizes) else ends,
        extra_tokens=packing.extra_tokens,
        oversize=oversize[np.isin(oversize, order)],
        duplicates=duplicates.astype(dtype),
    )


def _turns_of(sizes: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """For rows gathered step by step, where each stood before: turn * world_size + rank."""
    places = np.arange(int(sizes.sum()) * world_size).reshape(-1, world_size)
    return np.concatenate([block.T.ravel() for block in np.split(places, np.cumsum(sizes)[:-1])] or [places.ravel()])
