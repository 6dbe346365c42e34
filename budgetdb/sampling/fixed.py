"""Batches of one fixed size, as most evaluations have them: to compare a plan with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from budgetdb.sampling.packing import Lengths, padded_lengths


def fixed_batches(
    lengths: Lengths, size: int, *, is_sorted: bool, pad_multiple: int = 1, extra_tokens: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and padded length of each batch of `size` rows, the last one smaller; both of shape `(batches,)`.

    >>> fixed_batches(np.array([5, 9, 2]), 2, is_sorted=True)
    (array([2, 1]), array([9, 2]))

    Args:
        lengths: tokens of each sample, shape `(samples,)`.
        size: rows of a batch, at least 1.
        is_sorted: longest first, and not in the order of the dataset.
        pad_multiple: what the collator rounds up to.
        extra_tokens: tokens the model adds to every row on its own.
    """
    padded = padded_lengths(lengths, pad_multiple=pad_multiple, extra_tokens=extra_tokens)
    if is_sorted:
        padded = np.sort(padded)[::-1]
    starts = np.arange(0, len(padded), size)
    if not len(starts):
        return starts, starts
    return np.diff(starts, append=len(padded)), np.maximum.reduceat(padded, starts)
