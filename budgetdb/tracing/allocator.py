"""Torch's CUDA caching allocator, simulated: what a sequence of requests reserves, and where it runs out.

One device, one stream, no graph capture. Follows `DeviceCachingAllocator` of `c10/cuda/CUDACachingAllocator.cpp` as of
torch 2.13; the rules themselves stand in `blocks` (choosing and splitting), `segments` and `expandable` (taking memory
from the device and giving it back).
"""

from __future__ import annotations

from typing import NoReturn

from budgetdb.errors import SimulatedOutOfMemoryError, UsageError
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.tracing.blocks import SMALL_BYTES, Block, Pool
from budgetdb.tracing.expandable import ExpandableSegments
from budgetdb.tracing.segments import DeviceMemory, NativeSegments
from budgetdb.tracing.snapshot import SegmentSnapshot, snapshot_of

_DEFAULT_SETTINGS = AllocatorSettings()


class CachingAllocator:
    """Serves requests for bytes as torch's allocator does, and keeps its statistics.

    >>> allocator = CachingAllocator()
    >>> handle = allocator.allocate(3 * 2**20)  # cut from a segment of 20 MiB
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (3145728, 20971520)
    >>> allocator.free(handle)
    >>> allocator.empty_cache()
    >>> allocator.reserved_bytes
    0

    Args:
        settings: what PYTORCH_ALLOC_CONF sets.
        limit_bytes: most bytes to reserve, or None for no limit.
        capped: the limit is `torch.cuda.set_per_process_memory_fraction`'s, not the end of the device's memory. Only
            then does `garbage_collection_threshold` do anything; and with expandable segments the limit is compared as
            torch compares it, so that `reserved_bytes` may pass it by less than a page.

    Raises:
        UsageError: the settings choose another allocator, or the limit is negative.
    """

    def __init__(
        self,
        settings: AllocatorSettings = _DEFAULT_SETTINGS,
        limit_bytes: int | None = None,
        *,
        capped: bool = False,
    ) -> None:
        if settings.backend != "native":
            raise UsageError(
                f"the allocator backend {settings.backend!r} can't be simulated",
                next_step="Leave `backend` out of PYTORCH_ALLOC_CONF, or set it to `native`",
            )
        if limit_bytes is not None and limit_bytes < 0:
            raise UsageError(f"the limit is {limit_bytes} bytes", next_step="Give a limit of 0 bytes or more")
        self.settings = settings
        self._memory = DeviceMemory(limit_bytes)
        self._small = self._pool(is_small=True)
        self._large = self._pool(is_small=False)
        self._segments = self._segments_of(capped=capped)
        self._collects = capped and limit_bytes is not None and settings.garbage_collection_threshold > 0
        self._rounds_up = any(settings.roundup_power2_divisions)
        self._live: dict[int, Block] = {}
        self._allocated = self._requested = 0
        self._peak_allocated = self._peak_requested = 0
        self._allocated_at_peak = 0
        self._alloc_retries = 0

    def _pool(self, *, is_small: bool) -> Pool:
        return Pool(
            is_small=is_small,
            expandable=self.settings.expandable_segments,
            max_split_bytes=self.settings.max_split_size_bytes,
            max_rounding_bytes=self.settings.max_non_split_rounding_bytes,
        )

    def _segments_of(self, *, capped: bool) -> NativeSegments | ExpandableSegments:
        large = self.settings.large_segment_bytes
        if self.settings.expandable_segments:
            return ExpandableSegments(
                self._memory, small=self._small, large=self._large, large_segment_bytes=large, capped=capped
            )
        return NativeSegments(
            self._memory, large_segment_bytes=large, max_split_bytes=self.settings.max_split_size_bytes
        )

    def allocate(self, nbytes: int) -> int:
        """Serve a request, and return a handle to free it by: its address.

        Raises:
            UsageError: `nbytes` is below 1.
            SimulatedOutOfMemoryError: no room, even after the cache was given back; nothing else has changed.
        """
        if nbytes < 1:
            raise UsageError(f"a request of {nbytes} bytes", next_step="Ask for 1 byte or more")
        size = self.settings.rounded_bytes(nbytes) if self._rounds_up else (nbytes + 511) & -512
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.take_best(size) or self._new_block(pool, size, nbytes)
        remainder = block.size - size
        if remainder >= pool.min_remainder_bytes and size < pool.splits_below_bytes:
            rest = Block(block.address + size, remainder, pool)
            rest.link_after(block)
            block.size = size
            pool.put(rest)
        block.requested = nbytes
        self._live[block.address] = block
        # What stays unsplit of a block counts as allocated (`alloc_found_block`).
        self._allocated += block.size
        self._requested += nbytes
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
        if self._requested > self._peak_requested:
            self._peak_requested = self._requested
        return block.address

    def _new_block(self, pool: Pool, size: int, nbytes: int) -> Block:
        """A block from new memory: take it, else give back what is cached and try again (`malloc`)."""
        if self._collects and self._memory.limit_bytes is not None:
            threshold = int(self.settings.garbage_collection_threshold * self._memory.limit_bytes)
            self._segments.collect(self._large, threshold_bytes=threshold)
        peak_before = self._memory.peak_bytes
        block = self._segments.new_block(pool, size)
        if block is None and self._segments.release_oversize(pool, size):
            block = self._segments.new_block(pool, size)
        if block is None:
            self.empty_cache()
            self._alloc_retries += 1
            block = self._segments.new_block(pool, size)
        if block is None:
            self._raise_out_of_memory(nbytes)
        if self._memory.peak_bytes > peak_before:
            self._allocated_at_peak = self._allocated + size
        return block

    def _raise_out_of_memory(self, nbytes: int) -> NoReturn:
        raise SimulatedOutOfMemoryError(
            requested_bytes=nbytes,
            allocated_bytes=self._allocated,
            reserved_bytes=self._memory.held_bytes,
            limit_bytes=self._memory.limit_bytes or 0,
        )

    def free(self, handle: int) -> None:
        """Take back what `allocate` gave; it is cached, merged with its free neighbours (`free_block`).

        Raises:
            UsageError: nothing is allocated under that handle.
        """
        block = self._live.pop(handle, None)
        if block is None:
            raise UsageError(f"nothing is allocated at {handle}", next_step="Free each handle once")
        self._allocated -= block.size
        self._requested -= block.requested
        pool = block.pool
        if block.before is not None or block.after is not None:
            pool.absorb_neighbours(block)
        pool.put(block)

    def empty_cache(self) -> None:
        """Give back what is wholly free: segments, or pages of an expandable segment (`release_cached_blocks`)."""
        self._segments.release_cached(self._large)
        self._segments.release_cached(self._small)

    def reset_peaks(self) -> None:
        """Let every peak begin again at what is held now."""
        self._peak_allocated, self._peak_requested = self._allocated, self._requested
        self._memory.peak_bytes = self._memory.held_bytes
        self._allocated_at_peak = self._allocated

    def live_handles(self) -> set[int]:
        """What was allocated and not freed."""
        return set(self._live)

    def snapshot(self) -> list[SegmentSnapshot]:
        """Every segment and its blocks, as `torch.cuda.memory_snapshot` lists them, by address."""
        return snapshot_of([*self._live.values(), *self._small, *self._large])

    @property
    def allocated_bytes(self) -> int:
        """Bytes in blocks given out: the requests rounded up, and what stayed unsplit."""
        return self._allocated

    @property
    def requested_bytes(self) -> int:
        """Bytes of the requests served and not freed, as they were asked for."""
        return self._requested

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the device, given out or cached."""
        return self._memory.held_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes to reserve, or None."""
        return self._memory.limit_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The most `allocated_bytes` has been."""
        return self._peak_allocated

    @property
    def peak_requested_bytes(self) -> int:
        """The most `requested_bytes` has been."""
        return self._peak_requested

    @property
    def peak_reserved_bytes(self) -> int:
        """The most `reserved_bytes` has been."""
        return self._memory.peak_bytes

    @property
    def alloc_retries(self) -> int:
        """How often the cache was given back for want of room (`num_alloc_retries`)."""
        return self._alloc_retries

    @property
    def segments_allocated(self) -> int:
        """How often memory was taken from the device: segments, or ranges of pages (`num_device_alloc`)."""
        return self._memory.calls

    @property
    def least_refused_bytes(self) -> int | None:
        """The smallest total the limit has refused to reserve, or None when it never did."""
        return self._memory.least_refused_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that was in no block given out when most was reserved; 0 when nothing was.

        Taken when the peak was first reached, the request that raised it counted as served. It includes what the last
        segment or page has more than that request.
        """
        peak = self._memory.peak_bytes
        return 1 - self._allocated_at_peak / peak if peak else 0.0
