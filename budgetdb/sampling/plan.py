"""A plan: which samples go into which batch, in which order, as a few arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetdb.errors import UnknownNameError
from budgetdb.sampling.packing import (
    IndexArray,
    count_lengths,
    index_dtype,
    order_longest_first,
    order_shortest_first,
    pack_ascending,
    pack_fewest,
    padded_lengths,
)

MaxRows = Callable[[NDArray[np.int64]], NDArray[np.int64]]

# Both must agree: sizes are packed in the order in which the samples are emitted.
_ORDERS = {
    "descending": (order_longest_first, pack_fewest),
    "ascending": (order_shortest_first, pack_ascending),
}


def _no_indices() -> IndexArray:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Plan:
    """Batches as consecutive slices of one emission order.

    Batch b is `order[ends[b - 1]:ends[b]]`.

    Attributes:
        order: the dataset index of each row emitted, shape `(rows,)`.
        ends: where each batch ends in `order`, shape `(batches,)`; strictly rising.
        lengths: tokens of each row emitted before padding, shape `(rows,)`, in the narrowest unsigned integer.
        pad_multiple: what the collator rounds up to.
        extra_tokens: tokens the model adds to every row on its own.
        oversize: dataset indices of the samples that alone exceed the limit, in emission order; each has a batch to
            itself.
        duplicates: positions in `order` of rows that stand there only to even out ranks; the sample is elsewhere too.
    """

    order: IndexArray
    ends: IndexArray
    lengths: NDArray[np.unsignedinteger[Any]]
    pad_multiple: int = 1
    extra_tokens: int = 0
    oversize: IndexArray = field(default_factory=_no_indices)
    duplicates: IndexArray = field(default_factory=_no_indices)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each batch starts in `order`, shape `(batches,)`."""
        return self.ends.astype(np.int64) - self.batch_sizes

    @property
    def batch_sizes(self) -> NDArray[np.int64]:
        """Rows of each batch, shape `(batches,)`."""
        ends = self.ends.astype(np.int64)
        ends[1:] -= self.ends[:-1]
        return ends

    @property
    def batch_lengths(self) -> NDArray[np.int64]:
        """Padded length of each batch, the extra tokens included, shape `(batches,)`."""
        if len(self.ends) == 0:
            return np.empty(0, dtype=np.int64)
        longest = np.maximum.reduceat(self.lengths, self.starts).astype(np.int64)
        return padded_lengths(longest, pad_multiple=self.pad_multiple, extra_tokens=self.extra_tokens)

    @property
    def padding_share(self) -> float:
        """Padding tokens among all tokens the collator emits, 0 to 1."""
        tokens = int((self.batch_sizes * (self.batch_lengths - self.extra_tokens)).sum())
        return 1 - int(self.lengths.sum(dtype=np.int64)) / tokens if tokens else 0.0

    def dataset_positions(self) -> NDArray[np.int64]:
        """Where each sample of the dataset stands in `order`, shape `(samples,)`, for a plan that holds them all."""
        rows = np.delete(np.arange(len(self.order), dtype=np.int64), self.duplicates)
        positions = np.empty(len(rows), dtype=np.int64)
        positions[self.order[rows]] = rows
        return positions

    def select(self, batches: NDArray[np.int64]) -> Plan:
        """The plan of some of the batches, or of all in another order."""
        sizes = self.batch_sizes[batches]
        ends = np.cumsum(sizes)
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.starts[batches] - (ends - sizes), sizes)
        order = self.order[rows]
        return Plan(
            order=order,
            ends=ends.astype(self.ends.dtype),
            lengths=self.lengths[rows],
            pad_multiple=self.pad_multiple,
            extra_tokens=self.extra_tokens,
            oversize=order[np.isin(order, self.oversize)],
            duplicates=np.flatnonzero(np.isin(rows, self.duplicates)).astype(index_dtype(len(rows))),
        )


def plan_batches(
    lengths: NDArray[np.int64],
    *,
    max_rows: MaxRows,
    pad_multiple: int = 1,
    extra_tokens: int = 0,
    order: str = "descending",
) -> Plan:
    """Batches of which each has at most `max_rows` of its longest row.

    >>> plan = plan_batches(np.array([2, 9, 4]), max_rows=lambda padded: 10 // padded)
    >>> plan.order.tolist(), plan.batch_sizes.tolist(), plan.batch_lengths.tolist()
    ([1, 2, 0], [1, 2], [9, 4])

    Args:
        lengths: tokens of each sample, shape `(samples,)`.
        max_rows: from distinct padded lengths, extra tokens included and shortest first, to the most rows of each that
            fit, 0 where not even one does. It must not rise with the length.
        pad_multiple: what the collator rounds up to, at least 1.
        extra_tokens: tokens the model adds to every row on its own, at least 0.
        order: `descending` (longest first, the fewest batches) or `ascending` (shortest first, as micm-nlp has it).

    Raises:
        UnknownNameError: no such order.
    """
    if order not in _ORDERS:
        raise UnknownNameError("order", str(order), _ORDERS)
    sort, pack = _ORDERS[order]
    padded = padded_lengths(lengths, pad_multiple=pad_multiple, extra_tokens=extra_tokens)
    distinct, counts = count_lengths(padded)
    rows = max_rows(distinct)
    ends = np.cumsum(pack(counts, np.maximum(rows, 1)))
    emitted = sort(lengths)
    oversize = emitted[np.isin(padded[emitted], distinct[rows < 1])] if (rows < 1).any() else _no_indices()
    return Plan(
        order=emitted,
        ends=ends.astype(emitted.dtype),
        lengths=lengths[emitted].astype(np.min_scalar_type(int(lengths.max(initial=0)))),
        pad_multiple=pad_multiple,
        extra_tokens=extra_tokens,
        oversize=oversize,
    )
