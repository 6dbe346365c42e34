"""What must hold of a simulated allocator at any moment, and the sizes of tests."""

from __future__ import annotations

from itertools import pairwise

from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.tracing.blocks import Pool

MIB = 2**20


def allocator_with(conf: str, limit_mib: int | None = None, *, capped: bool = False) -> CachingAllocator:
    limit = None if limit_mib is None else limit_mib * MIB
    return CachingAllocator(AllocatorSettings.from_text(conf), limit, capped=capped)


def check(allocator: CachingAllocator) -> None:
    """Blocks tile segments, segments do not overlap, sums agree, and the lists of free blocks are what is free."""
    segments = allocator.snapshot()
    for segment in segments:
        addresses = [segment.address, *(block.address + block.size for block in segment.blocks)]
        assert [block.address for block in segment.blocks] == addresses[:-1]
        assert all(block.size > 0 and block.size % 512 == 0 for block in segment.blocks)
        assert all(one.allocated or other.allocated for one, other in pairwise(segment.blocks)), "unmerged neighbours"
        assert all(0 < block.requested <= block.size for block in segment.blocks if block.allocated)
    assert all(one.address + one.size <= other.address for one, other in pairwise(segments))
    blocks = [block for segment in segments for block in segment.blocks]
    assert sum(block.size for block in blocks) == allocator.reserved_bytes
    assert sum(block.size for block in blocks if block.allocated) == allocator.allocated_bytes
    assert sum(block.requested for block in blocks) == allocator.requested_bytes
    free = {(block.address, block.size) for block in blocks if not block.allocated}
    assert {key for pool in pools(allocator) for key in cached(pool)} == free
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.peak_requested_bytes >= allocator.requested_bytes
    assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
    assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    assert 0 <= allocator.fragmentation < 1


def pools(allocator: CachingAllocator) -> list[Pool]:
    return [allocator._small, allocator._large]


def cached(pool: Pool) -> list[tuple[int, int]]:
    blocks = list(pool)
    assert all(block.cached and block.mapped and block.pool is pool for block in blocks)
    order = [(block.size, block.address) for block in blocks]
    assert order == sorted(set(order))
    assert len(pool) == len(blocks)
    return [(block.address, block.size) for block in blocks]
