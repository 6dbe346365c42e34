"""What a list of births and deaths asks of an allocator: replayed, and the smallest limit it runs under.

Events are pairs `(storage, nbytes)`: `nbytes > 0` is the birth of that storage with so many bytes, `nbytes < 0` its
death; 0 is passed over. A list describes one step: what it leaves alive is what the step gives to its caller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from budgetdb.errors import SimulatedOutOfMemoryError, UsageError
from budgetdb.tracing.allocator import CachingAllocator
from budgetdb.tracing.allocator_settings import AllocatorSettings
from budgetdb.tracing.blocks import ROUND_LARGE_BYTES, SMALL_SEGMENT_BYTES

Event = tuple[int, int]
Hold = Literal["none", "previous", "all"]

_DEFAULT_SETTINGS = AllocatorSettings()
# TRACING 8: how often a list is run for the allocator to be warm.
WARM_PASSES = 5


class Allocates(Protocol):
    """What events are replayed on: `CachingAllocator`, or what only counts."""

    def allocate(self, nbytes: int) -> int:
        """Memory for so many bytes; a handle to it."""

    def free(self, handle: int) -> None:
        """Give it back."""


def replay(events: Iterable[Event], allocator: Allocates) -> dict[int, int]:
    """Run one list of events on the allocator; the handles of the storages it leaves alive.

    >>> allocator = CachingAllocator()
    >>> alive = replay([(1, 100), (2, 5 * 2**20), (1, -100)], allocator)
    >>> list(alive), allocator.allocated_bytes
    ([2], 5242880)

    Raises:
        UsageError: a storage is born while it is alive, or dies while it is not.
        SimulatedOutOfMemoryError: the allocator has no room; what was born before stays allocated.
    """
    allocate, free = allocator.allocate, allocator.free
    alive: dict[int, int] = {}
    for storage, nbytes in events:
        if nbytes > 0:
            if storage in alive:
                raise UsageError(f"storage {storage} is born twice", next_step="Give each storage a number of its own")
            alive[storage] = allocate(nbytes)
        elif nbytes < 0:
            handle = alive.pop(storage, None)
            if handle is None:
                raise UsageError(f"storage {storage} dies unborn", next_step="Let each list hold its storages' births")
            free(handle)
    return alive


def run(
    streams: Iterable[Sequence[Event]],
    allocator: Allocates,
    *,
    resident: Iterable[int] = (),
    hold: Hold = "none",
) -> None:
    """Run steps one after another: residents first, then each list, on one allocator that is never emptied.

    Args:
        streams: a list of events for each step.
        allocator: the allocator.
        resident: bytes of what is allocated before and never freed, such as weights.
        hold: what a list leaves alive lives until its end (`none`), until the end of the next one (`previous`: the
            loop's variable is assigned anew), or for ever (`all`).

    Raises:
        UsageError, SimulatedOutOfMemoryError: as `replay`.
    """
    for nbytes in resident:
        if nbytes > 0:
            allocator.allocate(nbytes)
    held: deque[dict[int, int]] = deque()
    kept_lists = {"none": 0, "previous": 1, "all": None}[hold]
    for events in streams:
        held.append(replay(events, allocator))
        while kept_lists is not None and len(held) > kept_lists:
            for handle in held.popleft().values():
                allocator.free(handle)


def peak_live_bytes(streams: Iterable[Sequence[Event]], *, resident: Iterable[int] = (), hold: Hold = "none") -> int:
    """The most bytes alive at once, as asked for: what no allocator can do with less than."""
    counter = _LiveBytes()
    run(streams, counter, resident=resident, hold=hold)
    return counter.peak


class _LiveBytes:
    """What is alive, as an allocator that has room for everything and keeps nothing."""

    def __init__(self) -> None:
        self.peak = self._alive = 0
        self._sizes: list[int] = []

    def allocate(self, nbytes: int) -> int:
        self._alive += nbytes
        self.peak = max(self.peak, self._alive)
        self._sizes.append(nbytes)
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        self._alive -= self._sizes[handle]


def smallest_limit_bytes(
    streams: Sequence[Sequence[Event]],
    settings: AllocatorSettings = _DEFAULT_SETTINGS,
    *,
    resident: Sequence[int] = (),
    hold: Hold = "none",
    capped: bool = False,
) -> int:
    """The smallest limit found under which the steps run without running out of memory.

    By bisection between the peak of live bytes and what an unlimited run reserves. Each run settles more than its own
    limit: one that ends well needs no more than it reserved, and one that fails would do the same under every limit
    below the smallest total that was refused.

    The limit returned is one that was run. Fitting is *not* monotone in the limit: less room makes the allocator give
    its cache back earlier, which may leave it less fragmented. So a smaller limit may exist that fits too, and a larger
    one that does not; every limit from an unlimited run's reserved bytes on does fit.

    Args:
        streams: a list of events for each step, run in turn on one allocator.
        settings: the allocator's settings.
        resident: bytes of what is allocated before and never freed.
        hold: how long outputs live, as in `run`.
        capped: the limit is a memory fraction, as in `CachingAllocator`.

    Raises:
        UsageError: as `replay`.
    """

    def attempt(limit_bytes: int | None) -> tuple[bool, CachingAllocator]:
        allocator = CachingAllocator(settings, limit_bytes, capped=capped)
        try:
            run(streams, allocator, resident=resident, hold=hold)
        except SimulatedOutOfMemoryError:
            return False, allocator
        return True, allocator

    # Memory is taken in multiples of this, so that limits between two of them are alike.
    step = math.gcd(settings.large_segment_bytes, SMALL_SEGMENT_BYTES, ROUND_LARGE_BYTES)
    _, unlimited = attempt(None)
    fits = unlimited.peak_reserved_bytes
    fails = (unlimited.peak_requested_bytes - 1) // step * step
    if capped:  # torch's comparison may ask for more than is mapped, or let more be mapped, by less than a page
        fails = max(fails - settings.large_segment_bytes, -step)
        while not attempt(fits)[0]:
            fits += settings.large_segment_bytes
    while fits - fails > step:
        limit = (fails + fits) // 2 // step * step
        passed, allocator = attempt(limit)
        if passed:
            fits = limit if capped else allocator.peak_reserved_bytes
        else:
            fails = limit if capped else max(limit, (allocator.least_refused_bytes or 0) - step)
    return fits


@dataclass(frozen=True, slots=True)
class FragmentationMargins:
    """Bytes the allocator needs beyond what is alive at the peak.

    Attributes:
        peak_live_bytes: most bytes alive at once in the step, residents included.
        cold_bytes: for the step once, in a fresh process.
        warm_bytes: for the step run several times in a row.
        mixed_bytes: for steps of several shapes in turn, beyond *their* peak; None when none were given.
    """

    peak_live_bytes: int
    cold_bytes: int
    warm_bytes: int
    mixed_bytes: int | None = None

    @property
    def largest_bytes(self) -> int:
        """The margin that serves all that was simulated."""
        return max(self.cold_bytes, self.warm_bytes, self.mixed_bytes or 0)


def fragmentation_margins(
    step: Sequence[Event],
    settings: AllocatorSettings = _DEFAULT_SETTINGS,
    *,
    mixed: Sequence[Sequence[Event]] = (),
    resident: Sequence[int] = (),
    hold: Hold = "none",
    capped: bool = False,
) -> FragmentationMargins:
    """What fragmentation and rounding add to a step's peak: cold, warm, and in a run of mixed shapes.

    Args:
        step: the events of the step.
        settings: the allocator's settings.
        mixed: steps of other shapes, run in this order on one allocator.
        resident: bytes of what is allocated before and never freed.
        hold: how long outputs live, as in `run`.
        capped: the limit is a memory fraction, as in `CachingAllocator`.

    Raises:
        UsageError: as `replay`.
    """

    def margin(streams: Sequence[Sequence[Event]]) -> int:
        needed = smallest_limit_bytes(streams, settings, resident=resident, hold=hold, capped=capped)
        return needed - peak_live_bytes(streams, resident=resident, hold=hold)

    return FragmentationMargins(
        peak_live_bytes=peak_live_bytes([step], resident=resident, hold=hold),
        cold_bytes=margin([step]),
        warm_bytes=margin([step] * WARM_PASSES),
        mixed_bytes=margin(mixed) if mixed else None,
    )
