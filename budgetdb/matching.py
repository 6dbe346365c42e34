"""Which stored profile answers a question, and what a difference between the two costs (DESIGN 5).

The key is never bargained with where it decides memory: model, dtype, attention and workload must be equal. What may
differ is where and how the profile was made, and a policy says what that means.

=============  ===================================  ===========================================================
policy         the card                             the environment
=============  ===================================  ===========================================================
`exact`        equal name and bytes                 equal
`compatible`   equal name, one VRAM bucket apart    may differ in versions; not in what changes how memory is used
`any`          the nearest by name and bytes        may differ
=============  ===================================  ===========================================================

Under the last two a profile of another `pad_multiple` answers too: the cost model is continuous in the length. What
differs in more than that is served with a wider headroom, and with the differences written beside it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from budgetdb.devices.info import BUCKET_BYTES
from budgetdb.errors import UnknownNameError
from budgetdb.profiles import Environment, Profile, ProfileKey, Provenance

# STORE 5.5: after a change of driver or versions a budget is used to nine tenths. Here it is bytes that are kept free:
# of what a step adds to the weights, which are known exactly.
WIDER_HEADROOM = 0.10
# A difference in one of these changes how memory is used, not how fast: kernels, or how the allocator cuts its blocks.
_DECISIVE = ("compute_capability", "allocator", "platform")
_VERSIONS = ("torch", "transformers", "runtime", "driver")


class MatchPolicy(StrEnum):
    """How alike a stored profile must be to answer."""

    EXACT = "exact"
    COMPATIBLE = "compatible"
    ANY = "any"


def parse_policy(name: str) -> MatchPolicy:
    """The policy called `name`.

    Raises:
        UnknownNameError: there is none; the message has the nearest spelling.
    """
    try:
        return MatchPolicy(name)
    except ValueError:
        raise UnknownNameError("match policy", name, [policy.value for policy in MatchPolicy]) from None


@dataclass(frozen=True)
class Match:
    """A stored profile beside what was asked for.

    Attributes:
        profile: as it is stored.
        differences: one line for each, for people.
        is_other_card: it was made on a card of another name or size, so it is a prediction for this one.
        needs_room: whether a difference asks for a wider headroom; another pad multiple alone does not.
    """

    profile: Profile
    differences: tuple[str, ...] = ()
    is_other_card: bool = False
    needs_room: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def matches(
    candidates: Iterable[Profile], *, key: ProfileKey, environment: Environment, policy: MatchPolicy
) -> list[Match]:
    """The candidates that `policy` lets answer, the best first; of equals the first given stays first."""
    compared = (compare(profile, key=key, environment=environment) for profile in candidates)
    allowed = [match for match in compared if match is not None and _allows(policy, match, key, environment)]
    return sorted(allowed, key=lambda match: _distance(match, key))


def compare(profile: Profile, *, key: ProfileKey, environment: Environment) -> Match | None:
    """`profile` beside `key` and `environment`; None where another model, dtype, attention or workload decides."""
    theirs = profile.key
    if any(getattr(theirs, name) != getattr(key, name) for name in ("model_hash", "dtype", "attention", "workload")):
        return None
    differences = []
    other_card = _is_other_card(theirs, key)
    if theirs.device_name != key.device_name or theirs.device_bytes != key.device_bytes:
        differences.append(
            f"card {theirs.device_name} of {theirs.device_bytes >> 20} MiB, here {key.device_name} of "
            f"{key.device_bytes >> 20} MiB"
        )
    changed = [
        f"{name} {getattr(profile.environment, name) or 'none'}, here {getattr(environment, name) or 'none'}"
        for name in _contradictions(profile, environment)
    ]
    differences += changed
    if theirs.pad_multiple != key.pad_multiple:
        differences.append(f"pad multiple {theirs.pad_multiple}, here {key.pad_multiple}")
    return Match(
        profile, differences=tuple(differences), is_other_card=other_card, needs_room=bool(changed) or other_card
    )


def _is_other_card(theirs: ProfileKey, ours: ProfileKey) -> bool:
    """Another name, or further apart than drivers make one card look: by one bucket, as a predicted key may be."""
    return theirs.device_name != ours.device_name or abs(theirs.device_bytes - ours.device_bytes) > BUCKET_BYTES


def _is_host(key: ProfileKey) -> bool:
    return key.device_name.startswith("CPU ")


def _allows(policy: MatchPolicy, match: Match, key: ProfileKey, environment: Environment) -> bool:
    if policy is MatchPolicy.ANY:  # but memory of the host is no card
        return _is_host(match.profile.key) == _is_host(key)
    if policy is MatchPolicy.EXACT:
        return match.is_exact
    decisive = set(_DECISIVE).intersection(_contradictions(match.profile, environment))
    same_torch = _major(match.profile.environment.torch) == _major(environment.torch)
    return not match.is_other_card and not decisive and same_torch


def _contradictions(profile: Profile, environment: Environment) -> list[str]:
    """Fields of the environment that differ; the card's exact bytes are the key's matter."""
    theirs = profile.environment
    # A prediction knows neither driver nor runtime of the card: what it does not know contradicts nothing.
    asked = (
        name
        for name in (*_VERSIONS, *_DECISIVE)
        if profile.provenance is not Provenance.PREDICTED or getattr(theirs, name)
    )
    return [name for name in asked if getattr(theirs, name) != getattr(environment, name)]


def _distance(match: Match, key: ProfileKey) -> tuple[object, ...]:
    """Smaller is better: what was measured, then the card's name, then its bytes, then everything else."""
    theirs = match.profile.key
    likeness = difflib.SequenceMatcher(None, theirs.device_name, key.device_name).ratio()
    return (
        match.is_other_card,
        match.profile.provenance is Provenance.PREDICTED,
        match.profile.provenance is Provenance.IMPORTED,
        -likeness,
        abs(theirs.device_bytes - key.device_bytes),
        match.needs_room,
        theirs.pad_multiple != key.pad_multiple,
        len(match.differences),
    )


def _major(version: str) -> str:
    return re.split(r"[.+]", version, maxsplit=1)[0]
