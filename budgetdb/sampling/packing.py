"""Packing: in which order samples go, and how many to a batch, from counts of padded lengths alone.

Rows of one padded length are interchangeable, so the sizes of all batches follow from how many samples there are of
each length: the work is proportional to the distinct lengths, not to the samples. A batch of consecutive samples, in
sorted order, is bounded at its longest row; and consecutive in sorted order is the best a partition can be, for any
cost of a batch that rises with its rows and with its longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.signedinteger[Any]]  # int32, or int64 where there are more than 2**31 samples
Lengths = NDArray[np.integer[Any]]

# Up to here counting into an array of all lengths (32 MiB) is cheaper than sorting.
_COUNTED = 2**22
# Samples that are sorted or counted at once, so that numpy's wider copies of them stay small.
_CHUNK = 2**21
_RADIX = 2**16
# Runs of so many equal lengths in a chunk, on average, are copied one by one faster than scattered.
_RUN = 64


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many samples there are of each padded length, and how many rows of it fit.

    Attributes:
        lengths: the distinct padded lengths, extra tokens included, shortest first; shape `(distinct,)`.
        counts: samples of each, at least 1.
        max_rows: the most rows of each that fit, 0 where not even one does; it never rises with the length.
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    max_rows: NDArray[np.int64]

    def __getstate__(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "counts": self.counts, "max_rows": self.max_rows}

    @property
    def samples(self) -> int:
        """All of them."""
        return int(self.counts.sum())

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """`max_rows`, and 1 where nothing fits: such a sample goes alone."""
        return np.maximum(self.max_rows, 1).astype(np.int64)

    def longest_of(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """For batches of `sizes`, longest sample first, the number in `lengths` of each one's longest row."""
        starts = np.cumsum(sizes) - sizes
        descending = np.cumsum(self.counts[::-1])
        return len(self.counts) - 1 - np.searchsorted(descending, starts, side="right")

    def every(self, step: int) -> Histogram:
        """Every `step`-th sample, longest first and the longest among them; limits stay."""
        ends = np.cumsum(self.counts[::-1])
        taken = -(-ends // step)
        counts = np.diff(taken, prepend=0)[::-1]
        kept = counts > 0
        return Histogram(self.lengths[kept], counts[kept], self.max_rows[kept])


def padded_lengths(lengths: Lengths, *, pad_multiple: int, extra_tokens: int = 0) -> NDArray[np.int64]:
    """What each row takes on the device: rounded up to `pad_multiple`, at least one multiple, plus `extra_tokens`.

    Shape `(samples,)`, as `lengths`; `budgetdb.shapes.padded_length` for one row.
    """
    wide = lengths.astype(np.int64, copy=False)
    return np.maximum(-(-wide // pad_multiple), 1) * pad_multiple + extra_tokens


def count_lengths(lengths: Lengths) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct lengths, shortest first, and how many samples have each; both of shape `(distinct,)`."""
    longest = int(lengths.max(initial=0))
    if len(lengths) == 0 or longest > _COUNTED:
        distinct, counts = np.unique(lengths, return_counts=True)
        return distinct.astype(np.int64, copy=False), counts.astype(np.int64, copy=False)
    histogram = np.zeros(longest + 1, dtype=np.int64)
    for start in range(0, len(lengths), _CHUNK):
        histogram += np.bincount(lengths[start : start + _CHUNK], minlength=longest + 1)
    present = np.flatnonzero(histogram).astype(np.int64, copy=False)
    return present, histogram[present]


def merged_counts(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Equal neighbours of `values`, which never fall, as one each, with their counts together."""
    firsts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[firsts], np.add.reduceat(counts, firsts) if len(firsts) else counts[:0]


def order_longest_first(lengths: Lengths) -> IndexArray:
    """Dataset indices by falling length, shape `(samples,)`; equal lengths keep the order of the dataset."""
    return _stable_order(lengths, longest_first=True)


def order_shortest_first(lengths: Lengths) -> IndexArray:
    """Dataset indices by rising length, shape `(samples,)`; equal lengths keep the order of the dataset."""
    return _stable_order(lengths, longest_first=False)


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


def pack_by_waste(
    counts: NDArray[np.int64], max_rows: NDArray[np.int64], row_costs: NDArray[np.float64], *, allowed: float
) -> NDArray[np.int64]:
    """Rows of each batch, longest sample first: a batch is closed when it is full, or padding would cost too much.

    Args:
        counts: as of `pack_fewest`.
        max_rows: as of `pack_fewest`.
        row_costs: what a row of each length costs, never falling; a shorter row costs as much as the longest one of
            its batch, and the difference is waste.
        allowed: how much waste a batch may have.

    Returns:
        As `pack_fewest`.
    """
    runs: list[tuple[int, int]] = []
    rows, most, dearest, waste = 0, 0, 0.0, 0.0
    for count, most_here, cost in zip(
        counts[::-1].tolist(), max_rows[::-1].tolist(), row_costs[::-1].tolist(), strict=True
    ):
        left = count
        if rows:
            each = dearest - cost
            joined = min(left, most - rows)
            if each > 0:
                joined = min(joined, int((allowed - waste) / each))
            rows, left, waste = rows + joined, left - joined, waste + joined * each
            if left or rows == most:
                runs.append((rows, 1))
                rows = 0
        if left:
            full, rows = divmod(left, most_here)
            most, dearest, waste = most_here, cost, 0.0
            if full:
                runs.append((most_here, full))
    if rows:
        runs.append((rows, 1))
    return _expand(runs)


def pack_exactly(
    counts: NDArray[np.int64], max_rows: NDArray[np.int64], row_costs: NDArray[np.float64], *, step_cost: float
) -> NDArray[np.int64]:
    """Rows of each batch, longest sample first, with the least `sum(step_cost + rows * cost of the longest row)`.

    With samples shortest first and `best[j]` the least cost of the first j, `best[j] = min over i of best[i] +
    step_cost + (j - i) * row_cost[j]`, `j - i` at most what fits of row j. The later of two starts i gains on the
    earlier one as j grows (the cost has the Monge property), so each start is best on one interval of ends, and a queue
    of these intervals gives all of them in `O(n log n)` (Galil and Giancarlo 1989, for the concave least-weight
    subsequence problem).

    Arguments and result are those of `pack_by_waste`.
    """
    costs = np.repeat(row_costs, counts).tolist()
    limits = np.repeat(max_rows, counts)
    n = len(costs)
    # The earliest start of a batch that ends with row j: never falling, since what fits never rises.
    earliest = np.maximum(np.arange(1, n + 1) - limits, 0).tolist()
    best, start_of = [0.0] * (n + 1), [0] * (n + 1)
    starts, since, head = [0], [1], 0  # starts that are best from some end on, until the next one's

    def gains(later: int, earlier: int, end: int) -> bool:
        """Whether a batch up to `end` had better start at `later` than at `earlier`."""
        if earlier < earliest[end - 1]:
            return True
        return best[later] - best[earlier] <= (later - earlier) * costs[end - 1]

    for end in range(1, n + 1):
        while head + 1 < len(starts) and since[head + 1] <= end:
            head += 1
        start = starts[head]
        best[end] = best[start] + step_cost + (end - start) * costs[end - 1]
        start_of[end] = start
        if end == n:
            break
        while len(starts) > head and gains(end, starts[-1], max(since[-1], end + 1)):
            starts.pop()
            since.pop()
        if len(starts) <= head:
            starts.append(end)
            since.append(end + 1)
            head = len(starts) - 1
        elif gains(end, starts[-1], n):
            low, high = max(since[-1], end + 1), n
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if gains(end, starts[-1], middle) else (middle + 1, high)
            starts.append(end)
            since.append(low)
    sizes, end = [], n
    while end > 0:
        sizes.append(end - start_of[end])
        end = start_of[end]
    return np.array(sizes, dtype=np.int64)


def index_dtype(samples: int) -> np.dtype[np.signedinteger[Any]]:
    """The narrowest integer that counts `samples`."""
    return np.dtype(np.int32 if samples < 2**31 else np.int64)


def _stable_order(lengths: Lengths, *, longest_first: bool) -> IndexArray:
    longest = int(lengths.max(initial=0))
    if longest >= _RADIX:
        wide = lengths.astype(np.int64, copy=False)
        order = np.argsort(longest - wide if longest_first else wide, kind="stable")
        return order.astype(index_dtype(len(lengths)), copy=False)
    return _counting_order(lengths, longest, longest_first=longest_first)


def _counting_order(lengths: Lengths, longest: int, *, longest_first: bool) -> IndexArray:
    """A counting sort by chunks: numpy sorts 16 bits by radix, and a chunk's runs go where the counts say.

    A few bytes a sample beside the result, however many there are.
    """

    def keys_of(start: int) -> NDArray[np.uint16]:
        chunk = lengths[start : start + _CHUNK]
        return (longest - chunk if longest_first else chunk).astype(np.uint16)

    chunks = range(0, len(lengths), _CHUNK)
    if len(chunks) <= 1:
        return np.argsort(keys_of(0), kind="stable").astype(index_dtype(len(lengths)), copy=False)
    counts = [np.bincount(keys_of(start), minlength=longest + 1) for start in chunks]
    total = np.sum(counts, axis=0, dtype=np.int64)
    places = np.cumsum(total) - total  # where the next sample of each key goes
    order = np.empty(len(lengths), dtype=index_dtype(len(lengths)))
    for start, here in zip(chunks, counts, strict=True):
        within = np.argsort(keys_of(start), kind="stable")
        moved = within.astype(order.dtype) + order.dtype.type(start)
        present = np.flatnonzero(here)
        if len(present) * _RUN > len(within):
            order[_positions(places, here)] = moved
        else:
            _place_runs(order, moved, places=places[present], counts=here[present])
        places += here
    return order


def _place_runs(order: IndexArray, moved: IndexArray, *, places: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Copy runs of `counts` neighbours in `moved` to where they go: no array of positions, for runs that are long."""
    ends = np.cumsum(counts)
    for place, first, end in zip(places.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        order[place : place + end - first] = moved[first:end]


def _positions(places: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`counts[i]` consecutive places from `places[i]` on, for each i."""
    shifts = places - (np.cumsum(counts) - counts)
    return np.repeat(shifts, counts) + np.arange(int(counts.sum()))


def _expand(runs: list[tuple[int, int]]) -> NDArray[np.int64]:
    sizes, repeats = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(sizes, repeats)
