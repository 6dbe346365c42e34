"""Expandable segments: one range of addresses per pool, into which pages are mapped as they are needed.

Pages are 2 MiB in the small pool and 20 MiB (`large_segment_size`) in the large one. Memory is mapped at the lowest
addresses where free and unmapped ranges together have room, and every page that nothing lies on can be given back.
(`ExpandableSegment`, `find_expandable_block`, `map_block`, `unmap_block`.)
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from budgetdb.tracing.blocks import SMALL_SEGMENT_BYTES, Block, Pool, segment_bytes
from budgetdb.tracing.segments import DeviceMemory

# Pages in a range of addresses. Torch reserves 1 1/8 of the device's memory and starts another range when that is used
# up; here it never is.
_PAGES = 2**24


class ExpandableSegments:
    """Where blocks come from when `expandable_segments` is on.

    Args:
        memory: what the device gives.
        small: the small pool.
        large: the large pool.
        large_segment_bytes: page size of the large pool.
        capped: the limit is the process's memory fraction, not the device's end. Torch then compares the limit with
            what the default allocator would ask for, not with the pages it maps: a request that needs few new pages
            may be refused, and one that is granted may go over the limit by less than a page.
    """

    def __init__(
        self, memory: DeviceMemory, *, small: Pool, large: Pool, large_segment_bytes: int, capped: bool
    ) -> None:
        self._memory = memory
        self._capped = capped
        self._large_segment_bytes = large_segment_bytes
        self._page_bytes = {small: SMALL_SEGMENT_BYTES, large: large_segment_bytes}
        self._unmapped: dict[Pool, list[Block]] = {}
        address = 0
        for pool, page in self._page_bytes.items():
            self._unmapped[pool] = [Block(address, _PAGES * page, pool, mapped=False)]
            address = -(-_PAGES * page // large_segment_bytes) * large_segment_bytes

    def new_block(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size`, backed by newly mapped pages; None when the device has no room for them.

        Pages mapped before the one that failed stay mapped, and cached (`try_allocate_expandable_block`).
        """
        if self._capped and not self._memory.fits(segment_bytes(size, self._large_segment_bytes)):
            return None
        block = self._lowest_room(pool, size)
        if not block.mapped and not self._map(block, size):
            return None
        while block.size < size:
            following = block.after
            if following is None or not self._map(following, size - block.size):
                return None
            block = following  # which has absorbed the one before it
        pool.take(block)
        return block

    def release_oversize(self, pool: Pool, size: int) -> bool:  # noqa: ARG002 (as NativeSegments has it)
        """Never: blocks of an expandable segment are not given back whole."""
        return False

    def release_cached(self, pool: Pool) -> None:
        """Give back every page that lies wholly within a cached block."""
        for block in pool:
            self._unmap(block)

    def collect(self, pool: Pool, *, threshold_bytes: int) -> None:
        """Nothing: garbage collection passes over expandable segments."""

    def _lowest_room(self, pool: Pool, size: int) -> Block:
        """The first of adjacent free or unmapped blocks that together have room for `size`, at the lowest address."""
        for unmapped in self._unmapped[pool]:
            before = unmapped.before
            first = before if before is not None and before.cached else unmapped
            if _has_room(first, size):
                return first
        raise AssertionError("the range of addresses is used up")

    def _map(self, block: Block, size: int) -> bool:
        """Back the first `size` bytes of an unmapped block by whole pages; cached and merged when that succeeds."""
        pool = block.pool
        page = self._page_bytes[pool]
        nbytes = -(-min(size, block.size) // page) * page
        if not self._capped and not self._memory.fits(nbytes):
            return False
        self._memory.take(nbytes)
        self._unmapped[pool].remove(block)
        block.mapped = True
        if nbytes < block.size:
            rest = Block(block.address + nbytes, block.size - nbytes, pool, mapped=False)
            rest.link_after(block)
            self._insert(rest)
            block.size = nbytes
        pool.absorb_neighbours(block)
        pool.put(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that lie wholly within a cached block; what is left of it at its ends stays cached."""
        pool = block.pool
        page = self._page_bytes[pool]
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.take(block)
        if begin > block.address:
            head = Block(block.address, begin - block.address, pool)
            head.link_before(block)
            pool.put(head)
        if end < block.address + block.size:
            tail = Block(end, block.address + block.size - end, pool)
            tail.link_after(block)
            pool.put(tail)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._memory.give_back(block.size)
        self._absorb_unmapped(block)
        self._insert(block)

    def _absorb_unmapped(self, block: Block) -> None:
        unmapped = self._unmapped[block.pool]
        before, after = block.before, block.after
        if before is not None and not before.mapped:
            unmapped.remove(before)
            block.absorb_before(before)
        if after is not None and not after.mapped:
            unmapped.remove(after)
            block.absorb_after(after)

    def _insert(self, block: Block) -> None:
        insort(self._unmapped[block.pool], block, key=attrgetter("address"))


def _has_room(block: Block, size: int) -> bool:
    room = 0
    following: Block | None = block
    while room < size and following is not None and (following.cached or not following.mapped):
        room += following.size
        following = following.after
    return room >= size
