"""Lists of births and deaths on an allocator, and the smallest limit they run under."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from allocator_checks import MIB, check
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetdb.errors import SimulatedOutOfMemoryError, UsageError
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.tracing.replay import (
    WARM_PASSES,
    Event,
    Hold,
    fragmentation_margins,
    peak_live_bytes,
    replay,
    run,
    smallest_limit_bytes,
)

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def step(*events: tuple[str, float]) -> list[Event]:
    """`("a", 3)` is the birth of `a` with 3 MiB, `("a", -3)` its death."""
    return [(ord(name), int(mib * MIB)) for name, mib in events]


# A step whose output `o` is alive at its end, after a large tensor came and went: logits, say, or scores.
HELD = step(("o", 12), ("L", 100), ("L", -100))

# A step that needs more room each time after the first, without anything held. Cold: t, r and u lie in one segment of
# 100 MiB one after another, and s gets one of 14. Warm: that one fits r better, u takes the 100 whole, and s has none.
SHIFTED = step(
    ("t", 100), ("t", -100), ("r", 12), ("u", 88), ("s", 14), ("s", -14), ("u", -88), ("r", -12)
)  # fmt: skip


def test_births_deaths_and_what_is_left_alive() -> None:
    allocator = CachingAllocator()
    alive = replay(step(("a", 12), ("b", 0), ("b", 3), ("a", -12), ("c", 15)), allocator)
    assert sorted(alive) == [ord("b"), ord("c")]
    assert allocator.requested_bytes == 18 * MIB
    assert allocator.peak_requested_bytes == 18 * MIB
    for handle in alive.values():
        allocator.free(handle)
    check(allocator)


def test_the_size_at_death_does_not_matter() -> None:
    allocator = CachingAllocator()
    replay([(1, 3 * MIB), (1, -1)], allocator)
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    ("events", "message"),
    [([(7, 1), (7, 2)], "storage 7 is born twice"), ([(7, 1), (7, -1), (7, -1)], "storage 7 dies unborn")],
)
def test_events_that_make_no_sense(events: list[Event], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replay(events, CachingAllocator())


@pytest.mark.parametrize(
    ("hold", "peak_mib", "left_mib"),
    [
        ("none", 112, 0),  # 12 + 100
        ("previous", 124, 12),  # 12 held + 12 + 100
        ("all", 136, 36),  # 24 held + 12 + 100
    ],
)
def test_how_long_outputs_live(hold: Hold, peak_mib: int, left_mib: int) -> None:
    assert peak_live_bytes([HELD] * 3, hold=hold) == peak_mib * MIB
    allocator = CachingAllocator()
    run([HELD] * 3, allocator, hold=hold)
    assert allocator.requested_bytes == left_mib * MIB


def test_residents_come_first_and_stay() -> None:
    allocator = CachingAllocator()
    run([HELD], allocator, resident=[30 * MIB, 0, 1])
    assert allocator.requested_bytes == 30 * MIB + 1
    assert allocator.snapshot()[0].size == 30 * MIB


def test_a_warm_step_runs_out_where_the_cold_one_passed() -> None:
    """TRACING 8: the large segment is free, and is split for a small tensor that stays."""
    limit = 150 * MIB
    assert limit > peak_live_bytes([HELD] * 2, hold="previous") == 124 * MIB
    allocator = CachingAllocator(limit_bytes=limit)
    outputs = replay(HELD, allocator)
    assert (allocator.peak_reserved_bytes, allocator.alloc_retries) == (112 * MIB, 0)
    # The second output takes 12 of the cached 100, of which 88 are left: neither enough for the large tensor, nor can
    # they be given back. 112 + 100 > 150.
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        replay(HELD, allocator)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (24 * MIB, 112 * MIB)
    check(allocator)
    assert len(outputs) == 1

    emptied = CachingAllocator(limit_bytes=limit)
    replay(HELD, emptied)
    emptied.empty_cache()
    replay(HELD, emptied)  # 12 + 12 + 100
    assert emptied.peak_reserved_bytes == 124 * MIB

    growing = CachingAllocator(EXPANDABLE, limit)
    run([HELD] * 2, growing, hold="previous")  # 12, 12 and 100 lie side by side: seven pages
    assert growing.peak_reserved_bytes == 140 * MIB


def test_smallest_limits_of_the_step_with_an_output() -> None:
    assert smallest_limit_bytes([HELD]) == 112 * MIB
    assert smallest_limit_bytes([HELD] * 2) == 112 * MIB  # nothing held: the segments serve again
    assert smallest_limit_bytes([HELD] * 2, hold="previous") == 212 * MIB
    assert smallest_limit_bytes([HELD] * 2, EXPANDABLE, hold="previous") == 140 * MIB
    # The resident has a segment of 20 MiB, in which the output has room.
    assert smallest_limit_bytes([HELD], resident=[6 * MIB]) == 120 * MIB
    assert peak_live_bytes([HELD], resident=[6 * MIB]) == 118 * MIB


def test_a_memory_fraction_may_have_to_be_larger_than_what_is_reserved() -> None:
    twice = step(("a", 22), ("b", 22))
    assert smallest_limit_bytes([twice], EXPANDABLE) == 60 * MIB
    # 40 are mapped for the first; torch compares the limit with 40 + 22, and maps 20.
    assert smallest_limit_bytes([twice], EXPANDABLE, capped=True) == 62 * MIB
    # Alone, the first needs 22 of the fraction and maps 40.
    assert smallest_limit_bytes([twice[:1]], EXPANDABLE, capped=True) == 22 * MIB


def test_margins() -> None:
    margins = fragmentation_margins(SHIFTED, mixed=[SHIFTED, HELD, SHIFTED])
    assert margins.peak_live_bytes == 114 * MIB  # r, u and s
    assert margins.cold_bytes == 0  # segments of 100 and 14
    assert margins.warm_bytes == 14 * MIB  # and another of 14
    assert margins.mixed_bytes is not None
    assert margins.largest_bytes == max(14 * MIB, margins.mixed_bytes)
    assert fragmentation_margins(SHIFTED).mixed_bytes is None
    assert fragmentation_margins(SHIFTED, EXPANDABLE).warm_bytes == 6 * MIB  # 114 in pages of 20


def test_nothing_needs_nothing() -> None:
    assert smallest_limit_bytes([]) == 0
    assert smallest_limit_bytes([[]]) == 0
    assert fragmentation_margins([]).largest_bytes == 0


SIZES = st.sampled_from([512, MIB, 3 * MIB, 9 * MIB, 12 * MIB, 14 * MIB, 30 * MIB, 55 * MIB]) | st.integers(1, 40 * MIB)


@st.composite
def steps(draw: st.DrawFn) -> list[Event]:
    """Storages with births and deaths in any order; some outlive the step."""
    events: list[Event] = []
    alive: list[tuple[int, int]] = []
    for storage in range(draw(st.integers(0, 12))):
        nbytes = draw(SIZES)
        events.append((storage, nbytes))
        alive.append((storage, nbytes))
        while alive and draw(st.booleans()):
            gone, size = alive.pop(draw(st.integers(0, len(alive) - 1)))
            events.append((gone, -size))
    return events


CONFS = st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20", "large_segment_size_mb:25"])


def fits(streams: Sequence[Sequence[Event]], conf: AllocatorSettings, limit: int, hold: Hold, *, capped: bool) -> bool:
    try:
        run(streams, CachingAllocator(conf, limit, capped=capped), hold=hold)
    except SimulatedOutOfMemoryError:
        return False
    return True


@settings(max_examples=60)
@given(
    streams=st.lists(steps(), max_size=3),
    conf=CONFS.map(AllocatorSettings.from_text),
    hold=st.sampled_from(["none", "previous", "all"]),
    capped=st.booleans(),
)
def test_the_smallest_limit_fits_and_the_next_smaller_does_not(
    streams: list[list[Event]], conf: AllocatorSettings, hold: Hold, capped: bool
) -> None:
    limit = smallest_limit_bytes(streams, conf, hold=hold, capped=capped)
    assert fits(streams, conf, limit, hold, capped=capped)
    assert limit == 0 or not fits(streams, conf, limit - 1, hold, capped=capped)
    if not capped:
        assert limit >= peak_live_bytes(streams, hold=hold)


def test_it_takes_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    made = CachingAllocator.__init__
    monkeypatch.setattr(CachingAllocator, "__init__", lambda *args, **kw: (runs.append(args), made(*args, **kw))[1])
    # Between 124 and 212 MiB lie 44 limits. The first to be tried fails, and says that none below 212 is any better.
    smallest_limit_bytes([HELD] * WARM_PASSES, hold="previous")
    assert len(runs) == 2
