"""Batches of samples with two lengths: a source and a target, each padded to the longest of its batch.

Sorted by source, the targets of a batch are any; sorted by both, there is no such order. A geometric grid on the source
with the targets sorted within each of its columns keeps both lengths close, and walking the columns up and down in turn
(a snake) keeps them close where one column ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from budgetdb.sampling.packing import IndexArray, Lengths, index_dtype, padded_lengths
from budgetdb.sampling.plan import Plan
from budgetdb.sampling.rows import GivenRows

# From padded source and target lengths, equally many, to the most rows that fit; 0 where not even one does.
MaxPairs = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]

# Widths of a column, as the ratio of its longest source to its shortest: which is best depends on the batch size.
_RATIOS = (1.03, 1.06, 1.12, 1.25, 1.5, 2.0)
# Orders are compared on so many samples at most.
_COMPARED = 50_000


def plan_pairs(
    sources: Lengths, targets: Lengths, *, max_rows: MaxPairs, pad_multiple: int = 1, extra_tokens: int = 0
) -> Plan:
    """Batches of pairs, largest first, each filled to what `max_rows` allows of its longest source and target.

    >>> plan = plan_pairs(np.array([9, 2, 8]), np.array([7, 3, 7]), max_rows=lambda s, t: 36 // (s + t))
    >>> list(plan)
    [[0, 2], [1]]

    `batch_lengths` of the plan are those of the source and of the target together.

    Args:
        sources: tokens of each source, shape `(samples,)`.
        targets: tokens of each target, shape `(samples,)`.
        max_rows: what fits; it must not rise with either length.
        pad_multiple: what the collator rounds both up to.
        extra_tokens: tokens the model adds to every source on its own.
    """
    source = padded_lengths(sources, pad_multiple=pad_multiple, extra_tokens=extra_tokens)
    target = padded_lengths(targets, pad_multiple=pad_multiple)
    order = _best_order(source, target, max_rows)
    source, target = source[order], target[order]
    sizes = _filled(source, target, max_rows)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    lengths = np.zeros_like(sizes)
    tokens = np.zeros_like(sizes)
    if len(sizes):
        lengths = np.maximum.reduceat(source, starts) + np.maximum.reduceat(target, starts)
        tokens = np.add.reduceat(sources[order].astype(np.int64) + targets[order], starts)
    alone = order[starts[sizes == 1]]
    over = max_rows(source[starts[sizes == 1]], target[starts[sizes == 1]]) < 1
    dtype = index_dtype(len(order))
    return Plan(
        rows=GivenRows(order.astype(dtype)),
        starts=starts,
        batch_sizes=sizes,
        batch_lengths=lengths,
        batch_tokens=tokens,
        extra_tokens=extra_tokens,
        oversize=alone[over].astype(dtype),
    )


def _best_order(source: NDArray[np.int64], target: NDArray[np.int64], max_rows: MaxPairs) -> IndexArray:
    """The snake whose columns are as wide as costs least padding, judged by a part of the samples."""
    if not len(source):
        return np.empty(0, dtype=np.int64)
    step = -(-len(source) // _COMPARED)

    def tokens(ratio: float) -> int:
        order = _snake(source[::step], target[::step], ratio)
        some_source, some_target = source[::step][order], target[::step][order]
        sizes = _filled(some_source, some_target, max_rows)
        starts = np.cumsum(sizes) - sizes
        lengths = np.maximum.reduceat(some_source, starts) + np.maximum.reduceat(some_target, starts)
        return int((sizes * lengths).sum())

    return _snake(source, target, min(_RATIOS, key=tokens))


def _snake(source: NDArray[np.int64], target: NDArray[np.int64], ratio: float) -> IndexArray:
    """Columns by falling source, targets falling in every other one and rising in those between."""
    longest = int(source.max())
    columns = np.floor(np.log(longest / source) / np.log(ratio)).astype(np.int64)
    present, column = np.unique(columns, return_inverse=True)
    del present  # numbered without gaps, so that neighbours run in opposite directions
    falls = column % 2 == 0
    return np.lexsort((-source, np.where(falls, -target, target), column))


def _filled(source: NDArray[np.int64], target: NDArray[np.int64], max_rows: MaxPairs) -> NDArray[np.int64]:
    """Rows of each batch, cut from the front as long as the longest source and target so far allow it."""
    sizes: list[int] = []
    start, samples = 0, len(source)
    while start < samples:
        most = max(int(max_rows(source[start : start + 1], target[start : start + 1])[0]), 1)
        sources = np.maximum.accumulate(source[start : start + most])
        targets = np.maximum.accumulate(target[start : start + most])
        fits = max_rows(sources, targets) > np.arange(len(sources))
        rows = max(len(fits) if fits.all() else int(np.argmin(fits)), 1)
        sizes.append(rows)
        start += rows
    return np.array(sizes, dtype=np.int64)
