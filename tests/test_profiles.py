from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from budgetdb.errors import UnknownNameError, UsageError
from budgetdb.profiles import (
    Bound,
    Caps,
    CostRecord,
    Environment,
    FrontierPoint,
    Outcome,
    Probe,
    Profile,
    ProfileKey,
    Provenance,
)
from budgetdb.shapes import Shape

KEY = ProfileKey(
    model_hash="ab" * 32,
    device_name="NVIDIA H100 80GB HBM3",
    device_bytes=80 * 2**30,
    dtype="bfloat16",
    attention="sdpa",
    pad_multiple=8,
    workload="forward[hold=previous]",
)
PROFILE = Profile(
    key=KEY,
    environment=Environment(torch="2.13.0"),
    model_name="bert-base",
    cost=CostRecord(kind="linear", parameters={"c": 1000.0, "a": 10.0}),
    limit_bytes=120_000,
    headroom_bytes=20_000,
    resident_bytes=900,
    max_length=512,
    bound=Bound.MEMORY,
    token_budget=9_900,
    frontier=(FrontierPoint(length=512, batch_size=19, peak_bytes=98_280, bound=Bound.MEMORY, probed=True),),
    probes=(Probe(batch_size=19, length=512, outcome=Outcome.FITS, peak_allocated_bytes=98_280),),
    provenance=Provenance.MEASURED,
    created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
)


def records() -> st.SearchStrategy[Profile]:
    """Profiles with anything in every field that a file could hold."""
    counts, positives = st.integers(0, 2**62), st.integers(1, 2**62)
    texts, names = st.text(max_size=20), st.text(min_size=1, max_size=20)
    floats = st.floats(allow_nan=False, allow_infinity=False)
    sizes, some_text = st.none() | counts, st.none() | texts
    key = st.builds(
        ProfileKey,
        model_hash=names,
        device_name=names,
        device_bytes=positives,
        dtype=names,
        attention=names,
        pad_multiple=positives,
        workload=names,
    )
    environment = st.builds(
        Environment,
        torch=texts,
        transformers=some_text,
        runtime=some_text,
        driver=some_text,
        compute_capability=some_text,
        allocator=texts,
        platform=texts,
        device_total_bytes=counts,
    )
    probe = st.builds(
        Probe,
        batch_size=positives,
        length=positives,
        outcome=st.sampled_from(Outcome),
        peak_allocated_bytes=sizes,
        peak_reserved_bytes=sizes,
        baseline_bytes=counts,
        held_bytes=counts,
        alloc_retries=counts,
        elapsed_s=st.floats(0, allow_infinity=False),
        cap_bytes=sizes,
        purpose=texts,
        message=some_text,
    )
    point = st.builds(
        FrontierPoint,
        length=positives,
        batch_size=counts,
        peak_bytes=counts,
        bound=st.sampled_from(Bound),
        probed=st.booleans(),
    )
    parameter = floats | st.lists(st.lists(floats, max_size=3), max_size=3)
    return st.builds(
        Profile,
        key=key,
        environment=environment,
        model_name=texts,
        cost=st.builds(CostRecord, kind=names, parameters=st.dictionaries(names, parameter, max_size=4)),
        caps=st.builds(
            Caps,
            rows=st.none() | positives,
            tokens=st.none() | positives,
            squares=st.none() | positives,
            reason=st.sampled_from(Bound),
        ),
        limit_bytes=positives,
        headroom_bytes=counts,
        overhead_bytes=counts,
        resident_bytes=counts,
        max_length=positives,
        bound=st.sampled_from(Bound),
        token_budget=counts,
        frontier=st.lists(point, max_size=2).map(tuple),
        probes=st.lists(probe, max_size=2).map(tuple),
        provenance=st.sampled_from(Provenance),
        flags=st.lists(names, max_size=2).map(tuple),
        created_at=st.datetimes(timezones=st.just(UTC)),
    )


@given(profile=records())
def test_a_profile_comes_back_from_json_equal(profile: Profile) -> None:
    text = profile.canonical_json()
    again = Profile.model_validate_json(text)
    assert again == profile
    assert again.canonical_json() == text
    assert again.digest == profile.digest
    # Any other JSON library reads it too: no NaN, no Infinity, no number that a double does not hold.
    assert Profile.model_validate_json(json.dumps(json.loads(text))) == profile


def test_having_been_asked_changes_no_profile() -> None:
    asked = Profile.model_validate_json(PROFILE.canonical_json())
    assert asked.max_batch_size(512) == 19
    assert asked == PROFILE
    assert asked.canonical_json() == PROFILE.canonical_json()


def changed(**changes: object) -> str:
    """JSON of the profile with fields replaced; a name with dots leads into it."""
    raw: Any = json.loads(PROFILE.canonical_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = raw
        for part in parents:
            target = target[int(part) if part.isdigit() else part]
        target[int(last) if last.isdigit() else last] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"cost__parameters__a": float("nan")},
        {"cost__parameters__a": float("inf")},
        {"cost__parameters__a": [[float("nan")]]},
        {"cost__parameters__a": "10"},
        {"cost__parameters__a": None},
        {"cost__parameters__a": [1.0]},
        {"probes__0__elapsed_s": float("nan")},
        {"probes__0__elapsed_s": -1.0},
        {"probes__0__batch_size": 0},
        {"probes__0__length": 0},
        {"probes__0__peak_allocated_bytes": -1},
        {"probes__0__outcome": "perhaps"},
        {"probes__0__unheard_of": 1},
        {"frontier__0__batch_size": -1},
        {"frontier__0__probed": 1},
        {"caps__rows": 0},
        {"key__device_bytes": 0},
        {"key__device_bytes": 2**62 + 1},
        {"key__device_bytes": "85899345920"},
        {"key__device_bytes": 1.0},
        {"key__pad_multiple": 0},
        {"key__pad_multiple": True},
        {"key__dtype": ""},
        {"key__unheard_of": "x"},
        {"environment__torch": 2.13},
        {"environment__unheard_of": None},
        {"limit_bytes": 0},
        {"limit_bytes": -1},
        {"headroom_bytes": -1},
        {"max_length": 0},
        {"token_budget": -1},
        {"model_name": "x" * 513},
        {"provenance": "guessed"},
        {"created_at": "yesterday"},
        {"schema_version": 2},
        {"schema_version": 0},
        {"unheard_of": 1},
    ],
    ids=str,
)
def test_what_is_no_profile_is_refused(changes: dict[str, object]) -> None:
    assert Profile.model_validate_json(changed(model_name="another name")).model_name == "another name"
    with pytest.raises(ValidationError) as caught:
        Profile.model_validate_json(changed(**changes))
    places = {str(part) for error in caught.value.errors() for part in error["loc"]}
    assert next(iter(changes)).split("__")[-1] in places


@pytest.mark.parametrize("name", [name for name, field in Profile.model_fields.items() if field.is_required()])
def test_no_required_field_may_be_missing(name: str) -> None:
    raw = json.loads(PROFILE.canonical_json())
    del raw[name]
    with pytest.raises(ValidationError, match=name):
        Profile.model_validate_json(json.dumps(raw))


def test_profiles_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PROFILE.limit_bytes = 1  # type: ignore[misc]  # what is tested
    with pytest.raises(ValidationError, match="frozen"):
        PROFILE.key.dtype = "x"  # type: ignore[misc]  # what is tested


@pytest.mark.parametrize("name", ProfileKey.model_fields)
def test_the_digest_of_a_key_changes_with_each_field(name: str) -> None:
    value = getattr(KEY, name)
    other = KEY.model_copy(update={name: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest != KEY.digest
    assert PROFILE.model_copy(update={"key": other}).id != PROFILE.id


def test_neighbouring_fields_do_not_run_together_in_a_digest() -> None:
    left = KEY.model_copy(update={"dtype": "ab", "attention": "c"})
    right = KEY.model_copy(update={"dtype": "a", "attention": "bc"})
    assert left.digest != right.digest


def test_digests_and_ids_are_what_stored_databases_hold() -> None:
    # Written down once: a change of these makes every stored profile unfindable.
    assert KEY.digest == "9709157a81cc5d22c12c19d127166f395b86b5ee3ffeb813a8a1539e9ae1f344"
    assert PROFILE.id == KEY.digest[:12]


def test_an_id_depends_on_the_key_alone() -> None:
    assert PROFILE.model_copy(update={"token_budget": 1}).id == PROFILE.id


def test_a_profile_answers_by_its_cost_model() -> None:
    assert PROFILE.usable_bytes == 100_000
    assert PROFILE.peak_bytes(Shape(2, 50)) == 2000
    # 1000 + 10 * 104 * k <= 100 000, and 100 is padded to 104
    assert PROFILE.max_batch_size(100) == 95
    assert PROFILE.max_batch_size(104) == 95
    assert PROFILE.max_batch_size(0) == PROFILE.max_batch_size(8)
    assert PROFILE.max_batch_size(512) == 19


def test_headroom_can_not_make_the_usable_bytes_negative() -> None:
    profile = PROFILE.model_copy(update={"headroom_bytes": 10**9})
    assert profile.usable_bytes == 0
    assert profile.max_batch_size(8) == 0


@pytest.mark.parametrize("length", [513, 520, 10**6])
def test_beyond_the_longest_length_there_is_no_answer(length: int) -> None:
    with pytest.raises(UsageError) as caught:
        PROFILE.max_batch_size(length)
    padded = -(-length // 8) * 8
    assert str(caught.value) == (
        f"length {padded} is beyond profile {PROFILE.id}, which is settled up to 512. "
        f"Calibrate with max_length={padded}"
    )


def test_a_cost_model_of_an_unknown_kind_says_so() -> None:
    profile = PROFILE.model_copy(update={"cost": CostRecord(kind="quadratc", parameters={})})
    with pytest.raises(UnknownNameError, match=r"unknown cost model 'quadratc'\. Did you mean 'quadratic'"):
        profile.max_batch_size(8)


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        (Caps(), lambda length: 10**9),
        (Caps(rows=7), lambda length: 7),
        (Caps(tokens=100), lambda length: 100 // length),
        (Caps(squares=10_000), lambda length: 10_000 // length**2),
        (Caps(rows=7, tokens=100, squares=300), lambda length: min(7, 100 // length, 300 // length**2)),
    ],
)
def test_caps_clip(caps: Caps, expected: Callable[[int], int]) -> None:
    for length in (1, 3, 10, 17, 99, 100, 101, 400):
        assert caps.clip(10**9, length) == expected(length)
        assert caps.clip(0, length) == 0


def test_caps_hold_in_a_profile() -> None:
    capped = PROFILE.model_copy(update={"caps": Caps(rows=10)})
    assert capped.max_batch_size(104) == 10
    assert capped.max_batch_size(512) == 10
    assert PROFILE.model_copy(update={"caps": Caps(rows=20)}).max_batch_size(512) == 19


def test_a_probe_is_judged_by_the_larger_of_its_peaks() -> None:
    probe = Probe(batch_size=2, length=8, outcome=Outcome.FITS, peak_allocated_bytes=5, peak_reserved_bytes=7)
    assert (probe.shape, probe.fits, probe.peak_bytes) == (Shape(2, 8), True, 7)
    assert probe.model_copy(update={"peak_reserved_bytes": None}).peak_bytes == 5
    for outcome in (Outcome.OOM, Outcome.KERNEL_LIMIT):
        failed = Probe(batch_size=2, length=8, outcome=outcome)
        assert not failed.fits
        assert failed.peak_bytes == 0
