"""A plan: which samples go into which batch, as a few arrays."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from budgetdb.errors import UnknownNameError
from budgetdb.sampling.packing import (
    Histogram,
    IndexArray,
    Lengths,
    count_lengths,
    index_dtype,
    merged_counts,
    pack_ascending,
    padded_lengths,
)
from budgetdb.sampling.rows import Rows, SortedRows
from budgetdb.sampling.strategies import Strategy, choose_strategy
from budgetdb.sampling.times import TimeModel

MaxRows = Callable[[NDArray[np.int64]], NDArray[np.int64]]

ORDERS = ("descending", "ascending")


def _no_indices() -> IndexArray:
    return np.empty(0, dtype=np.int32)


def _narrowed(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.min_scalar_type(int(array.max(initial=0))), copy=False)


_PER_BATCH = ("starts", "batch_sizes", "batch_lengths", "batch_tokens")


@dataclass(frozen=True, eq=False)
class Plan:
    """Batches as slices of one order of the samples.

    Batch b is `rows.indices[starts[b]:starts[b] + batch_sizes[b]]`. Everything but the indices is known without sorting
    the samples.

    Attributes:
        rows: the order of the samples.
        starts: where each batch starts in it, shape `(batches,)`.
        batch_sizes: rows of each batch, shape `(batches,)`.
        batch_lengths: padded length of each batch, the extra tokens included, shape `(batches,)`.
        batch_tokens: tokens of each batch before padding, shape `(batches,)`.
        extra_tokens: tokens the model adds to every row on its own.
        oversize: dataset indices of the samples that alone exceed the limit, in emission order; each has a batch to
            itself.
        duplicates: positions in `order` of rows that stand there only to even out ranks; the sample is elsewhere too.
        packing: what all batches were cut from, to cut them otherwise.
    """

    rows: Rows
    starts: NDArray[np.int64]
    batch_sizes: NDArray[np.int64]
    batch_lengths: NDArray[np.int64]
    batch_tokens: NDArray[np.int64]
    extra_tokens: int = 0
    oversize: IndexArray = field(default_factory=_no_indices)
    duplicates: IndexArray = field(default_factory=_no_indices)
    packing: Packing | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Every array in its narrowest integer, and no order: it is sorted again where it is asked for."""
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self._is_contiguous:
            state["starts"] = None
        return {name: _narrowed(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in _PER_BATCH:
            state[name] = None if state[name] is None else state[name].astype(np.int64)
        if state["starts"] is None:
            state["starts"] = np.cumsum(state["batch_sizes"]) - state["batch_sizes"]
        self.__dict__.update(state)

    @property
    def _is_contiguous(self) -> bool:
        return np.array_equal(self.starts, np.cumsum(self.batch_sizes) - self.batch_sizes)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        """The dataset indices of each batch."""
        return self.batches_from(0)

    def batches_from(self, first: int) -> Iterator[list[int]]:
        """The dataset indices of each batch from number `first` on."""
        indices = self.rows.indices
        starts, ends = self.starts[first:].tolist(), self.ends_in_rows[first:].tolist()
        for start, end in zip(starts, ends, strict=True):
            yield indices[start:end].tolist()

    @property
    def ends_in_rows(self) -> NDArray[np.int64]:
        """Where each batch ends in `rows`."""
        return self.starts + self.batch_sizes

    @property
    def emitted(self) -> int:
        """Rows of all batches, duplicates included."""
        return int(self.batch_sizes.sum())

    @cached_property
    def order(self) -> IndexArray:
        """The dataset index of each row emitted, shape `(rows,)`."""
        indices, ends = self.rows.indices, np.cumsum(self.batch_sizes)
        if self._is_contiguous:
            order: IndexArray = indices[: self.emitted]
        else:
            shifts = np.repeat(self.starts - (ends - self.batch_sizes), self.batch_sizes)
            order = indices[np.arange(self.emitted) + shifts]
        return order

    @property
    def padding_share(self) -> float:
        """Padding tokens among all tokens the collator emits, 0 to 1."""
        tokens = int((self.batch_sizes * (self.batch_lengths - self.extra_tokens)).sum())
        return 1 - int(self.batch_tokens.sum()) / tokens if tokens else 0.0

    def dataset_positions(self) -> NDArray[np.int64]:
        """Where each sample of the dataset stands in `order`, shape `(samples,)`, for a plan that holds them all."""
        rows = np.delete(np.arange(self.emitted, dtype=np.int64), self.duplicates)
        positions = np.empty(len(rows), dtype=np.int64)
        positions[self.order[rows]] = rows
        return positions

    def select(self, batches: NDArray[np.int64]) -> Plan:
        """The plan of some of the batches, or of all in another order."""
        return Plan(
            rows=self.rows,
            starts=self.starts[batches],
            batch_sizes=self.batch_sizes[batches],
            batch_lengths=self.batch_lengths[batches],
            batch_tokens=self.batch_tokens[batches],
            extra_tokens=self.extra_tokens,
            oversize=self._oversize_in(batches),
            duplicates=self._duplicates_in(batches),
        )

    def _oversize_in(self, batches: NDArray[np.int64]) -> IndexArray:
        if not len(self.oversize):
            return self.oversize
        single = batches[self.batch_sizes[batches] == 1]
        indices: IndexArray = self.rows.indices[self.starts[single]]
        return indices[np.isin(indices, self.oversize)]

    def _duplicates_in(self, batches: NDArray[np.int64]) -> IndexArray:
        if not len(self.duplicates):
            return self.duplicates
        ends = np.cumsum(self.batch_sizes)
        sizes = self.batch_sizes[batches]
        new_starts = np.cumsum(sizes) - sizes
        holders = np.searchsorted(ends, self.duplicates, side="right")
        within = self.duplicates - (ends - self.batch_sizes)[holders]
        found = [
            new_starts[place] + within[holders == batch]
            for place, batch in enumerate(batches.tolist())
            if (holders == batch).any()
        ]
        return np.concatenate(found or [_no_indices()]).astype(self.duplicates.dtype)

    def digest(self) -> str:
        """Equal for plans with equal batches of datasets with equal lengths; eight hexadecimal digits.

        A CRC tells plans apart that differ by accident; it is not meant to withstand a forger.
        """
        rows: Lengths = self.rows.lengths if isinstance(self.rows, SortedRows) else self.rows.indices
        value = 0
        for array in (self.starts, self.batch_sizes, self.batch_lengths, self.duplicates, rows):
            value = zlib.crc32(np.ascontiguousarray(array).data, value)
        return f"{value:08x}"


def plan_batches(
    lengths: Lengths,
    *,
    max_rows: MaxRows,
    pad_multiple: int = 1,
    extra_tokens: int = 0,
    order: str = "descending",
    strategy: str | None = None,
    times: TimeModel | None = None,
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
        order: `descending` (longest first) or `ascending` (shortest first; of the fewest batches micm-nlp's).
        strategy: of packing, by name; by default the fastest where `times` are known, else the fewest batches.
        times: how long steps take.

    Raises:
        UnknownNameError: no such order or strategy.
    """
    if order not in ORDERS:
        raise UnknownNameError("order", str(order), ORDERS)
    packing = Packing.of(
        lengths,
        max_rows=max_rows,
        pad_multiple=pad_multiple,
        extra_tokens=extra_tokens,
        longest_first=order == "descending",
        strategy=choose_strategy(strategy, times),
        times=times,
    )
    return packing.plan(packing.batch_sizes())


@dataclass(frozen=True, eq=False)
class Packing:
    """What batches are cut from: samples by length, and how many of each length fit.

    Attributes:
        rows: the samples, sorted when they are asked for.
        histogram: of padded lengths.
        raw: the distinct lengths before padding, shortest first, and how many samples have each.
        strategy: how they are cut.
        pad_multiple: what the collator rounds up to.
        extra_tokens: tokens the model adds to every row on its own.
        times: how long steps take, where that is known.
    """

    rows: SortedRows
    histogram: Histogram
    raw: tuple[NDArray[np.int64], NDArray[np.int64]]
    strategy: Strategy
    pad_multiple: int = 1
    extra_tokens: int = 0
    times: TimeModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        histogram = replace(self.histogram, max_rows=_narrowed(self.histogram.max_rows))  # and none of what it caches
        return {**self.__dict__, "raw": tuple(map(_narrowed, self.raw)), "histogram": histogram}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values, counts = state["raw"]
        self.__dict__.update(state, raw=(values.astype(np.int64), counts.astype(np.int64)))

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        *,
        max_rows: MaxRows,
        strategy: Strategy,
        pad_multiple: int = 1,
        extra_tokens: int = 0,
        longest_first: bool = True,
        times: TimeModel | None = None,
    ) -> Self:
        """Count the lengths; see `plan_batches`."""
        raw, counts = count_lengths(lengths)
        distinct, merged = merged_counts(
            padded_lengths(raw, pad_multiple=pad_multiple, extra_tokens=extra_tokens), counts
        )
        narrow = lengths.astype(np.min_scalar_type(int(raw[-1]) if len(raw) else 0), copy=False)
        return cls(
            rows=SortedRows(narrow, longest_first=longest_first),
            histogram=Histogram(distinct, merged, max_rows(distinct)),
            raw=(raw, counts),
            strategy=strategy,
            pad_multiple=pad_multiple,
            extra_tokens=extra_tokens,
            times=times,
        )

    def batch_sizes(self) -> NDArray[np.int64]:
        """Rows of each batch in the order of the rows."""
        if self.rows.longest_first:
            return self.strategy.batch_sizes(self.histogram, self.times)
        if self.strategy.name == "fewest":
            return pack_ascending(self.histogram.counts, self.histogram.rows)
        return self.strategy.batch_sizes(self.histogram, self.times)[::-1]

    def plan(self, sizes: NDArray[np.int64]) -> Plan:
        """The plan of batches of `sizes`, in the order of the rows."""
        ends = np.cumsum(sizes)
        direction = -1 if self.rows.longest_first else 1
        raw, counts = (array[::direction] for array in self.raw)
        longest = _at(raw, counts, ends - sizes if self.rows.longest_first else ends - 1)
        return Plan(
            rows=self.rows,
            starts=ends - sizes,
            batch_sizes=sizes,
            batch_lengths=padded_lengths(longest, pad_multiple=self.pad_multiple, extra_tokens=self.extra_tokens),
            batch_tokens=np.diff(_tokens_before(raw, counts, ends), prepend=0),
            extra_tokens=self.extra_tokens,
            oversize=self.oversize(),
            packing=self,
        )

    def oversize(self) -> IndexArray:
        """Dataset indices of the samples of which not one fits, in the order of the rows."""
        over = self.histogram.lengths[self.histogram.max_rows < 1]
        if not len(over):
            return _no_indices()
        # Longer than this before padding; everything is over where one multiple is.
        below = int(over[0]) - self.extra_tokens - self.pad_multiple
        lengths = self.rows.lengths
        found = np.flatnonzero(lengths > below) if below > 0 else np.arange(len(lengths))
        by_length = SortedRows(lengths[found], longest_first=self.rows.longest_first).indices
        return found[by_length].astype(index_dtype(len(lengths)))


def _at(values: NDArray[np.int64], counts: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """What stands at `positions` of `np.repeat(values, counts)`."""
    return values[np.searchsorted(np.cumsum(counts), positions, side="right")]


def _tokens_before(
    values: NDArray[np.int64], counts: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The sum of `np.repeat(values, counts)[:position]` for each of `positions`."""
    if not len(values):
        return positions
    ends, sums = np.cumsum(counts), np.cumsum(values * counts)
    at = np.minimum(np.searchsorted(ends, positions, side="left"), len(values) - 1)
    before: NDArray[np.int64] = sums[at] - (ends[at] - positions) * values[at]
    return before
