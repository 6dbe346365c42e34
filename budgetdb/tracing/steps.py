"""One step of a loop, and the same step again."""

from __future__ import annotations

from dataclasses import dataclass

from budgetdb.tracing.lifetimes import Event, Moment


@dataclass(frozen=True)
class Steps:
    """The events of one step, or of several in a row, and where each happened."""

    events: list[Event]
    moments: list[Moment]

    def repeated(self, batch: int, *, hold: str) -> Steps:
        """These events followed by the same step again on the same batch, whose tensors the first `batch` events made.

        With `hold` "none" the first outputs die before the second step, with "previous" after it, with "all" never.
        """
        step, moments = self.events[batch:], self.moments[batch:]
        births = sum(event.nbytes > 0 for event in self.events)
        inputs = {event.storage for event in self.events[:batch]}
        # What a step leaves is what it returned.
        freed = [Event(storage, -nbytes) for storage, nbytes in self.left(batch).items()]
        places = [Moment("", "free")] * len(freed)
        again = [
            event if event.storage in inputs else Event(event.storage + births - batch, event.nbytes) for event in step
        ]
        if hold == "none":
            return Steps([*self.events, *freed, *again], [*self.moments, *places, *moments])
        if hold == "previous":
            return Steps([*self.events, *again, *freed], [*self.moments, *moments, *places])
        return Steps([*self.events, *again], [*self.moments, *moments])

    def is_like(self, other: Steps) -> bool:
        """Whether both allocate and free the same bytes at the same places, in the same order."""
        return _pattern(self.events) == _pattern(other.events)

    def left(self, batch: int) -> dict[int, int]:
        """The bytes of each storage that is alive at the end, but for the batch's, which the first events made."""
        left: dict[int, int] = {}
        for event in self.events[batch:]:
            if event.nbytes > 0:
                left[event.storage] = event.nbytes
            else:
                left.pop(event.storage, None)
        return left


def _pattern(events: list[Event]) -> list[int]:
    """Bytes in order of events, a run of deaths sorted: which of two tensors goes first is nobody's decision."""
    pattern: list[int] = []
    deaths: list[int] = []
    for event in events:
        if event.nbytes < 0:
            deaths.append(event.nbytes)
            continue
        pattern += sorted(deaths)
        deaths = []
        pattern.append(event.nbytes)
    return pattern + sorted(deaths)
