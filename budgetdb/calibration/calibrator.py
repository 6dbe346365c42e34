"""From a session to a profile: search, check, and put together what is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from budgetdb.calibration.check import GUIDED_SHARES, SHARES, check_frontier
from budgetdb.calibration.guess import Guess
from budgetdb.calibration.planner import Planner
from budgetdb.calibration.search import SearchResult, run_search
from budgetdb.calibration.session import Ready, Session
from budgetdb.calibration.subject import Subject
from budgetdb.errors import UsageError
from budgetdb.plugins import ATTENTION, COSTS
from budgetdb.profiles import Bound, Probe, Profile, Provenance
from budgetdb.settings import format_bytes
from budgetdb.shapes import Shape, padded_length

_log = logging.getLogger(__name__)

# Where nothing ends the length (relative positions) and nobody says how far to go.
DEFAULT_MAX_LENGTH = 8192
# No batch whose step would take longer than this is tried where nobody says how long it may take.
DEFAULT_MAX_STEP_S = 120.0
# Shortest length worth settling: below it the cost of a row is one of tokens all the same.
_SHORTEST = 8


@dataclass(frozen=True)
class CalibrationEvent:
    """One thing that happened, for whoever watches.

    Attributes:
        stage: `known`, `resumed`, `loading`, `ready`, `probe`, `check`, `stored` or `note`.
        message: one line for people.
        probe: what was measured, for `probe` and `check`.
        limit_bytes: what a probe's peak is to be held against, once it is known.
    """

    stage: str
    message: str
    probe: Probe | None = None
    limit_bytes: int | None = None


Listener = Callable[[CalibrationEvent], None]


@dataclass(frozen=True)
class Goal:
    """What a calibration is to find out.

    Attributes:
        max_length: longest length wanted, None for the model's own limit.
        pad_multiple: what the collator rounds lengths up to.
        memory_limit_bytes: what the process may use on the device, None for all there is.
        headroom_bytes: what to keep free of it, None for the device's default.
        timeout_s: stop after this long with the best so far, None to take the time it takes.
        max_step_s: no batch whose step would take longer is tried.
    """

    max_length: int | None = None
    pad_multiple: int = 1
    memory_limit_bytes: int | None = None
    headroom_bytes: int | None = None
    timeout_s: float | None = None
    max_step_s: float | None = None

    def longest(self, max_positions: int | None) -> int:
        """The longest padded length to settle for a model of so many positions.

        Raises:
            UsageError: not even one multiple of `pad_multiple` fits.
        """
        wanted = padded_length(self.max_length, self.pad_multiple) if self.max_length is not None else None
        known = [length for length in (wanted, max_positions) if length is not None]
        longest = min(known, default=DEFAULT_MAX_LENGTH)
        if self.max_length is None:
            longest = min(longest, DEFAULT_MAX_LENGTH)
        if longest < self.pad_multiple:
            raise UsageError(
                f"the model takes {longest} tokens, fewer than one pad multiple of {self.pad_multiple}",
                next_step="Use a smaller pad_multiple",
            )
        return longest // self.pad_multiple * self.pad_multiple

    def is_cut(self, max_positions: int | None) -> bool:
        """Whether a longer length is wanted than the model has positions for."""
        return self.max_length is not None and self.longest(max_positions) < self.max_length


def lengths_to_settle(longest: int, pad_multiple: int) -> list[int]:
    """The shortest, the longest, and the one half-way: beyond that, eager attention's scores nearly always decide."""
    shortest = min(padded_length(_SHORTEST, pad_multiple), longest)
    middle = min(padded_length(longest // 2, pad_multiple), longest)
    return sorted({shortest, middle, longest})


def run_calibration(
    session: Session,
    subject: Subject,
    goal: Goal,
    *,
    known: Sequence[Probe] = (),
    record: Callable[[Probe], None],
    listen: Listener,
    guess: Guess | None = None,
) -> Profile:
    """Probe in `session` until the profile of `subject` is known.

    With a `guess` from a trace the probes only confirm and scale it; where they contradict it, or without one, the cost
    model is fitted to probes alone. Each probe is handed to `record` when it ends, before the next begins, so that an
    interrupted calibration can go on from its `known` probes.

    Raises:
        UsageError: the lengths asked for can't be.
        DoesNotFitError: not even one row of the shortest length fits.
        StepFailedError: a step failed for a reason that is not memory.
        CalibrationTimeoutError: time ran out before anything was known.
        WorkerError: the process that runs the probes is gone for good.
    """
    longest = goal.longest(subject.facts.max_positions)
    if goal.is_cut(subject.facts.max_positions):
        listen(
            CalibrationEvent(
                "note", f"{subject.facts.name} has {subject.facts.max_positions} positions: settled up to {longest}"
            )
        )
    listen(CalibrationEvent("loading", f"loading {subject.facts.name}"))
    ready = session.prepare(
        longest=longest, memory_limit_bytes=goal.memory_limit_bytes, headroom_bytes=goal.headroom_bytes
    )
    listen(CalibrationEvent("ready", _ready_message(ready), limit_bytes=ready.usable_bytes))

    def probe(shape: Shape, purpose: str = "search") -> Probe:
        done = session.probe(shape, purpose=purpose)
        record(done)
        stage = "check" if purpose == "check" else "probe"
        listen(CalibrationEvent(stage, describe_probe(done), probe=done, limit_bytes=ready.usable_bytes))
        return done

    usable = [earlier for earlier in known if still_counts(earlier, ready.usable_bytes)]
    if usable:
        listen(CalibrationEvent("resumed", f"{len(usable)} probes of an earlier calibration are used again"))
    if guess is not None:
        ran = list(usable)

        def needed(shape: Shape, purpose: str = "search") -> Probe:
            ran.append(probe(shape, purpose))
            return guess.needed(ran[-1])

        planner = _guided_planner(subject, goal, ready, longest=longest, guess=guess)
        found = run_search(
            planner,
            needed,
            limit_bytes=ready.limit_bytes,
            known=[guess.needed(earlier) for earlier in usable],
            timeout_s=goal.timeout_s,
        )
        if guess.is_trusted(found.probes):
            found = check_frontier(
                planner,
                found,
                lambda shape: needed(shape, "check"),
                limit_bytes=ready.limit_bytes,
                shares=GUIDED_SHARES if guess.trace is not None else SHARES,
            )
        if guess.is_trusted(found.probes):
            return _profile(subject, goal, ready, replace(found, probes=tuple(ran)))
        listen(CalibrationEvent("note", "the trace and the probes disagree: the cost model is fitted to probes alone"))
        usable = ran
    planner = _planner(subject, goal, ready, longest=longest)
    found = run_search(planner, probe, limit_bytes=ready.limit_bytes, known=usable, timeout_s=goal.timeout_s)
    found = check_frontier(planner, found, lambda shape: probe(shape, "check"), limit_bytes=ready.limit_bytes)
    return _profile(subject, goal, ready, found)


def _guided_planner(subject: Subject, goal: Goal, ready: Ready, *, longest: int, guess: Guess) -> Planner:
    planner = replace(_planner(subject, goal, ready, longest=longest), first_guess=guess.cost)
    if guess.trace is None:
        return planner
    lengths = guess.lengths(longest, pad_multiple=goal.pad_multiple, usable_bytes=ready.usable_bytes)
    return replace(planner, cost=guess.trace, lengths=lengths)


def _planner(subject: Subject, goal: Goal, ready: Ready, *, longest: int) -> Planner:
    return Planner(
        lengths=lengths_to_settle(longest, goal.pad_multiple),
        usable_bytes=ready.usable_bytes,
        cost=COSTS.get(cost_kind(subject.facts.attention)),
        caps=subject.caps,
        pad_multiple=goal.pad_multiple,
        max_step_s=goal.max_step_s,
    )


def cost_kind(attention: str) -> str:
    """The kind of cost model for an attention implementation; one nobody registered is taken for a fused one."""
    kind: str = ATTENTION.get(attention) if attention in ATTENTION else "linear"
    return kind


def still_counts(probe: Probe, usable_bytes: int) -> bool:
    """Whether a probe made under another cap says something under this one.

    What was measured stays measured. A failure under a larger or equal cap is a failure here; one under a smaller cap
    says nothing.
    """
    return probe.fits or probe.cap_bytes is None or probe.cap_bytes >= usable_bytes


def describe_probe(probe: Probe) -> str:
    """One line for people: `32 x 512 fits`."""
    return f"{probe.shape} {probe.outcome.value}"


def _ready_message(ready: Ready) -> str:
    return (
        f"{format_bytes(ready.usable_bytes)} to use: a limit of {format_bytes(ready.limit_bytes)} less "
        f"{format_bytes(ready.headroom_bytes)} of headroom; weights take {format_bytes(ready.resident_bytes)}"
    )


def _profile(subject: Subject, goal: Goal, ready: Ready, found: SearchResult) -> Profile:
    positions = subject.facts.max_positions
    cut = goal.is_cut(positions) and found.solved.max_length >= goal.longest(positions)
    return Profile(
        key=subject.key(goal.pad_multiple),
        environment=subject.environment,
        model_name=subject.facts.name[:512],
        cost=found.cost.record(),
        caps=found.caps,
        limit_bytes=ready.limit_bytes,
        headroom_bytes=ready.headroom_bytes,
        overhead_bytes=ready.overhead_bytes,
        resident_bytes=ready.resident_bytes,
        warm_up_bytes=ready.warm_up_bytes,
        step_s=ready.step_s,
        max_length=found.solved.max_length,
        bound=Bound.MAX_LENGTH if cut else found.solved.bound,
        token_budget=found.solved.token_budget,
        frontier=found.solved.frontier,
        probes=found.probes,
        provenance=Provenance.MEASURED,
        flags=subject.facts.flags,
        created_at=datetime.now(UTC),
    )
