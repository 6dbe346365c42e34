"""The shape of one batch as the device sees it."""

from __future__ import annotations

from dataclasses import dataclass


def padded_length(length: int, pad_multiple: int = 1) -> int:
    """Round `length` up to a multiple of `pad_multiple`, as a collator's `pad_to_multiple_of` does.

    A row is at least one multiple long, an empty one too.

    >>> padded_length(13, 8), padded_length(16, 8), padded_length(0, 8)
    (16, 16, 8)
    """
    return max(-(-length // pad_multiple), 1) * pad_multiple


@dataclass(frozen=True, order=True, slots=True)
class Shape:
    """`batch_size` rows of `length` tokens each, the length after padding.

    >>> Shape(32, 512).tokens
    16384
    """

    batch_size: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, padding included."""
        return self.batch_size * self.length

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.length}"
