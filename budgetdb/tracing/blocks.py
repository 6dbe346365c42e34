"""A pool's blocks: pieces of device memory linked to their neighbours, the free ones kept by size.

Sizes and addresses are in bytes and multiples of 512. Names in comments are those of torch's
`c10/cuda/CUDACachingAllocator.cpp`, which this package simulates in its own words.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

# c10/core/AllocatorConfig.h
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is a multiple of it
SMALL_BYTES = 2**20  # kSmallSize: the largest request the small pool serves
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * 2**20  # large_segment_size, when not configured
MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc: requests from here on get a segment of their own
ROUND_LARGE_BYTES = 2 * 2**20  # kRoundLarge: which is a multiple of this

# A free block's key orders by size, then by address, as BlockComparatorSize does: one integer compares faster than a
# tuple of two. Addresses of a simulation stay far below 2**80.
_ADDRESS_BITS = 80

UNLIMITED_BYTES = 2**62


class Block:
    """A piece of a segment: given out, cached (free and backed by memory) or unmapped (a free range of addresses).

    Attributes:
        address: where it begins.
        size: its bytes.
        pool: the pool it belongs to.
        requested: bytes the caller asked for, while it is given out.
        cached: in the pool's list of free blocks.
        mapped: backed by memory; only ranges of an expandable segment are ever not.
        before: the neighbour at lower addresses in the same segment, or None.
        after: the neighbour at higher addresses in the same segment, or None.
        key: its place in the pool's order, while it is cached.
        cached_at: how often the pool had been searched when it was cached.
    """

    __slots__ = ("address", "after", "before", "cached", "cached_at", "key", "mapped", "pool", "requested", "size")
    key: int
    cached_at: int

    def __init__(self, address: int, size: int, pool: Pool, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.mapped = mapped
        self.requested = 0
        self.cached = False
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Not split: nothing of its segment is outside it (the opposite of `Block::is_split`)."""
        return self.before is None and self.after is None

    def link_after(self, block: Block) -> None:
        """Become the neighbour that follows `block`."""
        self.before, self.after = block, block.after
        if block.after is not None:
            block.after.before = self
        block.after = self

    def link_before(self, block: Block) -> None:
        """Become the neighbour that precedes `block`."""
        self.before, self.after = block.before, block
        if block.before is not None:
            block.before.after = self
        block.before = self

    def absorb_before(self, block: Block) -> None:
        """Take over the preceding neighbour's range; `block` is gone afterwards."""
        self.address = block.address
        self.size += block.size
        self.before = block.before
        if block.before is not None:
            block.before.after = self

    def absorb_after(self, block: Block) -> None:
        """Take over the following neighbour's range; `block` is gone afterwards."""
        self.size += block.size
        self.after = block.after
        if block.after is not None:
            block.after.before = self


class Pool:
    """The cached blocks of one pool, and the rules by which one of them is chosen and split.

    Args:
        is_small: it serves requests up to 1 MiB.
        expandable: its memory is one expandable segment.
        max_split_bytes: blocks of at least this are oversize: kept for requests as large, and never split.
        max_rounding_bytes: an oversize block this much larger than a request is not used for it.
    """

    def __init__(
        self,
        *,
        is_small: bool,
        expandable: bool = False,
        max_split_bytes: int | None = None,
        max_rounding_bytes: int = LARGE_SEGMENT_BYTES,
    ) -> None:
        self.is_small = is_small
        self.searches = 0
        self._expandable = expandable
        self._max_split_bytes = UNLIMITED_BYTES if max_split_bytes is None else max_split_bytes
        self._max_rounding_bytes = max_rounding_bytes
        self._chooses = expandable or max_split_bytes is not None
        # should_split: any remainder in the small pool or an expandable segment; else more than 1 MiB, never oversize.
        splits_all = is_small or expandable
        self.min_remainder_bytes = MIN_BLOCK_BYTES if splits_all else SMALL_BYTES + MIN_BLOCK_BYTES
        self.splits_below_bytes = UNLIMITED_BYTES if splits_all else self._max_split_bytes
        self._keys: list[int] = []  # sorted
        self._blocks: list[Block] = []  # in the order of their keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Block]:
        """The cached blocks, smallest first; the pool may change meanwhile."""
        return iter(list(self._blocks))

    def put(self, block: Block) -> None:
        """Cache `block`."""
        key = block.size << _ADDRESS_BITS | block.address
        block.key = key
        block.cached = True
        block.cached_at = self.searches
        keys = self._keys
        index = bisect_left(keys, key)
        keys.insert(index, key)
        self._blocks.insert(index, block)

    def take(self, block: Block) -> None:
        """Remove `block` from the cached ones."""
        keys = self._keys
        index = bisect_left(keys, block.key)
        del keys[index]
        del self._blocks[index]
        block.cached = False

    def take_best(self, size: int) -> Block | None:
        """Remove and return the smallest cached block that fits `size`, the lowest of equals (`get_free_block`)."""
        self.searches += 1
        keys = self._keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if self._chooses:
            index = self._choice(index, size)
        if index == len(keys):
            return None
        del keys[index]
        block = self._blocks.pop(index)
        block.cached = False
        return block

    def largest(self) -> Block | None:
        """The largest cached block."""
        return self._blocks[-1] if self._blocks else None

    def smallest_of_at_least(self, size: int) -> Block | None:
        """The smallest cached block that fits `size`, whatever the rules say of it."""
        index = bisect_left(self._keys, size << _ADDRESS_BITS)
        return self._blocks[index] if index < len(self._blocks) else None

    def _choice(self, index: int, size: int) -> int:
        """The index of the block to use, from the best fit's; past the last when no cached block may be used."""
        blocks = self._blocks
        none = len(blocks)
        if index == none:
            return none
        if self._expandable:
            # A block that ends where unmapped addresses begin counts with them: it is kept for growing.
            while index + 1 < none and _room(blocks[index + 1]) < _room(blocks[index]):
                index += 1
        found = blocks[index].size
        oversize = self._max_split_bytes
        allowed = found < oversize if size < oversize else found < size + self._max_rounding_bytes
        return index if allowed else none

    def absorb_neighbours(self, block: Block) -> None:
        """Merge cached neighbours into `block`, which is neither cached nor given out (`try_merge_blocks`)."""
        before = block.before
        if before is not None and before.cached:
            self.take(before)
            block.absorb_before(before)
        after = block.after
        if after is not None and after.cached:
            self.take(after)
            block.absorb_after(after)


def _room(block: Block) -> int:
    """The block's bytes, with the unmapped addresses right after it."""
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size


def segment_bytes(size: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Bytes asked of the device for a request of `size` that no cached block serves (`get_allocation_size`).

    >>> segment_bytes(512), segment_bytes(2 * 2**20), segment_bytes(11 * 2**20)
    (2097152, 20971520, 12582912)
    """
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
