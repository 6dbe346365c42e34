"""When each tensor of a step is born and when it dies: what a trace found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Event(NamedTuple):
    """A storage's birth (`nbytes` above zero) or its death (the same bytes below zero).

    Attributes:
        storage: number of the storage, counted from 0 in the order of birth.
        nbytes: its bytes, with the sign of what happens to it.
    """

    storage: int
    nbytes: int


class Moment(NamedTuple):
    """Where in a step something happens, as people call it.

    Attributes:
        module: path of the innermost module that is running, empty outside of all.
        operation: torch operator, `aten.mm` for one; `inputs` for the batch itself.
    """

    module: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} in {self.module}" if self.module else self.operation


@dataclass(frozen=True)
class Trace:
    """Every allocation of a step, in order, as a device would see it.

    Attributes:
        resident_bytes: weights and buffers, alive before and after.
        events: births and deaths, the batch's own tensors first.
        moments: where each event happened, `moments[i]` for `events[i]`.
        held_bytes: what the outputs of one step keep alive.
        batch_length: how many of the events are the births of the batch's own tensors.
        step_length: how many are these and the first step's; the others are that step again.
    """

    resident_bytes: int
    events: Sequence[Event]
    moments: Sequence[Moment]
    held_bytes: int = 0
    batch_length: int = 0
    step_length: int = 0

    @cached_property
    def _peak_at(self) -> tuple[int, int]:
        """The most bytes alive beside the resident ones, and the event that made them so."""
        live = list(accumulate(event.nbytes for event in self.events))
        if not live:
            return 0, -1
        at = max(range(len(live)), key=live.__getitem__)
        return max(live[at], 0), at

    @property
    def step_events(self) -> Sequence[Event]:
        """The events of one step and its batch; what it leaves alive are its outputs and the batch."""
        return self.events[: self.step_length]

    @property
    def transient_bytes(self) -> int:
        """The most bytes alive at once beside weights and buffers: the batch, what the step made, what is held."""
        return self._peak_at[0]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, weights and buffers included."""
        return self.resident_bytes + self.transient_bytes

    @property
    def peak_moment(self) -> Moment:
        """Where the peak is."""
        at = self._peak_at[1]
        return self.moments[at] if at >= 0 else Moment("", "inputs")
