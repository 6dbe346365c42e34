"""Which sample stands where: sorted by length when it is first asked for, or given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from budgetdb.sampling.packing import IndexArray, order_longest_first, order_shortest_first


class Rows(Protocol):
    """A permutation of the samples of a dataset, which batches are slices of."""

    @property
    def indices(self) -> IndexArray:
        """Dataset index of each row, shape `(samples,)`."""

    def __len__(self) -> int:
        """Samples."""


@dataclass(eq=False)
class SortedRows:
    """By length; equal lengths in the order of the dataset.

    Batches follow from counts of lengths alone, so nothing is sorted before the first batch is asked for; a pickle
    has the lengths and not the order.

    Attributes:
        lengths: tokens of each sample, shape `(samples,)`, in the narrowest unsigned integer.
        longest_first: whether lengths fall.
    """

    lengths: NDArray[np.unsignedinteger[Any]]
    longest_first: bool = True

    @cached_property
    def indices(self) -> IndexArray:
        """Sorted now; `(samples,)`."""
        return order_longest_first(self.lengths) if self.longest_first else order_shortest_first(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "longest_first": self.longest_first}


@dataclass(frozen=True, eq=False)
class GivenRows:
    """In an order made elsewhere.

    Attributes:
        indices: dataset index of each row, shape `(samples,)`.
    """

    indices: IndexArray

    def __len__(self) -> int:
        return len(self.indices)
