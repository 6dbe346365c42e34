"""The default allocator: every rule by an example worked out by hand."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
from allocator_checks import MIB, allocator_with, check

from budgetdb.errors import SimulatedOutOfMemoryError, UsageError
from budgetdb.tracing.allocator import CachingAllocator


def numbers(allocator: CachingAllocator) -> tuple[float, float]:
    """Allocated and reserved MiB."""
    check(allocator)
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved_mib"),
    [
        (1, 512, 2),  # rounded to 512; small: a segment of 2 MiB
        (512, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),  # the largest small request
        (MIB + 1, MIB + 512, 20),  # from here a segment of 20 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB - 511, 10 * MIB, 10),  # rounds up to 10 MiB: a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12),  # of 12 MiB; the remainder of 2 MiB - 512 is more than 1 MiB: split
        (11 * MIB - 512, 11 * MIB - 512, 12),  # the remainder of 1 MiB + 512 is split off too
        (11 * MIB, 12 * MIB, 12),  # a remainder of 1 MiB is not: it counts as allocated
        (12 * MIB, 12 * MIB, 12),
        (18 * MIB + 1, 18 * MIB + 512, 20),  # the largest remainder of an own segment: 2 MiB - 512
    ],
)
def test_one_request(nbytes: int, allocated: int, reserved_mib: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    check(allocator)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved_mib * MIB)
    assert (allocator.requested_bytes, allocator.segments_allocated) == (nbytes, 1)


def test_a_small_segment_is_used_to_its_last_512_bytes() -> None:
    allocator = CachingAllocator()
    for nbytes in (MIB, MIB - 512, 512):  # together 2 MiB
        allocator.allocate(nbytes)
    assert numbers(allocator) == (2, 2)
    allocator.allocate(1)
    assert numbers(allocator) == (2 + 512 / MIB, 4)


def test_pools_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(15 * MIB))
    allocator.allocate(MIB)  # 16 MiB are free, but in the large pool
    assert numbers(allocator) == (1, 18)


def test_the_smallest_block_that_fits_is_used() -> None:
    allocator = CachingAllocator()
    handles = {mib: allocator.allocate(mib * MIB) for mib in (16, 12, 14)}
    for handle in handles.values():
        allocator.free(handle)
    assert allocator.allocate(13 * MIB) == handles[14]
    # The rest of 1 MiB stays with it. 16, 12 and 14 are reserved, no more.
    assert numbers(allocator) == (14, 42)
    assert allocator.allocate(14 * MIB) == handles[16]  # 2 MiB are split off
    assert numbers(allocator) == (28, 42)


def test_of_equal_blocks_the_lowest_is_used() -> None:
    allocator = CachingAllocator()
    handles = [allocator.allocate(12 * MIB) for _ in range(3)]
    for handle in reversed(handles):
        allocator.free(handle)
    assert [allocator.allocate(12 * MIB) for _ in range(3)] == handles


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_merge(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    handles = [allocator.allocate(5 * MIB) for _ in range(3)]  # 5 + 5 + 5 of 20 MiB, 5 left
    for index in order:
        allocator.free(handles[index])
        check(allocator)
    assert allocator.allocate(20 * MIB) == handles[0]  # all of it again
    assert numbers(allocator) == (20, 20)


def test_a_gap_is_filled_before_memory_is_taken() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(4 * MIB), allocator.allocate(9 * MIB)  # 4 | 9 | 7 free
    allocator.free(first)
    third = allocator.allocate(3 * MIB)  # fits 4 better than 7; the rest is exactly 1 MiB and is not split off
    assert (third, second) == (first, first + 4 * MIB)
    assert numbers(allocator) == (13, 20)


def test_peaks_and_their_reset() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(11 * MIB)  # 12 allocated of 12
    second = allocator.allocate(3 * MIB)  # 3 of 20
    allocator.free(first)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (3 * MIB, 3 * MIB)
    assert (allocator.peak_requested_bytes, allocator.peak_allocated_bytes) == (14 * MIB, 15 * MIB)
    assert allocator.peak_reserved_bytes == allocator.reserved_bytes == 32 * MIB
    allocator.empty_cache()  # the 12 MiB segment
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.peak_reserved_bytes == 32 * MIB
    allocator.reset_peaks()
    assert (allocator.peak_requested_bytes, allocator.peak_allocated_bytes) == (3 * MIB, 3 * MIB)
    assert allocator.peak_reserved_bytes == 20 * MIB
    allocator.free(second)
    assert allocator.peak_allocated_bytes == 3 * MIB


def test_fragmentation_is_what_was_free_when_most_was_reserved() -> None:
    allocator = CachingAllocator()
    assert allocator.fragmentation == 0
    first = allocator.allocate(3 * MIB)  # 3 of 20
    assert allocator.fragmentation == pytest.approx(17 / 20)
    allocator.allocate(9 * MIB)  # 12 of 20: no new peak of what is reserved
    assert allocator.fragmentation == pytest.approx(17 / 20)
    allocator.allocate(20 * MIB)  # 32 of 40
    allocator.free(first)
    assert allocator.fragmentation == pytest.approx(8 / 40)
    allocator.reset_peaks()  # 29 of 40
    assert allocator.fragmentation == pytest.approx(11 / 40)


def test_empty_cache_leaves_segments_in_use() -> None:
    allocator = CachingAllocator()
    kept, gone = allocator.allocate(3 * MIB), allocator.allocate(12 * MIB)  # 3 of 20: 12 fits the 17 left, 5 remain
    whole = allocator.allocate(30 * MIB)
    small = allocator.allocate(1)
    for handle in (gone, whole, small):
        allocator.free(handle)
    assert numbers(allocator) == (3, 52)
    allocator.empty_cache()
    assert numbers(allocator) == (3, 20)
    allocator.free(kept)
    allocator.empty_cache()
    assert numbers(allocator) == (0, 0)


def test_out_of_room_gives_the_cache_back_and_tries_again() -> None:
    allocator = CachingAllocator(limit_bytes=24 * MIB)
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(14 * MIB)  # 12 + 14 > 24; without the cached 12 it fits
    assert numbers(allocator) == (14, 14)
    assert (allocator.alloc_retries, allocator.least_refused_bytes) == (1, 26 * MIB)


def test_the_limit_itself_may_be_reserved() -> None:
    allocator = CachingAllocator(limit_bytes=24 * MIB)
    allocator.allocate(12 * MIB)
    allocator.allocate(12 * MIB)
    assert numbers(allocator) == (24, 24)
    assert (allocator.alloc_retries, allocator.least_refused_bytes) == (0, None)


def test_out_of_memory_where_a_split_segment_holds_what_is_free() -> None:
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    kept = allocator.allocate(3 * MIB)  # 3 of 20
    allocator.free(allocator.allocate(18 * MIB))  # does not fit the 17 left: 38 reserved, 18 cached
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        allocator.allocate(22 * MIB - 1)  # 20 + 22 > 40 even when the 18 are given back
    error = caught.value
    assert (error.requested_bytes, error.limit_bytes) == (22 * MIB - 1, 40 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (3 * MIB, 20 * MIB)
    assert "23,068,671 bytes" in str(error)
    assert "expandable_segments" in str(error)
    assert allocator.alloc_retries == 1
    # It goes on: nothing of the failed request is left.
    assert numbers(allocator) == (3, 20)
    allocator.allocate(20 * MIB)
    allocator.free(kept)
    assert numbers(allocator) == (20, 40)


def test_the_error_survives_the_way_to_another_process() -> None:
    error = SimulatedOutOfMemoryError(requested_bytes=1, allocated_bytes=2, reserved_bytes=3, limit_bytes=4)
    same = copy.copy(error)  # by the same way as pickling
    assert (str(same), same.limit_bytes, same.exit_code) == (str(error), 4, 5)
    assert isinstance(same, RuntimeError)


def test_large_segments_of_another_size() -> None:
    allocator = allocator_with("large_segment_size_mb:40")
    allocator.allocate(3 * MIB)
    allocator.allocate(12 * MIB)  # fits what is left of it
    allocator.allocate(30 * MIB)
    assert numbers(allocator) == (45, 70)


def test_divisions_round_up() -> None:
    allocator = allocator_with("roundup_power2_divisions:4")
    allocator.allocate(17 * MIB)  # between 16 and 32 in steps of 4 MiB: 20
    assert numbers(allocator) == (20, 20)
    assert allocator.requested_bytes == 17 * MIB
    allocator.free(allocator.allocate(MIB - 1))  # 1 MiB: still small
    assert numbers(allocator) == (20, 22)


class TestMaxSplitSize:
    def test_an_oversize_block_is_not_used_for_a_smaller_request(self) -> None:
        allocator = allocator_with("max_split_size_mb:32")
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(10 * MIB)
        assert numbers(allocator) == (10, 50)

    def test_a_block_of_just_that_size_is_oversize(self) -> None:
        allocator = allocator_with("max_split_size_mb:32")
        allocator.free(allocator.allocate(32 * MIB))
        allocator.allocate(30 * MIB)
        assert numbers(allocator) == (30, 62)

    def test_an_oversize_block_is_used_whole_for_nearly_as_large_a_request(self) -> None:
        allocator = allocator_with("max_split_size_mb:32")
        handle = allocator.allocate(50 * MIB)
        allocator.free(handle)
        assert allocator.allocate(32 * MIB) == handle  # 50 < 32 + 20
        assert numbers(allocator) == (50, 50)

    def test_but_not_if_it_is_a_large_segment_larger(self) -> None:
        allocator = allocator_with("max_split_size_mb:32")
        allocator.free(allocator.allocate(52 * MIB))
        allocator.allocate(32 * MIB)  # 52 >= 32 + 20
        assert numbers(allocator) == (32, 84)
        allocator = allocator_with("max_split_size_mb:32,max_non_split_rounding_mb:21")
        allocator.free(allocator.allocate(52 * MIB))
        allocator.allocate(32 * MIB)
        assert numbers(allocator) == (52, 52)

    def test_smaller_blocks_are_split_as_ever(self) -> None:
        allocator = allocator_with("max_split_size_mb:32")
        handle = allocator.allocate(30 * MIB)
        allocator.free(handle)
        assert allocator.allocate(12 * MIB) == handle
        assert numbers(allocator) == (12, 30)

    def test_largest_oversize_blocks_are_given_back_first_and_no_more_than_needed(self) -> None:
        allocator = allocator_with("max_split_size_mb:32", 140)
        handles = [allocator.allocate(mib * MIB) for mib in (40, 50, 34, 10)]  # 134
        for handle in handles:
            allocator.free(handle)
        # No cached block has 80 MiB: 50, then 40 are given back, 90 in all. 44 + 80 fit, the 34 and the 10 stay.
        allocator.allocate(80 * MIB)
        assert numbers(allocator) == (80, 124)
        assert allocator.alloc_retries == 0

    def test_one_oversize_block_is_enough_if_it_is_as_large(self) -> None:
        allocator = allocator_with("max_split_size_mb:32", 130)
        handles = [allocator.allocate(mib * MIB) for mib in (40, 70, 10)]  # 120
        for handle in handles:
            allocator.free(handle)
        # 70 >= 46 + 20, so it is not used for 46, but it is the smallest that is as large: 120 - 70 + 46.
        allocator.allocate(46 * MIB)
        assert numbers(allocator) == (46, 96)
        assert allocator.alloc_retries == 0

    def test_all_is_given_back_if_oversize_blocks_are_not_enough(self) -> None:
        allocator = allocator_with("max_split_size_mb:32", 60)
        handles = [allocator.allocate(mib * MIB) for mib in (40, 16)]
        for handle in handles:
            allocator.free(handle)
        allocator.allocate(50 * MIB)  # the 40 alone are less than 50; then the 16 go too
        assert numbers(allocator) == (50, 50)
        assert allocator.alloc_retries == 1

    def test_a_small_request_asks_for_an_oversize_block_too(self) -> None:
        allocator = allocator_with("max_split_size_mb:32", 60)
        handles = [allocator.allocate(mib * MIB) for mib in (40, 16)]
        for handle in handles:
            allocator.free(handle)
        # 18 MiB fit no cached block it may use. 56 + 18 > 60: the 40 are given back, not the 16.
        allocator.allocate(18 * MIB)
        assert numbers(allocator) == (18, 34)
        assert allocator.alloc_retries == 0


class TestGarbageCollection:
    def blocks(self, allocator: CachingAllocator) -> CachingAllocator:
        """30, 20 and 40 MiB cached, the last one the youngest; the pool was searched 3 times."""
        handles = [allocator.allocate(mib * MIB) for mib in (30, 20)]
        for handle in handles:
            allocator.free(handle)
        allocator.free(allocator.allocate(40 * MIB))
        assert numbers(allocator) == (0, 90)
        return allocator

    def test_the_old_are_given_back_when_the_threshold_is_passed(self) -> None:
        allocator = self.blocks(allocator_with("garbage_collection_threshold:0.5", 100, capped=True))
        # The fourth search. Ages: 2, 2 and 1; the average is 5/3. 90 - 50 = 40 MiB are wanted; 30 and 20 go.
        allocator.allocate(60 * MIB)
        assert numbers(allocator) == (60, 100)
        assert allocator.alloc_retries == 0

    def test_a_small_request_collects_large_blocks_too(self) -> None:
        allocator = self.blocks(allocator_with("garbage_collection_threshold:0.5", 100, capped=True))
        # It does not search the large pool. Ages: 1, 1 and 0; the average is 2/3. 30 and 20 go again, 2 come.
        allocator.allocate(1)
        assert numbers(allocator) == (512 / MIB, 42)

    def test_a_second_round_if_the_first_was_not_enough(self) -> None:
        allocator = allocator_with("garbage_collection_threshold:0.3", 100, capped=True)
        handles = [allocator.allocate(mib * MIB) for mib in (10, 20)]
        for handle in handles:
            allocator.free(handle)
        allocator.free(allocator.allocate(60 * MIB))  # 30 were held, 30 may be: nothing is collected
        # 90 are held, 60 are wanted. Ages 2, 2 and 1: 10 and 20 go; then the 60, the only one left.
        allocator.allocate(70 * MIB)
        assert numbers(allocator) == (70, 70)
        assert allocator.alloc_retries == 0

    def test_nothing_is_collected_without_a_memory_fraction(self) -> None:
        allocator = self.blocks(allocator_with("garbage_collection_threshold:0.5", 100))
        allocator.allocate(60 * MIB)  # 90 + 60 > 100: all is given back
        assert numbers(allocator) == (60, 60)
        assert allocator.alloc_retries == 1

    def test_nothing_is_collected_below_the_threshold(self) -> None:
        allocator = self.blocks(allocator_with("garbage_collection_threshold:0.9", 100, capped=True))
        allocator.allocate(60 * MIB)  # 90 are held, 90 may be
        assert numbers(allocator) == (60, 60)
        assert allocator.alloc_retries == 1

    def test_split_segments_stay(self) -> None:
        allocator = allocator_with("garbage_collection_threshold:0.1", 100, capped=True)
        allocator.allocate(3 * MIB)
        allocator.free(allocator.allocate(12 * MIB))
        allocator.allocate(40 * MIB)
        assert numbers(allocator) == (43, 60)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_request_of_nothing_is_an_error(nbytes: int) -> None:
    with pytest.raises(UsageError, match=f"request of {nbytes} bytes"):
        CachingAllocator().allocate(nbytes)


def test_freeing_twice_is_an_error() -> None:
    allocator = CachingAllocator()
    handle = allocator.allocate(1)
    allocator.free(handle)
    with pytest.raises(UsageError, match=f"nothing is allocated at {handle}"):
        allocator.free(handle)
    check(allocator)


def test_what_can_not_be_simulated_is_refused() -> None:
    with pytest.raises(UsageError, match="'cudaMallocAsync' can't be simulated"):
        allocator_with("backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="limit is -1 bytes"):
        CachingAllocator(limit_bytes=-1)


def test_nothing_here_imports_torch() -> None:
    modules = ["allocator", "replay", "workspaces"]
    code = f"import sys, {', '.join(f'budgetdb.tracing.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
