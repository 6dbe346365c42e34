"""The peak of a step as the largest of a few moments, each linear in the batch size.

DESIGN 2: a step's peak is the largest of a few moments (attention, MLP, logits, loss), and each moment is a polynomial
in `k`, `kL` and `kL²` above what is resident, k rows of L tokens. For a fixed length every moment is a straight line in
k, so the inverse needs no search.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetdb.shapes import Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Moment:
    """`constant + token * kL + square * kL²`, in bytes; no coefficient is negative.

    Attributes:
        constant: bytes whatever the batch.
        token: bytes for each token.
        square: bytes for each token and token of its row (attention scores, a padded mask).
    """

    constant: float
    token: float
    square: float = 0.0

    def __post_init__(self) -> None:
        for name in ("constant", "token", "square"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"coefficient {name} must be finite and not negative, got {value}")

    def slope(self, length: int) -> float:
        """Bytes for each row of `length` tokens."""
        return length * (self.token + self.square * length)

    def peak_bytes(self, shape: Shape) -> int:
        """Bytes alive at this moment, rounded up."""
        return math.ceil(self.constant + shape.batch_size * self.slope(shape.length))

    def max_batch_size(self, length: int, limit_bytes: int) -> int:
        """The largest k whose bytes are at most `limit_bytes`; `UNLIMITED` when rows cost nothing."""
        if self.constant > limit_bytes:
            return 0
        slope = self.slope(length)
        if slope <= 0:
            return UNLIMITED
        k = int(min((limit_bytes - self.constant) // slope, UNLIMITED))
        if self.peak_bytes(Shape(k, length)) <= limit_bytes < self.peak_bytes(Shape(k + 1, length)):
            return k
        # The division rounded, or rows cost less than the constant's last digit: the formula itself decides.
        rows = range(UNLIMITED + 1)
        return bisect_right(rows, limit_bytes, key=lambda k: self.peak_bytes(Shape(k, length))) - 1


# A batch size no device reaches: what "no limit" means where a number is needed.
UNLIMITED = 2**31 - 1


def largest_peak_bytes(moments: Iterable[Moment], shape: Shape) -> int:
    """The largest of the moments' bytes at `shape`."""
    return max(moment.peak_bytes(shape) for moment in moments)


def smallest_max_batch_size(moments: Iterable[Moment], length: int, limit_bytes: int) -> int:
    """The largest k at which every moment stays within `limit_bytes`."""
    return min(moment.max_batch_size(length, limit_bytes) for moment in moments)


def smallest_max_batch_sizes(moments: Iterable[Moment], lengths: Iterable[int], limit_bytes: int) -> NDArray[np.int64]:
    """`smallest_max_batch_size` for each of `lengths`, shape `(len(lengths),)`, without a Python loop over them."""
    import numpy as np

    lengths_array = np.fromiter(lengths, dtype=np.float64)
    smallest = np.full(len(lengths_array), UNLIMITED, dtype=np.int64)
    for moment in moments:
        constants = np.full(len(lengths_array), moment.constant)
        slopes = lengths_array * (moment.token + moment.square * lengths_array)
        smallest = np.minimum(smallest, rows_below(constants, slopes, limit_bytes))
    return smallest


def rows_below(constants: NDArray[np.float64], slopes: NDArray[np.float64], limit_bytes: int) -> NDArray[np.int64]:
    """For each straight line in the number of rows, `constant + k * slope` rounded up, the largest k within the limit.

    All arrays have one shape; 0 where not even the constant fits, `UNLIMITED` where rows cost nothing.
    """
    import numpy as np

    room = np.maximum(limit_bytes - constants, -1.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        sizes = np.where(slopes > 0, room / slopes, np.where(room >= 0, UNLIMITED, 0))
    sizes = np.clip(np.floor(sizes), 0, UNLIMITED).astype(np.int64)
    over = (np.ceil(constants + sizes * slopes) > limit_bytes) & (sizes > 0)
    under = (np.ceil(constants + (sizes + 1) * slopes) <= limit_bytes) & (sizes < UNLIMITED)
    for i in np.flatnonzero(over | under):  # the division rounded: rare
        # At one token per row a moment is just this line.
        sizes[i] = Moment(float(constants[i]), float(slopes[i])).max_batch_size(1, limit_bytes)
    return sizes
