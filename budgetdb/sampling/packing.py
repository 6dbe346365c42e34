"""Packing: in which order samples go, and how many to a batch, from counts of padded lengths alone.

Rows of one padded length are interchangeable, so the sizes of all batches follow from how many samples there are of
each length: the work is proportional to the distinct lengths, not to the samples. A batch of consecutive samples, in
sorted order, is bounded at its longest row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.signedinteger[Any]]  # int32, or int64 where there are more than 2**31 samples

# Up to here counting into an array of all lengths (32 MiB) is cheaper than sorting.
_COUNTED = 2**22


def padded_lengths(lengths: NDArray[np.int64], *, pad_multiple: int, extra_tokens: int = 0) -> NDArray[np.int64]:
    """What each row takes on the device: rounded up to `pad_multiple`, at least one multiple, plus `extra_tokens`.

    Shape `(samples,)`, as `lengths`; `budgetdb.shapes.padded_length` for one row.
    """
    return np.maximum(-(-lengths // pad_multiple), 1) * pad_multiple + extra_tokens


def count_lengths(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct lengths, shortest first, and how many samples have each; both of shape `(distinct,)`."""
    if len(lengths) == 0 or int(lengths.max()) > _COUNTED:
        distinct, counts = np.unique(lengths, return_counts=True)
        return distinct, counts.astype(np.int64, copy=False)
    histogram = np.bincount(lengths).astype(np.int64, copy=False)
    present = np.flatnonzero(histogram).astype(np.int64, copy=False)
    return present, histogram[present]


def order_longest_first(lengths: NDArray[np.int64]) -> IndexArray:
    """Dataset indices by falling length, shape `(samples,)`; equal lengths keep the order of the dataset."""
    return _stable_argsort(lengths.max(initial=0) - lengths)


def order_shortest_first(lengths: NDArray[np.int64]) -> IndexArray:
    """Dataset indices by rising length, shape `(samples,)`; equal lengths keep the order of the dataset."""
    return _stable_argsort(lengths)


def pack_fewest(counts: NDArray[np.int64], max_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of each batch, longest sample first: as few batches as any partition of the samples can have.

    Each batch is filled from the longest sample left to the most rows its own longest row allows. That gives the fewest
    batches whenever `max_rows` does not rise with the length: a batch that starts at a shorter row never holds fewer.

    Args:
        counts: samples of each distinct padded length, the shortest length first; shape `(distinct,)`.
        max_rows: the most rows of each of these lengths that fit, at least 1; shape `(distinct,)`.

    Returns:
        Shape `(batches,)`; the sum is that of `counts`.
    """
    runs: list[tuple[int, int]] = []  # rows, and how many batches in a row have so many
    places = 0  # left in the last batch
    for count, most in zip(counts[::-1].tolist(), max_rows[::-1].tolist(), strict=True):
        joined = min(places, count)
        places -= joined
        full, rest = divmod(count - joined, most)
        if full:
            runs.append((most, full))
        if rest:
            runs.append((most, 1))
            places = most - rest
    if places:
        runs[-1] = (runs[-1][0] - places, 1)
    return _expand(runs)


def pack_ascending(counts: NDArray[np.int64], max_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of each batch, shortest sample first: a batch is closed when the next sample would not fit in it.

    This is what micm-nlp's sampler yields. Arguments and result are those of `pack_fewest`.
    """
    runs: list[tuple[int, int]] = []
    rows = 0  # in the batch that is still open
    for count, most in zip(counts.tolist(), max_rows.tolist(), strict=True):
        joined = min(max(most - rows, 0), count)
        rows += joined
        if left := count - joined:
            runs.append((rows, 1))
            full, rows = divmod(left, most)
            if full:
                runs.append((most, full))
    if rows:
        runs.append((rows, 1))
    return _expand(runs)


def _stable_argsort(keys: NDArray[np.int64]) -> IndexArray:
    if keys.max(initial=0) < 2**16:
        indices = np.argsort(keys.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by radix
    else:
        indices = np.argsort(keys, kind="stable")
    return indices.astype(index_dtype(len(keys)), copy=False)


def index_dtype(samples: int) -> np.dtype[np.signedinteger[Any]]:
    """The narrowest integer that counts `samples`."""
    return np.dtype(np.int32 if samples < 2**31 else np.int64)


def _expand(runs: list[tuple[int, int]]) -> NDArray[np.int64]:
    sizes, repeats = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(sizes, repeats)
