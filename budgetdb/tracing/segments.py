"""Segments of the default allocator: each one `cudaMalloc`, given back only when nothing of it is in use."""

from __future__ import annotations

from budgetdb.tracing.blocks import Block, Pool, segment_bytes


class DeviceMemory:
    """Bytes taken from the device, and the most it gives.

    Attributes:
        held_bytes: taken now.
        peak_bytes: most taken at once.
        limit_bytes: most that may be taken, or None.
        calls: how often memory was taken (torch's `num_device_alloc`).
        least_refused_bytes: the smallest total that was refused, or None when nothing was. Under any limit below it,
            and not below the peak, the same requests get the same answers.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        self.calls = 0
        self.least_refused_bytes: int | None = None

    def fits(self, nbytes: int) -> bool:
        """Whether so many more bytes stay within the limit."""
        total = self.held_bytes + nbytes
        if self.limit_bytes is None or total <= self.limit_bytes:
            return True
        if self.least_refused_bytes is None or total < self.least_refused_bytes:
            self.least_refused_bytes = total
        return False

    def take(self, nbytes: int) -> None:
        """Take bytes, whatever the limit."""
        self.held_bytes += nbytes
        self.calls += 1
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give_back(self, nbytes: int) -> None:
        """Return bytes to the device."""
        self.held_bytes -= nbytes


class NativeSegments:
    """Where blocks come from when `expandable_segments` is off."""

    def __init__(self, memory: DeviceMemory, *, large_segment_bytes: int, max_split_bytes: int | None) -> None:
        self._memory = memory
        self._large_segment_bytes = large_segment_bytes
        self._max_split_bytes = max_split_bytes
        # A new segment lies above all others. The real driver may place it elsewhere, which only matters between free
        # blocks of equal size.
        self._next_address = 0

    def new_block(self, pool: Pool, size: int) -> Block | None:
        """A segment for a request of `size`, as one block; None when the device has no room (`alloc_block`)."""
        nbytes = segment_bytes(size, self._large_segment_bytes)
        if not self._memory.fits(nbytes):
            return None
        self._memory.take(nbytes)
        block = Block(self._next_address, nbytes, pool)
        self._next_address += nbytes
        return block

    def release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back oversize blocks, just enough for `size`; whether enough were found.

        (`release_available_cached_blocks`: the one block that is large enough, else the largest ones. What was given
        back stays so even where it was not enough.)
        """
        if self._max_split_bytes is None:
            return False
        wanted = max(size, self._max_split_bytes)
        block = pool.smallest_of_at_least(wanted)
        if block is not None:
            self._release(block)
            return True
        released = 0
        while released < wanted:
            block = pool.largest()
            if block is None or block.size < self._max_split_bytes:
                return False
            released += block.size
            self._release(block)
        return True

    def release_cached(self, pool: Pool) -> None:
        """Give back every segment of which nothing is in use (`release_blocks`)."""
        for block in pool:
            if block.is_whole_segment:
                self._release(block)

    def collect(self, pool: Pool, *, threshold_bytes: int) -> None:
        """Give back segments not used for long, until no more than the threshold is held.

        (`garbage_collect_cached_blocks`: age is counted in searches of the pool; each round frees all that are at
        least as old as the average of those left.)
        """
        wanted = self._memory.held_bytes - threshold_bytes
        if wanted <= 0:
            return
        ages = {block: pool.searches - block.cached_at for block in pool if block.is_whole_segment}
        released = 0
        while released < wanted and ages:
            # The round's bar is fixed before it begins; at least the oldest block passes it.
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                released += block.size
                self._release(block)
                del ages[block]

    def _release(self, block: Block) -> None:
        block.pool.take(block)
        self._memory.give_back(block.size)
