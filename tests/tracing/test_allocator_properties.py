"""What holds of any sequence of requests, whatever the settings, and that the obvious program does the same."""

from __future__ import annotations

import contextlib
import math

import pytest
from allocator_checks import MIB, allocator_with, check
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_allocator import PlainAllocator

from budgetdb.errors import SimulatedOutOfMemoryError
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings

# Requests of all kinds: tiny, around the bounds of the pools, and large.
SIZES = (
    st.integers(1, 4096)
    | st.integers(MIB - 1024, MIB + 1024)
    | st.integers(1, 40).map(lambda mib: mib * MIB)
    | st.integers(9 * MIB, 12 * MIB)
    | st.integers(1, 64 * MIB)
)
# A number frees the block it points at among those allocated, counted round; None empties the cache.
ACTION = (
    SIZES.map(lambda n: ("allocate", n))
    | st.integers(0, 999).map(lambda n: ("free", n))
    | st.sampled_from([("free", 0), ("free", 1), ("empty", 0)])
)
ACTIONS = st.lists(ACTION, max_size=10) | st.lists(ACTION, min_size=20, max_size=80)
CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:32,max_non_split_rounding_mb:24",
        "max_split_size_mb:24,expandable_segments:True",
        "roundup_power2_divisions:[1:8,4:2,>:4]",
        "large_segment_size_mb:11",
        "large_segment_size_mb:33,expandable_segments:True",
        "garbage_collection_threshold:0.4",
        "garbage_collection_threshold:0.4,max_split_size_mb:20,roundup_power2_divisions:4",
    ]
)


def act(allocator: CachingAllocator, actions: list[tuple[str, int]], *, checked: bool = True) -> list[int]:
    """Do them; what is allocated at the end. A request that fails is left out."""
    alive: list[int] = []
    for action, number in actions:
        if action == "allocate":
            with contextlib.suppress(SimulatedOutOfMemoryError):
                alive.append(allocator.allocate(number))
        elif action == "free" and alive:
            allocator.free(alive.pop(number % len(alive)))
        elif action == "empty":
            allocator.empty_cache()
        if checked:
            check(allocator)
    return alive


@settings(max_examples=150)
@given(actions=ACTIONS, conf=CONFS, limit_mib=st.none() | st.integers(0, 200), capped=st.booleans())
def test_whatever_is_asked_the_books_are_right(
    actions: list[tuple[str, int]], conf: str, limit_mib: int | None, capped: bool
) -> None:
    allocator = allocator_with(conf, limit_mib, capped=capped)
    alive = act(allocator, actions)
    if limit_mib is not None:
        # Torch itself passes the memory fraction by less than a page of expandable segments.
        page = allocator.settings.large_segment_bytes if capped and allocator.settings.expandable_segments else 0
        assert allocator.peak_reserved_bytes <= limit_mib * MIB + max(page - 1, 0)
    assert len(set(alive)) == len(alive)
    for handle in alive:
        allocator.free(handle)
    check(allocator)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (0, 0)
    allocator.empty_cache()
    check(allocator)
    assert allocator.reserved_bytes == 0
    assert allocator.snapshot() == []


@settings(max_examples=60)
@given(actions=ACTIONS, conf=CONFS)
def test_what_an_unlimited_run_reserves_is_enough(actions: list[tuple[str, int]], conf: str) -> None:
    unlimited = allocator_with(conf)
    alive = act(unlimited, actions, checked=False)
    allocator = CachingAllocator(unlimited.settings, unlimited.peak_reserved_bytes)
    assert act(allocator, actions, checked=False) == alive
    assert (allocator.alloc_retries, allocator.least_refused_bytes) == (0, None)
    assert allocator.snapshot() == unlimited.snapshot()


@settings(max_examples=150)
@given(actions=ACTIONS, expandable=st.booleans(), limit_mib=st.none() | st.integers(0, 200))
@example(
    actions=[("allocate", 20 * MIB)] * 3 + [("free", 1), ("empty", 0), ("free", 1), ("allocate", 50 * MIB)],
    expandable=True,
    limit_mib=60,
)
def test_it_does_what_the_obvious_program_does(
    actions: list[tuple[str, int]], expandable: bool, limit_mib: int | None
) -> None:
    limit = None if limit_mib is None else limit_mib * MIB
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable), limit)
    plain = PlainAllocator(expandable=expandable, limit_bytes=limit)
    alive: list[tuple[int, object]] = []
    for action, number in actions:
        if action == "allocate":
            piece = plain.allocate(number)
            if piece is None:
                with pytest.raises(SimulatedOutOfMemoryError):
                    allocator.allocate(number)
            else:
                alive.append((allocator.allocate(number), piece))
        elif action == "free" and alive:
            handle, piece = alive.pop(number % len(alive))
            allocator.free(handle)
            plain.free(piece)
        elif action == "empty":
            allocator.empty_cache()
            plain.empty_cache()
        assert allocator.reserved_bytes == plain.reserved_bytes
        assert allocator.allocated_bytes == plain.total("live")
        assert allocator.alloc_retries == plain.retries
    layout = [[(block.size, block.allocated) for block in segment.blocks] for segment in allocator.snapshot()]
    assert sorted(layout) == sorted(plain_layout(plain))


def plain_layout(plain: PlainAllocator) -> list[list[tuple[int, bool]]]:
    runs: list[list[tuple[int, bool]]] = []
    for segment in (segment for pool in plain.pools.values() for segment in pool):
        run: list[tuple[int, bool]] = []
        for piece in segment.pieces:
            if piece.state == "unmapped":
                runs.append(run)
                run = []
            else:
                run.append((piece.size, piece.state == "live"))
        runs.append(run)
    return [run for run in runs if run]


@given(nbytes=st.integers(1, 2**45), divisions=st.sampled_from([0, 1, 2, 4, 8, 16]))
def test_rounding_up(nbytes: int, divisions: int) -> None:
    rounded = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16).rounded_bytes(nbytes)
    assert nbytes <= rounded
    assert rounded % 512 == 0
    if divisions <= 1 or nbytes <= 512 * divisions:
        assert rounded < nbytes + 512
    else:
        step = 2 ** math.floor(math.log2(nbytes)) // divisions
        assert rounded < nbytes + step
        assert rounded % step == 0
