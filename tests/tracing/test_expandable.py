"""Expandable segments: which pages are mapped, which are given back, and where blocks go. All worked out by hand."""

from __future__ import annotations

import pytest
from allocator_checks import MIB, check

from budgetdb.errors import SimulatedOutOfMemoryError
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings


def expandable(limit_mib: int | None = None, *, capped: bool = False, more: str = "") -> CachingAllocator:
    settings = AllocatorSettings.from_text(f"expandable_segments:True,{more}")
    return CachingAllocator(settings, None if limit_mib is None else limit_mib * MIB, capped=capped)


def numbers(allocator: CachingAllocator) -> tuple[float, float]:
    """Allocated and reserved MiB."""
    check(allocator)
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


def take(allocator: CachingAllocator, *mibs: float) -> list[int]:
    return [allocator.allocate(int(mib * MIB)) for mib in mibs]


def test_pages_of_2_mib_in_the_small_pool_and_of_20_in_the_large() -> None:
    allocator = expandable()
    take(allocator, 1, 1)
    assert numbers(allocator) == (2, 2)
    take(allocator, 0.5, 1)  # half a MiB of a second page; its other 1.5 MiB hold the last
    assert numbers(allocator) == (3.5, 4)
    take(allocator, 3)
    assert numbers(allocator) == (6.5, 24)


def test_memory_is_mapped_for_what_the_free_end_lacks() -> None:
    allocator = expandable()
    first, second = take(allocator, 15, 24)  # 5 of 20 are left; 19 more need one page: 15 + 24 of 40
    assert second == first + 15 * MIB
    assert numbers(allocator) == (39, 40)
    (third,) = take(allocator, 1.5)  # 1 is left, half a MiB more needs a page
    assert third == second + 24 * MIB
    assert numbers(allocator) == (40.5, 60)
    assert allocator.segments_allocated == 3


def test_a_large_request_maps_whole_pages() -> None:
    allocator = expandable()
    take(allocator, 22)
    assert numbers(allocator) == (22, 40)


def test_every_remainder_is_split_off() -> None:
    allocator = expandable()
    allocator.allocate(19 * MIB + 512)  # the default allocator gives out 20
    assert allocator.allocated_bytes == 19 * MIB + 512
    allocator.allocate(MIB + 512)  # 1 MiB - 512 is left, so that 1024 bytes are mapped: a page
    assert numbers(allocator) == (20 + 1024 / MIB, 40)
    allocator = expandable()
    allocator.allocate(20 * MIB - 512)
    check(allocator)
    assert [block.size for block in allocator.snapshot()[0].blocks] == [20 * MIB - 512, 512]


def with_a_hole(allocator: CachingAllocator) -> tuple[int, int]:
    """15 used, 30 free, 5 used, 10 free: three pages. The first and the third block."""
    first, hole, third = take(allocator, 15, 30, 5)
    allocator.free(hole)
    assert numbers(allocator) == (20, 60)
    return first, third


def test_only_pages_with_nothing_on_them_are_given_back() -> None:
    allocator = expandable()
    first, third = with_a_hole(allocator)
    allocator.empty_cache()  # of the hole from 15 to 45, the page from 20 to 40; the end from 50 to 60 is half a page
    assert numbers(allocator) == (20, 40)
    assert [(segment.address - first, segment.size) for segment in allocator.snapshot()] == [
        (0, 20 * MIB),
        (40 * MIB, 20 * MIB),
    ]
    allocator.empty_cache()  # nothing more
    assert numbers(allocator) == (20, 40)
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    assert numbers(allocator) == (0, 0)


def test_a_gap_is_mapped_again_before_the_end_grows() -> None:
    allocator = expandable()
    first, _ = with_a_hole(allocator)
    allocator.empty_cache()
    # 5 free, 20 unmapped, 5 free: 28 have room there, when the page between is mapped. 2 are left.
    (again,) = take(allocator, 28)
    assert again == first + 15 * MIB
    assert numbers(allocator) == (48, 60)


def test_the_end_grows_if_the_gap_is_too_small() -> None:
    allocator = expandable()
    _, third = with_a_hole(allocator)
    allocator.empty_cache()
    # 31 do not fit the 30. At the end 10 are free; 21 more take two pages.
    (again,) = take(allocator, 31)
    assert again == third + 5 * MIB
    assert numbers(allocator) == (51, 80)


def test_a_block_that_can_grow_counts_as_large_as_it_can_grow() -> None:
    allocator = expandable()
    hole, _ = take(allocator, 8, 7)  # 8 | 7 | 5 free, with unmapped addresses behind it
    allocator.free(hole)
    assert take(allocator, 4) == [hole]  # though 4 fit the 5 at the end better
    assert numbers(allocator) == (11, 20)


def test_but_it_is_used_if_no_other_fits() -> None:
    allocator = expandable()
    hole, second = take(allocator, 3, 12)
    allocator.free(hole)
    assert take(allocator, 4) == [second + 12 * MIB]
    assert numbers(allocator) == (16, 20)


def test_out_of_room_unmaps_pages_and_tries_again() -> None:
    allocator = expandable(80)
    with_a_hole(allocator)
    # 31 need two pages at the end: 100 > 80. The page in the hole is given back: 40 + 40 fit.
    take(allocator, 31)
    assert numbers(allocator) == (51, 80)
    assert (allocator.alloc_retries, allocator.least_refused_bytes) == (1, 100 * MIB)


def test_out_of_memory_leaves_it_usable() -> None:
    allocator = expandable(79)
    with_a_hole(allocator)
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        take(allocator, 31)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (20 * MIB, 40 * MIB)
    assert numbers(allocator) == (20, 40)
    take(allocator, 28)
    assert numbers(allocator) == (48, 60)


def unmapped_then_free(limit_mib: int) -> CachingAllocator:
    """20 used, 20 unmapped, 20 free."""
    allocator = expandable(limit_mib)
    _, second, third = take(allocator, 20, 20, 20)
    allocator.free(second)
    allocator.empty_cache()
    allocator.free(third)
    assert numbers(allocator) == (20, 40)
    return allocator


def test_pages_before_and_after_a_free_block_are_mapped() -> None:
    allocator = unmapped_then_free(80)
    take(allocator, 50)  # the page before the free 20, and one after them: 10 are left
    assert numbers(allocator) == (70, 80)
    assert allocator.alloc_retries == 0


def test_pages_mapped_in_vain_are_cached_then_given_back() -> None:
    allocator = unmapped_then_free(60)
    # The page before is mapped: 60. The one after is refused: 80. All three are given back, then 60 are needed.
    with pytest.raises(SimulatedOutOfMemoryError):
        take(allocator, 50)
    assert numbers(allocator) == (20, 20)
    assert allocator.peak_reserved_bytes == 60 * MIB
    take(allocator, 40)
    assert numbers(allocator) == (60, 60)


def test_a_full_device_is_full_where_its_pages_end() -> None:
    allocator = expandable(39)
    with pytest.raises(SimulatedOutOfMemoryError):
        take(allocator, 22)  # two pages: 40
    assert numbers(allocator) == (0, 0)


def test_a_memory_fraction_is_compared_with_what_the_default_allocator_would_ask_for() -> None:
    allocator = expandable(39, capped=True)
    take(allocator, 22)  # 22 <= 39, and 40 are mapped
    assert numbers(allocator) == (22, 40)
    with pytest.raises(SimulatedOutOfMemoryError):
        take(allocator, 19)  # the end lacks 1; 20 are asked for
    assert numbers(allocator) == (22, 40)
    take(allocator, 18)  # the end has them
    assert numbers(allocator) == (40, 40)


def test_a_memory_fraction_refuses_what_one_page_would_serve() -> None:
    allocator = expandable(60, capped=True)
    take(allocator, 22)
    with pytest.raises(SimulatedOutOfMemoryError):
        take(allocator, 22)  # 40 + 22 > 60, though one page is all it needs
    allocator = expandable(60)
    take(allocator, 22, 22)
    assert numbers(allocator) == (44, 60)


def test_large_segments_of_another_size_are_pages_of_that_size() -> None:
    allocator = expandable(more="large_segment_size_mb:32")
    take(allocator, 3, 30)
    assert numbers(allocator) == (33, 64)


def test_garbage_collection_passes_over_it() -> None:
    allocator = expandable(200, capped=True, more="garbage_collection_threshold:0.1")
    allocator.free(take(allocator, 60)[0])
    take(allocator, 70)  # 60 + 70 <= 200; the end has 60, and one page more is mapped
    assert numbers(allocator) == (70, 80)


def test_oversize_blocks_are_not_used_for_smaller_requests_here_either() -> None:
    allocator = expandable(more="max_split_size_mb:32")
    first, hole, _ = take(allocator, 1.5, 40, 1.5)  # 43 of 60, 17 free at the end
    allocator.free(hole)
    # 20 fit the hole of 40, which is oversize. The end has 17: one page more.
    (new,) = take(allocator, 20)
    assert new == first + 43 * MIB
    assert numbers(allocator) == (23, 80)
    assert take(allocator, 33) == [hole]  # split, as every block of an expandable segment is
    assert numbers(allocator) == (56, 80)
