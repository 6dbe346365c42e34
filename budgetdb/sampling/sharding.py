"""One plan over many ranks: the same number of batches on each, every sample once, and no communication.

Each rank plans alike, so the rule has to be a function of the plan and the world size alone.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from budgetdb.errors import UsageError
from budgetdb.sampling.packing import IndexArray
from budgetdb.sampling.plan import Plan


def even_plan(plan: Plan, *, world_size: int) -> Plan:
    """`plan` with a number of batches that is a multiple of `world_size`, still in its order.

    With B batches of n samples over W ranks there are `T = W * ceil(B / W)` afterwards. As long as there are fewer,
    the batch with most rows (the first of them), of k rows, becomes two in its place, of `ceil(k / 2)` and
    `floor(k / 2)`: a part of a batch that fits fits. Where `T > n`, each sample is a batch by then, and `T - n`
    duplicates of the shortest one (the cheapest to run twice) follow at the end, each a batch, listed in `duplicates`.
    """
    batches = len(plan.ends) + -len(plan.ends) % world_size
    ends = _split_largest(plan.ends, batches)
    missing = batches - len(ends)
    if not missing:
        return replace(plan, ends=ends)
    shortest = int(np.argmin(plan.lengths))
    rows = np.arange(len(plan.order), len(plan.order) + missing)
    return replace(
        plan,
        order=np.append(plan.order, np.repeat(plan.order[shortest], missing)),
        ends=np.append(ends, (rows + 1).astype(ends.dtype)),
        lengths=np.append(plan.lengths, np.repeat(plan.lengths[shortest], missing)),
        duplicates=rows.astype(plan.order.dtype),
    )


def rank_plan(plan: Plan, *, rank: int, world_size: int) -> Plan:
    """Rank r's part of an even plan: batches `r, r + W, r + 2W, ...`, so that neighbours in length run together.

    Raises:
        UsageError: there is no such rank.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of a world of {world_size} does not exist", next_step="Give 0 <= rank < world_size"
        )
    return plan.select(np.arange(rank, len(plan.ends), world_size))


def gathered_plan(plan: Plan, *, world_size: int) -> Plan:
    """An even plan in the order in which its outputs arrive, rank 0's first, then rank 1's."""
    owners = np.arange(len(plan.ends)) % world_size
    return plan.select(np.argsort(owners, kind="stable"))


def _split_largest(ends: IndexArray, batches: int) -> IndexArray:
    """`ends` and the cuts that make `batches` of them, or fewer where every one is a single row."""
    sizes = np.diff(ends, prepend=ends.dtype.type(0))
    # No more than the largest can be touched: each split takes one batch, and there are so many splits.
    largest = np.argsort(-sizes, kind="stable")[: batches - len(ends)]
    heap = [
        (-int(sizes[batch]), int(ends[batch] - sizes[batch])) for batch in largest
    ]  # most rows first, then the first
    heapq.heapify(heap)
    cuts: list[int] = []
    while len(ends) + len(cuts) < batches and heap[0][0] < -1:
        negative_rows, start = heapq.heappop(heap)
        first, second = (1 - negative_rows) // 2, -negative_rows // 2
        cuts.append(start + first)
        heapq.heappush(heap, (-first, start))
        heapq.heappush(heap, (-second, start + first))
    return np.sort(np.append(ends, np.array(cuts, dtype=ends.dtype)))
