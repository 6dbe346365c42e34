"""What becomes of profiles that others made: which are taken, and in whose place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from budgetdb.profiles import Profile, Provenance

# What may take whose place without being told to: never what was measured here.
_RANK = {Provenance.PREDICTED: 0, Provenance.IMPORTED: 1, Provenance.MEASURED: 2}


class Fate(StrEnum):
    """What became of one profile of an import."""

    ADDED = "added"
    REPLACED = "replaced"
    KEPT = "kept"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Imported:
    """One profile of an import.

    Attributes:
        profile: as it was to be stored.
        fate: `kept` means that the one stored before stays.
        before: provenance of the one stored before, or None.
    """

    profile: Profile
    fate: Fate
    before: Provenance | None


def as_imported(profile: Profile) -> Profile:
    """`profile` as it is stored where it was not made: measurements of others are imported, predictions stay so."""
    if profile.provenance is not Provenance.MEASURED:
        return profile
    return profile.model_copy(update={"provenance": Provenance.IMPORTED})


def decide(profile: Profile, before: Profile | None, *, replace: bool) -> Imported:
    """What becomes of `profile` where `before` is stored under its key."""
    if before is None:
        return Imported(profile, Fate.ADDED, None)
    if before.canonical_json() == profile.canonical_json():
        return Imported(profile, Fate.UNCHANGED, before.provenance)
    outranked = before.provenance is Provenance.MEASURED or _RANK[before.provenance] > _RANK[profile.provenance]
    fate = Fate.KEPT if outranked and not replace else Fate.REPLACED
    return Imported(profile, fate, before.provenance)
