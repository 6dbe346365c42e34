"""A stored profile where one answers, and a calibration where none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from budgetdb.calibration.calibrator import CalibrationEvent, Goal, Listener, run_calibration
from budgetdb.calibration.session import Session
from budgetdb.calibration.subject import Subject
from budgetdb.costs.frontier import solve_profile
from budgetdb.errors import DoesNotFitError, StoreError
from budgetdb.matching import WIDER_HEADROOM, Match, MatchPolicy, compare, matches
from budgetdb.prediction import guess_for
from budgetdb.profiles import Caps, Environment, Probe, Profile, ProfileKey, Provenance, Served
from budgetdb.settings import format_bytes
from budgetdb.store.profile_store import ProfileStore
from budgetdb.store.shipped import shipped_profiles

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# A limit this much above the one a profile was made under asks for new probes; one below it only for solving again.
_SAME_LIMIT = 1.02


class Notebook:
    """A store as a calibration uses it.

    Args:
        store: where profiles and probes are kept.
        strict: whether its failure is raised. Otherwise it is reported once, and from then on nothing is looked up or
            kept: the store is a cache, and its failure never ends an evaluation.
    """

    def __init__(self, store: ProfileStore, *, strict: bool) -> None:
        self._store, self._strict, self._lost = store, strict, False

    def find(self, key: ProfileKey) -> Profile | None:
        """The profile stored under `key`, or None."""
        return self._use(lambda: self._store.find(key), otherwise=None)

    def find_candidates(self, model_hash: str) -> list[Profile]:
        """Every stored profile of the model, newest first."""
        return self._use(lambda: self._store.find_candidates(model_hash=model_hash), otherwise=[])

    def open(self) -> None:
        """Make the database ready to be written, so that a refusal comes before the work and not after it."""
        if not self._lost:
            self._use(self._store.upgrade, otherwise=None)

    def unfinished_probes(self, key: ProfileKey, environment: Environment) -> list[Probe]:
        """The probes of an interrupted calibration."""
        return self._use(lambda: self._store.unfinished_probes(key, environment), otherwise=[])

    def discard_probes(self, key: ProfileKey) -> None:
        """Forget them."""
        self._use(lambda: self._store.discard_probes(key), otherwise=None)

    def add_probe(self, key: ProfileKey, environment: Environment, probe: Probe) -> None:
        """Keep one probe."""
        self._use(lambda: self._store.add_probe(key, environment, probe), otherwise=None)

    def publish(self, profile: Profile) -> bool:
        """Keep the profile; whether it was."""
        self._use(lambda: self._store.publish(profile), otherwise=None)
        return not self._lost

    def _use(self, action: Callable[[], Answer], *, otherwise: Answer) -> Answer:
        if self._lost:
            return otherwise
        try:
            return action()
        except StoreError as error:
            if self._strict:
                raise
            self._lost = True
            _log.warning("going on without stored profiles: %s", error)
            return otherwise


def find_answer(
    subject: Subject,
    goal: Goal,
    notebook: Notebook,
    *,
    policy: MatchPolicy = MatchPolicy.EXACT,
    accept_predicted: bool = False,
) -> Profile | None:
    """The profile that answers `goal` under `policy`, solved for the goal's limit where that is smaller than its own.

    The user's own profiles come before those shipped with the package. A predicted one answers only where the caller
    accepts it: who would calibrate wants what was measured. One settled for shorter lengths than asked never answers.

    Raises:
        DoesNotFitError: there is one of exactly this key, and none of its batches fits the goal's limit.
        StoreError: from a strict notebook.
    """
    key, environment = subject.key(goal.pad_multiple), subject.environment
    own = notebook.find(key)
    same = compare(own, key=key, environment=environment) if own is not None else None
    found: Sequence[tuple[Match, str]] = ()
    if same is not None and same.is_exact and _may_answer(same, goal, subject, accept_predicted=accept_predicted):
        found = [(same, "store")]  # the way of every warm lookup: one row
    else:
        found = [
            (match, source)
            for source, candidates in (
                ("store", notebook.find_candidates(key.model_hash)),
                ("shipped", shipped_profiles(key.model_hash)),
            )
            for match in matches(candidates, key=key, environment=environment, policy=policy)
            if _may_answer(match, goal, subject, accept_predicted=accept_predicted)
        ]
    for match, source in found:
        answer = _answer(match, goal, subject, source=source, policy=policy)
        if answer is not None:
            return answer
    return None


def _may_answer(match: Match, goal: Goal, subject: Subject, *, accept_predicted: bool) -> bool:
    profile = match.profile
    if profile.provenance is Provenance.PREDICTED and not accept_predicted:
        return False
    return _reaches(profile, goal, subject) and _has_room(profile, goal)


def _answer(match: Match, goal: Goal, subject: Subject, *, source: str, policy: MatchPolicy) -> Profile | None:
    """The profile of `match` as it is served here; None where its wider headroom leaves too little."""
    stored, key = match.profile, subject.key(goal.pad_multiple)
    added = int(WIDER_HEADROOM * max(stored.usable_bytes - stored.resident_bytes, 0)) if match.needs_room else 0
    served = Served(
        profile_id=stored.id,
        source=source,
        policy=policy.value,
        differences=match.differences,
        added_headroom_bytes=added,
    )
    if match.is_exact:
        return _within(stored, goal).as_served(served)
    profile = stored.model_copy(update={"key": key})
    if match.is_other_card:  # what was run is not this card: its kernels may allow less, and peaks are expected only
        update = {"provenance": Provenance.PREDICTED, "caps": _stricter(stored.caps, subject.caps)}
        profile = profile.model_copy(update=update)
    try:
        profile = _within(profile, goal, added_bytes=added, regrid=stored.key.pad_multiple != key.pad_multiple)
    except DoesNotFitError:
        return None
    settled = stored.max_length // key.pad_multiple * key.pad_multiple
    if profile.max_length < min(settled, goal.longest(subject.facts.max_positions)):
        return None
    _say_once(
        f"{profile.model_name} is served by profile {stored.id} ({source}), which differs: "
        f"{'; '.join(match.differences)}"
        + (f": {format_bytes(added)} more are kept free. Calibrate to have all of it" if added else "")
    )
    return profile.as_served(served)


def _within(profile: Profile, goal: Goal, *, added_bytes: int = 0, regrid: bool = False) -> Profile:
    """`profile` under the goal's limit and headroom, with so much more kept free.

    With `regrid` it was settled for another pad multiple: its token budget is not known to hold between those lengths.
    """
    limit, headroom = profile.limit_bytes, profile.headroom_bytes
    if goal.memory_limit_bytes is not None:
        limit = min(limit, max(goal.memory_limit_bytes - profile.overhead_bytes, 0))
    if goal.headroom_bytes is not None:
        headroom = goal.headroom_bytes
    headroom += added_bytes
    if not regrid and (limit, headroom) == (profile.limit_bytes, profile.headroom_bytes):
        return profile
    return solved_for(profile, limit, headroom_bytes=headroom)


def _stricter(first: Caps, second: Caps) -> Caps:
    """Limits that both allow."""
    both = {
        name: min(known)
        for name in ("rows", "tokens", "squares")
        if (known := [cap for cap in (getattr(first, name), getattr(second, name)) if cap is not None])
    }
    return Caps(**both, reason=first.reason)


@cache
def _say_once(message: str) -> None:
    """Log what is not as it was asked for, once in a process."""
    _log.warning("%s", message)


def make_answer(
    session: Session, subject: Subject, goal: Goal, *, notebook: Notebook, listen: Listener, afresh: bool = False
) -> Profile:
    """Calibrate, storing each probe as it ends and the profile at the end.

    Probes that an interrupted calibration left, and those of a profile that is now extended, count; not so `afresh`.
    The session is left as it was found, also by an error.
    """
    key = subject.key(goal.pad_multiple)
    notebook.open()
    if afresh:
        notebook.discard_probes(key)
        known = []
    else:
        earlier = notebook.find(key)
        same_place = earlier is not None and earlier.environment == subject.environment
        known = [*(earlier.probes if earlier is not None and same_place else ())]
        known += notebook.unfinished_probes(key, subject.environment)
    with session:
        guess = guess_for(session, subject, goal)
        if guess is not None:
            listen(CalibrationEvent("note", guess.note))
        profile = run_calibration(
            session,
            subject,
            goal,
            known=known,
            record=lambda probe: notebook.add_probe(key, subject.environment, probe),
            listen=listen,
            guess=guess,
        )
    if notebook.publish(profile):
        listen(CalibrationEvent("stored", f"stored as {profile.id}"))
    return profile.as_served(Served(profile_id=profile.id, source="calibrated", policy=MatchPolicy.EXACT.value))


def solved_for(profile: Profile, limit_bytes: int, *, headroom_bytes: int | None) -> Profile:
    """`profile` under another limit.

    Raises:
        DoesNotFitError: none of its batches fits.
    """
    solved = solve_profile(profile, limit_bytes, headroom_bytes=headroom_bytes)
    if solved is None:
        raise DoesNotFitError(
            f"no batch of profile {profile.id} ({profile.model_name}) fits {format_bytes(limit_bytes)}; its weights "
            f"take {format_bytes(profile.resident_bytes)}",
            needed_bytes=profile.resident_bytes,
            limit_bytes=limit_bytes,
            next_step="Free memory on the device, or raise the memory limit",
        )
    return solved


def _reaches(profile: Profile, goal: Goal, subject: Subject) -> bool:
    """Whether it is settled for lengths as long as wanted, or a probe has shown that no longer one fits."""
    if profile.max_length >= goal.longest(subject.facts.max_positions):
        return True
    return any(
        not probe.fits and probe.batch_size == 1 and probe.length > profile.max_length for probe in profile.probes
    )


def _has_room(profile: Profile, goal: Goal) -> bool:
    """Whether it was made under a limit as large as the one asked for: beyond what was probed, new probes are due."""
    if goal.memory_limit_bytes is None:
        return True
    return goal.memory_limit_bytes <= _SAME_LIMIT * (profile.limit_bytes + profile.overhead_bytes)
