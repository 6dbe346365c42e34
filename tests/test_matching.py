"""Which stored profile answers, and what it costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from budgetdb.errors import UnknownNameError
from budgetdb.matching import MatchPolicy, compare, matches, parse_policy
from budgetdb.profiles import Environment, Profile, ProfileKey, Provenance

sys.path.insert(0, str(Path(__file__).parent / "store"))
from store_records import ENVIRONMENT, KEY, make_key, make_profile

BUCKET = 256 * 2**20


def changed(**changes: Any) -> Environment:
    return ENVIRONMENT.model_copy(update=changes)


def answer(
    *profiles: Profile, policy: str, key: ProfileKey = KEY, environment: Environment = ENVIRONMENT
) -> list[Profile]:
    found = matches(profiles, key=key, environment=environment, policy=MatchPolicy(policy))
    return [match.profile for match in found]


@pytest.mark.parametrize(
    ("profile", "policies"),
    [
        (make_profile(), "exact compatible any"),
        (make_profile(environment=changed(device_total_bytes=1)), "exact compatible any"),
        (make_profile(environment=changed(torch="2.9.1+cu128")), "compatible any"),
        (make_profile(environment=changed(transformers="5.0.0")), "compatible any"),
        (make_profile(environment=changed(driver="580.1")), "compatible any"),
        (make_profile(make_key(pad_multiple=64)), "compatible any"),
        (make_profile(make_key(device_bytes=KEY.device_bytes - BUCKET)), "compatible any"),
        (make_profile(environment=changed(torch="1.13.1")), "any"),
        (make_profile(environment=changed(allocator="expandable_segments:True")), "any"),
        (make_profile(environment=changed(compute_capability="8.0")), "any"),
        (make_profile(make_key(device_bytes=KEY.device_bytes - 2 * BUCKET)), "any"),
        (make_profile(make_key(device_name="NVIDIA H200")), "any"),
        (make_profile(make_key(device_name="CPU AMD EPYC")), ""),
        (make_profile(make_key(model_hash="cd" * 32)), ""),
        (make_profile(make_key(dtype="float32")), ""),
        (make_profile(make_key(attention="eager")), ""),
        (make_profile(make_key(workload="loss[hold=previous]")), ""),
    ],
)
def test_what_each_policy_lets_answer(profile: Profile, policies: str) -> None:
    assert [policy for policy in MatchPolicy if answer(profile, policy=policy.value)] == policies.split()


def test_a_prediction_is_not_contradicted_by_what_it_can_not_know() -> None:
    here = changed(driver="580.1", runtime="12.9", compute_capability="9.0")
    predicted = make_profile(make_key(device_bytes=KEY.device_bytes - BUCKET), provenance=Provenance.PREDICTED)
    assert answer(predicted, policy="compatible", environment=here) == [predicted]
    found = compare(predicted, key=KEY, environment=here)
    assert found is not None
    assert not found.needs_room
    assert len(found.differences) == 1


def test_only_what_changes_memory_needs_room() -> None:
    pad = compare(make_profile(make_key(pad_multiple=64)), key=KEY, environment=ENVIRONMENT)
    torch = compare(make_profile(environment=changed(torch="2.9.1")), key=KEY, environment=ENVIRONMENT)
    assert pad is not None
    assert torch is not None
    assert (pad.needs_room, torch.needs_room) == (False, True)
    assert torch.differences == ("torch 2.9.1, here 2.13.0",)


def test_the_nearest_card_by_name_and_bytes_and_what_was_measured_first() -> None:
    here = make_profile(age_s=9)
    predicted = make_profile(provenance=Provenance.PREDICTED)
    sibling = make_profile(make_key(device_bytes=KEY.device_bytes + 3 * BUCKET))
    smaller = make_profile(make_key(device_bytes=KEY.device_bytes // 2))
    other = make_profile(make_key(device_name="NVIDIA A100-SXM4-80GB"))
    stranger = make_profile(make_key(device_name="AMD Instinct MI300X"))
    given = (stranger, other, smaller, predicted, sibling, here)
    assert answer(*given, policy="any") == [here, predicted, sibling, smaller, other, stranger]


def test_a_misspelt_policy() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'exact'"):
        parse_policy("exactly")
